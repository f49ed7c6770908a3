"""A layer's call under flex attention, and what proves it: transformers' own function against the fp64 oracle."""

from __future__ import annotations

import functools
import inspect
import logging
import math
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fsdp_sink_patches import Measurement
from fsdp_sink_patches.ops import block_masks
from fsdp_sink_patches.ops.flex_attention import flex_attention
from fsdp_sink_patches.ops.sink_attention.oracle import oracle_attention, relative_error

NAME = "transformers.flex-sinks"
_log = logging.getLogger("fsdp_sink_patches")
HEADS, KV_HEADS, HEAD_DIM, LENGTH, WINDOW = 8, 2, 64, 500, 128
DOCUMENTS = (200, 1, 57, 242)
LONG = 4096


def layer_forward(
    original: Callable[..., Any],
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    *a: Any,
    **k: Any,
) -> tuple[Tensor, Tensor | None]:
    """What upstream's function returns: ``out`` ``[batch, Q, heads, head_dim]`` and the log-sum-exp (None on a CPU)."""
    if a:  # upstream's names for what was passed by place; they differ between releases
        names = [*inspect.signature(original).parameters][5:]
        k = {**dict(zip(names, a, strict=False)), **k}
        if "s_aux" not in k:
            return original(module, query, key, value, attention_mask, **k)  # type: ignore[no-any-return]
    for name in ("head_mask", "indices", "block_bias"):
        if k.get(name) is not None:
            raise NotImplementedError(
                f"{NAME}: {type(module).__name__} passed {name}; expected plain attention with sinks. Flex attention "
                f'would leave {name} out: use attn_implementation="eager".'
            )
    if k.get("dropout", 0.0):
        raise ValueError(
            f"{NAME}: dropout={k['dropout']} in {type(module).__name__}; expected 0, since flex attention has none. "
            "Set attention_dropout to 0 in the config."
        )
    try:
        out, lse = flex_attention(
            query, key, value, k.get("s_aux"),
            mask=attention_mask, position_bias=k.get("position_bias"), softcap=k.get("softcap"),
            scale=k.get("scaling"), kernel_options=k.get("kernel_options"),
        )  # fmt: skip
    except ValueError as error:
        raise ValueError(f"{NAME}: in {type(module).__name__}: {error}.") from error
    except (NotImplementedError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # what torch.compile raises when a kernel can't be built has many names
        if query.device.type == "cpu":
            raise
        _say_upstreams(type(module).__name__, f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}")
        return original(module, query, key, value, attention_mask, **k)  # type: ignore[no-any-return]
    return out.transpose(1, 2).contiguous(), lse


@functools.cache
def _say_upstreams(layer: str, error: str) -> None:
    _log.error(
        "%s: found that torch could not build or start our flex attention in %s (%s); expected it to run. "
        "transformers' own runs instead, which rounds the log-sum-exp: sink gradients are off by 1 to 3 %%. Use "
        'attn_implementation="flash_attention_2" for exact ones, and please report this.',
        NAME,
        layer,
        error,
    )


def measure(device: str) -> Measurement:
    """Upstream's registered function, packed and windowed, bf16 on a GPU and fp32 on a CPU."""
    half = device != "cpu"
    dtype = torch.bfloat16 if half else torch.float32
    errors: dict[str, float] = {}
    for window in (None, WINDOW):
        label = "window" if window else "full"
        errors |= {f"{label} {name}": e for name, e in layer_errors(device, dtype, window).items()}
    limits = dict.fromkeys(errors, 4e-3 if half else 1e-5)
    time_ms, peak = _timed(device, dtype)
    details = {"documents": DOCUMENTS, "sinks": "4, 8, 20, then 2 * randn", "dtype": str(dtype).removeprefix("torch.")}
    details["timed"] = f"forward and backward of one layer, {LONG if half else LENGTH} tokens"
    return Measurement(errors, limits, time_ms, peak, details)


def inputs(
    device: str,
    dtype: torch.dtype,
    length: int = LENGTH,
    heads: int = HEADS,
    kv_heads: int = KV_HEADS,
    dims: tuple[int, int] = (HEAD_DIM, HEAD_DIM),
) -> tuple[Tensor, ...]:
    """q, k, v ``[1, heads, length, dim]``, sinks of 4, 8, 20 and a random spread in fp32, and dout."""
    generator = torch.Generator().manual_seed(4)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(device, dtype)

    q, k = normal(1, heads, length, dims[0]), normal(1, kv_heads, length, dims[0])
    v, dout = normal(1, kv_heads, length, dims[1]), normal(1, length, heads, dims[1])
    sinks = 2 * torch.randn(heads, generator=generator)
    sinks[:3] = torch.tensor([4.0, 8.0, 20.0])
    return q, k, v, sinks.to(device), dout


def layer(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, mask: Any, **more: Any) -> Tensor:
    """The function that a model on flex attention calls today, patched or not."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    module = types.SimpleNamespace(training=True)
    function = ALL_ATTENTION_FUNCTIONS["flex_attention"]
    out: Tensor = function(module, q, k, v, mask, scaling=q.shape[-1] ** -0.5, s_aux=sinks, **more)[0]
    return out


def document_starts(lengths: tuple[int, ...], device: str) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0)[:-1].to(device)


def layer_errors(
    device: str, dtype: torch.dtype, window: int | None, documents: tuple[int, ...] = DOCUMENTS, **shape: Any
) -> dict[str, float]:
    """Relative L2 errors of one layer against :func:`oracle_attention`; infinite where the layer raises."""
    given = inputs(device, dtype, sum(documents), **shape)
    leaves: Any = [t.detach().requires_grad_() for t in given[:4]]
    mask = block_masks.causal(
        sum(documents), documents=document_starts(documents, device), window=window, device=device
    )
    names = ("out", "dq", "dk", "dv", "dsink")
    try:
        out = layer(leaves[0], leaves[1], leaves[2], leaves[3], mask)
        found = (out.detach(), *torch.autograd.grad(out, leaves, given[4]))
    except (ValueError, RuntimeError, NotImplementedError):
        return dict.fromkeys(names, math.inf)
    exact = [t.detach().double().requires_grad_() for t in given[:4]]
    parts, start = [], 0
    for length in documents:
        q, k, v = (t[:, :, start : start + length].transpose(1, 2) for t in exact[:3])
        size = (-1, -1) if window is None else (window - 1, 0)
        parts.append(oracle_attention(q, k, v, exact[3], causal=True, window_size=size)[0])
        start += length
    expected = torch.cat(parts, 1)
    wanted = (expected.detach(), *torch.autograd.grad(expected, exact, given[4].double()))
    return {name: relative_error(f, w) for name, f, w in zip(names, found, wanted, strict=True)}


def _timed(device: str, dtype: torch.dtype) -> tuple[float, int]:
    from . import _validation

    length = LENGTH if device == "cpu" else LONG
    q, k, v, sinks, dout = inputs(device, dtype, length)
    leaves: Any = [t.requires_grad_() for t in (q, k, v, sinks)]
    mask = block_masks.causal(length, device=device)

    def step() -> None:
        torch.autograd.grad(layer(leaves[0], leaves[1], leaves[2], leaves[3], mask), leaves, dout)

    try:
        return _validation._time(step, device)
    except (ValueError, RuntimeError):  # upstream on a CPU
        return math.nan, 0
