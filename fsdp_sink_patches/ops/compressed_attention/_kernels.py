"""DeepSeek-V4's attention as Triton kernels: every head of a token on the MMA's M axis, keys and values one tensor.

A token sees the keys of its window, then compressed entries, either a range of them or those that it picked, then the
sink. One shared key head means that all heads of a token read the same keys, so a tile of keys is fetched once for 64
rows of scores, and serves as values too.

- forward: a program is one token and a block of heads.
- backward of q: the same programs, with the same keys; it also makes ``delta = rowsum(dout * out)``. For entries that
  were picked it hands out the entries' gradients too, added atomically or written out to be summed in order.
- backward of the window's keys, and of entries in ranges: a program is a block of keys and runs over the tokens that
  see them, so nothing is added atomically. Ranges are cut into chunks of tokens, whose sums are added at the end.

The backward recomputes ``P = exp(S - lse)`` from the lse that includes the sink (FlashAttention-2, algorithm 2), so
``dS = P * (dP - delta)`` is exact and the sink's own gradient is ``-sum_t exp(sink - lse) * delta``.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime.errors import OutOfResources

log = logging.getLogger(__name__)

LOG2E = 1.4426950408889634
_LN2 = tl.constexpr(0.6931471805599453)
_LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit  # type: ignore[untyped-decorator]
def _keys(base, index, seen, stride, D: tl.constexpr, BLOCK_D: tl.constexpr):  # type: ignore[no-untyped-def]
    """Rows ``index`` of ``[rows, D]``, zeros where not ``seen``."""
    d = tl.arange(0, BLOCK_D)
    at = base + index[:, None].to(tl.int64) * stride + d[None, :]
    if BLOCK_D == D:
        return tl.load(at, mask=seen[:, None], other=0.0)
    return tl.load(at, mask=seen[:, None] & (d[None, :] < D), other=0.0)


@triton.jit  # type: ignore[untyped-decorator]
def _heads(base, token, head, there, t, h, D: tl.constexpr, BLOCK_D: tl.constexpr):  # type: ignore[no-untyped-def]
    """``[BLOCK_H, BLOCK_D]`` of a token in ``[tokens, heads, D]``."""
    d = tl.arange(0, BLOCK_D)
    at = base + token.to(tl.int64) * t + head[:, None] * h + d[None, :]
    return tl.load(at, mask=there[:, None] & (d[None, :] < D), other=0.0)


@triton.jit  # type: ignore[untyped-decorator]
def _last_pick(topk_ptr, token, topk_t, picks, BLOCK_K: tl.constexpr):  # type: ignore[no-untyped-def]
    """One past the last place of a token's picks that holds an entry."""
    place = tl.arange(0, BLOCK_K)
    index = tl.load(topk_ptr + token.to(tl.int64) * topk_t + place, mask=place < picks, other=-1)
    return tl.max(tl.where(index >= 0, place + 1, 0), 0)


@triton.jit
def _online(acc, top, mass, q, k, seen, scale):  # type: ignore[no-untyped-def]
    scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
    scores = tl.where(seen[None, :], scores, float("-inf"))
    new_top = tl.maximum(top, tl.max(scores, 1))
    probs = tl.exp2(scores - new_top[:, None])
    keep = tl.exp2(top - new_top)
    mass = mass * keep + tl.sum(probs, 1)
    acc = tl.dot(probs.to(k.dtype), k, acc * keep[:, None], input_precision="ieee")
    return acc, new_top, mass


