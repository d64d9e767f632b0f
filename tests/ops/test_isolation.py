"""NaN and Inf stay in their sequence and head, in the outputs and in the gradients."""

import pytest
import torch

from osdn.ops import available_backends, newton_delta_rule, online_scaled_delta_rule, pgdn_delta_rule
from tests.ops.problems import Config, answer, make

PER_TOKEN = ("q", "k", "v", "beta", "gain", "log_decay", "retention")
PHASE_2 = ("q", "k", "v", "beta", "log_decay", "retention", "initial_state")
LENGTHS, H, GROUP = (70, 0, 5, 70), 2, 2
SICK = 2, 1  # the sequence and the key head that are not well


def sick_part(x: torch.Tensor, per_token: bool, packed: bool) -> torch.Tensor:
    """A mask of the elements that belong to the sick sequence and head; the rest must not notice."""
    sequence, head = SICK
    mask = torch.zeros(x.shape, dtype=torch.bool)
    if per_token and packed:
        start = sum(LENGTHS[:sequence])
        rows = mask[:, start : start + LENGTHS[sequence]].movedim(2, 0)  # [heads, 1, T, ...]
    elif per_token:
        rows = mask[sequence].movedim(1, 0)  # [heads, T, ...]
    else:
        rows = mask[sequence]  # [heads, ...]
    rows[head * len(rows) // H : (head + 1) * len(rows) // H] = True
    return mask


@pytest.mark.filterwarnings("ignore:log_decay has elements above 0")
@pytest.mark.parametrize("backend", available_backends())
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("decay", ["head", "channel"])
@pytest.mark.parametrize("poison", [torch.nan, torch.inf])
@pytest.mark.parametrize(
    ("operator", "block", "where"),
    [
        *((online_scaled_delta_rule, 1, where) for where in (*PHASE_2, "initial_scale")),
        *((newton_delta_rule, 2, where) for where in ("k", "beta", "retention", "initial_covariance")),
        *((newton_delta_rule, 1, where) for where in ("k", "initial_covariance")),
        *((pgdn_delta_rule, 1, where) for where in ("k", "gain", "retention", "initial_gram")),
    ],
    ids=lambda x: getattr(x, "__name__", str(x)),
)
def test_a_sick_head_infects_no_other(backend, packed, decay, poison, operator, block, where):
    lengths = LENGTHS if packed else (LENGTHS[-1],) * len(LENGTHS)
    problem = make(
        Config(
            lengths,
            packed=packed,
            H=H,
            group=GROUP,
            K=6,
            block=block,
            V=3,
            decay=decay,
            retention="channel",
            bounds=None,  # a clip would cure an infinite scale
            initial_state=True,
            initial_scale="each",
        )
    )
    healthy = answer(operator, problem, backend, torch.float32)
    x = problem.tensors[where]
    mask = sick_part(x, where in PER_TOKEN, packed)
    chosen = mask.nonzero()[len(mask.nonzero()) // 2]  # one element in the middle
    x[tuple(chosen)] = poison
    got = answer(operator, problem, backend, torch.float32)
    assert got.pop("grad_center", torch.zeros(())).isnan().sum() < H * GROUP  # shared by the sequences
    for name, value in got.items():
        per_token = name.removeprefix("grad_") in (*PER_TOKEN, "o")
        well = ~sick_part(value, per_token, packed)
        assert torch.equal(value[well], healthy[name][well]), name
    assert not all(value.isfinite().all() for value in got.values()), "the poison should have been swallowed"
