"""``attn_implementation="flash_attention_2/3/4"`` computes attention sinks, forward and backward, installed or not.

What breaks for the user: a model with sinks (one learned logit per head, ``self_attn.sinks``, handed to the attention
function as ``s_aux``) is trained with flash attention, and depending on the release transformers drops the sink without
a word (4.57), refuses (5.0-5.2), swaps in a hub kernel that has to be downloaded (5.3 on), or crashes FlashAttention 4
on packed rows (5.4 on). The loss looks normal and the trained model is not the model that is served.

With the patch those three names run :mod:`fsdp_sink_patches.ops.sink_attention` in every model that passes ``s_aux``:

- gpt_oss, granite_swa, granitemoe_swa, mimo_v2_flash, flint and openai_privacy_filter, and remote code that does so;
- hy_v4, hy_v4_vl and deepseek_v4 pass ``s_aux`` too, but their attention is not plain attention (top-k indices,
  compressed entries), they declare ``_supports_flash_attn = False``, and they stay refused.

A model without sinks never reaches this code, except on transformers 5.6.0, where upstream crashes without a sink
(huggingface/transformers#45588). A sink that can't be computed raises.
"""

from __future__ import annotations

import functools
import inspect
import logging
import sys
from typing import TYPE_CHECKING, Any

from fsdp_sink_patches import Measurement, Patch, Target

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

FLASH_NAMES = ("flash_attention_2", "flash_attention_3", "flash_attention_4")
"""The implementation names that run our functions when the model passes sinks."""

SINK_LAYER = "fsdp_sink_patches_sink_layer"
"""Keyword by which a layer tells the inner function that its model has sinks, also where this layer has none (mimo's
full attention); verl's wrapper hands it on with the other keywords."""

_log = logging.getLogger("fsdp_sink_patches")


def check_and_adjust(
    original: Callable[..., str], self: Any, attn_implementation: str | None, *a: Any, **k: Any
) -> str:
    """Admit a flash name on a model with sinks as it is: no class list, no package check, no hub kernel, no network."""
    if _admits(self, attn_implementation):
        _announce(self.config.model_type, str(attn_implementation))
        return str(attn_implementation)
    return original(self, attn_implementation, *a, **k)


def get_correct(original: Callable[..., str], self: Any, requested_attention: str | None, *a: Any, **k: Any) -> str:
    """The same answer for a sub-model, which ``set_attn_implementation`` asks through this method."""
    if _admits(self, requested_attention):
        return str(requested_attention)
    return original(self, requested_attention, *a, **k)


def flash_attention_forward(
    original: Callable[..., Any],
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *a: Any,
    **k: Any,
) -> Any:
    """The attention function of a layer: sinks stay in their own dtype and V keeps its own head_dim."""
    sinks = k.get("s_aux") is not None or ("s_aux" in k and hasattr(module, "sinks"))
    if not (sinks and module.config._attn_implementation in FLASH_NAMES) and not _crashes_without_sinks():
        return original(module, query, key, value, attention_mask, *a, **k)
    from . import _sink_forward

    return _sink_forward.layer_forward(module, query, key, value, attention_mask, *a, **k)


def flash_forward(original: Callable[..., Any], *a: Any, **k: Any) -> Any:
    """What the layer's function and verl's Ulysses wrapper call: pads, packs and runs the kernel."""
    sink_layer = k.pop(SINK_LAYER, False)
    if not sink_layer and k.get("s_aux") is None:
        return original(*a, **k)
    from . import _sink_forward

    name = k.get("attn_implementation", k.get("implementation"))
    if name is not None and name not in FLASH_NAMES:
        _sink_forward.require_sink_kernel(name)
        return original(*a, **k)
    return _sink_forward.flash_forward(*a, **k)


def sdpa_attention_forward(original: Callable[..., Any], *a: Any, **k: Any) -> Any:
    """SDPA has no sink argument and takes ``s_aux`` into its keywords without looking; say so instead."""
    if k.get("s_aux") is not None:
        raise NotImplementedError(
            "transformers.flash-sinks: sdpa was called with s_aux (attention sinks), which it would drop. Expected an "
            'implementation that computes sinks; use attn_implementation="flash_attention_2" or "eager".'
        )
    return original(*a, **k)