@triton.jit  # type: ignore[untyped-decorator]
def _forward_kernel(  # type: ignore[no-untyped-def]
    q_ptr, kv_ptr, entry_ptr, sink_ptr, window_ptr, range_ptr, topk_ptr, out_ptr, lse_ptr,
    heads, picks, scale, q_t, q_h, kv_t, entry_t, range_t, topk_t,
    RANGES: tl.constexpr, PICKS: tl.constexpr, BLOCK_K: tl.constexpr,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0)
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    there = head < heads
    n = tl.arange(0, BLOCK_N)
    q = _heads(q_ptr, token, head, there, q_t, q_h, D, BLOCK_D)
    # a finite start instead of -inf: a tile that the token must not see at all would make -inf - -inf
    top = tl.full([BLOCK_H], -1e30, tl.float32)
    mass = tl.zeros([BLOCK_H], tl.float32)
    acc = tl.zeros([BLOCK_H, BLOCK_D], tl.float32)
    for start in tl.range(tl.load(window_ptr + token).to(tl.int32), token + 1, BLOCK_N):
        index = start + n
        seen = index <= token
        acc, top, mass = _online(acc, top, mass, q, _keys(kv_ptr, index, seen, kv_t, D, BLOCK_D), seen, scale)
    if RANGES:
        at = range_ptr + token.to(tl.int64) * range_t
        last = tl.load(at + 1).to(tl.int32)
        for start in tl.range(tl.load(at).to(tl.int32), last, BLOCK_N):
            index = start + n
            seen = index < last
            k = _keys(entry_ptr, index, seen, entry_t, D, BLOCK_D)
            acc, top, mass = _online(acc, top, mass, q, k, seen, scale)
    if PICKS:
        for start in tl.range(0, _last_pick(topk_ptr, token, topk_t, picks, BLOCK_K), BLOCK_N):
            place = start + n
            index = tl.load(topk_ptr + token.to(tl.int64) * topk_t + place, mask=place < picks, other=-1)
            seen = index >= 0
            k = _keys(entry_ptr, index, seen, entry_t, D, BLOCK_D)
            acc, top, mass = _online(acc, top, mass, q, k, seen, scale)
    # the sink joins last, in fp32: had it set `top`, a large one would push every probability below fp16's range
    sink = tl.load(sink_ptr + head, mask=there, other=0.0).to(tl.float32) * _LOG2E
    highest = tl.maximum(top, sink)
    share = tl.exp2(top - highest)
    mass = mass * share + tl.exp2(sink - highest)
    out = acc * (share / mass)[:, None]
    d = tl.arange(0, BLOCK_D)
    at = out_ptr + (token.to(tl.int64) * heads + head[:, None]) * D + d[None, :]
    tl.store(at, out.to(out_ptr.dtype.element_ty), mask=there[:, None] & (d[None, :] < D))
    tl.store(lse_ptr + token.to(tl.int64) * heads + head, (highest + tl.log2(mass)) * _LN2, mask=there)


@triton.jit
def _probabilities(q, dout, k, seen, lse, delta, scale):  # type: ignore[no-untyped-def]
    """``P`` and ``dS / softmax_scale`` of a tile, in the dtype of the matmuls that follow."""
    scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
    probs = tl.where(seen, tl.exp2(scores - lse[:, None]), 0.0)
    dprobs = tl.dot(dout, tl.trans(k), input_precision="ieee")
    return probs.to(k.dtype), (probs * (dprobs - delta[:, None])).to(k.dtype)


