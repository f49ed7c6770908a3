"""The two Triton kernels: joining parts after a flash forward, and the sink's gradient before a flash backward.

Both only stream ``out`` once, so their floor is bytes: the forward reads and writes ``tokens * heads * head_dim``
elements, the backward reads twice that. A program takes BLOCK_T tokens of one head: its rows of ``out`` are whole
cache lines and its ``lse`` is contiguous.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit  # type: ignore[untyped-decorator]
def _merge_kernel(  # type: ignore[no-untyped-def]
    out_ptr, lse_ptr, slot_out_ptr, slot_lse_ptr, sink_ptr, merged_ptr, merged_lse_ptr,
    tokens, heads,
    out_b, out_t, out_h, slot_b, slot_t, slot_h, merged_b, merged_t, merged_h,
    HAS_SLOTS: tl.constexpr, HAS_SINK: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    batch = tl.program_id(2).to(tl.int64)
    head = tl.program_id(0).to(tl.int64)
    t = (tl.program_id(1) * BLOCK_T + tl.arange(0, BLOCK_T)).to(tl.int64)
    d = tl.arange(0, BLOCK_D)
    row = t < tokens
    cell = row[:, None] & (d < D)[None, :]
    neg_inf = float("-inf")

    lse_at = (batch * heads + head) * tokens + t
    lse = tl.load(lse_ptr + lse_at, mask=row, other=neg_inf)
    # flash-attn 2 and 3 report a row without keys as +inf
    lse = tl.where(lse == float("inf"), neg_inf, lse)
    top = lse
    if HAS_SLOTS:
        slot_lse = tl.load(slot_lse_ptr + lse_at, mask=row, other=neg_inf)
        slot_lse = tl.where(slot_lse == float("inf"), neg_inf, slot_lse)
        top = tl.maximum(top, slot_lse)
    if HAS_SINK:
        sink = tl.load(sink_ptr + head).to(tl.float32)
        top = tl.maximum(top, sink)
    shift = tl.where(top == neg_inf, 0.0, top)
    mass = tl.exp(lse - shift)
    total = mass
    if HAS_SLOTS:
        slot_mass = tl.exp(slot_lse - shift)
        total += slot_mass
    if HAS_SINK:
        total += tl.exp(sink - shift)
    empty = total == 0.0
    inverse = 1.0 / tl.where(empty, 1.0, total)
    tl.store(merged_lse_ptr + lse_at, tl.where(empty, neg_inf, shift + tl.log(tl.where(empty, 1.0, total))), mask=row)

    weight = (mass * inverse)[:, None]
    out = tl.load(out_ptr + batch * out_b + t[:, None] * out_t + head * out_h + d[None, :], mask=cell, other=0.0)
    merged = tl.where(weight > 0, out.to(tl.float32) * weight, 0.0)
    if HAS_SLOTS:
        slot_weight = (slot_mass * inverse)[:, None]
        slot = tl.load(
            slot_out_ptr + batch * slot_b + t[:, None] * slot_t + head * slot_h + d[None, :], mask=cell, other=0.0
        )
        merged += tl.where(slot_weight > 0, slot.to(tl.float32) * slot_weight, 0.0)
    tl.store(
        merged_ptr + batch * merged_b + t[:, None] * merged_t + head * merged_h + d[None, :],
        merged.to(merged_ptr.dtype.element_ty),
        mask=cell,
    )


@triton.jit  # type: ignore[untyped-decorator]
def _sink_gradient_kernel(  # type: ignore[no-untyped-def]
    dout_ptr, out_ptr, lse_ptr, sink_ptr, partial_ptr,
    tokens, heads, blocks,
    dout_b, dout_t, dout_h, out_b, out_t, out_h,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    batch = tl.program_id(2).to(tl.int64)
    head = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    t = (block * BLOCK_T + tl.arange(0, BLOCK_T)).to(tl.int64)
    d = tl.arange(0, BLOCK_D)
    row = t < tokens
    cell = row[:, None] & (d < D)[None, :]
    dout = tl.load(dout_ptr + batch * dout_b + t[:, None] * dout_t + head * dout_h + d[None, :], mask=cell, other=0.0)
    out = tl.load(out_ptr + batch * out_b + t[:, None] * out_t + head * out_h + d[None, :], mask=cell, other=0.0)
    lse = tl.load(lse_ptr + (batch * heads + head) * tokens + t, mask=row, other=float("inf"))
    sink = tl.load(sink_ptr + head).to(tl.float32)
    delta = tl.sum(dout.to(tl.float32) * out.to(tl.float32), axis=1)
    # a row that sees nothing, under a sink of -inf, has lse = -inf: nothing lies on its sink
    p_sink = tl.exp(sink - tl.where(lse == float("-inf"), float("inf"), lse))
    tl.store(partial_ptr + (batch * heads + head) * blocks + block, -tl.sum(p_sink * delta))


def _block_tokens(head_dim: int) -> int:
    """Tokens a program takes: about 4096 elements of one head."""
    rows: int = 4096 // triton.next_power_of_2(head_dim)
    return max(8, min(64, rows))


def merge(
    out: Tensor, lse: Tensor, s_aux: Tensor | None, slot_out: Tensor | None, slot_lse: Tensor | None
) -> tuple[Tensor, Tensor]:
    """:func:`._merge.merge` as one kernel, in place where ``out`` is contiguous."""
    batch, tokens, heads, head_dim = out.shape
    lse = lse.contiguous()
    # Never over ``lse``: several warps hold the same rows of it, and one may read what another has stored.
    merged_lse = torch.empty_like(lse)
    merged = out if out.is_contiguous() else torch.empty(out.shape, dtype=out.dtype, device=out.device)
    block = _block_tokens(head_dim)
    slot = slot_out if slot_out is not None else out
    _merge_kernel[(heads, triton.cdiv(tokens, block), batch)](
        out, lse, slot, lse if slot_lse is None else slot_lse.contiguous(), lse if s_aux is None else s_aux,
        merged, merged_lse,
        tokens, heads,
        out.stride(0), out.stride(1), out.stride(2), slot.stride(0), slot.stride(1), slot.stride(2),
        merged.stride(0), merged.stride(1), merged.stride(2),
        HAS_SLOTS=slot_out is not None, HAS_SINK=s_aux is not None,
        D=head_dim, BLOCK_D=triton.next_power_of_2(head_dim), BLOCK_T=block,
        num_warps=4,
    )  # fmt: skip
    return merged, merged_lse


def sink_gradient(dout: Tensor, out: Tensor, lse: Tensor, s_aux: Tensor) -> Tensor:
    """:func:`._merge.sink_gradient`; partial sums per block in fp32, so the result is the same in every run."""
    batch, tokens, heads, head_dim = out.shape
    block = _block_tokens(head_dim)
    blocks = triton.cdiv(tokens, block)
    partial = torch.empty(batch, heads, blocks, dtype=torch.float32, device=out.device)
    _sink_gradient_kernel[(heads, blocks, batch)](
        dout, out, lse, s_aux, partial, tokens, heads, blocks,
        dout.stride(0), dout.stride(1), dout.stride(2), out.stride(0), out.stride(1), out.stride(2),
        D=head_dim, BLOCK_D=triton.next_power_of_2(head_dim), BLOCK_T=block,
        num_warps=4,
    )  # fmt: skip
    return partial.sum(dim=(0, 2)).to(s_aux.dtype)
