"""``fsdp_sink_patches::sink_attention``: the operator that torch.compile, checkpointing and autograd see.

It is registered with ``torch.library.Library`` rather than ``torch.library.custom_op``, whose autograd wrapper walks
the schema at
each call: 0.1 ms of Python, more than a sliding layer's forward takes on the device.

The forward computes attention over the keys (and over the slots, if any) with whichever backend serves the shapes, and
joins the parts with the sink. The backward hands every part the merged ``out`` and ``lse``; see ``docs/gpt-oss.md``
for why that is exact.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from fsdp_sink_patches.ops.sink_attention import _merge
from fsdp_sink_patches.ops.sink_attention._backends import Backend, Part, Request, select

_Result = TypeVar("_Result")


def _choose(q: Tensor, k: Tensor, v: Tensor, part: Part, backend: str) -> Backend:
    request = Request(
        device=q.device.type,
        capability=torch.cuda.get_device_capability(q.device) if q.is_cuda else (0, 0),
        dtype=q.dtype,
        head_dim=q.shape[-1],
        head_dim_v=v.shape[-1],
        heads=q.shape[-2],
        kv_heads=k.shape[-2],
        softcap=part.softcap > 0,
        deterministic=part.deterministic,
    )
    return select(request, backend or None)


def _slot_part(part: Part, q: Tensor, slots: int) -> Part:
    """Every query sees every slot: one document without a window if packed, the slots once a batch row if dense."""
    if part.cu_seqlens_q is None:
        cu_q, cu_k, queries = None, None, q.shape[1]
    else:
        ends = torch.arange(2, dtype=torch.int32, device=q.device)
        cu_q, cu_k, queries = ends * q.shape[0], ends * slots, q.shape[0]
    return Part(cu_q, cu_k, queries, slots, part.scale, (-1, -1), part.softcap, part.deterministic)


def _slot_keys(slot: Tensor, q: Tensor) -> Tensor:
    """Slots ``[slots, kv_heads, d]`` as the keys of a call like ``q``'s: repeated for each batch row if dense."""
    slot = slot.to(q.dtype)
    return slot.contiguous() if q.dim() == 3 else slot[None].expand(q.shape[0], -1, -1, -1).contiguous()


_library = torch.library.Library("fsdp_sink_patches", "DEF")
_OPTIONS = (
    "Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, SymInt max_seqlen_q, SymInt max_seqlen_k, float softmax_scale, "
    "int window_left, int window_right, float softcap, bool deterministic, str backend"
)
_library.define(
    f"sink_attention(Tensor q, Tensor k, Tensor v, Tensor? s_aux, Tensor? slot_k, Tensor? slot_v, {_OPTIONS})"
    " -> (Tensor, Tensor)"
)
_library.define(
    "sink_attention_backward(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor? s_aux, "
    f"Tensor? slot_k, Tensor? slot_v, {_OPTIONS}, bool need_sinks)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"
)
sink_attention = torch.ops.fsdp_sink_patches.sink_attention.default
sink_attention_backward = torch.ops.fsdp_sink_patches.sink_attention_backward.default


def _on_its_device(function: Callable[..., _Result]) -> Callable[..., _Result]:
    """Triton launches on the current CUDA device, which a model spread over several cards leaves on the first."""

    @functools.wraps(function)
    def run(first: Tensor, *rest: Any) -> _Result:
        if not first.is_cuda:
            return function(first, *rest)
        with torch.cuda.device(first.device):
            return function(first, *rest)

    return run


@_on_its_device
def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    s_aux: Tensor | None,
    slot_k: Tensor | None,
    slot_v: Tensor | None,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    softmax_scale: float,
    window_left: int,
    window_right: int,
    softcap: float,
    deterministic: bool,
    backend: str,
) -> tuple[Tensor, Tensor]:
    """``out`` (like ``q``, v's head_dim, contiguous) and ``lse`` (``[heads, tokens]`` or ``[batch, heads,
    seqlen]``)."""
    s_aux = None if s_aux is None else s_aux.contiguous()
    part = Part(
        cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
        softmax_scale, (window_left, window_right), softcap, deterministic,
    )  # fmt: skip
    chosen = _choose(q, k, v, part, backend)
    native = chosen.native_sinks and s_aux is not None and slot_k is None and q.numel() > 0 and k.numel() > 0
    out, lse = _attend(chosen, q, k, v, part, s_aux if native else None)
    if native or (s_aux is None and slot_k is None):
        if s_aux is None:
            # flash-attn 2 and 3 report a row without keys as +inf
            lse = torch.where(lse == float("inf"), float("-inf"), lse)
        return out.to(q.dtype).contiguous(), lse.contiguous()
    slot_out = slot_lse = None
    if slot_k is not None and slot_v is not None:
        slots = _slot_part(part, q, slot_k.shape[0])
        slot_out, slot_lse = _attend(chosen, q, _slot_keys(slot_k, q), _slot_keys(slot_v, q), slots, None)
    out, lse = _merge.merge(out, lse, s_aux, slot_out, slot_lse)
    return out.to(q.dtype), lse


def _attend(
    chosen: Backend, q: Tensor, k: Tensor, v: Tensor, part: Part, sinks: Tensor | None
) -> tuple[Tensor, Tensor]:
    if q.numel() == 0 or k.numel() == 0:
        return _empty_out(q, v).zero_(), _empty_lse(q).fill_(float("-inf"))
    return chosen.forward(q, k, v, part, sinks)


def _empty_out(q: Tensor, v: Tensor) -> Tensor:
    return q.new_empty(*q.shape[:-1], v.shape[-1])


