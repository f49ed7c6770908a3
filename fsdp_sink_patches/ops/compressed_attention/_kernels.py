"""DeepSeek-V4's attention as Triton kernels: every head of a token on the MMA's M axis, keys and values one tensor.

A token sees the keys of its window, then compressed entries, either a range of them or those that it picked, then the
sink. One shared key head means that all heads of a token read the same keys, so a tile of keys is fetched once for 64
rows of scores, and serves as values too.

- forward: a program is one token and a block of heads.
- backward of q: the same programs, with the same keys; it also makes ``delta = rowsum(dout * out)``.
- backward of picked entries: the same programs again, since no two tokens pick alike. What a token gives to an entry is
  added atomically, or written out and summed in order.
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
def _rows(base, index, seen, stride, first, D: tl.constexpr, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
    """Columns ``first ...`` of rows ``index`` of ``[rows, D]``, zeros where not ``seen``."""
    d = first + tl.arange(0, WIDTH)
    at = base + index[:, None].to(tl.int64) * stride + d[None, :]
    return tl.load(at, mask=seen[:, None] & (d[None, :] < D), other=0.0)


@triton.jit  # type: ignore[untyped-decorator]
def _last_pick(topk_ptr, token, topk_t, picks, BLOCK_K: tl.constexpr):  # type: ignore[no-untyped-def]
    """One past the last place of a token's picks that holds an entry."""
    place = tl.arange(0, BLOCK_K)
    index = tl.load(topk_ptr + token.to(tl.int64) * topk_t + place, mask=place < picks, other=-1)
    return tl.max(tl.where(index >= 0, place + 1, 0), 0)


