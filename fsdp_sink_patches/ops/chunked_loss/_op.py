"""The operators that torch.compile, checkpointing and autograd see.

``fsdp_sink_patches::logit_statistics`` gives each row's log-probability, lse, mean and entropy; its backward computes
the logits again. ``fsdp_sink_patches::linear_loss`` gives a sum of losses, and its gradients in the same pass; its
backward only scales them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fsdp_sink_patches.ops.chunked_loss import _tiles
from fsdp_sink_patches.ops.chunked_loss._tiles import Options

_library = torch.library.Library("fsdp_sink_patches", "FRAGMENT")
_library.define(
    "logit_statistics(Tensor hidden, Tensor weight, Tensor? bias, Tensor labels, Tensor? coolness, "
    "SymInt chunk, float softcap, bool entropy) -> Tensor"
)
_library.define(
    "logit_statistics_backward(Tensor dstatistics, Tensor found, Tensor hidden, Tensor weight, Tensor? bias, "
    "Tensor labels, Tensor? coolness, SymInt chunk, float softcap, bool entropy, bool need_hidden, bool need_weight, "
    "bool need_bias) -> (Tensor, Tensor, Tensor)"
)
_library.define(
    "linear_loss(Tensor hidden, Tensor weight, Tensor? bias, Tensor labels, Tensor? coolness, "
    "Tensor token_weights, float label_smoothing, float z_loss, SymInt chunk, float softcap, bool need_hidden, "
    "bool need_weight, bool need_bias) -> (Tensor, Tensor, Tensor, Tensor)"
)
logit_statistics = torch.ops.fsdp_sink_patches.logit_statistics.default
logit_statistics_backward = torch.ops.fsdp_sink_patches.logit_statistics_backward.default
linear_loss = torch.ops.fsdp_sink_patches.linear_loss.default


def _statistics(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    coolness: Tensor | None,
    chunk: int,
    softcap: float,
    entropy: bool,
) -> Tensor:
    # what the caller's autocast means was settled before; under it, an fp32 sum would be rounded again
    with torch.autocast(hidden.device.type, enabled=False):
        return _tiles.statistics(hidden, weight, bias, labels, coolness, Options(chunk, softcap, entropy))


def _statistics_backward(
    dstatistics: Tensor,
    found: Tensor,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    coolness: Tensor | None,
    chunk: int,
    softcap: float,
    entropy: bool,
    need_hidden: bool,
    need_weight: bool,
    need_bias: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    options, needs = Options(chunk, softcap, entropy), (need_hidden, need_weight, need_bias)
    with torch.autocast(hidden.device.type, enabled=False):
        grads = _tiles.gradients(dstatistics, found, hidden, weight, bias, labels, coolness, options, needs)
    return _or_empty(grads[0], hidden), _or_empty(grads[1], hidden), _or_empty(grads[2], hidden)


def _loss(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    coolness: Tensor | None,
    token_weights: Tensor,
    label_smoothing: float,
    z_loss: float,
    chunk: int,
    softcap: float,
    need_hidden: bool,
    need_weight: bool,
    need_bias: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    options, needs = Options(chunk, softcap, False), (need_hidden, need_weight, need_bias)
    with torch.autocast(hidden.device.type, enabled=False):
        loss, *grads = _tiles.loss_and_gradients(
            hidden, weight, bias, labels, coolness, token_weights, label_smoothing, z_loss, options, needs
        )
    return loss, _or_empty(grads[0], hidden), _or_empty(grads[1], hidden), _or_empty(grads[2], hidden)


def _or_empty(grad: Tensor | None, like: Tensor) -> Tensor:
    return like.new_empty(0) if grad is None else grad


_library.impl("logit_statistics", _statistics, "CompositeExplicitAutograd")
_library.impl("logit_statistics_backward", _statistics_backward, "CompositeExplicitAutograd")
_library.impl("linear_loss", _loss, "CompositeExplicitAutograd")


@torch.library.register_fake("fsdp_sink_patches::logit_statistics", lib=_library)
def _(hidden, *_):  # type: ignore[no-untyped-def]
    return hidden.new_empty(6, hidden.shape[0], dtype=_tiles.accumulator(hidden.dtype))


@torch.library.register_fake("fsdp_sink_patches::logit_statistics_backward", lib=_library)
def _(dstatistics, found, hidden, weight, bias, labels, coolness, *options):  # type: ignore[no-untyped-def]
    return tuple(
        hidden.new_empty(0) if x is None or not need else x.new_empty(x.shape)
        for x, need in zip((hidden, weight, bias), options[-3:], strict=True)
    )


@torch.library.register_fake("fsdp_sink_patches::linear_loss", lib=_library)
def _(hidden, weight, bias, *options):  # type: ignore[no-untyped-def]
    total = _tiles.accumulator(hidden.dtype)
    return hidden.new_empty((), dtype=total), *(
        hidden.new_empty(0) if x is None or not need else x.new_empty(x.shape, dtype=total)
        for x, need in zip((hidden, weight, bias), options[-3:], strict=True)
    )


class _Once(torch.autograd.Function):
    """Hands gradients through and refuses to be differentiated."""

    @staticmethod
    def forward(ctx, *grads):  # type: ignore[no-untyped-def]
        return grads

    @staticmethod
    def backward(ctx, *_):  # type: ignore[no-untyped-def]
        raise RuntimeError(
            "ops.chunked_loss: a second derivative was asked for (create_graph=True), and the backward of the chunked "
            "loss has none; take second derivatives of a loss on full logits"
        )


def _first_order(grads: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
    if not torch.is_grad_enabled():
        return grads
    there = iter(_Once.apply(*(g.requires_grad_() for g in grads if g is not None)))  # type: ignore[no-untyped-call]
    return tuple(None if g is None else next(there) for g in grads)


class _Statistics(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, bias, labels, coolness, *options):  # type: ignore[no-untyped-def]
        with torch._C._AutoDispatchBelowAutograd():
            found = logit_statistics(hidden, weight, bias, labels, coolness, *options)
        ctx.save_for_backward(found, hidden, weight, bias, labels, coolness)
        ctx.options = options
        return found

    @staticmethod
    def backward(ctx, dstatistics):  # type: ignore[no-untyped-def]
        saved, needed = ctx.saved_tensors, ctx.needs_input_grad[:3]
        with torch.no_grad():
            grads = logit_statistics_backward(dstatistics, *saved, *ctx.options, *needed)
        kept = tuple(g if n else None for g, n in zip(grads, needed, strict=True))
        return *_first_order(kept), None, None, *(None,) * len(ctx.options)


class _Loss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, bias, labels, coolness, token_weights, *options):  # type: ignore[no-untyped-def]
        with torch._C._AutoDispatchBelowAutograd():
            loss, *grads = linear_loss(hidden, weight, bias, labels, coolness, token_weights, *options)
        ctx.save_for_backward(*grads)
        ctx.dtypes = [None if x is None else x.dtype for x in (hidden, weight, bias)]
        ctx.options = options
        ctx.mark_non_differentiable(*grads)
        ctx.set_materialize_grads(False)
        return loss, *grads

    @staticmethod
    def backward(ctx, dloss, *_):  # type: ignore[no-untyped-def]
        if dloss is None:
            return (None,) * (6 + len(ctx.options))
        saved, needed = ctx.saved_tensors, ctx.needs_input_grad[:3]
        with torch.no_grad():
            grads = tuple(
                torch.mul(g, dloss, out=torch.empty_like(g, dtype=dtype)) if n else None
                for g, n, dtype in zip(saved, needed, ctx.dtypes, strict=True)
            )
        return *_first_order(grads), None, None, None, *(None,) * len(ctx.options)


def _wants_gradient(*tensors: Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)


def _differentiable_statistics(*inputs):  # type: ignore[no-untyped-def]
    if _wants_gradient(*inputs[:3]):
        return _Statistics.apply(*inputs)  # type: ignore[no-untyped-call]
    with torch._C._AutoDispatchBelowAutograd():
        return logit_statistics(*inputs)


def _differentiable_loss(*inputs):  # type: ignore[no-untyped-def]
    if _wants_gradient(*inputs[:3]):
        return _Loss.apply(*inputs)  # type: ignore[no-untyped-call]
    with torch._C._AutoDispatchBelowAutograd():
        return linear_loss(*inputs)


_library.impl("logit_statistics", _differentiable_statistics, "Autograd")
_library.impl("linear_loss", _differentiable_loss, "Autograd")
