"""Joining the parts of a log-sum-exp union, and the gradient of the sink.

Softmax attention over a union of key sets is ``lse = logaddexp(lse_1, lse_2, ...)``, ``out = sum_i exp(lse_i - lse) *
out_i``. A sink is a part with ``out = 0`` and ``lse = sink``. On CUDA with Triton each function is one kernel
(``_kernels.py``); the plain torch beside it is what the kernel is tested against and what runs everywhere else.
"""

from __future__ import annotations

import importlib.util
from functools import lru_cache

import torch
from torch import Tensor


@lru_cache(maxsize=1)
def have_triton() -> bool:
    """Triton comes with CUDA builds of torch, but not with every one."""
    return importlib.util.find_spec("triton") is not None


def _use_kernels(out: Tensor, lse: Tensor) -> bool:
    return out.is_cuda and lse.dtype == torch.float32 and out.stride(-1) == 1 and out.numel() > 0 and have_triton()


def merge(
    out: Tensor, lse: Tensor, s_aux: Tensor | None, slot_out: Tensor | None = None, slot_lse: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Join attention over keys, over slots, and a sink.

    Args:
        out: ``[batch, seqlen, heads, head_dim]``, or packed ``[tokens, heads, head_dim]``, attention over the keys;
            may be overwritten.
        lse: ``[batch, heads, seqlen]``, or packed ``[heads, tokens]``, its log-sum-exp in fp32 or fp64; may be
            overwritten. A row without keys may report ``-inf``, or ``+inf`` as flash-attn 2 and 3 do; both mean "no
            part".
        s_aux: ``[heads]`` sink logits, or None.
        slot_out, slot_lse: the same as ``out`` and ``lse`` over the sink slots, or None.

    Returns:
        The merged pair, contiguous; rows that see nothing have ``out = 0`` and ``lse = -inf``.
    """
    if out.dim() == 3:
        slots = (None, None) if slot_out is None or slot_lse is None else (slot_out[None], slot_lse[None])
        merged, merged_lse = merge(out[None], lse[None], s_aux, *slots)
        return merged[0], merged_lse[0]
    if _use_kernels(out, lse):
        from fsdp_sink_patches.ops.sink_attention import _kernels

        return _kernels.merge(out, lse, s_aux, slot_out, slot_lse)
    return merge_reference(out, lse, s_aux, slot_out, slot_lse)


def merge_reference(
    out: Tensor, lse: Tensor, s_aux: Tensor | None, slot_out: Tensor | None, slot_lse: Tensor | None
) -> tuple[Tensor, Tensor]:
    """:func:`merge` in plain torch."""

    def mass(part_lse: Tensor) -> Tensor:
        return part_lse.to(lse.dtype).masked_fill(part_lse == float("inf"), float("-inf"))

    total = key_lse = mass(lse)
    if slot_lse is not None:
        total = torch.logaddexp(total, mass(slot_lse))
    if s_aux is not None:
        total = torch.logaddexp(total, s_aux.to(lse.dtype)[None, :, None])
    shift = torch.where(total == float("-inf"), torch.zeros_like(total), total)

    def weigh(part: Tensor, part_lse: Tensor) -> Tensor:
        weight = torch.exp(part_lse - shift).transpose(1, 2)[..., None]
        return torch.where(weight > 0, part.to(lse.dtype) * weight, torch.zeros_like(weight))

    merged = weigh(out, key_lse)
    if slot_out is not None and slot_lse is not None:
        merged = merged + weigh(slot_out, mass(slot_lse))
    return merged.to(out.dtype).contiguous(), total.contiguous()


def sink_gradient(dout: Tensor, out: Tensor, lse: Tensor, s_aux: Tensor) -> Tensor:
    """``dsink = -sum over rows of exp(sink - lse) * rowsum(dout * out)``, in the dtype of ``s_aux``.

    The softmax Jacobian applied to the sink's column, whose value is 0: ``dS_sink = P_sink * (0 - delta)``.

    Args:
        dout, out: ``[batch, seqlen, heads, head_dim]`` or packed ``[tokens, heads, head_dim]``; ``out`` is the merged
            output.
        lse: ``[batch, heads, seqlen]`` or packed ``[heads, tokens]``, merged.
        s_aux: ``[heads]``.
    """
    if out.dim() == 3:
        return sink_gradient(dout[None], out[None], lse[None], s_aux)
    if _use_kernels(out, lse):
        from fsdp_sink_patches.ops.sink_attention import _kernels

        return _kernels.sink_gradient(dout, out, lse, s_aux)
    return sink_gradient_reference(dout, out, lse, s_aux)


def sink_gradient_reference(dout: Tensor, out: Tensor, lse: Tensor, s_aux: Tensor) -> Tensor:
    """:func:`sink_gradient` in plain torch."""
    delta = (dout.to(lse.dtype) * out.to(lse.dtype)).sum(-1).transpose(1, 2)
    # a row that sees nothing, under a sink of -inf, has lse = -inf: nothing lies on its sink
    p_sink = torch.exp(s_aux.to(lse.dtype)[None, :, None] - lse).masked_fill(lse == float("-inf"), 0.0)
    return (-(p_sink * delta).sum(dim=(0, 2))).to(s_aux.dtype)
