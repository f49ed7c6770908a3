"""Tables and rotation of DeepSeek-V4, for ``transformers.deepseek-v4-rope``."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fsdp_sink_patches import settings
from fsdp_sink_patches.ops.rope import apply_rotary, tables

CosSin = tuple[Tensor, Tensor]

_log = logging.getLogger("fsdp_sink_patches")


def rotary_forward(
    original: Callable[..., Any], self: Any, x: Tensor, position_ids: Tensor, layer_type: str | None
) -> CosSin:
    """The remembered tables of ``position_ids``, or newly computed ones.

    ``original`` is upstream's own forward, which takes nothing but device and dtype from ``x``.
    """
    rounded = settings.rope_dtype == "activation"
    dtype = x.dtype if rounded else torch.promote_types(x.dtype, torch.float32)

    def upstream() -> CosSin:
        like = x if rounded else x.new_empty(0, dtype=dtype)
        named = {} if layer_type is None else {"layer_type": layer_type}
        found: CosSin = original(self, like, position_ids, **named)
        return found

    inv_freq = None if layer_type is None else getattr(self, f"{layer_type}_inv_freq")
    if (
        type(inv_freq) is not Tensor
        or type(position_ids) is not Tensor
        or inv_freq.requires_grad
        or position_ids.device != x.device
        or "dynamic" in self.rope_type[layer_type]
        or self.rope_type[layer_type] == "longrope"
    ):
        tables.count()
        return upstream()

    scaling = getattr(self, f"{layer_type}_attention_scaling")

    def exact() -> CosSin:
        return tables.cos_sin(position_ids, inv_freq, scaling=scaling, dtype=dtype)

    compute = upstream if rounded else exact
    frequencies = tables.fingerprint(inv_freq)
    if frequencies is None:
        return tables.computed(compute)
    return tables.remembered(position_ids, (layer_type, frequencies, scaling, dtype, rounded), compute)


def apply_rotary_pos_emb(
    original: Callable[..., Any], x: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int
) -> Tensor:
    """Out of place, like upstream's: a hook may have kept ``x``, and a flash kernel keeps its output for the backward.

    The caller's ``-sin`` is rotated by as it comes. fp64 is rotated in fp64, where upstream goes through fp32.
    """
    if (
        type(x) is Tensor
        and type(cos) is Tensor
        and type(sin) is Tensor
        and x.dim() == 4
        and cos.dim() == 3
        and unsqueeze_dim in (1, 2)
        and cos.shape == sin.shape
        and cos.shape[0] in (1, x.shape[0])
        and cos.shape[1] == x.shape[3 - unsqueeze_dim]
        and 0 < 2 * cos.shape[2] <= x.shape[3]
        and not cos.requires_grad
        and not sin.requires_grad
    ):
        if cos.dtype.itemsize < 4 and settings.rope_dtype == "fp32" and not torch.compiler.is_compiling():
            _warn_of_rounded_tables(cos.dtype)
        return apply_rotary(x, cos, sin, interleaved=True, unsqueeze_dim=unsqueeze_dim)
    found: Tensor = original(x, cos, sin, unsqueeze_dim=unsqueeze_dim)
    return found


@functools.cache
def _warn_of_rounded_tables(dtype: torch.dtype) -> None:
    """Tables are inputs of each layer, and FSDP2 casts those unless told not to; the model would only be less exact."""
    _log.warning(
        "transformers.deepseek-v4-rope: found cos and sin in %s where a layer rotates by them, expected fp32, as they "
        "were made. Whatever wraps the layers casts their inputs; under FSDP2 pass "
        "MixedPrecisionPolicy(..., cast_forward_inputs=False), or choose fsdp_sink_patches.settings rope_dtype = "
        '"activation" to have rounded tables everywhere.',
        str(dtype).removeprefix("torch."),
    )
