"""DeepSeek-V4's lightning indexer: the entries that score best for each token, a chunk of tokens at a time.

Entry ``s`` scores ``sum_h w[t, h] * relu(q[t, h] . k[s]) * scale`` for token ``t`` (arXiv 2606.19348, 2.3.1, eq. 16).
Written out, that is a tensor ``[tokens, heads, entries]``; here it exists for a chunk of tokens only, so memory is
``O(tokens * k + chunk)``. The picks are integers, so nothing flows back: no graph is made.

There is no objective that trains the indexer (the paper's KL to the attention distribution): transformers has none.
"""

from __future__ import annotations

import torch
from torch import Tensor

SCORES_AT_ONCE = 2**24
"""Scores of a chunk, over all heads: 64 MiB in fp32."""

_library = torch.library.Library("fsdp_sink_patches", "FRAGMENT")
_library.define(
    "top_entries(Tensor q, Tensor keys, Tensor weights, Tensor entry_ranges, int k, float scale, bool rounded)"
    " -> Tensor"
)


def top_entries(
    q: Tensor, keys: Tensor, weights: Tensor, entry_ranges: Tensor, k: int, scale: float, rounded: bool = False
) -> Tensor:
    """The ``k`` best entries of each token among those that it sees; of equal scores the lower entries.

    Args:
        q: ``[rows, tokens, heads, dim]``, floating point. Sums have at least fp32; on CUDA half precision is multiplied
            on tensor cores all the same, which is exact.
        keys: ``[rows, entries, dim]``, q's dtype.
        weights: ``[rows, tokens, heads]``, floating point.
        entry_ranges: integers ``[1 or rows, tokens, 2]``, the entries ``[first, last + 1)`` of the token's own row.
        k: how many.
        scale: factor of the products.
        rounded: products over ``dim`` are rounded to q's dtype, as a matmul's are.

    Returns:
        int32 ``[rows, tokens, min(k, entries)]``, ascending, then -1 where fewer are seen.

    Raises:
        ValueError: shapes that don't fit each other.
    """
    rows, tokens, heads, dim = q.shape
    if (
        keys.shape[::2] != (rows, dim)
        or keys.dtype != q.dtype
        or weights.shape != (rows, tokens, heads)
        or entry_ranges.shape[1:] != (tokens, 2)
        or entry_ranges.shape[0] not in (1, rows)
    ):
        raise ValueError(
            f"top_entries: found q {tuple(q.shape)} {q.dtype}, keys {tuple(keys.shape)} {keys.dtype}, weights "
            f"{tuple(weights.shape)} and entry_ranges {tuple(entry_ranges.shape)}; expected [rows, tokens, heads, dim],"
            " [rows, entries, dim] of the same dtype, [rows, tokens, heads] and [1 or rows, tokens, 2]. Pass those."
        )
    picks: Tensor = torch.ops.fsdp_sink_patches.top_entries.default(
        q.detach(), keys.detach(), weights.detach(), entry_ranges, k, scale, rounded
    )
    return picks


def _top_entries(
    q: Tensor, keys: Tensor, weights: Tensor, entry_ranges: Tensor, k: int, scale: float, rounded: bool
) -> Tensor:
    rows, tokens, heads, _ = q.shape
    entries = keys.shape[1]
    k = min(k, entries)
    picks = q.new_empty((rows, tokens, k), dtype=torch.int32)
    step = max(1, SCORES_AT_ONCE // max(1, heads * entries))
    if k == entries:  # nothing to choose
        step = max(1, SCORES_AT_ONCE // max(1, k))
    slots = torch.arange(entries, device=q.device)
    ranges = entry_ranges.expand(rows, -1, -1)
    with torch.no_grad(), torch.autocast(q.device.type, enabled=False):
        for row in range(rows):
            for begin in range(0, tokens, step):
                chunk = slice(begin, min(begin + step, tokens))
                first, end = ranges[row, chunk].unsqueeze(1).unbind(-1)
                seen = (slots >= first) & (slots < end)
                if k < entries:
                    scores = _scores(q[row, chunk], keys[row], weights[row, chunk], scale, rounded)
                    seen &= _best(scores.masked_fill_(~seen, float("-inf")), k)
                picks[row, chunk] = _listed(seen, slots, k)
    return picks


def _scores(q: Tensor, keys: Tensor, weights: Tensor, scale: float, rounded: bool) -> Tensor:
    """``[tokens, entries]``, in at least fp32."""
    sums = torch.promote_types(q.dtype, torch.float32)
    flat = q.flatten(0, 1)
    if rounded or q.dtype == sums:
        products = flat @ keys.t()
    elif q.is_cuda and hasattr(torch.ops.aten.mm, "dtype"):
        products = torch.mm(flat, keys.t(), out_dtype=sums)
    else:
        products = flat.to(sums) @ keys.t().to(sums)
    heads = products.relu_().mul_(scale).view(q.shape[0], q.shape[1], -1)
    total: Tensor = (heads * weights.to(sums).unsqueeze(-1)).sum(1)
    return total


def _best(scores: Tensor, k: int) -> Tensor:
    """Which ``k`` of each row are the largest, of equal ones the first: torch.topk leaves those open."""
    least = scores.topk(k, dim=-1, sorted=False).values.amin(-1, keepdim=True)
    above, tied = scores > least, scores == least
    return above | (tied & (tied.cumsum(-1) <= k - above.sum(-1, keepdim=True)))


def _listed(chosen: Tensor, slots: Tensor, k: int) -> Tensor:
    """The places of at most ``k`` trues in each row, then -1."""
    place = torch.where(chosen, chosen.cumsum(-1) - 1, k)
    listed = slots.new_full((chosen.shape[0], k + 1), -1)
    return listed.scatter_(1, place, slots.expand_as(place))[:, :k]


_library.impl("top_entries", _top_entries, "CompositeExplicitAutograd")


@torch.library.register_fake("fsdp_sink_patches::top_entries", lib=_library)
def _(q, keys, weights, entry_ranges, k, scale, rounded):  # type: ignore[no-untyped-def]
    return q.new_empty((*q.shape[:2], min(k, keys.shape[1])), dtype=torch.int32)
