"""Packed documents of gpt-oss don't see each other under eager and flex attention.

What breaks for the user: rows are packed (``position_ids`` restart at each document, as verl's ``use_remove_padding``
and TRL's packing do), and ``GptOssModel.forward`` builds its masks without looking at ``position_ids``. Every document
attends to the ones before it in the row, in every release to 5.24, with no error. Even a model that passes them loses
the detection as soon as ``use_cache`` is on (the config's default) or an all-ones ``attention_mask`` comes along.

With the patch the masks follow the documents, with or without padding and whatever ``use_cache`` says. Rows that are
not packed, flash implementations (which read ``position_ids`` themselves), masks that the caller prepared, and caches
that already hold keys run upstream's code untouched. openai_privacy_filter has the same defect and is not covered here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fsdp_sink_patches import Measurement, Patch, Target

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor


def model_forward(
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

    return _packed_masks.model_forward(original, self, input_ids, attention_mask, position_ids, *a, **k)


PATCH = Patch(
    id="transformers.gpt-oss-packed-masks",
    gives="packed documents isolated in gpt-oss",
    distribution="transformers",
    requires=">=4.57",
    fixed_in=None,
    link="https://github.com/huggingface/transformers/pull/39997",
    remove_when="GptOssModel.forward passes position_ids to the mask functions, with use_cache on as well",
    targets=(Target("transformers.models.gpt_oss.modeling_gpt_oss:GptOssModel.forward", model_forward),),
    relies_on=(
        "transformers.masking_utils:create_causal_mask",
        "transformers.masking_utils:create_sliding_window_causal_mask",
        "transformers.masking_utils:packed_sequence_mask_function",
        "transformers.masking_utils:_preprocess_mask_arguments",
    ),
)


def validate(device: str) -> Measurement:
    """Packed documents against the same documents alone; see :mod:`_validation`."""
    from . import _validation

    return _validation.packed_masks(device)
