"""The two Triton kernels of a tile: its rows' statistics, and the gradient of its logits.

Both only stream the tile: the first reads it, the second reads it and writes the gradient in the dtype of the matmuls
that follow. Formulas and names are those of ``_tiles.py``.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _tanh(x):  # type: ignore[no-untyped-def]
    decay = tl.exp(-2.0 * tl.abs(x))
    size = (1.0 - decay) / (1.0 + decay)
    return tl.where(x < 0, -size, size)


@triton.jit  # type: ignore[untyped-decorator]
def _update_kernel(  # type: ignore[no-untyped-def]
    z_ptr, labels_ptr, coolness_ptr, state_ptr, columns, state_stride, first, softcap, inverse_cap,
    BEGIN: tl.constexpr, COOLED: tl.constexpr, CAPPED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    coolness = 1.0
    if COOLED:
        coolness = tl.load(coolness_ptr + row)
    # per lane, joined over the row at the end: no reduction in the loop
    peak = tl.full((BLOCK,), float("-inf"), tl.float32)
    summed = tl.zeros((BLOCK,), tl.float32)
    moment = tl.zeros((BLOCK,), tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, columns, BLOCK):
        at = start + tl.arange(0, BLOCK)
        there = at < columns
        z = tl.load(z_ptr + row * columns + at, mask=there, other=0.0)
        if CAPPED:
            z = softcap * _tanh(z * inverse_cap)
        z = z * coolness
        total += tl.where(there, z, 0.0)
        higher = tl.where(there, tl.maximum(peak, z), peak)
        # a lane that has seen nothing has a peak of -inf and a sum of 0
        moved = tl.where(summed > 0.0, peak - higher, 0.0)
        scale = tl.exp(moved)
        moment = scale * (moment + moved * summed)
        summed = scale * summed
        shifted = tl.where(there, z - higher, 0.0)
        mass = tl.where(there, tl.exp(shifted), 0.0)
        moment += mass * shifted
        summed += mass
        peak = higher
    top = tl.max(peak, 0)
    moved = tl.where(summed > 0.0, peak - top, 0.0)
    scale = tl.where(summed > 0.0, tl.exp(moved), 0.0)
    row_moment = tl.sum(scale * (moment + moved * summed), 0)
    row_sum = tl.sum(scale * summed, 0)
    row_total = tl.sum(total, 0)
    column = tl.load(labels_ptr + row) - first
    inside = (column >= 0) & (column < columns)
    label = tl.load(z_ptr + row * columns + column, mask=inside, other=0.0)
    if CAPPED:
        label = softcap * _tanh(label * inverse_cap)
    label = label * coolness
    if not BEGIN:
        old_peak = tl.load(state_ptr + row)
        old_sum = tl.load(state_ptr + state_stride + row)
        old_moment = tl.load(state_ptr + 2 * state_stride + row)
        joined = tl.maximum(top, old_peak)
        mine, theirs = top - joined, old_peak - joined
        my_scale, their_scale = tl.exp(mine), tl.exp(theirs)
        row_moment = my_scale * (row_moment + mine * row_sum) + their_scale * (old_moment + theirs * old_sum)
        row_sum = my_scale * row_sum + their_scale * old_sum
        row_total += tl.load(state_ptr + 4 * state_stride + row)
        label = tl.where(inside, label, tl.load(state_ptr + 3 * state_stride + row))
        top = joined
    tl.store(state_ptr + row, top)
    tl.store(state_ptr + state_stride + row, row_sum)
    tl.store(state_ptr + 2 * state_stride + row, row_moment)
    tl.store(state_ptr + 3 * state_stride + row, label)
    tl.store(state_ptr + 4 * state_stride + row, row_total)


@triton.jit  # type: ignore[untyped-decorator]
def _differentiate_kernel(  # type: ignore[no-untyped-def]
    out_ptr, z_ptr, labels_ptr, coolness_ptr, peak_ptr, log_sum_ptr, terms_ptr, columns, terms_stride, first,
    softcap, inverse_cap,
    COOLED: tl.constexpr, CAPPED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there = at < columns
    a = tl.load(terms_ptr + row)
    b = tl.load(terms_ptr + terms_stride + row)
    c = tl.load(terms_ptr + 2 * terms_stride + row)
    e = tl.load(terms_ptr + 3 * terms_stride + row)
    z = tl.load(z_ptr + row * columns + at, mask=there, other=0.0)
    slope = 1.0
    if CAPPED:
        inner = _tanh(z * inverse_cap)
        slope = 1.0 - inner * inner
        z = softcap * inner
    if COOLED:
        z = z * tl.load(coolness_ptr + row)
    shifted = z - tl.load(peak_ptr + row)
    dz = tl.exp(shifted - tl.load(log_sum_ptr + row)) * (a + e * shifted) + c
    dz += tl.where(at == tl.load(labels_ptr + row) - first, b, 0.0)
    tl.store(out_ptr + row * columns + at, (dz * slope).to(out_ptr.dtype.element_ty), mask=there)


def _on_its_device(z: Tensor) -> AbstractContextManager[Any]:
    """Triton launches on the current CUDA device, which a model spread over several cards leaves on the first."""
    return torch.cuda.device(z.device) if z.is_cuda else nullcontext()


def update(state: Tensor, z: Tensor, labels: Tensor, coolness: Tensor | None, first: int, softcap: float) -> None:
    """Join raw logits ``z`` ``[rows, columns]``, contiguous fp32, into ``state`` ``[5, rows]``; see
    ``_tiles._update``."""
    if z.shape[0] == 0:
        return
    with _on_its_device(z):
        _update_kernel[(z.shape[0],)](
            z, labels, coolness, state, z.shape[1], state.stride(0), first, softcap, 1 / softcap if softcap else 1.0,
            BEGIN=first == 0, COOLED=coolness is not None, CAPPED=softcap > 0, BLOCK=2048, num_warps=8,
        )  # fmt: skip


def differentiate(
    out: Tensor,
    z: Tensor,
    labels: Tensor,
    coolness: Tensor | None,
    first: int,
    found: Tensor,
    row_terms: Tensor,
    softcap: float,
) -> None:
    """Write the gradient of raw logits ``z`` to ``out``, which may be ``z``; see ``_tiles._differentiate``."""
    if z.shape[0] == 0:
        return
    block = 4096
    with _on_its_device(z):
        _differentiate_kernel[(z.shape[0], triton.cdiv(z.shape[1], block))](  # only the first axis has no limit
            out, z, labels, coolness, found[4], found[5], row_terms, z.shape[1], row_terms.stride(0), first,
            softcap, 1 / softcap if softcap else 1.0,
            COOLED=coolness is not None, CAPPED=softcap > 0, BLOCK=block, num_warps=8,
        )  # fmt: skip
