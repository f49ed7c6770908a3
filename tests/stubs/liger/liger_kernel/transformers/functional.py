"""liger's fused linear cross-entropy on all logits, for the calls that we make of it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fsdp_sink_patches.ops.chunked_loss import reference

CALLS: list[dict[str, Any]] = []


def liger_fused_linear_cross_entropy(
    input: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    ce_weight: Tensor | None = None,
    ignore_index: int = -100,
    lse_square_scale: float = 0.0,
    label_smoothing: float = 0.0,
    reduction: str = "mean",
    softcap: float | None = None,
    return_z_loss: bool = False,
    accum_dtype: torch.dtype | None = None,
    use_token_scaling: bool = False,
    return_token_accuracy: bool = False,
    return_predicted_tokens: bool = False,
    chunk_mem_const: int = 1,
) -> Any:
    CALLS.append({name: value for name, value in locals().items() if name not in ("input", "weight", "bias")})
    assert ce_weight is None
    assert not any([return_z_loss, use_token_scaling, return_token_accuracy, return_predicted_tokens])
    assert input.dim() == 2
    assert input.is_contiguous()
    if not input.requires_grad:  # as the real one: no gradient of the input, no gradient at all
        weight, bias = weight.detach(), None if bias is None else bias.detach()
    return reference.cross_entropy(
        input, weight, target, bias=bias, ignore_index=ignore_index, z_loss=lse_square_scale,
        label_smoothing=label_smoothing, reduction=reduction, softcap=softcap,
    )  # fmt: skip
