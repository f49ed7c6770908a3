"""The rotation as one Triton kernel: both pairings, forward and conjugate, in place or out of place, any strides.

It only moves bytes. In place it reads and writes the rotary slice and the tables; out of place it copies the channels
before the slice in the same pass. A program takes a block of tokens times a block of heads as rows: a token's row of
cos and sin is fetched from memory once and serves all its heads from the cache, and every load is issued before the
first store (in place, the compiler may not move a load over a store).
"""

from __future__ import annotations

import contextlib

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit  # type: ignore[untyped-decorator]
def _rotate_kernel(  # type: ignore[no-untyped-def]
    x_ptr, out_ptr, cos_ptr, sin_ptr,
    tokens, heads, token_blocks, head_blocks,
    x_b, x_h, x_t, x_d, out_b, out_h, out_t, out_d, table_b, table_t, table_d,
    KEPT: tl.constexpr, HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr, CONJUGATE: tl.constexpr, COPY: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_KEPT: tl.constexpr, BLOCK_HALF: tl.constexpr,
):  # fmt: skip
    # One axis of programs: the others end at 65535.
    block = tl.program_id(0)
    head_block = block % head_blocks
    block = block // head_blocks
    token_block = block % token_blocks
    batch = (block // token_blocks).to(tl.int64)
    row = tl.arange(0, BLOCK_T * BLOCK_H)
    h = (head_block * BLOCK_H + row % BLOCK_H).to(tl.int64)
    t = (token_block * BLOCK_T + row // BLOCK_H).to(tl.int64)
    here = (h < heads) & (t < tokens)
    x_row = (x_ptr + batch * x_b + h * x_h + t * x_t)[:, None]
    out_row = (out_ptr + batch * out_b + h * out_h + t * out_t)[:, None]
    table_row = (batch * table_b + t * table_t)[:, None]

    pair = tl.arange(0, BLOCK_HALF)[None, :]
    paired = here[:, None] & (pair < HALF)
    cos = tl.load(cos_ptr + table_row + pair * table_d, mask=paired, other=0.0).to(tl.float32)
    sin = tl.load(sin_ptr + table_row + pair * table_d, mask=paired, other=0.0).to(tl.float32)
    if CONJUGATE:
        sin = -sin
    if COPY:
        column = tl.arange(0, BLOCK_KEPT)[None, :]
        kept = here[:, None] & (column < KEPT)
        unchanged = tl.load(x_row + column * x_d, mask=kept)
    if INTERLEAVED:
        # Loaded as they lie, whole lines at a time, and taken apart in registers.
        channel = tl.arange(0, 2 * BLOCK_HALF)[None, :]
        rotary = here[:, None] & (channel < 2 * HALF)
        both = tl.load(x_row + (KEPT + channel) * x_d, mask=rotary, other=0.0).to(tl.float32)
        a, b = tl.split(tl.reshape(both, [BLOCK_T * BLOCK_H, BLOCK_HALF, 2]))
        turned = tl.reshape(tl.join(a * cos - b * sin, b * cos + a * sin), [BLOCK_T * BLOCK_H, 2 * BLOCK_HALF])
        tl.store(out_row + (KEPT + channel) * out_d, turned.to(out_ptr.dtype.element_ty), mask=rotary)
    else:
        a = tl.load(x_row + (KEPT + pair) * x_d, mask=paired, other=0.0).to(tl.float32)
        b = tl.load(x_row + (KEPT + HALF + pair) * x_d, mask=paired, other=0.0).to(tl.float32)
        turned_a, turned_b = a * cos - b * sin, b * cos + a * sin
        tl.store(out_row + (KEPT + pair) * out_d, turned_a.to(out_ptr.dtype.element_ty), mask=paired)
        tl.store(out_row + (KEPT + HALF + pair) * out_d, turned_b.to(out_ptr.dtype.element_ty), mask=paired)
    if COPY:
        tl.store(out_row + column * out_d, unchanged, mask=kept)


ELEMENTS = 4096, 8192
"""Elements that a program holds at once, in place and out of place: two to four 16-byte loads in flight per thread, and
no more than fits in registers."""


def blocks(heads: int, channels: int, elements: int) -> tuple[int, int]:
    """Tokens and heads of a program whose rows have ``channels`` channels; both powers of two, at least one row."""
    rows: int = max(1, elements // triton.next_power_of_2(channels))
    block_h: int = min(16, rows, triton.next_power_of_2(heads))
    return max(1, rows // block_h), block_h


def rotate(out: Tensor, x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool, conjugate: bool) -> None:
    """Write ``x`` with its trailing channels rotated to ``out``; only those channels where ``out`` is ``x``.

    Args:
        out, x: ``[batch, heads, tokens, dim]`` in fp32, bf16 or fp16, any strides; ``out`` is ``x`` or apart from it.
        cos, sin: ``[1 or batch, tokens, half]``, any strides.
    """
    batch, heads, tokens, dim = x.shape
    if x.numel() == 0:
        return
    half = cos.shape[-1]
    kept = dim - 2 * half
    copy = out is not x and kept > 0
    if cos.stride() != sin.stride():
        cos, sin = cos.contiguous(), sin.contiguous()
    block_t, block_h = blocks(heads, dim if copy else 2 * half, ELEMENTS[copy])
    token_blocks, head_blocks = triton.cdiv(tokens, block_t), triton.cdiv(heads, block_h)
    # Triton launches on the current CUDA device, which a model spread over several cards leaves on the first.
    with torch.cuda.device(x.device) if x.is_cuda else contextlib.nullcontext():
        _rotate_kernel[(batch * token_blocks * head_blocks,)](
            x, out, cos, sin,
            tokens, heads, token_blocks, head_blocks,
            *x.stride(), *out.stride(), 0 if cos.shape[0] == 1 else cos.stride(0), cos.stride(1), cos.stride(2),
            KEPT=kept, HALF=half, INTERLEAVED=interleaved, CONJUGATE=conjugate, COPY=copy,
            BLOCK_T=block_t, BLOCK_H=block_h,
            BLOCK_KEPT=triton.next_power_of_2(max(kept, 1)), BLOCK_HALF=triton.next_power_of_2(half),
            num_warps=4,
            # Products rounded before they are added, as in plain torch: the same bits on every device.
            enable_fp_fusion=False,
        )  # fmt: skip