@triton.jit  # type: ignore[untyped-decorator]
def _span(  # type: ignore[no-untyped-def]
    token, window_ptr, range_ptr, range_t, topk_ptr, topk_t, picks,
    RANGES: tl.constexpr, PICKS: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """First key of the window and how many tiles it takes, first entry or place among the picks, and one past the
    last."""
    window = tl.load(window_ptr + token).to(tl.int32)
    tiles = tl.cdiv(token + 1 - window, BLOCK_N)
    first = 0
    last = 0
    if RANGES:
        at = range_ptr + token.to(tl.int64) * range_t
        first = tl.load(at).to(tl.int32)
        last = tl.maximum(tl.load(at + 1).to(tl.int32), first)
    if PICKS:
        last = _last_pick(topk_ptr, token, topk_t, picks, BLOCK_K)
    return window, tiles, first, last


@triton.jit  # type: ignore[untyped-decorator]
def _tile(  # type: ignore[no-untyped-def]
    tile, token, window, tiles, first, last, kv_ptr, kv_t, entry_ptr, entry_t, topk_ptr, topk_t,
    RANGES: tl.constexpr, PICKS: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Keys of a tile, and which are there. One loop runs over the window's tiles and then the entries': two would hold
    their registers side by side."""
    n = tl.arange(0, BLOCK_N)
    index = window + tile * BLOCK_N + n
    seen = index <= token
    if RANGES or PICKS:
        of_window = tile < tiles
        place = first + (tile - tiles) * BLOCK_N + n
        entry = place
        there = (place >= first) & (place < last)
        if PICKS:
            entry = tl.load(topk_ptr + token.to(tl.int64) * topk_t + place, mask=there, other=-1)
            there = entry >= 0
        seen = tl.where(of_window, seen, there)
        base = tl.where(
            of_window,
            kv_ptr + index[:, None].to(tl.int64) * kv_t,
            entry_ptr + entry[:, None].to(tl.int64) * entry_t,
        )
    else:
        base = kv_ptr + index[:, None].to(tl.int64) * kv_t
    d = tl.arange(0, BLOCK_D)
    return tl.load(base + d[None, :], mask=seen[:, None] & (d[None, :] < D), other=0.0), seen


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
    d = tl.arange(0, BLOCK_D)
    window, tiles, first, last = _span(
        token, window_ptr, range_ptr, range_t, topk_ptr, topk_t, picks, RANGES, PICKS, BLOCK_K, BLOCK_N
    )
    q = _rows(q_ptr + token.to(tl.int64) * q_t, head, there, q_h, 0, D, BLOCK_D)
    # a finite start instead of -inf: a tile that the token must not see at all would make -inf - -inf
    top = tl.full([BLOCK_H], -1e30, tl.float32)
    mass = tl.zeros([BLOCK_H], tl.float32)
    acc = tl.zeros([BLOCK_H, BLOCK_D], tl.float32)
    for tile in tl.range(0, tiles + tl.cdiv(last - first, BLOCK_N)):
        k, seen = _tile(
            tile, token, window, tiles, first, last, kv_ptr, kv_t, entry_ptr, entry_t, topk_ptr, topk_t,
            RANGES, PICKS, D, BLOCK_D, BLOCK_N,
        )  # fmt: skip
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        scores = tl.where(seen[None, :], scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))
        probs = tl.exp2(scores - new_top[:, None])
        keep = tl.exp2(top - new_top)
        mass = mass * keep + tl.sum(probs, 1)
        acc = tl.dot(probs.to(k.dtype), k, acc * keep[:, None], input_precision="ieee")
        top = new_top
    # the sink joins last, in fp32: had it set `top`, a large one would push every probability below fp16's range
    sink = tl.load(sink_ptr + head, mask=there, other=0.0).to(tl.float32) * _LOG2E
    highest = tl.maximum(top, sink)
    share = tl.exp2(top - highest)
    mass = mass * share + tl.exp2(sink - highest)
    out = acc * (share / mass)[:, None]
    at = out_ptr + (token.to(tl.int64) * heads + head[:, None]) * D + d[None, :]
    tl.store(at, out.to(out_ptr.dtype.element_ty), mask=there[:, None] & (d[None, :] < D))
    tl.store(lse_ptr + token.to(tl.int64) * heads + head, (highest + tl.log2(mass)) * _LN2, mask=there)


@triton.jit  # type: ignore[untyped-decorator]
def _query_kernel(  # type: ignore[no-untyped-def]
    q_ptr, kv_ptr, entry_ptr, window_ptr, range_ptr, topk_ptr, out_ptr, lse_ptr, dout_ptr, dq_ptr, delta_ptr,
    heads, picks, scale, softmax_scale,
    q_t, q_h, kv_t, entry_t, range_t, topk_t, out_t, out_h, dout_t, dout_h,
    RANGES: tl.constexpr, PICKS: tl.constexpr, BLOCK_K: tl.constexpr,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0)
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    there = head < heads
    d = tl.arange(0, BLOCK_D)
    window, tiles, first, last = _span(
        token, window_ptr, range_ptr, range_t, topk_ptr, topk_t, picks, RANGES, PICKS, BLOCK_K, BLOCK_N
    )
    dout = _rows(dout_ptr + token.to(tl.int64) * dout_t, head, there, dout_h, 0, D, BLOCK_D)
    out = _rows(out_ptr + token.to(tl.int64) * out_t, head, there, out_h, 0, D, BLOCK_D)
    delta = tl.sum(out.to(tl.float32) * dout.to(tl.float32), 1)
    row = token.to(tl.int64) * heads + head
    tl.store(delta_ptr + row, delta, mask=there)
    lse = tl.load(lse_ptr + row, mask=there, other=0.0) * _LOG2E
    q = _rows(q_ptr + token.to(tl.int64) * q_t, head, there, q_h, 0, D, BLOCK_D)
    dq = tl.zeros([BLOCK_H, BLOCK_D], tl.float32)
    for tile in tl.range(0, tiles + tl.cdiv(last - first, BLOCK_N)):
        k, seen = _tile(
            tile, token, window, tiles, first, last, kv_ptr, kv_t, entry_ptr, entry_t, topk_ptr, topk_t,
            RANGES, PICKS, D, BLOCK_D, BLOCK_N,
        )  # fmt: skip
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        probs = tl.where(there[:, None] & seen[None, :], tl.exp2(scores - lse[:, None]), 0.0)
        dprobs = tl.dot(dout, tl.trans(k), input_precision="ieee")
        dq = tl.dot((probs * (dprobs - delta[:, None])).to(k.dtype), k, dq, input_precision="ieee")
    at = dq_ptr + (token.to(tl.int64) * heads + head[:, None]) * D + d[None, :]
    tl.store(at, (dq * softmax_scale).to(dq_ptr.dtype.element_ty), mask=there[:, None] & (d[None, :] < D))


@triton.jit
def _weights(scores, dprobs, seen, lse, delta, scale):  # type: ignore[no-untyped-def]
    """``P`` and ``dS / softmax_scale``, both ``[keys, heads]``, in fp32."""
    probs = tl.where(seen, tl.exp2(scores * scale - lse[None, :]), 0.0)
    return probs, probs * (dprobs - delta[None, :])


@triton.jit  # type: ignore[untyped-decorator]
def _pick_kernel(  # type: ignore[no-untyped-def]
    q_ptr, entry_ptr, topk_ptr, lse_ptr, dout_ptr, delta_ptr, dentry_ptr,
    heads, picks, scale, softmax_scale, first_token, chunk, q_t, q_h, entry_t, topk_t, dout_t, dout_h,
    WRITE: tl.constexpr, BLOCK_K: tl.constexpr,
    D: tl.constexpr, WIDTH: tl.constexpr, HALVES: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """What one token and a block of its heads give to WIDTH columns of the entries that it picked: added atomically, or
    with WRITE written out pick by pick."""
    token = first_token + tl.program_id(0)
    own = tl.program_id(2) * WIDTH
    other = WIDTH - own  # of two halves the other one
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    there = head < heads
    n = tl.arange(0, BLOCK_N)
    d = own + tl.arange(0, WIDTH)
    q_base = q_ptr + token.to(tl.int64) * q_t
    dout_base = dout_ptr + token.to(tl.int64) * dout_t
    q = _rows(q_base, head, there, q_h, own, D, WIDTH)
    dout = _rows(dout_base, head, there, dout_h, own, D, WIDTH)
    if HALVES == 2:
        other_q = _rows(q_base, head, there, q_h, other, D, WIDTH)
        other_dout = _rows(dout_base, head, there, dout_h, other, D, WIDTH)
    row = token.to(tl.int64) * heads + head
    lse = tl.load(lse_ptr + row, mask=there, other=0.0) * _LOG2E
    delta = tl.load(delta_ptr + row, mask=there, other=0.0)
    for start in tl.range(0, _last_pick(topk_ptr, token, topk_t, picks, BLOCK_K), BLOCK_N):
        place = start + n
        index = tl.load(topk_ptr + token.to(tl.int64) * topk_t + place, mask=place < picks, other=-1)
        seen = index >= 0
        k = _rows(entry_ptr, index, seen, entry_t, own, D, WIDTH)
        scores = tl.dot(k, tl.trans(q), input_precision="ieee")
        dprobs = tl.dot(k, tl.trans(dout), input_precision="ieee")
        if HALVES == 2:
            k = _rows(entry_ptr, index, seen, entry_t, other, D, WIDTH)
            scores = tl.dot(k, tl.trans(other_q), scores, input_precision="ieee")
            dprobs = tl.dot(k, tl.trans(other_dout), dprobs, input_precision="ieee")
        p, ds = _weights(scores, dprobs, seen[:, None] & there[None, :], lse, delta, scale)
        # keys are values: one sum, of dS and of P / softmax_scale
        dk = tl.dot(ds.to(k.dtype), q, input_precision="ieee")
        dk = tl.dot((p / softmax_scale).to(k.dtype), dout, dk, input_precision="ieee") * softmax_scale
        cell = seen[:, None] & (d[None, :] < D)
        if WRITE:
            slot = (tl.program_id(1) * chunk + tl.program_id(0)).to(tl.int64) * picks + place
            tl.store(dentry_ptr + slot[:, None] * D + d[None, :], dk, mask=cell)
        else:
            tl.atomic_add(dentry_ptr + index[:, None].to(tl.int64) * D + d[None, :], dk, mask=cell, sem="relaxed")


@triton.jit  # type: ignore[untyped-decorator]
def _key_kernel(  # type: ignore[no-untyped-def]
    q_ptr, kv_ptr, bound_ptr, span_ptr, lse_ptr, dout_ptr, delta_ptr, dkv_ptr,
    heads, head_blocks, keys, scale, softmax_scale, q_t, q_h, kv_t, range_t, dout_t, dout_h,
    RANGES: tl.constexpr,
    D: tl.constexpr, WIDTH: tl.constexpr, HALVES: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Gradient of WIDTH columns of a block of keys: of the window (``bound_ptr`` is window_starts), or of entries in
    ranges (``bound_ptr`` is entry_ranges), from the tokens ``span_ptr[chunk, block]``, first and one past the last."""
    first_key = tl.program_id(0) * BLOCK_N
    chunk = tl.program_id(1)
    own = tl.program_id(2) * WIDTH
    other = WIDTH - own  # of two halves the other one
    index = first_key + tl.arange(0, BLOCK_N)
    real = index < keys
    d = own + tl.arange(0, WIDTH)
    k = _rows(kv_ptr, index, real, kv_t, own, D, WIDTH)
    if HALVES == 2:
        other_k = _rows(kv_ptr, index, real, kv_t, other, D, WIDTH)
    dk = tl.zeros([BLOCK_N, WIDTH], tl.float32)
    at_span = span_ptr + (chunk * tl.num_programs(0) + tl.program_id(0)) * 2
    first = tl.load(at_span).to(tl.int32)
    end = tl.load(at_span + 1).to(tl.int32)
    # one loop over tokens and blocks of their heads, so that the next block is on its way whatever it belongs to
    for turn in tl.range(first * head_blocks, end * head_blocks):
        token = (turn // head_blocks) + tl.zeros([], tl.int64)
        head = (turn % head_blocks) * BLOCK_H + tl.arange(0, BLOCK_H)
        there = head < heads
        if RANGES:
            lower = tl.load(bound_ptr + token * range_t)
            upper = tl.load(bound_ptr + token * range_t + 1)
        else:
            lower = tl.load(bound_ptr + token)
            upper = token + 1
        seen = real & (index >= lower) & (index < upper)
        q_base = q_ptr + token * q_t
        dout_base = dout_ptr + token * dout_t
        q = _rows(q_base, head, there, q_h, own, D, WIDTH)
        dout = _rows(dout_base, head, there, dout_h, own, D, WIDTH)
        row = token * heads + head
        lse = tl.load(lse_ptr + row, mask=there, other=0.0) * _LOG2E
        delta = tl.load(delta_ptr + row, mask=there, other=0.0)
        scores = tl.dot(k, tl.trans(q), input_precision="ieee")
        dprobs = tl.dot(k, tl.trans(dout), input_precision="ieee")
        if HALVES == 2:
            other_q = _rows(q_base, head, there, q_h, other, D, WIDTH)
            other_dout = _rows(dout_base, head, there, dout_h, other, D, WIDTH)
            scores = tl.dot(other_k, tl.trans(other_q), scores, input_precision="ieee")
            dprobs = tl.dot(other_k, tl.trans(other_dout), dprobs, input_precision="ieee")
        p, ds = _weights(scores, dprobs, seen[:, None] & there[None, :], lse, delta, scale)
        # keys are values: one sum, of dS and of P / softmax_scale, takes half the registers of two
        dk = tl.dot(ds.to(k.dtype), q, dk, input_precision="ieee")
        dk = tl.dot((p / softmax_scale).to(k.dtype), dout, dk, input_precision="ieee")
    at = dkv_ptr + (chunk.to(tl.int64) * keys + index[:, None]) * D + d[None, :]
    tl.store(at, (dk * softmax_scale).to(dkv_ptr.dtype.element_ty), mask=real[:, None] & (d[None, :] < D))


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
    """Keys a tile, warps and stages of the forward, to be tried in this order: what fits an H200's 227 KiB at head_dim
    512 with few spills, as its compiler says. **Not timed yet.**"""
    return [
        {"BLOCK_N": 64, "num_warps": 8, "num_stages": 2},
        {"BLOCK_N": 32, "num_warps": 8, "num_stages": 2},
        {"BLOCK_N": 16, "num_warps": 4, "num_stages": 1},
    ]


def query_tiles(head_dim: int) -> list[Options]:
    """The same of the backward of q."""
    return [
        {"BLOCK_N": 32, "num_warps": 8, "num_stages": 1},
        {"BLOCK_N": 16, "num_warps": 8, "num_stages": 1},
    ]


def pick_tiles(head_dim: int) -> list[Options]:
    """The same of the backward of picks; a Hopper MMA wants 64 of them."""
    return [
        {"BLOCK_N": 64, "num_warps": 8, "num_stages": 1},
        {"BLOCK_N": 32, "num_warps": 4, "num_stages": 1},
        {"BLOCK_N": 16, "num_warps": 4, "num_stages": 1},
    ]


def key_tiles(head_dim: int) -> list[Options]:
    """The same of the backward of keys, and heads a turn."""
    return [
        {"BLOCK_N": 64, "BLOCK_H": 32, "num_warps": 4, "num_stages": 2},
        {"BLOCK_N": 64, "BLOCK_H": 16, "num_warps": 4, "num_stages": 2},
        {"BLOCK_N": 32, "BLOCK_H": 16, "num_warps": 4, "num_stages": 1},
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
    blocks_h = triton.cdiv(heads, block_h)

    def queries(**options: int) -> None:
        _query_kernel[(tokens, blocks_h)](
            q, kv, entries, window_starts, some_ranges, some_topk, out, lse, dout, dq, delta,
            heads, picks, softmax_scale * LOG2E, softmax_scale,
            q.stride(0), q.stride(1), kv.stride(0), entries.stride(0), some_ranges.stride(0), some_topk.stride(0),
            out.stride(0), out.stride(1), dout.stride(0), dout.stride(1),
            RANGES=ranges is not None, PICKS=picks > 0, BLOCK_K=block_k,
            D=dim, BLOCK_D=block_d, BLOCK_H=block_h, **options,
        )  # fmt: skip

    _launch("query", q.device, (dim, block_h), tiles or query_tiles(dim), queries)

    halves = 2 if block_d >= 512 else 1  # columns of a gradient that fit in registers beside the rest

    def pick(first: int, count: int, target: Tensor, write: bool) -> None:
        def run(**options: int) -> None:
            _pick_kernel[(count, blocks_h, halves)](
                q, entries, some_topk, lse, dout, delta, target,
                heads, picks, softmax_scale * LOG2E, softmax_scale, first, count,
                q.stride(0), q.stride(1), entries.stride(0), some_topk.stride(0), dout.stride(0), dout.stride(1),
                WRITE=write, BLOCK_K=block_k, D=dim, WIDTH=block_d // halves, HALVES=halves, BLOCK_H=block_h, **options,
            )  # fmt: skip

        _launch("pick", q.device, (dim, block_h), tiles or pick_tiles(dim), run)

    if picked and deterministic and topk is not None:
        step = max(1, WRITTEN_AT_ONCE // (blocks_h * picks * dim * 4))
        for first in range(0, tokens, step):
            count = min(step, tokens - first)
            written = torch.empty(blocks_h, count * picks, dim, dtype=torch.float32, device=q.device)
            pick(first, count, written, True)
            by_entry, order = topk[first : first + count].reshape(-1).sort(stable=True)
            borders = torch.arange(entries.shape[0] + 1, device=q.device, dtype=by_entry.dtype)
            _segment_kernel[(entries.shape[0],)](
                written, order, torch.searchsorted(by_entry, borders), dentries, count * picks, blocks_h,
                D=dim, BLOCK_D=block_d, num_warps=4,
            )  # fmt: skip
    elif picked:
        pick(0, tokens, dentries, False)

    def keys(of: Tensor, bounds: Tensor, target: Tensor, chunks: int, spans: Callable[[int], Tensor]) -> None:
        def run(**options: int) -> None:
            _key_kernel[(triton.cdiv(of.shape[0], options["BLOCK_N"]), chunks, halves)](
                q, of, bounds, spans(options["BLOCK_N"]), lse, dout, delta, target,
                heads, triton.cdiv(heads, options["BLOCK_H"]), of.shape[0], softmax_scale * LOG2E, softmax_scale,
                q.stride(0), q.stride(1), of.stride(0), bounds.stride(0), dout.stride(0), dout.stride(1),
                RANGES=bounds.dim() == 2, D=dim, WIDTH=block_d // halves, HALVES=halves, **options,
            )  # fmt: skip

        _launch(
            "key", q.device, (dim,), key_tiles(dim) if tiles is None else [{**t, "BLOCK_H": 16} for t in tiles], run
        )

    keys(kv, window_starts, dkv, 1, lambda block: window_spans(window_starts, block))
    if ranges is not None and entries.shape[0] > 0:
        chunk = max(64, triton.cdiv(tokens * triton.cdiv(entries.shape[0], 64) * halves, PROGRAMS))
        chunks = triton.cdiv(tokens, chunk)
        parts = torch.empty(chunks, *entries.shape, dtype=torch.float32, device=q.device)
        keys(entries, ranges, parts, chunks, lambda block: range_spans(ranges, entries.shape[0], chunk, block))
        dentries = parts.sum(0)
    return dq, dkv, dentries.to(entries.dtype), delta


WRITTEN_AT_ONCE = 2**29
"""Bytes of gradients of picks that a deterministic backward holds before it sums them: 512 MiB."""

PROGRAMS = 528
"""Programs that an H200 with 132 multiprocessors is kept busy by."""


def window_spans(window_starts: Tensor, block: int) -> Tensor:
    """For each block of keys the first token whose window may hold one of them, and one past the last, ``[blocks, 2]``:
    the block's first key, and the last token whose window begins at or before the block's last key."""
    tokens = torch.arange(window_starts.shape[0], device=window_starts.device)
    latest = torch.zeros_like(tokens).scatter_reduce_(0, window_starts.long(), tokens, "amax").cummax(0).values
    first = tokens[::block]
    return torch.stack((first, latest[(first + block - 1).clamp(max=tokens.shape[0] - 1)] + 1), 1)


def range_spans(ranges: Tensor, entries: int, chunk: int, block: int) -> Tensor:
    """For each chunk of tokens and block of entries the first token of the chunk that sees one of them and one past the
    last, ``[chunks, blocks, 2]``; nothing where none does."""
    tokens = torch.arange(ranges.shape[0], device=ranges.device)
    firsts = torch.arange(0, entries, block, device=ranges.device)
    sees = (ranges[:, :1] < firsts + block) & (ranges[:, 1:] > firsts) & (ranges[:, 1:] > ranges[:, :1])
    chunks = triton.cdiv(ranges.shape[0], chunk)
    shape = chunks, chunk, firsts.shape[0]
    padding = (0, 0, 0, chunks * chunk - ranges.shape[0])
    first = torch.where(sees, tokens[:, None], ranges.shape[0])
    first = torch.nn.functional.pad(first, padding, value=ranges.shape[0]).view(shape).amin(1)
    last = torch.nn.functional.pad(torch.where(sees, tokens[:, None] + 1, 0), padding).view(shape).amax(1)
    return torch.stack((torch.minimum(first, last), last), -1).contiguous()
