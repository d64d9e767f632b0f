import pytest
import torch
from torch import nn

from osdn.zoo import DOMAINS, RECURRENCES, RecurrentMixer
from osdn.zoo.mixer import CONVOLVED


def mixer(name):
    torch.manual_seed(0)
    return RecurrentMixer(name, hidden_size=12, num_heads=3, head_k_dim=5, head_v_dim=4, num_slots=6)


def test_the_output_has_the_inputs_shape_and_every_parameter_learns(name):
    layer = mixer(name)
    y = layer(torch.randn(2, 9, 12))
    assert y.shape == (2, 9, 12)
    (y * torch.randn(y.shape)).sum().backward()
    for label, parameter in layer.named_parameters():
        assert parameter.grad is not None, label
        assert parameter.grad.isfinite().all(), label
        assert parameter.grad.abs().max() > 0, label


def test_a_later_token_never_changes_an_earlier_output(name):
    layer, x = mixer(name), torch.randn(2, 9, 12)
    changed = torch.cat([x[:, :6], torch.randn(2, 3, 12)], 1)
    a, b = layer(x), layer(changed)
    torch.testing.assert_close(a[:, :6], b[:, :6])
    assert not torch.allclose(a[:, 6:], b[:, 6:])


def test_the_mixer_runs_the_named_row(name):
    """Without convolutions, a head is the row's scan over the projected inputs."""
    layer = RecurrentMixer(name, hidden_size=6, num_heads=1, num_slots=4, conv_size=1)
    for convolution in layer.convolutions.values():
        nn.init.ones_(convolution.weight)
    x = torch.randn(1, 5, 6)
    row, inputs = RECURRENCES[name], {}
    for label, spec in row.inputs.items():
        y = layer.projections[label](x)
        inputs[label] = DOMAINS[spec.domain](nn.functional.silu(y) if label in CONVOLVED else y)
    weights = {label: DOMAINS[spec.domain](layer.weights[label][0]) for label, spec in row.weights.items()}
    o, _ = row.scan(inputs, weights)
    torch.testing.assert_close(layer(x), layer.o_proj(layer.norm(o)))


def test_state_size_counts_all_heads():
    assert mixer("osdn").state_size == 3 * (5 * 4 + 5)


def test_an_unknown_row_is_rejected_and_the_error_lists_the_rows():
    with pytest.raises(ValueError, match=r"no row 'transformer'.*linear_attention.*mesa_net"):
        RecurrentMixer("transformer", hidden_size=4)


def recall_batch(generator, batch=32, pairs=3, vocabulary=8):
    """`k1 v1 k2 v2 ... | k`: the answer is the value that followed the key."""
    keys = torch.stack([torch.randperm(vocabulary, generator=generator)[:pairs] for _ in range(batch)])
    values = torch.randint(vocabulary, (batch, pairs), generator=generator) + vocabulary
    asked = torch.randint(pairs, (batch, 1), generator=generator)
    tokens = torch.cat([torch.stack([keys, values], -1).flatten(1), keys.gather(1, asked)], 1)
    return tokens, values.gather(1, asked)[:, 0]


def train_recall(name, steps):
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(0)
    embed, layer, head = (
        nn.Embedding(16, 32),
        RecurrentMixer(name, 32, num_heads=2, num_slots=16),
        nn.Linear(32, 16),
    )
    parameters = [*embed.parameters(), *layer.parameters(), *head.parameters()]
    optimiser, losses = torch.optim.AdamW(parameters, lr=5e-3), []
    for _ in range(steps):
        tokens, answer = recall_batch(generator)
        x = embed(tokens)
        loss = nn.functional.cross_entropy(head((x + layer(x))[:, -1]), answer)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    return losses


def test_a_mixer_learns_in_a_model(name):
    losses = train_recall(name, 40)
    assert sum(losses[-5:]) / 5 < 0.85 * losses[0]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["delta_net", "osdn", "gla", "mesa_net"])
def test_a_mixer_solves_a_small_recall_task(name):
    losses = train_recall(name, 600)
    # guessing any value costs log 8 = 2.08, guessing one of the context's values log 3 = 1.1
    assert sum(losses[-20:]) / 20 < 0.2