@triton.jit  # type: ignore[untyped-decorator]
def _query_kernel(  # type: ignore[no-untyped-def]
    q_ptr, kv_ptr, entry_ptr, window_ptr, range_ptr, topk_ptr, out_ptr, lse_ptr, dout_ptr,
    dq_ptr, delta_ptr, dentry_ptr,
    heads, picks, scale, softmax_scale, first_token, chunk,
    q_t, q_h, kv_t, entry_t, range_t, topk_t, out_t, out_h, dout_t, dout_h,
    RANGES: tl.constexpr, PICKS: tl.constexpr, DENTRY: tl.constexpr, BLOCK_K: tl.constexpr,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """DENTRY: 0 leaves the picked entries' gradient out, 1 adds it atomically, 2 writes it out pick by pick."""
    token = first_token + tl.program_id(0)
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    there = head < heads
    n = tl.arange(0, BLOCK_N)
    d = tl.arange(0, BLOCK_D)
    cell = there[:, None] & (d[None, :] < D)
    dout = _heads(dout_ptr, token, head, there, dout_t, dout_h, D, BLOCK_D)
    out = _heads(out_ptr, token, head, there, out_t, out_h, D, BLOCK_D)
    delta = tl.sum(out.to(tl.float32) * dout.to(tl.float32), 1)
    row = token.to(tl.int64) * heads + head
    tl.store(delta_ptr + row, delta, mask=there)
    lse = tl.load(lse_ptr + row, mask=there, other=0.0) * _LOG2E
    q = _heads(q_ptr, token, head, there, q_t, q_h, D, BLOCK_D)
    dq = tl.zeros([BLOCK_H, BLOCK_D], tl.float32)
    for start in tl.range(tl.load(window_ptr + token).to(tl.int32), token + 1, BLOCK_N):
        index = start + n
        seen = index <= token
        k = _keys(kv_ptr, index, seen, kv_t, D, BLOCK_D)
        _, ds = _probabilities(q, dout, k, there[:, None] & seen[None, :], lse, delta, scale)
        dq = tl.dot(ds, k, dq, input_precision="ieee")
    if RANGES:
        at = range_ptr + token.to(tl.int64) * range_t
        last = tl.load(at + 1).to(tl.int32)
        for start in tl.range(tl.load(at).to(tl.int32), last, BLOCK_N):
            index = start + n
            seen = index < last
            k = _keys(entry_ptr, index, seen, entry_t, D, BLOCK_D)
            _, ds = _probabilities(q, dout, k, there[:, None] & seen[None, :], lse, delta, scale)
            dq = tl.dot(ds, k, dq, input_precision="ieee")
    if PICKS:
        for start in tl.range(0, _last_pick(topk_ptr, token, topk_t, picks, BLOCK_K), BLOCK_N):
            place = start + n
            index = tl.load(topk_ptr + token.to(tl.int64) * topk_t + place, mask=place < picks, other=-1)
            seen = index >= 0
            k = _keys(entry_ptr, index, seen, entry_t, D, BLOCK_D)
            p, ds = _probabilities(q, dout, k, there[:, None] & seen[None, :], lse, delta, scale)
            dq = tl.dot(ds, k, dq, input_precision="ieee")
            if DENTRY > 0:
                dk = tl.dot(tl.trans(ds), q, input_precision="ieee") * softmax_scale
                dk = tl.dot(tl.trans(p), dout, dk, input_precision="ieee")
                wide = seen[:, None] & (d[None, :] < D)
                if DENTRY == 1:
                    tl.atomic_add(
                        dentry_ptr + index[:, None].to(tl.int64) * D + d[None, :], dk, mask=wide, sem="relaxed"
                    )
                else:
                    slot = (tl.program_id(1) * chunk + tl.program_id(0)).to(tl.int64) * picks + place
                    tl.store(dentry_ptr + slot[:, None] * D + d[None, :], dk, mask=wide)
    at = dq_ptr + (token.to(tl.int64) * heads + head[:, None]) * D + d[None, :]
    tl.store(at, (dq * softmax_scale).to(dq_ptr.dtype.element_ty), mask=cell)


@triton.jit  # type: ignore[untyped-decorator]
def _key_kernel(  # type: ignore[no-untyped-def]
    q_ptr, kv_ptr, bound_ptr, last_ptr, lse_ptr, dout_ptr, delta_ptr, dkv_ptr,
    tokens, heads, keys, scale, softmax_scale, chunk, q_t, q_h, kv_t, range_t, dout_t, dout_h,
    RANGES: tl.constexpr,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Gradient of a block of keys: of the window (``bound_ptr`` is window_starts), or of entries in ranges
    (``bound_ptr`` is entry_ranges), there from the tokens of one chunk."""
    first_key = tl.program_id(0) * BLOCK_N
    index = first_key + tl.arange(0, BLOCK_N)
    real = index < keys
    k = _keys(kv_ptr, index, real, kv_t, D, BLOCK_D)
    d = tl.arange(0, BLOCK_D)
    dk = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    dv = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    if RANGES:
        first = tl.program_id(1) * chunk
        end = tl.minimum(first + chunk, tokens)
    else:
        first = first_key
        end = tl.load(last_ptr + tl.minimum(first_key + BLOCK_N, keys) - 1).to(tl.int32) + 1
    for at_token in tl.range(first, end):
        token = at_token + tl.zeros([], tl.int64)
        if RANGES:
            lower = tl.load(bound_ptr + token.to(tl.int64) * range_t).to(tl.int32)
            upper = tl.load(bound_ptr + token.to(tl.int64) * range_t + 1).to(tl.int32)
        else:
            lower = tl.load(bound_ptr + token).to(tl.int32)
            upper = token + 1
        if (lower < first_key + BLOCK_N) & (upper > first_key):
            seen = real & (index >= lower) & (index < upper)
            for block in range(0, heads, BLOCK_H):
                head = block + tl.arange(0, BLOCK_H)
                there = head < heads
                q = _heads(q_ptr, token, head, there, q_t, q_h, D, BLOCK_D)
                dout = _heads(dout_ptr, token, head, there, dout_t, dout_h, D, BLOCK_D)
                row = token.to(tl.int64) * heads + head
                lse = tl.load(lse_ptr + row, mask=there, other=0.0) * _LOG2E
                delta = tl.load(delta_ptr + row, mask=there, other=0.0)
                p, ds = _probabilities(q, dout, k, there[:, None] & seen[None, :], lse, delta, scale)
                dv = tl.dot(tl.trans(p), dout, dv, input_precision="ieee")
                dk = tl.dot(tl.trans(ds), q, dk, input_precision="ieee")
    at = dkv_ptr + (tl.program_id(1).to(tl.int64) * keys + index[:, None]) * D + d[None, :]
    total = dv + dk * softmax_scale
    tl.store(at, total.to(dkv_ptr.dtype.element_ty), mask=real[:, None] & (d[None, :] < D))


@triton.jit  # type: ignore[untyped-decorator]
def _segment_kernel(  # type: ignore[no-untyped-def]
    written_ptr, order_ptr, offset_ptr, total_ptr, rows, copies, D: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Add to each entry the rows that belong to it, in their order."""
    entry = tl.program_id(0)
    d = tl.arange(0, BLOCK_D)
    there = d < D
    total = tl.zeros([BLOCK_D], tl.float32)
    for j in tl.range(tl.load(offset_ptr + entry).to(tl.int32), tl.load(offset_ptr + entry + 1).to(tl.int32)):
        row = tl.load(order_ptr + j).to(tl.int64)
        for copy in range(copies):
            total += tl.load(written_ptr + (copy * rows + row) * D + d, mask=there, other=0.0)
    at = total_ptr + entry.to(tl.int64) * D + d
    tl.store(at, tl.load(at, mask=there, other=0.0) + total, mask=there)


# --- launches --------------------------------------------------------------------------------------------------------

Options = dict[str, int]


def forward_tiles(head_dim: int) -> list[Options]:
    """Keys a tile, warps and stages of the forward, to be tried in this order. **Not tuned yet**: the second is the one
    of a trial on an H200."""
    wide = {"BLOCK_N": 64, "num_warps": 8, "num_stages": 2}
    small = {"BLOCK_N": 32, "num_warps": 8, "num_stages": 2}
    return [wide, small, {"BLOCK_N": 16, "num_warps": 4, "num_stages": 1}]


def backward_tiles(head_dim: int) -> list[Options]:
    """The same of both backward kernels. **Not tuned yet.**"""
    return [
        {"BLOCK_N": 32, "num_warps": 8, "num_stages": 2},
        {"BLOCK_N": 32, "num_warps": 8, "num_stages": 1},
        {"BLOCK_N": 16, "num_warps": 8, "num_stages": 1},
    ]


_too_large: set[tuple[Any, ...]] = set()
"""What did not fit a card's shared memory, never tried twice."""


def _launch(
    name: str, device: torch.device, shape: tuple[int, ...], tiles: list[Options], run: Callable[..., None]
) -> None:
    """Run with the first tiles that fit this card.

    Raises:
        RuntimeError: none fit.
    """
    for options in tiles:
        key = (name, device.index or 0, *shape, *options.values())
        if key in _too_large:
            continue
        try:
            run(**options)
            return
        except OutOfResources as error:
            _too_large.add(key)
            log.warning("compressed attention: %s of the %s kernel do not fit this card: %s", options, name, error)
    raise RuntimeError(
        f"compressed_attention: found a card whose shared memory holds none of the {name} kernel's tiles for head_dim "
        f"{shape[0]}; expected an A100, H100 or newer. Run on the CPU, or in fp32, for the plain torch reference."
    )


def _block_heads(heads: int) -> int:
    block: int = max(16, min(64, triton.next_power_of_2(heads)))
    return block


def _sees(window_starts: Tensor, ranges: Tensor | None, topk: Tensor | None) -> tuple[Tensor, Tensor, int, int]:
    """What the kernels get for absent tensors, the number of picks and the power of two above it."""
    picks = 0 if topk is None else topk.shape[1]
    return (
        window_starts if ranges is None else ranges,
        window_starts if topk is None else topk,
        picks,
        triton.next_power_of_2(max(picks, 1)),
    )


def forward(
    q: Tensor, kv: Tensor, entries: Tensor, sinks: Tensor, window_starts: Tensor, ranges: Tensor | None,
    topk: Tensor | None, softmax_scale: float, tiles: list[Options] | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """``out`` (contiguous, q's dtype) and ``lse`` (fp32, ``[tokens, heads]``); the last dimension of q, kv and entries
    is contiguous."""
    tokens, heads, dim = q.shape
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty(tokens, heads, dtype=torch.float32, device=q.device)
    if q.numel() == 0:
        return out, lse
    some_ranges, some_topk, picks, block_k = _sees(window_starts, ranges, topk)
    block_h = _block_heads(heads)

    def run(**options: int) -> None:
        _forward_kernel[(tokens, triton.cdiv(heads, block_h))](
            q, kv, entries, sinks, window_starts, some_ranges, some_topk, out, lse,
            heads, picks, softmax_scale * LOG2E,
            q.stride(0), q.stride(1), kv.stride(0), entries.stride(0), some_ranges.stride(0), some_topk.stride(0),
            RANGES=ranges is not None, PICKS=picks > 0, BLOCK_K=block_k,
            D=dim, BLOCK_D=triton.next_power_of_2(dim), BLOCK_H=block_h, **options,
        )  # fmt: skip

    _launch("forward", q.device, (dim, block_h), tiles or forward_tiles(dim), run)
    return out, lse


def backward(
    dout: Tensor, q: Tensor, kv: Tensor, entries: Tensor, window_starts: Tensor, ranges: Tensor | None,
    topk: Tensor | None, out: Tensor, lse: Tensor, softmax_scale: float, deterministic: bool,
    tiles: list[Options] | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """``dq``, ``dkv`` and ``dentries`` in the dtypes of their tensors, and ``delta`` (fp32, ``[tokens, heads]``)."""
    tokens, heads, dim = q.shape
    dq = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    dkv = torch.empty(kv.shape, dtype=kv.dtype, device=q.device)
    delta = torch.empty(tokens, heads, dtype=torch.float32, device=q.device)
    if q.numel() == 0:
        return dq, dkv.zero_(), torch.zeros_like(entries), delta
    picked = topk is not None and topk.shape[1] > 0 and entries.shape[0] > 0
    dentries = torch.zeros(entries.shape, dtype=torch.float32, device=q.device)
    block_h, block_d = _block_heads(heads), triton.next_power_of_2(dim)
    some_ranges, some_topk, picks, block_k = _sees(window_starts, ranges, topk)
    tiles = tiles or backward_tiles(dim)
    blocks_h = triton.cdiv(heads, block_h)

    def queries(first: int, count: int, mode: int, target: Tensor) -> None:
        def run(**options: int) -> None:
            _query_kernel[(count, blocks_h)](
                q, kv, entries, window_starts, some_ranges, some_topk, out, lse, dout, dq, delta, target,
                heads, picks, softmax_scale * LOG2E, softmax_scale, first, count,
                q.stride(0), q.stride(1), kv.stride(0), entries.stride(0), some_ranges.stride(0), some_topk.stride(0),
                out.stride(0), out.stride(1), dout.stride(0), dout.stride(1),
                RANGES=ranges is not None, PICKS=picks > 0, DENTRY=mode, BLOCK_K=block_k,
                D=dim, BLOCK_D=block_d, BLOCK_H=block_h, **options,
            )  # fmt: skip

        _launch(f"query {mode}", q.device, (dim, block_h), tiles, run)

    if picked and deterministic and topk is not None:
        step = max(1, WRITTEN_AT_ONCE // (blocks_h * picks * dim * 4))
        for first in range(0, tokens, step):
            count = min(step, tokens - first)
            written = torch.empty(blocks_h, count * picks, dim, dtype=torch.float32, device=q.device)
            queries(first, count, 2, written)
            chosen = topk[first : first + count].reshape(-1)
            by_entry, order = chosen.sort(stable=True)
            borders = torch.arange(entries.shape[0] + 1, device=q.device, dtype=by_entry.dtype)
            _segment_kernel[(entries.shape[0],)](
                written, order, torch.searchsorted(by_entry, borders), dentries, count * picks, blocks_h,
                D=dim, BLOCK_D=block_d, num_warps=4,
            )  # fmt: skip
    else:
        queries(0, tokens, 1 if picked else 0, dentries)

    def keys(run_on: Tensor, bounds: Tensor, last: Tensor, target: Tensor, chunk: int, chunks: int) -> None:
        def run(**options: int) -> None:
            _key_kernel[(triton.cdiv(run_on.shape[0], options["BLOCK_N"]), chunks)](
                q, run_on, bounds, last, lse, dout, delta, target,
                tokens, heads, run_on.shape[0], softmax_scale * LOG2E, softmax_scale, chunk,
                q.stride(0), q.stride(1), run_on.stride(0), bounds.stride(0), dout.stride(0), dout.stride(1),
                RANGES=chunk > 0, D=dim, BLOCK_D=block_d, BLOCK_H=block_h, **options,
            )  # fmt: skip

        _launch("key", q.device, (dim, block_h), tiles, run)

    keys(kv, window_starts, last_queries(window_starts), dkv, 0, 1)
    if ranges is not None and entries.shape[0] > 0:
        blocks = triton.cdiv(entries.shape[0], 32)
        chunk = max(64, triton.cdiv(tokens * blocks, PROGRAMS))
        chunks = triton.cdiv(tokens, chunk)
        parts = torch.empty(chunks, *entries.shape, dtype=torch.float32, device=q.device)
        keys(entries, ranges, window_starts, parts, chunk, chunks)
        dentries = parts.sum(0)
    return dq, dkv, dentries.to(entries.dtype), delta


WRITTEN_AT_ONCE = 2**29
"""Bytes of gradients of picks that a deterministic backward holds before it sums them: 512 MiB."""

PROGRAMS = 528
"""Programs that an H200 with 132 multiprocessors is kept busy by."""


def last_queries(window_starts: Tensor) -> Tensor:
    """The last token whose window begins at or before each key, ``[tokens]``: behind it no token sees that key."""
    tokens = torch.arange(window_starts.shape[0], device=window_starts.device)
    latest = torch.zeros_like(tokens).scatter_reduce_(0, window_starts.long(), tokens, "amax")
    return latest.cummax(0).values
