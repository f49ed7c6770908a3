"""liger-kernel and cut-cross-entropy behind the same call, for who names them.

Neither is taken unasked, because neither keeps the contract in half precision: liger's logits are rounded to the dtype
of hidden before the softmax, and again in place as their gradient, and cut-cross-entropy adds up the gradients of
hidden and weight in their own dtype, block by block and in an order that differs between runs. In fp32, where liger is
exact, it saves no memory over ours and waits for the device at each call.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import inspect
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class _Request:
    """What decides whether a library can compute a call."""

    device: str
    dtype: torch.dtype
    bias: bool
    cooled: bool
    label_smoothing: float
    z_loss: float
    weighted: bool
    only_weight_trained: bool


class _Liger:
    """``liger_fused_linear_cross_entropy``, read in 0.8.5: chunks of tokens, gradients in the forward."""

    name = "liger"
    distribution = "liger-kernel"
    module = "liger_kernel.transformers.functional"
    function = "liger_fused_linear_cross_entropy"
    words = frozenset({"accum_dtype", "lse_square_scale", "softcap"})

    def refuses(self, request: _Request) -> str | None:
        if request.device != "cuda":
            return f"its kernels need CUDA tensors, got {request.device}"
        if request.dtype == torch.float64:
            return "its sums are fp32, and hidden is fp64"
        if request.cooled:
            return "it has no temperature"
        if request.weighted:
            return "it has no token_weights"
        if request.only_weight_trained:
            return "it gives the weight and the bias no gradient where hidden needs none"
        return None

    def loss(self, call: Any, hidden: Tensor, weight: Tensor, labels: Tensor, options: dict[str, Any]) -> Tensor:
        loss: Tensor = call(
            hidden,
            weight,
            labels,
            bias=options["bias"],
            ignore_index=-100,
            lse_square_scale=options["z_loss"],
            label_smoothing=options["label_smoothing"],
            reduction=options["reduction"],
            softcap=options["softcap"],
            accum_dtype=torch.float32,  # its default sums the weight's gradient in bf16, once a chunk
        )
        return loss


class _CutCrossEntropy:
    """``cut_cross_entropy.linear_cross_entropy``, read in 25.1.1: logits never leave the chip."""

    name = "cut-cross-entropy"
    distribution = "cut-cross-entropy"
    module = "cut_cross_entropy"
    function = "linear_cross_entropy"
    words = frozenset({"filter_eps", "softcap", "impl"})

    def refuses(self, request: _Request) -> str | None:
        if request.device != "cuda":
            return f"its kernels need CUDA tensors, got {request.device}"
        if request.dtype not in (torch.float16, torch.bfloat16):
            return f"its backward takes fp16 and bf16, got {request.dtype}"
        for name, wanted in (
            ("bias", request.bias),
            ("temperature", request.cooled),
            ("label_smoothing", request.label_smoothing),
            ("z_loss", request.z_loss),
            ("token_weights", request.weighted),
        ):
            if wanted:
                return f"it has no {name}"
        return None

    def loss(self, call: Any, hidden: Tensor, weight: Tensor, labels: Tensor, options: dict[str, Any]) -> Tensor:
        reduction = options["reduction"]
        loss: Tensor = call(
            hidden,
            weight,
            labels,
            ignore_index=-100,
            softcap=options["softcap"],
            reduction="sum" if reduction == "mean" else reduction,  # its mean over no token is NaN
            filter_eps=None,  # its default leaves out gradients below 2^-12 in bf16
            impl="cce",  # the other one computes all logits
        )
        return loss / (labels != -100).sum().clamp(min=1) if reduction == "mean" else loss


_LIBRARIES: tuple[_Liger | _CutCrossEntropy, ...] = (_Liger(), _CutCrossEntropy())


def backends() -> dict[str, str]:
    """Each backend's name with ``"available"`` or the reason why it is not."""
    return {"torch": "available"} | {library.name: _unavailable(library.name) or "available" for library in _LIBRARIES}


def compute(
    backend: str,
    hidden: Tensor,
    weight: Tensor,
    ids: Tensor,
    counted: Tensor,
    *,
    bias: Tensor | None,
    reduction: str,
    softcap: float | None,
    cooled: bool,
    label_smoothing: float,
    z_loss: float,
    weighted: bool,
    shape: torch.Size,
) -> Tensor:
    """The loss by the library named; arguments as :func:`linear_cross_entropy` has prepared them.

    Raises:
        ValueError: no such backend, it is not here, or it cannot compute what was asked.
    """
    library = next((one for one in _LIBRARIES if one.name == backend), None)
    if library is None:
        raise ValueError(
            f"ops.chunked_loss: backend is {backend!r}; expected one of {', '.join(backends())}, or None for torch: "
            "name one of them"
        )
    trained = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (weight, bias))
    request = _Request(
        hidden.device.type, hidden.dtype, bias is not None, cooled, label_smoothing, z_loss, weighted,
        trained and not hidden.requires_grad,
    )  # fmt: skip
    reason = _unavailable(backend) or library.refuses(request)
    if reason is None and hidden.shape[0] == 0:
        reason = "there are no tokens"
    if reason is not None:
        raise ValueError(
            f"ops.chunked_loss: backend {backend!r} cannot compute this: {reason}; expected a request within what it "
            "offers: leave backend at None, which computes every request"
        )
    call = getattr(importlib.import_module(library.module), library.function)
    options = {
        "bias": bias,
        "reduction": reduction,
        "softcap": softcap,
        "label_smoothing": label_smoothing,
        "z_loss": z_loss,
    }
    loss = library.loss(call, hidden.contiguous(), weight, torch.where(counted, ids, -100), options)
    return loss.view(shape) if reduction == "none" else loss


@lru_cache(maxsize=4)
def _unavailable(name: str) -> str | None:
    library = next(one for one in _LIBRARIES if one.name == name)
    try:
        version = importlib.metadata.version(library.distribution)
    except importlib.metadata.PackageNotFoundError:
        return f"{library.distribution} is not installed"
    try:
        module = importlib.import_module(library.module)
        parameters = inspect.signature(getattr(module, library.function)).parameters
    except Exception as error:  # each way an installation can be broken is a reason not to use it
        return f"{library.distribution} {version} does not import: {type(error).__name__}: {error}"
    missing = sorted(library.words - set(parameters))
    return f"{library.distribution} {version} takes no {', '.join(missing)}" if missing else None
