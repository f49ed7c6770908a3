"""``fsdp_sink_patches::compressed_attention`` and its backward, as compile, checkpointing and autograd see them."""

from __future__ import annotations

import importlib.util
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from fsdp_sink_patches.ops.compressed_attention import reference

_library = torch.library.Library("fsdp_sink_patches", "FRAGMENT")
_SEEN = "Tensor window_starts, Tensor? entry_ranges, Tensor? topk_indices, float softmax_scale, bool deterministic"
_library.define(f"compressed_attention(Tensor q, Tensor kv, Tensor entries, Tensor sinks, {_SEEN}) -> (Tensor, Tensor)")
_library.define(
    "compressed_attention_backward(Tensor dout, Tensor q, Tensor kv, Tensor entries, Tensor sinks, Tensor out, "
    f"Tensor lse, {_SEEN}, bool need_sinks) -> (Tensor, Tensor, Tensor, Tensor)"
)
compressed_attention = torch.ops.fsdp_sink_patches.compressed_attention.default
compressed_attention_backward = torch.ops.fsdp_sink_patches.compressed_attention_backward.default


@lru_cache(maxsize=1)
def _have_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def use_kernels(q: Tensor) -> bool:
    """Half precision on CUDA with Triton, head_dim up to 512; everything else takes the plain torch reference."""
    return q.is_cuda and q.dtype in (torch.bfloat16, torch.float16) and q.shape[-1] <= 512 and _have_triton()


def _dense(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _contiguous(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.contiguous()


def _forward(
    q: Tensor, kv: Tensor, entries: Tensor, sinks: Tensor, window_starts: Tensor, entry_ranges: Tensor | None,
    topk_indices: Tensor | None, softmax_scale: float, deterministic: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """``out`` like ``q`` and ``lse`` ``[tokens, heads]``."""
    if not use_kernels(q):
        return reference.forward(q, kv, entries, sinks, window_starts, entry_ranges, topk_indices, softmax_scale)
    from fsdp_sink_patches.ops.compressed_attention import _kernels

    with torch.cuda.device(q.device):
        return _kernels.forward(
            _dense(q), _dense(kv), _dense(entries), sinks.contiguous(), window_starts.contiguous(),
            _contiguous(entry_ranges), _contiguous(topk_indices), softmax_scale,
        )  # fmt: skip


_library.impl("compressed_attention", _forward, "CompositeExplicitAutograd")


def _lse_dtype(q: Tensor) -> torch.dtype:
    return torch.float64 if q.dtype == torch.float64 else torch.float32


@torch.library.register_fake("fsdp_sink_patches::compressed_attention", lib=_library)
def _(q, kv, entries, sinks, *_):  # type: ignore[no-untyped-def]
    return q.new_empty(q.shape), q.new_empty(q.shape[:2], dtype=_lse_dtype(q))


def _backward(
    dout: Tensor, q: Tensor, kv: Tensor, entries: Tensor, sinks: Tensor, out: Tensor, lse: Tensor,
    window_starts: Tensor, entry_ranges: Tensor | None, topk_indices: Tensor | None, softmax_scale: float,
    deterministic: bool, need_sinks: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """``dq``, ``dkv``, ``dentries`` and, where needed, ``dsinks``, else an empty tensor."""
    if use_kernels(q):
        from fsdp_sink_patches.ops.compressed_attention import _kernels

        with torch.cuda.device(q.device):
            dq, dkv, dentries, delta = _kernels.backward(
                _dense(dout), _dense(q), _dense(kv), _dense(entries), window_starts.contiguous(),
                _contiguous(entry_ranges), _contiguous(topk_indices), out, lse, softmax_scale,
                deterministic or torch.are_deterministic_algorithms_enabled(),
            )  # fmt: skip
    else:
        dq, dkv, dentries, delta = reference.backward(
            dout, q, kv, entries, window_starts, entry_ranges, topk_indices, out, lse, softmax_scale
        )
    dsinks = q.new_empty(0)
    if need_sinks:
        # The softmax Jacobian applied to the sink's column, whose value is 0: dS_sink = P_sink * (0 - delta).
        dsinks = (-((sinks.to(lse.dtype) - lse).exp() * delta).sum(0)).to(sinks.dtype)
    return _like(dq, q), _like(dkv, kv), _like(dentries, entries), dsinks


def _like(grad: Tensor, x: Tensor) -> Tensor:
    """With the strides that ``empty_like`` gives, as a traced graph expects it."""
    wanted = torch.empty_like(x)
    return grad if grad.stride() == wanted.stride() else wanted.copy_(grad)


_library.impl("compressed_attention_backward", _backward, "CompositeExplicitAutograd")


@torch.library.register_fake("fsdp_sink_patches::compressed_attention_backward", lib=_library)
def _(dout, q, kv, entries, sinks, *rest):  # type: ignore[no-untyped-def]
    dsinks = sinks.new_empty(sinks.shape) if rest[-1] else q.new_empty(0)
    return torch.empty_like(q), torch.empty_like(kv), torch.empty_like(entries), dsinks


class _CompressedAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, *inputs):  # type: ignore[no-untyped-def]
        with torch._C._AutoDispatchBelowAutograd():
            out, lse = compressed_attention(*inputs)
        *tensors, softmax_scale, deterministic = inputs
        ctx.mark_non_differentiable(lse)
        ctx.save_for_backward(*tensors[:4], out, lse, *tensors[4:])
        ctx.options = softmax_scale, deterministic
        return out, lse

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dout, _dlse):  # type: ignore[no-untyped-def]
        saved = ctx.saved_tensors  # read once: non-reentrant checkpointing unpacks a tensor a single time
        needed = ctx.needs_input_grad[:4]
        grads = compressed_attention_backward(dout, *saved, *ctx.options, needed[3])
        return *(grad if wanted else None for grad, wanted in zip(grads, needed, strict=True)), *(None,) * 5


def _differentiable(*inputs: Any) -> Any:
    if torch.is_grad_enabled() and any(t.requires_grad for t in inputs[:4]):
        return _CompressedAttention.apply(*inputs)  # type: ignore[no-untyped-call]
    with torch._C._AutoDispatchBelowAutograd():
        return compressed_attention(*inputs)


_library.impl("compressed_attention", _differentiable, "Autograd")
