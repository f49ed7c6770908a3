"""The same in plain operators, for CPU and fp64: flex attention has neither a backward nor a log-sum-exp there.

Queries go in chunks, each against the keys that the mask's blocks can reach, and a chunk is computed again in the
backward pass: memory is O(Q + KV) and one chunk of scores.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_mask
from torch.utils.checkpoint import checkpoint

from fsdp_sink_patches.ops.block_masks._lists import states

SCORE_BYTES = 32 * 2**20
"""How much memory one chunk of scores may take."""


def forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sinks: Tensor | None,
    block_mask: BlockMask | None,
    added: Tensor | None,
    position_bias: Tensor | None,
    softcap: float,
    scale: float,
) -> Tensor:
    """``out`` in query's dtype, computed in fp32 (fp64 for fp64); every floating tensor gets its gradient."""
    batch, heads, queries, _ = query.shape
    keys = key.shape[2]
    compute = torch.float64 if query.dtype == torch.float64 else torch.float32
    rows = max(1, min(queries, SCORE_BYTES // (compute.itemsize * batch * heads * max(keys, 1))))
    blocks = None if block_mask is None else states(block_mask)
    parts = []
    for start in range(0, queries, rows):
        stop = min(start + rows, queries)
        low, high, hidden = 0, keys, None
        if block_mask is not None and blocks is not None:
            low, high = _reached(block_mask, blocks, start, stop, keys)
            hidden = functools.partial(_hidden, block_mask, blocks, start, stop, low, high)
        terms = [t[:, :, start:stop, low:high] for t in (added, position_bias) if t is not None]
        attend = functools.partial(_attend, scale=scale, softcap=softcap, compute=compute)
        arguments: tuple[Any, ...]
        arguments = query[:, :, start:stop], key[:, :, low:high], value[:, :, low:high], sinks, hidden, *terms
        if torch.is_grad_enabled():
            parts.append(checkpoint(attend, *arguments, use_reentrant=False, preserve_rng_state=False))
        else:
            parts.append(attend(*arguments))
    return torch.cat(parts, dim=2) if parts else query.new_zeros(batch, heads, 0, value.shape[-1])


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sinks: Tensor | None,
    hidden: Callable[[], Tensor] | None,
    *added: Tensor,
    scale: float,
    softcap: float,
    compute: torch.dtype,
) -> Tensor:
    batch, heads, rows, _ = query.shape
    kv_heads, keys = key.shape[1:3]
    with torch.autocast("cpu", enabled=False):
        q = query.to(compute).reshape(batch, kv_heads, -1, query.shape[-1])
        scores = (q @ key.to(compute).transpose(2, 3) * scale).view(batch, heads, rows, keys)
        if softcap > 0:
            scores = softcap * torch.tanh(scores / softcap)
        for term in added:
            scores = scores + term.to(compute)
        if hidden is not None:
            scores = scores.masked_fill(hidden(), float("-inf"))
        top = (
            scores.detach().amax(-1, keepdim=True) if keys else scores.new_full((batch, heads, rows, 1), float("-inf"))
        )
        sink = None if sinks is None else sinks.to(compute).view(1, -1, 1, 1)
        if sink is not None:
            top = torch.maximum(top, sink.detach())
        top = torch.where(top == float("-inf"), 0.0, top)  # a row that sees nothing: exp(-inf - 0) = 0 and no NaN
        weights = torch.exp(scores - top)
        total = weights.sum(-1, keepdim=True)
        if sink is not None:
            total = total + torch.exp(sink - top)
        weights = weights / torch.where(total == 0, 1.0, total)
        out = weights.view(batch, kv_heads, -1, keys) @ value.to(compute)
        return out.view(batch, heads, rows, -1).to(query.dtype)


def _reached(mask: BlockMask, blocks: tuple[Tensor, Tensor], start: int, stop: int, keys: int) -> tuple[int, int]:
    """First key that one of the queries ``start:stop`` can reach, and one past the last."""
    q_block, kv_block = mask.BLOCK_SIZE
    row = torch.arange(start, stop) // q_block
    partial, full = (b[:, :, row] for b in blocks)
    reached = (partial | full).flatten(0, 2).any(0).nonzero()[:, 0].tolist()
    return (reached[0] * kv_block, min((reached[-1] + 1) * kv_block, keys)) if reached else (0, 0)


def _hidden(mask: BlockMask, blocks: tuple[Tensor, Tensor], start: int, stop: int, low: int, high: int) -> Tensor:
    """True ``[batch, heads, q, kv]`` where a key must not be seen. Made inside of a chunk: kept for the backward, the
    chunks' masks would be the whole mask."""
    q_block, kv_block = mask.BLOCK_SIZE
    row, column = torch.arange(start, stop) // q_block, torch.arange(low, high) // kv_block
    partial, full = (b[:, :, row][..., column] for b in blocks)
    if not bool(partial.any()):
        return ~full
    batch, heads = partial.shape[:2]

    def shifted(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return mask.mask_mod(b, h, q + start, kv + low)

    visible = create_mask(shifted, batch, heads, stop - start, high - low, "cpu")
    return ~((partial & visible) | full)
