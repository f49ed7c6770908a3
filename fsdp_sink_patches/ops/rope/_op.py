"""``fsdp_sink_patches::apply_rotary`` and ``apply_rotary_``: the rotation that compile, checkpointing and autograd see.

The backward of a rotation is the conjugate rotation of the gradient, so nothing of ``x`` is kept for it.
"""

from __future__ import annotations

import functools
import importlib.util
from typing import Any

import torch
from torch import Tensor

from fsdp_sink_patches.ops.rope import reference

_KERNEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def apply_rotary(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    interleaved: bool,
    conjugate: bool = False,
    inplace: bool = False,
    unsqueeze_dim: int = 1,
    full_tables: bool = False,
) -> Tensor:
    """Rotate the trailing channels of each head by the angles of its token (RoPE), or back.

    One kernel on CUDA (fp32, bf16, fp16), plain torch elsewhere; both compute in fp32 (fp64 for fp64) and round the
    result once, and give the same bits. See :mod:`.reference` for the formula.

    Args:
        x: ``[batch, heads, tokens, dim]``, or ``[batch, tokens, heads, dim]`` with ``unsqueeze_dim=2``; packed:
            ``[tokens, heads, dim]``, or ``[heads, tokens, dim]`` with ``unsqueeze_dim=0``. Floating point, any strides.
        cos, sin: ``[batch, tokens, half]``, or with batch 1 or without that axis for tables that all rows share. Any
            floating dtype. The last ``2 * half`` channels are rotated. They take part as constants and get no
            gradient.
        interleaved: pairs are channels ``2i, 2i + 1`` (DeepSeek-V4); else ``i, i + half`` (gpt-oss, Llama).
        conjugate: rotate back.
        inplace: overwrite ``x`` and return it, touching the rotated channels alone. As with torch's own in-place
            functions, a backward that needs the old ``x`` (because another operation saved it) then raises.
        unsqueeze_dim: where ``cos`` and ``sin`` lack ``x``'s axis of heads, as in transformers.
        full_tables: ``cos`` and ``sin`` come with ``2 * half`` columns, each value twice, as Llama's
            ``cat((freqs, freqs))`` (half-split) or ``repeat_interleave(2)`` (interleaved) makes them.

    Returns:
        A tensor of ``x``'s shape, dtype and, where ``x`` is dense, strides.

    Raises:
        ValueError: an argument does not fit, ``cos`` or ``sin`` requires a gradient, or ``inplace`` was asked for a
            tensor whose elements share memory.
        RuntimeError: ``inplace`` on a leaf that requires a gradient.
    """
    if full_tables:
        kept = slice(None, None, 2) if interleaved else slice(None, cos.shape[-1] // 2)
        cos, sin = cos[..., kept], sin[..., kept]
    if cos.dim() == x.dim() - 2:
        cos, sin = cos[None], sin[None]
    _check(x, cos, sin, unsqueeze_dim)
    if inplace:
        _check_inplace(x)
    if not torch.compiler.is_compiling() and _transformed():
        forward, forward_ = _forward, _forward_
    else:
        forward, forward_ = _apply_rotary, _apply_rotary_
    if inplace:
        forward_(x, cos, sin, unsqueeze_dim, interleaved, conjugate)
        return x
    return forward(x, cos, sin, unsqueeze_dim, interleaved, conjugate)


def _transformed() -> bool:
    """Under ``torch.func`` or forward-mode differentiation, which the Python kernel of an operator can't take part in;
    plain torch can."""
    return torch._C._are_functorch_transforms_active() or torch.autograd.forward_ad._current_level >= 0


def _check(x: Tensor, cos: Tensor, sin: Tensor, heads_at: int) -> None:
    def refuse(found: str, expected: str) -> None:
        raise ValueError(f"apply_rotary: found {found}; expected {expected}.")

    if x.dim() not in (3, 4) or not 0 <= heads_at <= x.dim() - 2 or (x.dim() == 4 and heads_at == 0):
        refuse(
            f"x of shape {tuple(x.shape)} with unsqueeze_dim={heads_at}",
            "[batch, heads, tokens, dim] with 1, [batch, tokens, heads, dim] with 2, [tokens, heads, dim] with 1 or "
            "[heads, tokens, dim] with 0",
        )
    if not (x.is_floating_point() and cos.is_floating_point() and sin.is_floating_point()):
        refuse(f"dtypes {x.dtype}, {cos.dtype} and {sin.dtype}", "floating point")
    if cos.shape != sin.shape or not _fits(x, cos, heads_at):
        expected = [size for axis, size in enumerate(x.shape[:-1]) if axis != heads_at]
        refuse(
            f"cos of shape {tuple(cos.shape)} and sin of shape {tuple(sin.shape)} for x of shape {tuple(x.shape)}",
            f"both {expected[:-1] or ''}{expected[-1:]} (or batch 1) with one column for each pair of the at most "
            f"{x.shape[-1]} rotated channels; pass unsqueeze_dim for another layout of x, full_tables=True for tables "
            "that hold each value twice",
        )
    if not x.device == cos.device == sin.device:
        refuse(f"x on {x.device}, cos on {cos.device}, sin on {sin.device}", "one device")
    if cos.requires_grad or sin.requires_grad:
        refuse(
            "cos or sin that requires a gradient",
            "constants (detach them; trained frequencies need a rotation that differentiates through its tables)",
        )


def _fits(x: Tensor, cos: Tensor, heads_at: int) -> bool:
    if cos.dim() != x.dim() - 1 or not 0 < 2 * cos.shape[-1] <= x.shape[-1]:
        return False
    tokens_at = x.dim() - 2 if heads_at != x.dim() - 2 else x.dim() - 3
    return cos.shape[-2] == x.shape[tokens_at] and (x.dim() == 3 or cos.shape[0] in (1, x.shape[0]))


def _check_inplace(x: Tensor) -> None:
    if any(stride == 0 and size > 1 for size, stride in zip(x.shape, x.stride(), strict=True)):
        raise ValueError(
            f"apply_rotary: found inplace=True for an expanded tensor (shape {tuple(x.shape)}, strides {x.stride()}); "
            "expected every element in memory of its own. Clone it, or rotate out of place."
        )
    owner = x if x._base is None else x._base
    if torch.is_grad_enabled() and owner.is_leaf and owner.requires_grad:
        # autograd says so too, but only after the kernel has written
        raise RuntimeError(
            "apply_rotary: found inplace=True for a leaf that requires a gradient, or a view of one; expected the "
            "result of an operation. Rotate out of place."
        )


# --- the operators -------------------------------------------------------------------------------------------------

_library = torch.library.Library("fsdp_sink_patches", "FRAGMENT")
_OPTIONS = "Tensor cos, Tensor sin, int heads_at, bool interleaved, bool conjugate"
# The result has the strides of x, so a compiled graph must hand x over with those that it was traced with.
_STRIDES = getattr(torch.Tag, "needs_exact_strides", torch.Tag.needs_fixed_stride_order)
_library.define(f"apply_rotary(Tensor x, {_OPTIONS}) -> Tensor", tags=(_STRIDES,))
_library.define(f"apply_rotary_(Tensor(a!) x, {_OPTIONS}) -> ()", tags=(_STRIDES,))
_apply_rotary = torch.ops.fsdp_sink_patches.apply_rotary.default
_apply_rotary_ = torch.ops.fsdp_sink_patches.apply_rotary_.default


@functools.lru_cache(maxsize=1)
def _have_triton() -> bool:
    """Triton comes with CUDA builds of torch, but not with every one."""
    return importlib.util.find_spec("triton") is not None


def _use_kernel(x: Tensor) -> bool:
    return x.is_cuda and x.dtype in _KERNEL_DTYPES and _have_triton() and not _transformed()


def _canonical(x: Tensor, heads_at: int) -> Tensor:
    """``x`` as ``[batch, heads, tokens, dim]``, a view."""
    if x.dim() == 3:
        x, heads_at = x[None], heads_at + 1
    return x if heads_at == 1 else x.transpose(1, 2)


def _forward(x: Tensor, cos: Tensor, sin: Tensor, heads_at: int, interleaved: bool, conjugate: bool) -> Tensor:
    out = torch.empty_like(x)
    given, made = _canonical(x, heads_at), _canonical(out, heads_at)
    cos, sin = (table if x.dim() == 4 else table[None] for table in (cos, sin))
    if _use_kernel(x):
        from fsdp_sink_patches.ops.rope import _kernels

        _kernels.rotate(made, given, cos, sin, interleaved=interleaved, conjugate=conjugate)
    else:
        kept = x.shape[-1] - 2 * cos.shape[-1]
        made[..., :kept] = given[..., :kept]
        reference.rotate_(made, given, cos, sin, interleaved=interleaved, conjugate=conjugate)
    return out


def _forward_(x: Tensor, cos: Tensor, sin: Tensor, heads_at: int, interleaved: bool, conjugate: bool) -> None:
    given = _canonical(x, heads_at)
    cos, sin = (table if x.dim() == 4 else table[None] for table in (cos, sin))
    if _use_kernel(x):
        from fsdp_sink_patches.ops.rope import _kernels

        _kernels.rotate(given, given, cos, sin, interleaved=interleaved, conjugate=conjugate)
    else:
        reference.rotate_(given, given, cos, sin, interleaved=interleaved, conjugate=conjugate)


_library.impl("apply_rotary", _forward, "CompositeExplicitAutograd")
_library.impl("apply_rotary_", _forward_, "CompositeExplicitAutograd")


@torch.library.register_fake("fsdp_sink_patches::apply_rotary", lib=_library)
def _(x, *_):  # type: ignore[no-untyped-def]
    return torch.empty_like(x)


@torch.library.register_fake("fsdp_sink_patches::apply_rotary_", lib=_library)
def _(*_):  # type: ignore[no-untyped-def]
    return None


def _changes_x(x, *rest):  # type: ignore[no-untyped-def]
    """What torch generates for its own in-place operators: whoever saved ``x`` for a backward notices the change."""
    torch.autograd.graph.increment_version(x)
    with torch._C._AutoDispatchBelowADInplaceOrView():
        _apply_rotary_(x, *rest)


_library.impl("apply_rotary_", _changes_x, "ADInplaceOrView")


class _Rotary(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, cos, sin, *options):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(cos, sin)
        ctx.options = options
        with torch._C._AutoDispatchBelowAutograd():
            return _apply_rotary(x, cos, sin, *options)

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        return _conjugate(ctx, grad)


class _RotaryInPlace(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, cos, sin, *options):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(cos, sin)
        ctx.options = options
        ctx.mark_dirty(x)
        with torch._C._AutoDispatchBelowAutograd():
            _apply_rotary_(x, cos, sin, *options)
        return x

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        # Out of place here too: the gradient may be somebody else's as well.
        return _conjugate(ctx, grad)


def _conjugate(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    heads_at, interleaved, conjugate = ctx.options
    cos, sin = ctx.saved_tensors
    return _apply_rotary(grad, cos, sin, heads_at, interleaved, not conjugate), None, None, None, None, None


def _differentiable(x, *rest):  # type: ignore[no-untyped-def]
    if torch.is_grad_enabled() and x.requires_grad:
        return _Rotary.apply(x, *rest)  # type: ignore[no-untyped-call]
    with torch._C._AutoDispatchBelowAutograd():
        return _apply_rotary(x, *rest)


def _differentiable_(x, *rest):  # type: ignore[no-untyped-def]
    if torch.is_grad_enabled() and x.requires_grad:
        _RotaryInPlace.apply(x, *rest)  # type: ignore[no-untyped-call]
    else:
        with torch._C._AutoDispatchBelowAutograd():
            _apply_rotary_(x, *rest)


_library.impl("apply_rotary", _differentiable, "Autograd")
_library.impl("apply_rotary_", _differentiable_, "Autograd")
