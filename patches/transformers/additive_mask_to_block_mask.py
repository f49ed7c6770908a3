"""A 4-D mask on flex attention masks, and skips what it hides.

What breaks for the user: a model on ``flex_attention`` is handed a prepared mask ``[batch, heads, Q, KV]`` (draft
training, tree attention, prefix-LM). Upstream adds it to the scores: a boolean mask adds 1 to what is visible and hides
nothing, a mask with more than one head is read at head 0 for all heads, and one with batch 1 is read out of bounds, all
with no error. An additive mask is right on a GPU, but every block of the score matrix is computed, hidden or not, and a
CPU build of torch 2.13 corrupts its memory in the compiled kernel.

With the patch the mask becomes a BlockMask where upstream hands it through, without a copy. Left to upstream, as they
were: other implementations, masks that hold a bias (finite numbers that are not 0) or that learn, masks shorter than
the keys, and additive masks inside ``torch.compile``, where their values can't be looked at. A mask of the
integers 0 and 1 is refused with advice, since added to the scores it hides nothing; other integers, heads that are not
the config's, and models that name BlockMask themselves (doge adds up masks that are tensors) are left to upstream too.
A row that sees nothing gives 0, where adding the dtype's lowest number to the whole row gives the mean of all values. A
dict of masks, and a model or draft that calls the attention function with a tensor itself, do not pass this place.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fsdp_sink_patches import Measurement, Patch, Target

if TYPE_CHECKING:
    from collections.abc import Callable


def preprocess_mask_arguments(original: Callable[..., Any], *a: Any, **k: Any) -> Any:
    """Upstream's tuple, with a BlockMask in the place of a 4-D tensor that is a mask; ``a`` begins with the config."""
    config = a[0] if a else k["config"]
    result = original(*a, **k)
    if config._attn_implementation != "flex_attention":
        return result
    from . import _given_masks

    return _given_masks.with_block_mask(original, result, a, k)


PATCH = Patch(
    id="transformers.additive-mask-to-block-mask",
    gives="4-D masks on flex attention",
    distribution="transformers",
    requires=">=4.57",
    fixed_in=None,
    link="https://github.com/huggingface/transformers/issues/33898",
    remove_when="flex attention turns a 4-D mask into a BlockMask, boolean ones and those with heads as well",
    targets=(Target("transformers.masking_utils:_preprocess_mask_arguments", preprocess_mask_arguments),),
    relies_on=("transformers.integrations.flex_attention:flex_attention_forward",),
)


def validate(device: str) -> Measurement:
    """Logits under boolean, additive and per-head masks against the same model in fp64; see :mod:`_given_masks`."""
    from . import _given_masks

    return _given_masks.measure(device)
