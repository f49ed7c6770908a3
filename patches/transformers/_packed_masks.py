"""The masks that two models' forwards should have built: windowed as theirs, and blind to other documents."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
import transformers.masking_utils as masking
from torch import Tensor

from ._documents import document_starts

_ACCEPTED = frozenset(inspect.signature(masking.create_causal_mask).parameters)


def forward(
    original: Callable[..., Any],
    self: Any,
    input_ids: Tensor | None,
    attention_mask: Any,
    position_ids: Tensor | None,
    a: tuple[Any, ...],
    k: dict[str, Any],
    embeds_at: int,
    masks: Callable[[Any, Tensor, Tensor | None, Tensor], Any],
) -> Any:
    """Hand packed rows on with prepared masks, everything else as it came.

    Args:
        a: the model's positional arguments after ``position_ids``.
        k: its named ones.
        embeds_at: the place of ``inputs_embeds`` in ``a``, where it is given by place.
        masks: makes them, of the config, the embeddings, the padding mask and every token's document.
    """
    by_place = len(a) > embeds_at
    embeds = a[embeds_at] if by_place else k.get("inputs_embeds")
    tokens = input_ids if embeds is None else embeds
    documents = None
    if position_ids is not None and tokens is not None and "flash" not in self.config._attn_implementation:
        documents = _documents(position_ids, attention_mask, tokens.shape[:2])
    if documents is None:
        return original(self, input_ids, attention_mask, position_ids, *a, **k)
    if embeds is None:
        # The masks take their dtype from the embeddings, so these are made here, once, as upstream makes them.
        embeds, input_ids = self.embed_tokens(input_ids), None
    if by_place:
        a = (*a[:embeds_at], embeds, *a[embeds_at + 1 :])
    else:
        k = {**k, "inputs_embeds": embeds}
    return original(self, input_ids, masks(self.config, embeds, attention_mask, documents), position_ids, *a, **k)


def is_empty(cache: Any) -> bool:
    """No key is seen yet and none is preallocated, so that queries and keys are the same tokens."""
    if cache is None:
        return True
    if getattr(cache, "is_compileable", False) or not hasattr(cache, "get_seq_length"):
        return False
    return bool(cache.get_seq_length() == 0)


def causal(config: Any, embeds: Tensor, mask: Tensor | None, documents: Tensor) -> dict[str, Any]:
    """gpt-oss's two masks, by layer type."""
    arguments: dict[str, Any] = {
        "config": config,
        "inputs_embeds" if "inputs_embeds" in _ACCEPTED else "input_embeds": embeds,
        "cache" if "cache" in _ACCEPTED else "past_key_values": None,
        "attention_mask": mask,
        "and_mask_function": masking.packed_sequence_mask_function(documents),
    }
    if "cache_position" in _ACCEPTED:
        arguments["cache_position"] = torch.arange(embeds.shape[1], device=embeds.device)
    return {
        "full_attention": masking.create_causal_mask(**arguments),
        "sliding_attention": masking.create_sliding_window_causal_mask(**arguments),
    }


def bidirectional(config: Any, embeds: Tensor, mask: Tensor | None, documents: Tensor) -> Any:
    """openai_privacy_filter's one mask, which its forward hands on as it is when it is 4-D or a BlockMask."""
    return masking.create_bidirectional_sliding_window_mask(
        config=config,
        inputs_embeds=embeds,
        attention_mask=mask,
        and_mask_function=masking.packed_sequence_mask_function(documents),
    )


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
