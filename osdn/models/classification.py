"""Heads for sequence and token classification, as `transformers` builds them for every model."""

from transformers.modeling_layers import GenericForSequenceClassification, GenericForTokenClassification

from osdn.models.modeling_osdn import OSDNPreTrainedModel


class OSDNForSequenceClassification(GenericForSequenceClassification, OSDNPreTrainedModel):
    """`OSDNModel` with scores from the last token that is not padding.

    Batches of several sequences need `config.pad_token_id`.

    >>> model = OSDNForSequenceClassification(OSDNConfig.from_preset("osdn-tiny", num_labels=3))
    >>> model(torch.tensor([[1, 2, 3]])).logits.shape
    torch.Size([1, 3])
    """


class OSDNForTokenClassification(GenericForTokenClassification, OSDNPreTrainedModel):
    """`OSDNModel` with scores for every token."""
