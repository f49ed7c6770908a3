"""Which scenarios there are, and what their numbers mean."""

from __future__ import annotations

from importlib import metadata
from typing import Any

from packaging.version import Version

Results = dict[str, Any]

TRANSFORMERS = ("transformers.flash-sinks", "transformers.packed-masks")

RIGHT = 1e-5
"""Relative L2 of an fp32 run against fp64."""

RIGHT_UNDER_FLASH = (
    "packed", "packed_fa3", "packed_rows", "packed_and_padded", "starts_mid_document", "given_borders",
    "padded_left", "padded_right", "checkpointed", "ulysses", "changed_in_place",
)  # fmt: skip
RIGHT_UNDER_EAGER = (
    "eager_packed", "eager_packed_by_default", "eager_packed_all_ones", "eager_packed_rows",
    "eager_packed_empty_cache", "eager_packed_and_padded",
)  # fmt: skip
HAS_ENCODER = Version(metadata.version("transformers")) >= Version("5.6")
"""Whether the transformers that the children see has openai_privacy_filter."""
ENCODER_PACKED = (
    "encoder_packed", "encoder_packed_all_ones", "encoder_packed_rows", "encoder_packed_and_padded",
    "encoder_packed_checkpointed",
) if HAS_ENCODER else ()  # fmt: skip
ENCODER = (
    *ENCODER_PACKED, "encoder_leak", "encoder_embeddings", "encoder_untouched", "encoder_flex_masks",
) if HAS_ENCODER else ()  # fmt: skip
SINGLE = (
    "packed_fa4", "numpy_lengths", "compiled", "compiled_borders", "generated", "loaded", "derived_once", "autocast",
    "dropout", "resolved", "refused", "sdpa_forced", "foreign_kernels", "sink_sources", "window", "wide_keys",
    "precise_sinks", "unusual_arguments", "eager_embeddings", "eager_compiled", "eager_untouched", "flex_masks",
    "every_model", "validated_flash_sinks", "validated_packed_masks",
)  # fmt: skip
CONTROL = (
    *RIGHT_UNDER_FLASH, *RIGHT_UNDER_EAGER, "packed_fa4", "resolved", "refused", "sdpa_forced", "foreign_kernels",
    "eager_embeddings", "eager_untouched", "flex_masks", "validated_flash_sinks", "validated_packed_masks",
)  # fmt: skip
UNDER_FLASH_ATTN_2 = ("packed", "sinkless", "direct_without_sinks", "direct", "validated_varlen_sinks")
"""Run with the stub of flash-attn 2 on the path."""


def errors(result: dict[str, Any]) -> dict[str, float]:
    """Relative errors of the logits, of the sinks' gradient, and the largest of any gradient."""
    assert "raises" not in result, result["raises"]
    return {name: result[name] for name in ("logits", "dsink", "gradient")}


def refusals(transformers: Version) -> tuple[str, ...]:
    """How what upstream says begins when gpt-oss asks for flash_attention_2 or _3, in the release it says so."""
    no_package = (
        "ImportError: FlashAttention2 has been toggled on",
        "ImportError: FlashAttention3 has been toggled on",
    )
    if transformers < Version("5"):
        return no_package
    if transformers < Version("5.3"):
        # set_attn_implementation on a built model passes the config and looks for the package.
        return ("ValueError: GPT-OSS model does not support the specified flash attention implementation", *no_package)
    # The hub kernel that it swaps in can't be loaded; some releases tell a process's second model it isn't registered.
    return (
        "ImportError: `kernels` is either not installed or uses an incompatible version",
        "KeyError: '`kernels-community/vllm-flash-attn3` is not a valid attention implementation",
    )


def proves(patched: dict[str, Any], control: dict[str, Any], *refusals: str) -> bool:
    """A patch's own validation is right with the patch; without, it is wrong or refused in one of these words."""
    return patched["right"] and (
        control["raises"].startswith(refusals) if "raises" in control else not control["right"]
    )


def fails(result: dict[str, Any], *refusals: str) -> bool:
    """Off by more than any rounding, or refused in one of these words; no other exception counts."""
    return result["raises"].startswith(refusals) if "raises" in result else max(errors(result).values()) > 1e-2
