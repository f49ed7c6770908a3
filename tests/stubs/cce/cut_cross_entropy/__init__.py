"""cut-cross-entropy's one function on all logits, for the calls that we make of it."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fsdp_sink_patches.ops.chunked_loss import reference

CALLS: list[dict[str, Any]] = []


def linear_cross_entropy(
    e: Tensor,
    c: Tensor,
    targets: Tensor,
    ignore_index: int = -100,
    softcap: float | None = None,
    reduction: str = "mean",
    shift: bool = False,
    filter_eps: float | str | None = "high",
    impl: str = "cce",
) -> Tensor:
    CALLS.append({name: value for name, value in locals().items() if name not in ("e", "c")})
    assert not shift
    assert e.shape[:-1] == targets.shape
    losses = reference.cross_entropy(e, c, targets, ignore_index=ignore_index, softcap=softcap, reduction="none")
    kept = losses[targets != ignore_index]
    # its mean over no token is NaN, as torch's is
    return losses if reduction == "none" else kept.mean() if reduction == "mean" else kept.sum()
