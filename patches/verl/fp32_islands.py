"""What a model asks to have in fp32 is fp32 under verl's FSDP2: sinks, norms, hyper-connections, routers.

What breaks for the user: models list parameters that must stay fp32 beside bf16 weights (DeepSeek-V4: 43 of 86 tensors
of a tiny one; MiMo-V2-Flash, HY-V4 and most routers from transformers 5.2x on). verl loses that four times over, and
says nothing:

- ``module.to(torch_dtype)`` right after loading rounds them, and the fp32 buffers of routers with them, when
  ``model_dtype=bfloat16`` (the choice for 20B and more; the ref worker's default in 0.5.0);
- one ``MixedPrecisionPolicy`` for the whole model gathers them as bf16, whatever the optimizer holds;
- its ``cast_forward_inputs=True`` rounds fp32 cos and sin, which are inputs of every layer;
- the forward runs under autocast, so that even ``F.linear(x.float(), weight.float())`` multiplies in bf16.

With the patch, under ``strategy=fsdp2``:

- The values are those of the checkpoint, not rounded ones.
- The listed parameters are FSDP2 units of their own (:func:`fsdp_sink_patches.fsdp.shard_fp32_units`), gathered in
  fp32, their gradients reduced in fp32; verl wraps everything else as before. Names, state dicts and optimizers are
  what they were, but for the dtype.
- Modules that are listed as a whole compute outside autocast, as they do without verl.
- Layers take their inputs as they are.

A model that lists nothing (Llama, gpt-oss) is left alone, and so is a job with ``param_dtype=fp32``. LoRA adapters that
are fp32 beside bf16 weights stay where verl puts them. If the units can't be made, one warning says why, and verl goes
on as it would without the patch. FSDP1 can't hold two dtypes in a flat parameter: docs/fsdp.md says what it can do.
Frequencies are ``transformers.rotary-buffers``'.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from fsdp_sink_patches import Measurement, Patch, Target

if TYPE_CHECKING:
    from collections.abc import Callable


def get_init_weight_context_manager(original: Callable[..., Any], *a: Any, **k: Any) -> Callable[[], Any]:
    """verl loads a model, and calls ``module.to(dtype)`` on it, inside the context that this returns."""
    from . import _fp32_islands

    return functools.partial(_fp32_islands.remembering, original(*a, **k))


def apply_fsdp2(original: Callable[..., Any], model: Any, fsdp_kwargs: dict[str, Any], config: Any) -> Any:
    """``fully_shard`` of the layers, the embeddings and the root; every call is verl's own, after our units."""
    from . import _fp32_islands

    return _fp32_islands.apply_fsdp2(original, model, fsdp_kwargs, config)


def fsdp2_load_full_state_dict(original: Callable[..., Any], model: Any, full_state: Any, *a: Any, **k: Any) -> Any:
    """``full_state`` was taken after the cast and before ``apply_fsdp2``; rank 0's is what everybody gets."""
    from . import _fp32_islands

    _fp32_islands.give_exact(model, full_state)
    return original(model, full_state, *a, **k)


PATCH = Patch(
    id="verl.fp32-islands",
    gives="fp32 parameters stay fp32",
    distribution="verl",
    requires=">=0.5",
    fixed_in=None,
    link="https://github.com/verl-project/verl/issues/7092",
    remove_when="verl keeps _keep_in_fp32_modules_strict through its cast, its FSDP2 policy and its autocast",
    targets=(
        Target("verl.utils.fsdp_utils:get_init_weight_context_manager", get_init_weight_context_manager),
        Target("verl.utils.fsdp_utils:apply_fsdp2", apply_fsdp2),
        Target("verl.utils.fsdp_utils:fsdp2_load_full_state_dict", fsdp2_load_full_state_dict),
    ),
    relies_on=(
        "verl.utils.fsdp_utils:maybe_patch_fsdp_module?",
        "verl.workers.engine.fsdp.transformer_impl:FSDPEngine._build_module?",
        "verl.workers.engine.fsdp.transformer_impl:FSDPEngine._build_fsdp_module?",
        "verl.workers.fsdp_workers:ActorRolloutRefWorker._build_model_optimizer?",
    ),
)


def validate(device: str) -> Measurement:
    """A tiny DeepSeek-V4 through verl's own wrap on two ranks; see :mod:`_fp32_validation`."""
    from . import _fp32_validation

    return _fp32_validation.fp32_islands(device)
