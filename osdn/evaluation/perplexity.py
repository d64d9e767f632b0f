"""Perplexity of documents and of long texts, for any causal model.

Documents are packed into one row if the model accepts boundaries, and padded otherwise.  A long text is read
in pieces with the model's own cache.  A recurrent model only keeps its state, so memory does not grow with
the length of the text; the cache of an attention model does.  Only sums of losses are kept.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from itertools import islice

import numpy as np
import torch
from datasets import Dataset
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from osdn.evaluation.processes import ALONE, Processes
from osdn.models import OSDNForCausalLM
from osdn.results.paper import BUCKETS
from osdn.results.scores import Score
from osdn.training.data import checked, tokenize

IGNORED_LABEL = -100
CONTEXT = 4096  # longer documents are split, as in training
LABELS = 10_000_000  # the paper's cap on FineWeb-Edu
BLOCK = 20_480  # tokens of a book that share one state
SEGMENT = 1024  # tokens of a block that are read at once
Report = Callable[[int, int], None]  # called with the amount done and the total


def perplexity(losses: np.ndarray, labels: np.ndarray) -> Score:
    """exp(sum of losses / number of labels) over documents, with its standard error.

    The mean loss is a ratio of two sums over documents; its variance is that of the residuals
    `losses - mean * labels` (Cochran, Sampling Techniques, 1977, section 2.11).
    """
    mean = losses.sum() / labels.sum()
    value = math.exp(mean)
    if len(losses) < 2:
        return Score(value)
    spread = np.sqrt(((losses - mean * labels) ** 2).sum() * len(losses) / (len(losses) - 1))
    return Score(value, float(value * spread / labels.sum()))


def document_losses(model: PreTrainedModel, documents: list[Tensor]) -> Tensor:
    """The summed loss of each document, given as tokens [T_i], in one forward pass: [N] float64."""
    lengths = torch.tensor([len(document) for document in documents], device=model.device)
    if isinstance(model, OSDNForCausalLM):
        row = torch.cat(documents)[None].to(model.device)  # [1, sum T_i]
        ends = F.pad(lengths.cumsum(0), (1, 0))
        logits = model(row, cu_seqlens=ends).logits[0]
        labels = F.pad(row[0, 1:], (0, 1))
        labels[ends[1:] - 1] = IGNORED_LABEL
    else:
        batch = torch.nn.utils.rnn.pad_sequence(documents, batch_first=True).to(model.device)  # [N, T]
        real = torch.arange(batch.shape[1], device=model.device) < lengths[:, None]
        logits = model(batch, attention_mask=real.long(), use_cache=False).logits[
            real
        ]  # [sum T_i, vocabulary]
        shifted = F.pad(batch[:, 1:], (0, 1))
        labels = shifted.masked_fill(~F.pad(real[:, 1:], (0, 1)), IGNORED_LABEL)[real]
    losses = F.cross_entropy(logits.float(), labels, reduction="none", ignore_index=IGNORED_LABEL).double()
    owner = torch.arange(len(documents), device=model.device).repeat_interleave(lengths)
    return losses.new_zeros(len(documents)).index_add(0, owner, losses).cpu()


@torch.inference_mode()
def document_perplexity(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    data: Dataset,
    tokens_at_once: int,
    report: Report | None = None,
    max_labels: int = LABELS,
    context: int = CONTEXT,
    processes: Processes = ALONE,
) -> Score:
    """Perplexity of the documents in "text", split and terminated as in training, up to so many labels."""
    pieces = tokenize(data, tokenizer, context).with_format("torch")["input_ids"]
    share = processes.share(_up_to(max_labels, pieces))
    losses: list[tuple[float, int]] = []  # with the number of labels
    for batch in _batches(share, tokens_at_once, isinstance(model, OSDNForCausalLM)):
        losses += zip(document_losses(model, batch).tolist(), [len(piece) - 1 for piece in batch])
        if report:
            report(len(losses) * processes.count, len(pieces))
    losses = processes.gather(losses)
    if not losses:
        raise ValueError("no document has two tokens, so there is nothing to predict")
    return perplexity(*np.array(losses).T)


def _up_to(max_labels: int, pieces: Iterable[Tensor]) -> Iterator[Tensor]:
    """Pieces of at least two tokens; the last is truncated so that there are `max_labels` labels in total."""
    for piece in pieces:
        piece = piece[: max_labels + 1].long()
        if max_labels > 0 and len(piece) > 1:
            max_labels -= len(piece) - 1
            yield piece


def _batches(pieces: Iterable[Tensor], tokens_at_once: int, packed: bool) -> Iterator[list[Tensor]]:
    """Pieces in batches of at most `tokens_at_once` tokens, including padding unless they are packed."""
    batch: list[Tensor] = []
    for piece in pieces:
        lengths = [len(x) for x in (*batch, piece)]
        if batch and (sum(lengths) if packed else max(lengths) * len(lengths)) > tokens_at_once:
            yield batch
            batch = []
        batch.append(piece)
    if batch:
        yield batch


@torch.inference_mode()
def read_in_pieces(
    model: PreTrainedModel, ids: Tensor, segment: int = SEGMENT
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields the logits of `ids` [B, T], `segment` tokens at a time, and the labels that they should predict.

    The shapes are [B, ≤ segment, vocabulary] and [B, ≤ segment]; a cache carries the state between pieces.
    A model without such a cache, such as Mamba, reads all tokens at once.
    """
    cache = None
    for start in range(0, ids.shape[1] - 1, segment):
        piece = ids[:, start : start + segment].to(model.device)
        output = model(piece, past_key_values=cache, use_cache=True)
        cache = getattr(output, "past_key_values", None)
        if cache is None and segment < ids.shape[1] - 1:
            yield from read_in_pieces(model, ids, ids.shape[1])
            return
        labels = ids[:, start + 1 : start + 1 + segment].to(model.device)
        yield output.logits[:, : labels.shape[1]].float(), labels