def gpt_oss_config_setattr(original: Callable[..., None], self: Any, key: str, value: Any) -> None:
    """transformers 5.0-5.2 refuses every flash name but one hub kernel when the config attribute is set."""
    if key in ("_attn_implementation", "_attn_implementation_internal") and value in FLASH_NAMES:
        config_class = sys.modules["transformers.models.gpt_oss.configuration_gpt_oss"].GptOssConfig
        super(config_class, self).__setattr__(key, value)
    else:
        original(self, key, value)


def _admits(model: Any, name: str | None) -> bool:
    if name not in FLASH_NAMES or not passes_sinks(model.__class__):
        return False
    if name not in sys.modules["transformers.modeling_utils"].ALL_ATTENTION_FUNCTIONS.valid_keys():
        # 5.3 turns a flash name that it does not know into a hub kernel.
        version = sys.modules["transformers"].__version__
        raise ValueError(
            f"transformers.flash-sinks: {model.config.model_type} asked for {name}, a name that transformers {version} "
            'does not know (it came with 5.4). Use "flash_attention_2": with sinks it runs the best flash kernel that '
            "is installed, flash-attn-4 included."
        )
    return True


@functools.cache
def passes_sinks(model_class: type) -> bool:
    """Whether this model class hands ``s_aux`` to the attention function and leaves flash attention to us.

    Read from the class's own modelling file, so that a model released tomorrow or loaded with ``trust_remote_code``
    counts. A class that supports SDPA has no sinks, because SDPA has no place for them (hy_v4_vl's vision tower shares
    a file with a text model that has).
    """
    if not getattr(model_class, "_supports_flash_attn", False) or getattr(model_class, "_supports_sdpa", False):
        return False
    return any("s_aux" in _source(base.__module__) for base in model_class.__mro__)


def _crashes_without_sinks() -> bool:
    """transformers 5.6.0 calls ``s_aux.to`` without looking whether there is one (huggingface/transformers#45588)."""
    return bool(sys.modules["transformers"].__version__ == "5.6.0")


@functools.cache
def _source(module: str) -> str:
    try:
        return inspect.getsource(sys.modules[module])
    except (KeyError, OSError, TypeError):
        # A class made in a notebook or a shell has no file; the class it derives from has one and is looked at too.
        return ""


@functools.cache
def _announce(model: str, name: str) -> None:
    from fsdp_sink_patches.ops import sink_attention

    usable = [backend for backend, why in sink_attention.backends().items() if why == "available"]
    _log.warning(
        "transformers.flash-sinks: %s asked for %s; its attention runs fsdp_sink_patches.ops.sink_attention with exact "
        "sinks (backends here, best first: %s), and nothing is downloaded.",
        model, name, ", ".join(usable),
    )  # fmt: skip


PATCH = Patch(
    id="transformers.flash-sinks",
    gives="exact sinks under flash attention",
    distribution="transformers",
    requires=">=4.57",
    fixed_in=None,
    link="https://github.com/huggingface/transformers/pull/44177",
    remove_when="transformers computes sinks forward and backward under flash_attention_2 without a hub download",
    targets=(
        Target("transformers.modeling_flash_attention_utils:_flash_attention_forward", flash_forward),
        Target("transformers.integrations.flash_attention:flash_attention_forward", flash_attention_forward),
        Target("transformers.integrations.sdpa_attention:sdpa_attention_forward", sdpa_attention_forward),
        Target("transformers.modeling_utils:PreTrainedModel._check_and_adjust_attn_implementation", check_and_adjust),
        Target("transformers.modeling_utils:PreTrainedModel.get_correct_attn_implementation", get_correct),
        Target(
            "transformers.models.gpt_oss.configuration_gpt_oss:GptOssConfig.__setattr__",
            gpt_oss_config_setattr,
            optional=True,
        ),
    ),
    relies_on=(
        "transformers.modeling_flash_attention_utils:lazy_import_flash_attention",
        "transformers.modeling_flash_attention_utils:_lazy_define_process_function",
        "transformers.modeling_flash_attention_utils:_process_flash_attention_kwargs",
        "transformers.integrations.flash_attention:get_target_dtype?",
        "transformers.masking_utils:flash_attention_mask",
        "transformers.modeling_utils:AttentionInterface",
        "transformers.models.gpt_oss.modeling_gpt_oss:GptOssAttention.forward",
    ),
)


def validate(device: str) -> Measurement:
    """A real gpt-oss on packed rows against the same model in fp64; see :mod:`_validation`."""
    from . import _validation

    return _validation.flash_sinks(device)
