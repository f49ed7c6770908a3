"""verl's fused log-probs read the weight of ``lm_head`` under FSDP2.

What breaks for the user: with ``use_fused_kernels=True``, ``strategy=fsdp2`` and an untied ``lm_head`` every step stops
with "got mixed torch.Tensor and DTensor". From 0.7.1 verl makes ``lm_head`` an FSDP2 unit of its own, whose weight is
gathered by its forward, and the fused forward reads the weight without calling it. Here ``lm_head`` stays with the root
while a fused forward is in place, as it did to 0.7.0: the root's forward gathers it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fsdp_sink_patches import Measurement, Patch, Target

if TYPE_CHECKING:
    from collections.abc import Callable


def select_fsdp2_wrap_targets(original: Callable[..., Any], model: Any, *a: Any, **k: Any) -> list[Any]:
    """verl calls this once a model, after its fused forward is in place: the modules to shard, each on its own."""
    found: list[Any] = original(model, *a, **k)
    if not any(_is_fused(type(module)) for module in model.modules()):
        return found
    heads = [module for name, module in model.named_modules() if name.rpartition(".")[2] == "lm_head"]
    return [module for module in found if not any(module is head for head in heads)]


def _is_fused(cls: type) -> bool:
    """Its forward is one of verl's that compute log-probs from hidden states."""
    forward = getattr(cls, "forward", None)
    name, module = getattr(forward, "__name__", ""), getattr(forward, "__module__", "") or ""
    return module.startswith("verl.") and name.startswith("forward_with_")


PATCH = Patch(
    id="verl.fused-kernels-fsdp2",
    gives="fused log-probs under FSDP2",
    distribution="verl",
    requires=">=0.7.1",
    fixed_in=None,
    link="https://github.com/verl-project/verl/issues/5633",
    remove_when="verl leaves lm_head with the root, or gathers its weight, when fused kernels are on",
    targets=(Target("verl.utils.fsdp_utils:_select_fsdp2_wrap_targets", select_fsdp2_wrap_targets),),
    relies_on=(
        "verl.utils.fsdp_utils:apply_fsdp2",
        "verl.models.transformers.monkey_patch:patch_forward_with_backends",
        "verl.models.transformers.dense_common:forward_with_torch_backend",
    ),
)


def validate(device: str) -> Measurement:
    """Log-probs and gradients of an untied model sharded by verl, against fp64."""
    from . import _log_probs_validation

    return _log_probs_validation.fused_kernels_fsdp2(device)