def stream(model: PreTrainedModel, ids: Tensor, segment: int = SEGMENT) -> Iterator[Tensor]:
    """Yields the losses of `ids` [B, T] given all earlier tokens, `segment` at a time: [B, ≤ segment]."""
    for logits, labels in read_in_pieces(model, ids, segment):
        yield F.cross_entropy(logits.transpose(1, 2), labels, reduction="none")


def blocks(texts: Iterable[str], tokenizer: PreTrainedTokenizerBase, length: int) -> Iterator[Tensor]:
    """The complete blocks of `length` tokens in each text, [n, length]; the rest of a text is not read."""
    for text in texts:
        ids = torch.tensor(tokenizer(checked(text), verbose=False).input_ids)
        yield ids[: len(ids) // length * length].reshape(-1, length)


def position_perplexity(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    texts: Iterable[str],
    count: int,
    tokens_at_once: int,
    report: Report | None = None,
    block: int = BLOCK,
    processes: Processes = ALONE,
) -> dict[str, Score]:
    """Perplexity of each tenth of a block and of the whole, over all blocks of `count` texts.

    Texts that are shorter than a block do not count.
    """
    size = block // len(BUCKETS)
    rows_at_once = max(1, tokens_at_once // SEGMENT)
    sums_of_texts: list[np.ndarray] = []  # [blocks, buckets] for each text
    complete = (ids for ids in blocks(texts, tokenizer, block) if len(ids))
    for done, ids in enumerate(processes.share(islice(complete, count)), 1):
        sums_of_texts.append(
            np.concatenate([_bucket_sums(model, rows, size) for rows in ids.split(rows_at_once)])
        )
        if report:
            report(min(done * processes.count, count), count)
    sums_of_texts = processes.gather(sums_of_texts)
    if not sums_of_texts:
        raise ValueError(f"none of the texts has {block:,} tokens, the length of a block")
    sums = np.concatenate(sums_of_texts)
    labels = np.full(sums.shape, size)
    labels[:, 0] -= 1  # nothing predicts the first token
    scores = {name: perplexity(sums[:, i], labels[:, i]) for i, name in enumerate(BUCKETS)}
    return {**scores, "pg19_ppl": perplexity(sums.sum(1), labels.sum(1))}


def _bucket_sums(model: PreTrainedModel, ids: Tensor, size: int) -> np.ndarray:
    """The sum of losses in each bucket, by the position of the label: [B, T / size]."""
    sums = torch.zeros(len(ids), ids.shape[1] // size, dtype=torch.float64)
    position = 1  # of the label
    for losses in stream(model, ids):
        bucket = torch.arange(position, position + losses.shape[1]) // size
        sums.index_add_(1, bucket, losses.double().cpu())
        position += losses.shape[1]
    return sums.numpy()