def _empty_lse(q: Tensor) -> Tensor:
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    return q.new_empty(*q.shape[:-3], q.shape[-2], q.shape[-3], dtype=dtype)


_library.impl("sink_attention", _forward, "CompositeExplicitAutograd")


@torch.library.register_fake("fsdp_sink_patches::sink_attention", lib=_library)
def _(q, k, v, s_aux, slot_k, slot_v, *_):  # type: ignore[no-untyped-def]
    return _empty_out(q, v), _empty_lse(q)


@_on_its_device
def _backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    s_aux: Tensor | None,
    slot_k: Tensor | None,
    slot_v: Tensor | None,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    softmax_scale: float,
    window_left: int,
    window_right: int,
    softcap: float,
    deterministic: bool,
    backend: str,
    need_sinks: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """``dq, dk, dv, ds_aux, dslot_k, dslot_v``; what is not there or not needed comes back empty."""
    s_aux = None if s_aux is None else s_aux.contiguous()
    part = Part(
        cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
        softmax_scale, (window_left, window_right), softcap, deterministic,
    )  # fmt: skip
    chosen = _choose(q, k, v, part, backend)
    dout = dout.contiguous()
    wanted = s_aux if need_sinks else None
    nothing = q.numel() == 0 or k.numel() == 0
    native = chosen.native_sink_gradient and wanted is not None and wanted.dtype != torch.float64 and not nothing
    if native and wanted is not None:
        dq, dk, dv, dsinks = chosen.backward_with_sinks(dout, q, k, v, out, lse, part, wanted)
    else:
        dsinks = _absent(q) if wanted is None else _merge.sink_gradient(dout, out, lse, wanted)
        if nothing:
            dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
        else:
            dq, dk, dv = chosen.backward(dout, q, k, v, out, lse, part)
    dslot_k, dslot_v = _absent(q), _absent(q)
    if slot_k is not None and slot_v is not None:
        dslot_k, dslot_v = torch.zeros_like(slot_k), torch.zeros_like(slot_v)
        if q.numel() > 0:
            dq_slots, dsk, dsv = chosen.backward(
                dout, q, _slot_keys(slot_k, q), _slot_keys(slot_v, q), out, lse, _slot_part(part, q, slot_k.shape[0])
            )
            dq = dq + dq_slots
            dslot_k, dslot_v = (
                d if q.dim() == 3 else d.sum(0, dtype=torch.promote_types(d.dtype, torch.float32)) for d in (dsk, dsv)
            )
    return _like(dq, q), _like(dk, k), _like(dv, v), dsinks, _like(dslot_k, slot_k), _like(dslot_v, slot_v)


def _absent(q: Tensor) -> Tensor:
    return q.new_empty(0)


def _like(grad: Tensor, x: Tensor | None) -> Tensor:
    """The gradient in the dtype of ``x``, with the strides that ``empty_like`` gives, as a traced graph expects it."""
    if x is None or (grad.dtype == x.dtype and grad.stride() == x.stride()):
        return grad
    return torch.empty_like(x).copy_(grad)


_library.impl("sink_attention_backward", _backward, "CompositeExplicitAutograd")


@torch.library.register_fake("fsdp_sink_patches::sink_attention_backward", lib=_library)
def _(dout, q, k, v, out, lse, s_aux, slot_k, slot_v, *rest):  # type: ignore[no-untyped-def]
    need_sinks = rest[-1]
    return (
        torch.empty_like(q),
        torch.empty_like(k),
        torch.empty_like(v),
        s_aux.new_empty(s_aux.shape) if need_sinks and s_aux is not None else _absent(q),
        _absent(q) if slot_k is None else torch.empty_like(slot_k),
        _absent(q) if slot_v is None else torch.empty_like(slot_v),
    )


class _SinkAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, *inputs):  # type: ignore[no-untyped-def]
        with torch._C._AutoDispatchBelowAutograd():
            out, lse = sink_attention(*inputs)
        q, k, v, s_aux, slot_k, slot_v, cu_seqlens_q, cu_seqlens_k, *options = inputs
        ctx.mark_non_differentiable(lse)
        ctx.save_for_backward(q, k, v, out, lse, s_aux, slot_k, slot_v, cu_seqlens_q, cu_seqlens_k)
        ctx.options = options
        return out, lse

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dout, _dlse):  # type: ignore[no-untyped-def]
        saved = ctx.saved_tensors  # read once: non-reentrant checkpointing unpacks a tensor a single time
        s_aux, slot_k = saved[5:7]
        needed = ctx.needs_input_grad
        grads = sink_attention_backward(dout, *saved, *ctx.options, s_aux is not None and needed[3])
        dq, dk, dv, dsinks, dslot_k, dslot_v = grads
        return (
            dq if needed[0] else None,
            dk if needed[1] else None,
            dv if needed[2] else None,
            dsinks if s_aux is not None and needed[3] else None,
            dslot_k if slot_k is not None and needed[4] else None,
            dslot_v if slot_k is not None and needed[5] else None,
            *(None,) * (len(ctx.options) + 2),
        )


def _differentiable(*inputs):  # type: ignore[no-untyped-def]
    if torch.is_grad_enabled() and any(isinstance(t, Tensor) and t.requires_grad for t in inputs[:6]):
        return _SinkAttention.apply(*inputs)  # type: ignore[no-untyped-call]
    with torch._C._AutoDispatchBelowAutograd():
        return sink_attention(*inputs)


_library.impl("sink_attention", _differentiable, "Autograd")
