"""A Triton flash forward that counts the sink into its softmax before it writes ``out``.

torch's own flash kernels round ``out`` to half precision before the sink can rescale it, and a second rounding follows;
here ``out`` is rounded once, and nothing reads it back. The backward stays torch's: it takes the merged pair as it is.
One program computes BLOCK_M queries of one head (FlashAttention-2, algorithm 1).
"""

from __future__ import annotations

import logging
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime.errors import OutOfResources

log = logging.getLogger(__name__)

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit  # type: ignore[untyped-decorator]
def _tiles(  # type: ignore[no-untyped-def]
    acc, top, mass, q, k_base, v_base, k_t, v_t, first, last, seqlen_k, position, left, right, scale,
    LEFT: tl.constexpr, RIGHT: tl.constexpr, MASKED: tl.constexpr,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Online softmax over the key tiles ``first .. last``; MASKED where a tile may hold keys that some row must not
    see."""
    d = tl.arange(0, BLOCK_D)
    for start in tl.range(first, last, BLOCK_N):
        n = start + tl.arange(0, BLOCK_N)
        at_k = k_base + n[None, :].to(tl.int64) * k_t + d[:, None]
        at_v = v_base + n[:, None].to(tl.int64) * v_t + d[None, :]
        if MASKED or BLOCK_D != D:
            k = tl.load(at_k, mask=(n[None, :] < seqlen_k) & (d[:, None] < D), other=0.0)
        else:
            k = tl.load(at_k)
        scores = tl.dot(q, k) * scale
        if MASKED:
            seen = n[None, :] < seqlen_k
            if LEFT:
                seen = seen & (n[None, :] >= position[:, None] - left)
            if RIGHT:
                seen = seen & (n[None, :] <= position[:, None] + right)
            scores = tl.where(seen, scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))
        probs = tl.exp2(scores - new_top[:, None])
        keep = tl.exp2(top - new_top)
        mass = mass * keep + tl.sum(probs, 1)
        acc = acc * keep[:, None]
        if MASKED or BLOCK_D != D:
            v = tl.load(at_v, mask=(n[:, None] < seqlen_k) & (d[None, :] < D), other=0.0)
        else:
            v = tl.load(at_v)
        acc = tl.dot(probs.to(v.dtype), v, acc)
        top = new_top
    return acc, top, mass


@triton.jit  # type: ignore[untyped-decorator]
def _forward_kernel(  # type: ignore[no-untyped-def]
    q_ptr, k_ptr, v_ptr, sink_ptr, out_ptr, lse_ptr, cu_q_ptr, cu_k_ptr,
    q_b, q_t, q_h, k_b, k_t, k_h, v_b, v_t, v_h, out_b, out_t, out_h, lse_b, lse_h,
    seqlen_q, seqlen_k, left, right, scale,
    GROUP: tl.constexpr, PACKED: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0).to(tl.int64)
    document = tl.program_id(2).to(tl.int64)
    # the longest rows first: with a causal mask the last block of queries has the most keys
    block = tl.num_programs(1) - 1 - tl.program_id(1)
    if PACKED:
        q_start = tl.load(cu_q_ptr + document).to(tl.int64)
        k_start = tl.load(cu_k_ptr + document).to(tl.int64)
        seqlen_q = (tl.load(cu_q_ptr + document + 1) - q_start).to(tl.int32)
        seqlen_k = (tl.load(cu_k_ptr + document + 1) - k_start).to(tl.int32)
        q_base, k_base, v_base = q_start * q_t, k_start * k_t, k_start * v_t
        out_base, lse_base = q_start * out_t, q_start
    else:
        q_base, k_base, v_base = document * q_b, document * k_b, document * v_b
        out_base, lse_base = document * out_b, document * lse_b
    m0 = block * BLOCK_M
    if m0 >= seqlen_q:
        return
    kv_head = head // GROUP
    m = m0 + tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    cell = (m[:, None] < seqlen_q) & (d[None, :] < D)
    q = tl.load(q_ptr + q_base + m[:, None].to(tl.int64) * q_t + head * q_h + d[None, :], mask=cell, other=0.0)

    # a finite start instead of -inf: a tile that a row must not see at all would make -inf - -inf
    top = tl.full([BLOCK_M], -1e30, tl.float32)
    mass = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)

    # queries are aligned to the end of the keys; every row sees the tiles inner .. outer whole, the others are masked
    shift = seqlen_k - seqlen_q
    position = m + shift
    last = seqlen_k
    outer = (seqlen_k // BLOCK_N) * BLOCK_N
    if RIGHT:
        last = tl.minimum(seqlen_k, m0 + BLOCK_M + shift + right)
        outer = (tl.minimum(seqlen_k, tl.maximum(m0 + shift + right + 1, 0)) // BLOCK_N) * BLOCK_N
    k_base = k_ptr + k_base + kv_head * k_h
    v_base = v_ptr + v_base + kv_head * v_h
    if LEFT:
        first = (tl.maximum(m0 + shift - left, 0) // BLOCK_N) * BLOCK_N
        inner = (tl.maximum(m0 + BLOCK_M - 1 + shift - left, 0) + BLOCK_N - 1) // BLOCK_N * BLOCK_N
        inner = tl.where(outer > inner, inner, last)
        outer = tl.maximum(inner, outer)
        acc, top, mass = _tiles(
            acc, top, mass, q, k_base, v_base, k_t, v_t, first, inner, seqlen_k, position, left, right, scale,
            LEFT, RIGHT, True, D, BLOCK_D, BLOCK_N,
        )  # fmt: skip
    else:
        inner = 0
    acc, top, mass = _tiles(
        acc, top, mass, q, k_base, v_base, k_t, v_t, inner, outer, seqlen_k, position, left, right, scale,
        LEFT, RIGHT, False, D, BLOCK_D, BLOCK_N,
    )  # fmt: skip
    acc, top, mass = _tiles(
        acc, top, mass, q, k_base, v_base, k_t, v_t, outer, last, seqlen_k, position, left, right, scale,
        LEFT, RIGHT, True, D, BLOCK_D, BLOCK_N,
    )  # fmt: skip

    # the sink joins last, in fp32: had it set `top`, a large one would push every probability below fp16's range
    sink = tl.load(sink_ptr + head).to(tl.float32) * LOG2E
    highest = tl.maximum(top, sink)
    share = tl.exp2(top - highest)
    mass = mass * share + tl.exp2(sink - highest)
    out = acc * (share / tl.where(mass > 0, mass, 1.0))[:, None]
    at = out_ptr + out_base + m[:, None].to(tl.int64) * out_t + head * out_h + d[None, :]
    tl.store(at, out.to(out_ptr.dtype.element_ty), mask=cell)
    tl.store(lse_ptr + lse_base + head * lse_h + m, (highest + tl.log2(mass)) * LN2, mask=m < seqlen_q)


def tiles(head_dim: int, windowed: bool) -> list[dict[str, int]]:
    """Block sizes, warps and pipeline stages, fastest first, smaller ones behind for cards with less shared memory.

    Measured on an H200 by ``benchmarks/forward_tiles.py``.
    """
    small = {"BLOCK_M": 64, "BLOCK_N": 32, "num_warps": 4, "num_stages": 2}
    if windowed and head_dim <= 128:
        return [small]
    if head_dim <= 64:
        return [{"BLOCK_M": 128, "BLOCK_N": 64, "num_warps": 8, "num_stages": 3}, small]
    if head_dim <= 128:
        return [
            {"BLOCK_M": 128, "BLOCK_N": 128, "num_warps": 8, "num_stages": 3},
            {"BLOCK_M": 64, "BLOCK_N": 64, "num_warps": 4, "num_stages": 3},
            small,
        ]
    return [{"BLOCK_M": 64, "BLOCK_N": 32, "num_warps": 8, "num_stages": 2}]


_too_large: set[tuple[int, ...]] = set()
"""Tiles that did not fit a card's shared memory, never tried twice: the card, head_dim, then the tiles' numbers."""


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor,
    *,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    max_seqlen_q: int,
    scale: float,
    window: tuple[int, int],
    **launch: Any,
) -> tuple[Tensor, Tensor] | None:
    """``out`` (contiguous, q's dtype) and ``lse`` (fp32) of attention with a sink, packed or dense; one head_dim for
    all.

    None where no tiles fit this card. ``launch`` overrides :func:`tiles`.
    """
    heads, head_dim = q.shape[-2:]
    packed = cu_seqlens_q is not None and cu_seqlens_k is not None
    left, right = window
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty(*q.shape[:-3], heads, q.shape[-3], dtype=torch.float32, device=q.device)
    if cu_seqlens_q is not None:
        rows, batch = max_seqlen_q, cu_seqlens_q.shape[0] - 1
    else:
        rows, batch = q.shape[1], q.shape[0]
    strides = [s for t in (q, k, v, out) for s in ((0, *t.stride()[:2]) if packed else t.stride()[:3])]
    for options in [launch] if launch else tiles(head_dim, left >= 0):
        key = (q.device.index or 0, head_dim, *options.values())
        if key in _too_large:
            continue
        try:
            _forward_kernel[(heads, triton.cdiv(rows, options["BLOCK_M"]), batch)](
                q, k, v, sinks, out, lse, cu_seqlens_q if packed else lse, cu_seqlens_k if packed else lse,
                *strides, 0 if packed else lse.stride(0), lse.stride(-2),
                rows, k.shape[-3], left, right, scale * 1.4426950408889634,
                GROUP=heads // k.shape[-2], PACKED=packed, LEFT=left >= 0, RIGHT=right >= 0,
                D=head_dim, BLOCK_D=triton.next_power_of_2(head_dim), **options,
            )  # fmt: skip
            return out, lse
        except OutOfResources as error:
            _too_large.add(key)
            log.warning("sink attention: %s do not fit this card at head_dim %d: %s", options, head_dim, error)
    return None
