"""The layout of a batch's tokens: unchanged, or as one row of sequences without padding.

A padded batch is gathered into one packed row before the first block and spread out again after the last.  So
state, scale and convolutions see only real tokens, and padding costs nothing.  While a program is traced, no
size may depend on the data; padding is then appended to the row as a separate sequence.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from osdn.ops import checks


class Layout(NamedTuple):
    """How the layers see the tokens of a batch `[B, T]`."""

    B: int
    T: int
    tokens: Tensor | None = None  # places of the row's tokens in the flattened batch; None: all, in order
    cu_seqlens: Tensor | None = None  # [N + 1] boundaries of the row's sequences; None for a plain batch
    packed: bool = False  # whether a row of the batch contains several sequences
    padding: Tensor | None = None  # [B, T]; if given, the padding is the last sequence of the row

    def gather(self, x: Tensor) -> Tensor:
        """Turn `[B, T, D]` into what the layers see: the same, or `[1, tokens, D]`."""
        if self.cu_seqlens is None:
            return x
        x = x.reshape(1, self.B * self.T, x.shape[-1])
        return x if self.tokens is None else x[:, self.tokens]

    def spread(self, x: Tensor) -> Tensor:
        """The inverse of `gather`, with zeros for padding."""
        if self.cu_seqlens is None:
            return x
        if self.tokens is not None:
            x = x.new_zeros(self.B * self.T, x.shape[-1]).index_copy(0, self.tokens, x[0])
        x = x.reshape(self.B, self.T, x.shape[-1])
        return x if self.padding is None else x.masked_fill(self.padding[..., None], 0)

    def sequences(self) -> Tensor:
        """The index of each token's sequence, `[B, T]`; -1 is padding."""
        return self._back(self._numbers(), -1)

    def positions(self) -> Tensor:
        """The position of each token in its sequence, `[B, T]`, counted from 0."""
        numbers = self._numbers()
        assert self.cu_seqlens is not None
        return self._back(torch.arange(len(numbers), device=numbers.device) - self.cu_seqlens[numbers], 0)

    def _numbers(self) -> Tensor:
        assert self.cu_seqlens is not None
        count = self.B * self.T if self.tokens is None else self.tokens.shape[0]
        tokens = torch.arange(count, device=self.cu_seqlens.device, dtype=self.cu_seqlens.dtype)
        return torch.bucketize(tokens, self.cu_seqlens[1:], right=True)

    def _back(self, x: Tensor, fill: int) -> Tensor:
        """Move values of the row's tokens to their places in the batch."""
        if self.tokens is not None:
            x = x.new_full((self.B * self.T,), fill).index_copy(0, self.tokens, x)
        x = x.view(self.B, self.T)
        return x if self.padding is None else x.masked_fill(self.padding, fill)


def lay_out(
    B: int,
    T: int,
    attention_mask: Tensor | None = None,
    position_ids: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    seq_idx: Tensor | None = None,
    cached: bool = False,
) -> Layout:
    """The layout that these arguments of a model describe.

    With `cached`, a row cannot contain several sequences.  This raises an error here if that can be checked;
    while tracing it cannot, and the traced program raises the error when it runs.
    """
    traced = torch.compiler.is_compiling()
    mask = _padding_mask(B, T, attention_mask)
    for name, x in (("position_ids", position_ids), ("seq_idx", seq_idx)):
        if (
            x is not None
            and T > 1
            and (x.ndim != 2 or x.shape[1] != T or (x.shape[0] != B and x.shape[0] != 1))
        ):
            raise ValueError(f"{name} has shape {list(x.shape)}; it must be [{B}, {T}] or [1, {T}]")
    if mask is not None and traced and (T == 1 or cu_seqlens is not None):
        torch._assert_async(mask.all(), "a compiled step of one token, or with cu_seqlens, has no padding")
        mask = None
    elif mask is not None and not traced and bool(mask.all()):
        mask = None
    if cu_seqlens is not None:
        checks.sequence_count(cu_seqlens, B)
        if mask is not None:
            raise ValueError(
                "cu_seqlens packs a row without padding; attention_mask must be None or all ones"
            )
        return Layout(B, T, cu_seqlens=_shared(cu_seqlens, T), packed=True)

    layout = Layout(B, T)
    if mask is not None:
        cuts = F.pad(mask.sum(1).cumsum(0), (1, 0))
        if traced:
            tokens = mask.flatten().logical_not().byte().argsort(stable=True)
            cuts = torch.cat([cuts, cuts.new_full((1,), B * T)])
            layout = Layout(B, T, tokens, cuts, padding=~mask)
        else:
            layout = Layout(B, T, mask.flatten().nonzero()[:, 0], _shared(cuts))
    if T < 2 or (position_ids is None and seq_idx is None):
        return layout

    cuts, restarts = _restarts(layout, position_ids, seq_idx)
    if traced and cached:
        torch._assert_async(~restarts.any(), "a packed row cannot be cached: pass a padded batch")
        return layout
    if not traced and not bool(restarts.any()):
        return layout
    inner = (cuts | restarts).nonzero()[:, 0] + 1
    ends = torch.arange(2, device=inner.device) * (cuts.shape[0] + 1)
    return layout._replace(cu_seqlens=_shared(torch.cat([ends[:1], inner, ends[1:]])), packed=True)


def _padding_mask(B: int, T: int, attention_mask: Tensor | None) -> Tensor | None:
    if attention_mask is None or attention_mask.is_meta:
        return None
    if attention_mask.ndim != 2 or attention_mask.shape[0] != B or attention_mask.shape[1] < T:
        raise ValueError(
            f"attention_mask has shape {list(attention_mask.shape)}; "
            f"it must be [{B}, {T} or more], 0 at padding"
        )
    return attention_mask[:, attention_mask.shape[1] - T :] != 0


def _restarts(layout: Layout, position_ids: Tensor | None, seq_idx: Tensor | None) -> tuple[Tensor, Tensor]:
    """Flags between the row's tokens: where another row of the batch starts, and where another sequence."""
    B, T = layout.B, layout.T
    ids = position_ids if position_ids is not None else seq_idx
    assert ids is not None
    rows = torch.arange(B, device=ids.device)[:, None].expand(B, T)
    if layout.padding is not None:
        rows = rows.masked_fill(layout.padding, B)

    def row_of(x: Tensor) -> Tensor:
        x = x.expand(B, T).flatten()
        return x if layout.tokens is None else x[layout.tokens]

    rows = row_of(rows)
    cuts = rows.diff() != 0
    restarts = torch.zeros_like(cuts)
    if position_ids is not None:
        restarts = restarts | (row_of(position_ids).diff() != 1)
    if seq_idx is not None:
        restarts = restarts | (row_of(seq_idx).diff() != 0)
    return cuts, restarts & ~cuts & (rows[1:] < B)


def _shared(cu_seqlens: Tensor, T: int | None = None) -> Tensor:
    """Boundaries for all layers, checked and read only once."""
    if torch.compiler.is_compiling():
        return cu_seqlens
    if cu_seqlens.is_inference():  # has no version counter, so each layer would read it again
        with torch.inference_mode(False):
            cu_seqlens = cu_seqlens.clone()
    if T is not None:
        checks.boundaries(cu_seqlens, T)
    return cu_seqlens
