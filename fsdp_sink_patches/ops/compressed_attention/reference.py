"""The same attention in plain torch, a chunk of tokens at a time: any device, any dtype, easy to believe.

It runs where the kernels don't, and they are tested against it. Scores are summed in fp32 (fp64 for fp64); memory is
``O(chunk * heads * keys)``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import NamedTuple, ParamSpec, TypeVar

import torch
from torch import Tensor

_P = ParamSpec("_P")
_R = TypeVar("_R")

SCORES_AT_ONCE = 2**24
"""Scores of a chunk: 64 MiB in fp32."""


class _Chunk(NamedTuple):
    tokens: slice
    window: slice
    """Keys that some token of the chunk sees."""
    in_window: Tensor
    """bool ``[chunk, keys]``."""
    entries: Tensor
    """``[chunk or 1, seen, head_dim]`` in the accumulator's dtype."""
    which: Tensor | None
    """int64 ``[chunk, seen]``: which entries these are; None for all of them in order."""
    sees: Tensor
    """bool ``[chunk, seen]``."""


def _chunks(
    q: Tensor, kv: Tensor, entries: Tensor, window_starts: Tensor, ranges: Tensor | None, topk: Tensor | None
) -> Iterator[_Chunk]:
    tokens, heads, _ = q.shape
    total = torch.promote_types(q.dtype, torch.float32)
    seen = 0 if ranges is None and topk is None else entries.shape[0] if topk is None else topk.shape[1]
    step = max(1, min(256, SCORES_AT_ONCE // max(1, heads * (seen + 512))))
    for begin in range(0, tokens, step):
        rows = slice(begin, min(begin + step, tokens))
        starts = window_starts[rows].long()
        window = slice(int(starts.min()), rows.stop)
        columns = torch.arange(window.start, window.stop, device=q.device)
        row = torch.arange(rows.start, rows.stop, device=q.device)
        in_window = (columns >= starts[:, None]) & (columns <= row[:, None])
        index = None
        if topk is not None and entries.shape[0] > 0:
            index = topk[rows].long()
            sees = index >= 0
            index = index.clamp(min=0)
            chosen = entries.to(total)[index]
        elif ranges is not None:
            slots = torch.arange(entries.shape[0], device=q.device)
            bounds = ranges[rows].long()
            sees = (slots >= bounds[:, :1]) & (slots < bounds[:, 1:])
            chosen = entries.to(total)[None]
        else:
            sees = in_window.new_zeros(rows.stop - rows.start, 0)
            chosen = entries.new_zeros(1, 0, entries.shape[1], dtype=total)
        yield _Chunk(rows, window, in_window, chosen, index, sees)


def _scores(q: Tensor, keys: Tensor, chunk: _Chunk, scale: float) -> Tensor:
    """``[chunk, heads, keys + seen]``, -inf where not seen."""
    of_window = torch.einsum("thd,kd->thk", q, keys).masked_fill(~chunk.in_window[:, None], float("-inf"))
    entries = chunk.entries.expand(q.shape[0], -1, -1)
    of_entries = torch.einsum("thd,tkd->thk", q, entries).masked_fill(~chunk.sees[:, None], float("-inf"))
    return torch.cat((of_window, of_entries), -1) * scale


def _without_autocast(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Sums are fp32 whatever autocast says, also in a backward that runs inside of it."""

    @functools.wraps(function)
    def run(*a: _P.args, **k: _P.kwargs) -> _R:
        with torch.autocast("cuda", enabled=False), torch.autocast("cpu", enabled=False):
            return function(*a, **k)

    return run


@_without_autocast
def forward(
    q: Tensor, kv: Tensor, entries: Tensor, sinks: Tensor, window_starts: Tensor, ranges: Tensor | None,
    topk: Tensor | None, softmax_scale: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """``out`` in q's dtype and ``lse`` ``[tokens, heads]`` in fp32 (fp64 for fp64), the sink included."""
    total = torch.promote_types(q.dtype, torch.float32)
    out, lse = torch.empty(q.shape, dtype=q.dtype, device=q.device), q.new_empty(q.shape[:2], dtype=total)
    for chunk in _chunks(q, kv, entries, window_starts, ranges, topk):
        keys = kv[chunk.window].to(total)
        scores = _scores(q[chunk.tokens].to(total), keys, chunk, softmax_scale)
        lse[chunk.tokens] = torch.logaddexp(scores.logsumexp(-1), sinks.to(total))
        probs = (scores - lse[chunk.tokens, :, None]).exp()
        found = torch.einsum("thk,kd->thd", probs[..., : len(keys)], keys)
        found += torch.einsum("thk,tkd->thd", probs[..., len(keys) :], chunk.entries.expand(len(found), -1, -1))
        out[chunk.tokens] = found.to(q.dtype)
    return out, lse


@_without_autocast
def backward(
    dout: Tensor, q: Tensor, kv: Tensor, entries: Tensor, window_starts: Tensor, ranges: Tensor | None,
    topk: Tensor | None, out: Tensor, lse: Tensor, softmax_scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """``dq``, ``dkv`` and ``dentries`` in the dtypes of their tensors, and ``delta = rowsum(dout * out)``
    ``[tokens, heads]``."""
    total = lse.dtype
    dq, delta = torch.empty(q.shape, dtype=q.dtype, device=q.device), torch.empty_like(lse)
    dkv, dentries = torch.zeros_like(kv, dtype=total), torch.zeros_like(entries, dtype=total)
    for chunk in _chunks(q, kv, entries, window_starts, ranges, topk):
        rows = chunk.tokens
        keys, of_chunk, grad = kv[chunk.window].to(total), q[rows].to(total), dout[rows].to(total)
        probs = (_scores(of_chunk, keys, chunk, softmax_scale) - lse[rows, :, None]).exp()
        delta[rows] = (grad * out[rows].to(total)).sum(-1)
        seen = chunk.entries.expand(len(grad), -1, -1)
        dprobs = torch.cat((torch.einsum("thd,kd->thk", grad, keys), torch.einsum("thd,tkd->thk", grad, seen)), -1)
        dscores = probs * (dprobs - delta[rows, :, None]) * softmax_scale
        (p_keys, p_seen), (d_keys, d_seen) = (
            (t[..., : len(keys)], t[..., len(keys) :]) for t in (probs, dscores)
        )  # fmt: skip
        found = torch.einsum("thk,kd->thd", d_keys, keys) + torch.einsum("thk,tkd->thd", d_seen, seen)
        dq[rows] = found.to(q.dtype)
        dkv[chunk.window] += torch.einsum("thk,thd->kd", d_keys, of_chunk) + torch.einsum("thk,thd->kd", p_keys, grad)
        if chunk.sees.shape[1] == 0:
            continue
        if chunk.which is None:
            dentries += torch.einsum("thk,thd->kd", d_seen, of_chunk) + torch.einsum("thk,thd->kd", p_seen, grad)
        else:
            each = torch.einsum("thk,thd->tkd", d_seen, of_chunk) + torch.einsum("thk,thd->tkd", p_seen, grad)
            dentries.index_add_(0, chunk.which.flatten(), each.flatten(0, 1))
    return dq, dkv.to(kv.dtype), dentries.to(entries.dtype), delta
