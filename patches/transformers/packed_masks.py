"""Packed documents of gpt-oss and openai_privacy_filter don't see each other under eager and flex attention.

What breaks for the user: rows are packed (``position_ids`` restart at each document, as verl's ``use_remove_padding``
and TRL's packing do), and the forwards of both models build their masks without looking at ``position_ids``. Every
document of gpt-oss attends to the ones before it in the row, and every document of openai_privacy_filter, which is
bidirectional, to its neighbours on both sides, in every release to 5.24, with no error. Even a model that passes them
loses the detection as soon as ``use_cache`` is on (the default of a decoder) or an all-ones ``attention_mask`` comes
along.

With the patch the masks follow the documents, with or without padding and whatever ``use_cache`` says; windows stay
what they are, causal or bidirectional. Rows that are not packed, flash implementations (which read ``position_ids``
themselves), masks that the caller prepared, and caches that already hold keys run upstream's code untouched.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fsdp_sink_patches import Measurement, Patch, Target

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor


def gpt_oss_forward(
    original: Callable[..., Any],
    self: Any,
    input_ids: Tensor | None = None,
    attention_mask: Any = None,
    position_ids: Tensor | None = None,
    *a: Any,
    **k: Any,
) -> Any:
    """Prepare the documented dict of masks for packed rows and hand it on as ``attention_mask``."""
    from . import _packed_masks

    cache = a[0] if a else k.get("cache", k.get("past_key_values"))
    if not _packed_masks.is_empty(cache):
        return original(self, input_ids, attention_mask, position_ids, *a, **k)
    return _packed_masks.forward(
        original, self, input_ids, attention_mask, position_ids, a, k, embeds_at=1, masks=_packed_masks.causal
    )


def privacy_filter_forward(
    original: Callable[..., Any],
    self: Any,
    input_ids: Tensor | None = None,
    attention_mask: Any = None,
    position_ids: Tensor | None = None,
    *a: Any,
    **k: Any,
) -> Any:
    """Prepare the one mask of this encoder, which has no cache, for packed rows."""
    from . import _packed_masks

    return _packed_masks.forward(
        original, self, input_ids, attention_mask, position_ids, a, k, embeds_at=0, masks=_packed_masks.bidirectional
    )


PATCH = Patch(
    id="transformers.packed-masks",
    gives="packed documents isolated without flash",
    distribution="transformers",
    requires=">=4.57",
    fixed_in=None,
    link="https://github.com/huggingface/transformers/pull/39997",
    remove_when="both forwards pass position_ids to the mask functions, gpt-oss's with use_cache on as well",
    # Both optional: a job has one of the two models, and the other one's module is never imported.
    targets=(
        Target("transformers.models.gpt_oss.modeling_gpt_oss:GptOssModel.forward", gpt_oss_forward, optional=True),
        Target(
            "transformers.models.openai_privacy_filter.modeling_openai_privacy_filter:OpenAIPrivacyFilterModel.forward",
            privacy_filter_forward,
            optional=True,
        ),
    ),
    relies_on=(
        "transformers.masking_utils:create_causal_mask",
        "transformers.masking_utils:create_sliding_window_causal_mask",
        "transformers.masking_utils:create_bidirectional_sliding_window_mask?",
        "transformers.masking_utils:packed_sequence_mask_function",
        "transformers.masking_utils:_preprocess_mask_arguments",
    ),
)


def validate(device: str) -> Measurement:
    """Packed documents against the same documents alone; see :mod:`_validation`."""
    from . import _validation

    return _validation.packed_masks(device)
