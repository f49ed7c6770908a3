"""Packed, padded and cut rows of DeepSeek-V4 give what each document gives alone.

What breaks for the user: the compressed layers cut their windows from the first column of the row, whatever stands
there. In a packed row (``position_ids`` that restart, as verl's ``use_remove_padding`` makes them) windows span two
documents and every later document reads the compressed entries of the first instead of its own: logits are off by
50-100 %, gradients by 73 %, with no error. One token of padding on the left does the same. The sliding window keeps
documents apart only from 5.14, only with ``use_cache=False`` (not the default) and without an ``attention_mask``.

With the patch windows, entry positions, what a token may see and the overlap of windows belong to the document, in
every layer: packed rows, rows that start in the middle of a document (a window that began before the row has no entry),
padding anywhere, several rows. A document runs as long as the positions of its tokens go up by one. Padding, where the
2-D mask is 0 or the position negative, neither starts nor ends one: a row is worth what it is without its padding, be
that inside a document (an end-of-turn token that is the padding token too), and counted by the positions or not. A
plain document gives upstream's logits and gradients bit for bit.

Caches: prompts without padding run upstream's code untouched. Prompts padded on the left, one a row, are continued
row by row. A cache that any other rows went through can be returned, as a training step with the config's
``use_cache=True`` does, but not continued: that raises.

``settings.pooling_dtype = "fp32"`` projects and pools entries in fp32 as the reference implementation does.
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
    """Hand on positions that say where documents and padding are, and the mask that follows from them."""
    from . import _deepseek_v4_packing

    return _deepseek_v4_packing.model_forward(original, self, input_ids, attention_mask, position_ids, *a, **k)


def hca_forward(original: Callable[..., Any], self: Any, hidden_states: Tensor, *a: Any, **k: Any) -> Any:
    """The entries of a heavily compressed layer and their bias."""
    from . import _deepseek_v4_packing

    return _deepseek_v4_packing.hca_forward(original, self, hidden_states, *a, **k)


def csa_forward(original: Callable[..., Any], self: Any, hidden_states: Tensor, *a: Any, **k: Any) -> Any:
    """The entries of a sparse layer and the bias of what the indexer picked."""
    from . import _deepseek_v4_packing

    return _deepseek_v4_packing.csa_forward(original, self, hidden_states, *a, **k)


def indexer_forward(original: Callable[..., Any], self: Any, hidden_states: Tensor, *a: Any, **k: Any) -> Any:
    """The entries that each token picks among those of its own document."""
    from . import _deepseek_v4_packing

    return _deepseek_v4_packing.indexer_forward(original, self, hidden_states, *a, **k)


_MODELLING = "transformers.models.deepseek_v4.modeling_deepseek_v4"

PATCH = Patch(
    id="transformers.deepseek-v4-packing",
    gives="packed and padded DeepSeek-V4 rows",
    distribution="transformers",
    requires=">=5.8.1",
    fixed_in=None,
    link="https://github.com/huggingface/transformers/issues/45938",
    remove_when="the compressors of DeepSeek-V4 cut windows per document, with padding and with a cache as well",
    targets=(
        Target(f"{_MODELLING}:DeepseekV4Model.forward", model_forward),
        Target(f"{_MODELLING}:DeepseekV4HCACompressor.forward", hca_forward),
        Target(f"{_MODELLING}:DeepseekV4CSACompressor.forward", csa_forward),
        Target(f"{_MODELLING}:DeepseekV4Indexer.forward", indexer_forward),
    ),
    relies_on=(
        f"{_MODELLING}:DeepseekV4Attention.forward",
        f"{_MODELLING}:DeepseekV4IndexerScorer.forward?",
        f"{_MODELLING}:DeepseekV4HCACache.__init__",
        f"{_MODELLING}:DeepseekV4HCACache.update",
        f"{_MODELLING}:DeepseekV4CSACache.__init__",
        f"{_MODELLING}:apply_rotary_pos_emb",
    ),
    refuses={
        "==5.8.0": "DeepSeek-V4 in transformers 5.8.0 is not causal: its mask is padded with zeros over the compressed "
        "entries, so every query sees the future"
    },
)


def validate(device: str) -> Measurement:
    """A packed row of a sliding, a CSA and an HCA layer against its documents alone in fp64."""
    from . import _deepseek_v4_packing_validation

    return _deepseek_v4_packing_validation.validate(device)
