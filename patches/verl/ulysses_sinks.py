"""Sequence parallelism keeps the sinks: each rank uses the sinks of the heads it got.

What breaks for the user: with ``ulysses_sequence_parallel_size`` above 1, verl's wrapper around flash attention trades
tokens for heads, so that a rank holds all tokens of ``heads / size`` heads, but hands ``s_aux`` on whole. Kernels that
take sinks stop with "s_aux must have shape (num_heads)", in every release to 0.9.1; one that didn't look would add the
sinks of other heads.

What is worse needs no sinks: the wrapper sits in the flash path alone. Under eager, sdpa and flex attention every token
attends inside its own rank's shard of the row, in any model, without a word (mean log-prob error 0.35 for a llama on
two ranks). The all-to-all can't be added there from outside, because the model has built its mask from the shard; so
this is refused, with the implementations that work. Not seen: layers that carry a state along the row (linear
attention, Mamba), which verl gathers for Qwen3.5 only.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from fsdp_sink_patches import Measurement, Patch, Target

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

LOCAL = ("eager", "sdpa", "flex_attention")
"""Implementations that verl's all-to-all never reaches."""


def ulysses_flash_attention_forward(original: Callable[..., Any], query_states: Tensor, *a: Any, **k: Any) -> Any:
    """``query_states``: [batch, seqlen / size, heads, head_dim]; ``s_aux`` in ``k``: [heads], every head of the model.

    The all-to-all gives rank r the r-th run of ``heads / size`` query heads, whether or not the KV heads are repeated.
    The slice is differentiable: a rank's gradient is zero outside its heads, and what verl does with every other
    parameter's gradient (mean over the group, times its size) makes the sum of the slices the gradient of the whole.
    """
    s_aux = k.get("s_aux")
    size = sys.modules["verl.utils.ulysses"].get_ulysses_sequence_parallel_world_size()
    # verl's own condition: without position_ids (a vision tower) it does no all-to-all.
    if s_aux is not None and size > 1 and k.get("position_ids") is not None:
        heads = query_states.shape[2]
        if s_aux.shape != (heads,) or heads % size:
            raise ValueError(
                f"verl.ulysses-sinks: found s_aux of shape {tuple(s_aux.shape)} beside {heads} query heads on {size} "
                f"ranks; expected one sink per query head, and heads that the ranks can share out. Choose an "
                "ulysses_sequence_parallel_size that divides the model's query heads."
            )
        rank = sys.modules["verl.utils.ulysses"].get_ulysses_sequence_parallel_rank()
        k["s_aux"] = s_aux.view(size, heads // size)[rank]
    return original(query_states, *a, **k)


def apply_monkey_patch(original: Callable[..., Any], model: Any, ulysses_sp_size: int = 1, *a: Any, **k: Any) -> Any:
    """verl calls this once a model, after it is built and before it is sharded."""
    out = original(model, ulysses_sp_size, *a, **k)
    if ulysses_sp_size > 1 and not _has_verls_attention(model):
        text = model.config.get_text_config()
        found = getattr(text, "_attn_implementation", None)
        if found in LOCAL:
            flash = (
                "+model.override_config.attn_implementation=flash_attention_2 (with transformers.flash-sinks it "
                "computes sinks exactly, and needs no flash-attn package), or "
            )
            raise NotImplementedError(
                f"verl.ulysses-sinks: {type(model).__name__} runs {found} attention with "
                f"ulysses_sequence_parallel_size={ulysses_sp_size}; its tokens would attend inside their own rank's "
                "part of each row only. Expected a flash implementation, the only one that verl gathers the heads "
                f"for. Set {flash if getattr(model, '_supports_flash_attn', True) else ''}"
                "ulysses_sequence_parallel_size=1. If your own attention gathers the row itself, leave this patch out: "
                "FSDP_SINK_PATCHES_DISABLE=verl.ulysses-sinks."
            )
    return out


def _has_verls_attention(model: Any) -> bool:
    """verl replaces the attention of some vision-language models by its own, which does the all-to-all itself."""
    classes = {type(module) for module in model.modules() if "Attention" in type(module).__name__}
    return any(getattr(cls.forward, "__module__", "").startswith("verl.") for cls in classes)


PATCH = Patch(
    id="verl.ulysses-sinks",
    gives="sinks right under sequence parallel",
    distribution="verl",
    requires=">=0.5",
    fixed_in=None,
    link="https://github.com/verl-project/verl/pull/4551",
    remove_when="verl slices s_aux in its Ulysses wrapper, and refuses or gathers eager, sdpa and flex attention",
    targets=(
        Target(
            "verl.models.transformers.monkey_patch:_ulysses_flash_attention_forward", ulysses_flash_attention_forward
        ),
        Target("verl.models.transformers.monkey_patch:apply_monkey_patch", apply_monkey_patch),
    ),
    relies_on=(
        "verl.utils.ulysses:get_ulysses_sequence_parallel_world_size",
        "verl.utils.ulysses:get_ulysses_sequence_parallel_rank",
        "verl.utils.ulysses:gather_seq_scatter_heads",
        "verl.utils.ulysses:gather_heads_scatter_seq",
        "verl.utils.ulysses:SeqAllToAll",
    ),
)


def validate(device: str) -> Measurement:
    """Two gloo ranks, or two NCCL ranks where there are two GPUs; see :mod:`_validation`."""
    from . import _validation

    return _validation.ulysses_sinks(device)
