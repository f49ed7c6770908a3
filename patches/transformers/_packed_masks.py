"""The masks that ``GptOssModel.forward`` should have built: causal, windowed, and blind to other documents."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
import transformers.masking_utils as masking
import transformers.models.gpt_oss.modeling_gpt_oss as modelling
from torch import Tensor

from ._documents import document_starts

_ACCEPTED = frozenset(inspect.signature(masking.create_causal_mask).parameters)


def model_forward(
    original: Callable[..., Any],
    self: Any,
    input_ids: Tensor | None,
    attention_mask: Any,
    position_ids: Tensor | None,
    *a: Any,
    **k: Any,
) -> Any:
    """Hand packed rows on with prepared masks, everything else as it came.

    ``a`` and ``k`` are the rest of ``GptOssModel.forward``: the cache, ``inputs_embeds``, ``use_cache`` ...
    """
    cache = a[0] if a else k.get("cache", k.get("past_key_values"))
    inputs_embeds = a[1] if len(a) > 1 else k.get("inputs_embeds")
    documents = None
    if position_ids is not None and "flash" not in self.config._attn_implementation and _is_empty(cache):
        tokens = input_ids if inputs_embeds is None else inputs_embeds
        if tokens is not None:
            documents = _documents(position_ids, attention_mask, tokens.shape[:2])
    if documents is None:
        return original(self, input_ids, attention_mask, position_ids, *a, **k)
    if inputs_embeds is None:
        # The masks take their dtype from the embeddings, so these are made here, once, as upstream makes them.
        inputs_embeds, input_ids = self.embed_tokens(input_ids), None
    masks = _masks(self.config, inputs_embeds, attention_mask, documents)
    if len(a) > 1:
        a = (a[0], inputs_embeds, *a[2:])
    else:
        k["inputs_embeds"] = inputs_embeds
    return original(self, input_ids, masks, position_ids, *a, **k)


def _is_empty(cache: Any) -> bool:
    """No key is seen yet and none is preallocated, so that queries and keys are the same tokens."""
    if cache is None:
        return True
    if getattr(cache, "is_compileable", False) or not hasattr(cache, "get_seq_length"):
        return False
    return bool(cache.get_seq_length() == 0)


def _documents(position_ids: Tensor, mask: Any, shape: torch.Size) -> Tensor | None:
    """The document of every token, ``[batch, seqlen]``; None when no row holds more than one.

    None too for a mask that is already prepared (a dict, a BlockMask, 4-D), as ``generate`` does.
    """
    if mask is not None and not (isinstance(mask, Tensor) and mask.shape == shape):
        return None
    positions = position_ids.expand(shape)
    if torch.compiler.is_compiling():
        # No branch on data in a graph: the mask is built from the documents whether or not there are several.
        return document_starts(positions, None if mask is None else mask.bool()).cumsum(1)
    real = None if mask is None or mask.all() else mask.bool()
    starts = document_starts(positions, real)
    return starts.cumsum(1) if bool((starts.sum(1) > 1).any()) else None


def _masks(config: Any, inputs_embeds: Tensor, mask: Tensor | None, documents: Tensor) -> dict[str, Any]:
    arguments: dict[str, Any] = {
        "config": config,
        "inputs_embeds" if "inputs_embeds" in _ACCEPTED else "input_embeds": inputs_embeds,
        "cache" if "cache" in _ACCEPTED else "past_key_values": None,
        "attention_mask": mask,
        "and_mask_function": masking.packed_sequence_mask_function(documents),
    }
    if "cache_position" in _ACCEPTED:
        arguments["cache_position"] = torch.arange(inputs_embeds.shape[1], device=inputs_embeds.device)
    return {
        "full_attention": modelling.create_causal_mask(**arguments),
        "sliding_attention": modelling.create_sliding_window_causal_mask(**arguments),
    }
