"""DeepSeek-V4's attention through :mod:`fsdp_sink_patches.ops.compressed_attention`, and who decides that it is.

:func:`upstreams_because` decides. The model asks it before it makes a mask (``transformers.deepseek-v4-packing``, which
then hands :class:`Rows` to the layers in its place) and each layer asks it again.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

import torch
import transformers.models.deepseek_v4.modeling_deepseek_v4 as modelling
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from fsdp_sink_patches import settings
from fsdp_sink_patches.ops.compressed_attention import compressed_attention

from ._deepseek_v4_packing import _CACHE, Rows, picks_of

ID = "transformers.deepseek-v4-attention"

_log = logging.getLogger("fsdp_sink_patches")


# --- the choice ----------------------------------------------------------------------------------------------------


def upstreams_because(
    config: Any, device: torch.device, training: bool, output_attentions: bool | None = None, past: int = 0
) -> str | None:
    """Why upstream's own attention runs, or None: the fused one does.

    On the CPU upstream's runs because it gives its own bits there and the fused one is plain torch, no faster.

    Args:
        config: the model's.
        device: where the activations are.
        training: dropout would be on.
        output_attentions: the probabilities are asked for; None leaves it to ``config``.
        past: tokens in the cache.

    Raises:
        NotImplementedError: the fused attention would run, and has no dropout.
    """
    choice = settings.compressed_attention
    implementation = config._attn_implementation or "eager"
    if choice == "eager":
        return "settings.compressed_attention is 'eager' ('auto' is the fused one)"
    if config.output_attentions if output_attentions is None else output_attentions:
        return "output_attentions asks for probabilities, which the fused one never has"
    if past:
        return "the rows go on from a cache"
    if implementation != "eager":
        return f"attn_implementation is {implementation!r}, not 'eager'"
    if device.type != "cuda" and choice != "fused":
        return f"tensors are on {device.type}, not CUDA (settings.compressed_attention = 'fused' runs it there too)"
    if training and config.attention_dropout > 0:
        raise NotImplementedError(
            f"{ID}: found attention_dropout={config.attention_dropout} in training; expected 0, the fused attention "
            "has no dropout. Set config.attention_dropout = 0, or fsdp_sink_patches.settings.use("
            'compressed_attention="eager") for transformers\' own attention.'
        )
    return None


_EXPECTED = ("settings.", "output_attentions", "the rows go on", "attn_implementation", "tensors are on")
"""Reasons that the user chose, or that cost nothing that transformers would not cost."""


@functools.cache
def _say(reason: str) -> None:
    level = logging.INFO if reason.startswith(_EXPECTED) else logging.WARNING
    _log.log(level, "%s: transformers' own attention runs: %s.", ID, reason)


@functools.cache
def _say_slow(what: str) -> None:
    _log.warning(
        "%s: found %s; expected bf16 or fp16, head_dim up to 512 and Triton. Plain torch computes the same, a chunk of "
        "tokens at a time: slower than the kernels, but without the score matrix that transformers would make.",
        ID,
        what,
    )


# --- the attention -------------------------------------------------------------------------------------------------


def attention_forward(
    original: Callable[..., Any],
    self: Any,
    hidden_states: Tensor,
    position_embeddings: Any,
    position_ids: Tensor,
    attention_mask: Any,
    *a: Any,
    **k: Any,
) -> tuple[Tensor, Tensor | None]:
    """``DeepseekV4Attention.forward``; ``a`` and ``k`` are the cache and what attention functions take.

    Returns:
        ``[batch, seqlen, hidden]``, and the probabilities where upstream's attention ran, else None.
    """
    given = {**dict(zip((_CACHE,), a, strict=False)), **k}
    if "past_key_values" in given:  # 5.24 takes the old name too
        given[_CACHE] = given.pop("past_key_values")
    cache = given.get(_CACHE)
    past = 0 if cache is None else int(cache.get_seq_length(self.layer_idx))
    reason = upstreams_because(self.config, hidden_states.device, self.training, given.get("output_attentions"), past)
    rows = attention_mask
    if reason is None and not isinstance(rows, Rows):
        rows = _rows_in(attention_mask, hidden_states, self.sliding_window)
        reason = rows if isinstance(rows, str) else None
    if reason is None and type(hidden_states) is not Tensor and not torch.compiler.is_compiling():
        reason = f"the activations are {type(hidden_states).__name__}, not plain tensors"
    if reason is None:
        return _fused(self, hidden_states, position_embeddings, position_ids, rows, cache), None
    if not torch.compiler.is_compiling():
        _say(reason)
    if isinstance(attention_mask, Rows):
        attention_mask = attention_mask.mask(hidden_states.shape[0], self.sliding_window, hidden_states.dtype)
    found: tuple[Tensor, Tensor | None] = original(
        self, hidden_states, position_embeddings, position_ids, attention_mask, *a, **k
    )
    return found


def _fused(
    self: Any, hidden_states: Tensor, position_embeddings: Any, position_ids: Tensor, rows: Rows, cache: Any
) -> Tensor:
    """Upstream's forward with one call in place of the concatenation, the mask and the softmax."""
    batch, seqlen, _ = hidden_states.shape
    cos, sin = position_embeddings[self.rope_layer_type]
    q_residual = self.q_a_norm(self.q_a_proj(hidden_states))
    q = self.q_b_norm(self.q_b_proj(q_residual).view(batch, seqlen, -1, self.head_dim))
    q = modelling.apply_rotary_pos_emb(q, cos, sin, unsqueeze_dim=2)
    kv = self.kv_norm(self.kv_proj(hidden_states)).unsqueeze(1)
    kv = modelling.apply_rotary_pos_emb(kv, cos, sin)
    if cache is not None:
        kv = cache.update(kv, kv, self.layer_idx)[0]
    entries, ranges, picks = _entries(self, hidden_states, q_residual, position_ids, rows, cache)

    dtype, device = q.dtype, q.device
    if torch.is_autocast_enabled(device.type) and dtype != torch.float64:
        dtype = torch.get_autocast_dtype(device.type)
    if not torch.compiler.is_compiling() and device.type == "cuda":
        _say_if_slow(dtype, self.head_dim)
    first_token = torch.arange(0, batch * seqlen, seqlen, device=device)[:, None]
    starts = (rows.starts + first_token).flatten()
    first_entry = torch.arange(batch, device=device)[:, None, None] * entries.shape[1]
    if ranges is not None:
        ranges = (ranges + first_entry).flatten(0, 1)
    if picks is not None:
        picks = torch.where(picks >= 0, picks + first_entry, -1).flatten(0, 1)
    queries, keys = q.to(dtype).flatten(0, 1), kv[:, 0].to(dtype).flatten(0, 1)
    if rows.order is not None:
        closed = (rows.order + first_token).flatten()
        queries, keys = queries.index_select(0, closed), keys.index_select(0, closed)
        ranges = None if ranges is None else ranges.index_select(0, closed)
        picks = None if picks is None else picks.index_select(0, closed)
    # The sums of plain torch are fp32 whatever autocast says.
    with torch.autocast(device.type, enabled=False):
        out = compressed_attention(
            queries, keys, entries.to(dtype).flatten(0, 1), self.sinks, window_starts=starts.int(),
            entry_ranges=None if ranges is None else ranges.int(), topk_indices=None if picks is None else picks.int(),
            softmax_scale=self.scaling,
        )  # fmt: skip
    if rows.rank is not None:
        out = out.index_select(0, (rows.rank + first_token).flatten())
    # Values are keys, rotated; turning the output back makes each value's place relative to the query's.
    out = modelling.apply_rotary_pos_emb(out.view(batch, seqlen, *out.shape[1:]), cos, -sin, unsqueeze_dim=2)
    grouped = self.o_a_proj(out.reshape(batch, seqlen, self.config.o_groups, -1)).flatten(2)
    projected: Tensor = self.o_b_proj(grouped)
    return projected


def _entries(
    self: Any, hidden_states: Tensor, q_residual: Tensor, position_ids: Tensor, rows: Rows, cache: Any
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Entries ``[batch, entries, head_dim]``, and the ranges or the picks that each token sees of its row's."""
    if self.compressor is None:
        return hidden_states.new_zeros((hidden_states.shape[0], 0, self.head_dim)), None, None
    sparse = self.layer_type == "compressed_sparse_attention"
    arguments = (hidden_states, q_residual, position_ids, cache, self.layer_idx)
    if isinstance(rows, _RowsOfMask):
        entries, bias = self.compressor(*arguments)
        if bias is None:  # no window has closed
            return entries[:, 0, :0], None, None
        seen = picks_of(bias, self.compressor.indexer.index_topk) if sparse else _ranges_of(bias)
    else:
        entries, seen = self.compressor(*arguments, compact=True)
    entries = entries[:, 0]
    if entries.shape[1] == 0:
        return entries, None, None
    return (entries, None, seen) if sparse else (entries, seen, None)


def _say_if_slow(dtype: torch.dtype, head_dim: int) -> None:
    from fsdp_sink_patches.ops.compressed_attention import _op

    if dtype not in (torch.bfloat16, torch.float16):
        _say_slow(str(dtype).removeprefix("torch."))
    elif head_dim > 512:
        _say_slow(f"head_dim {head_dim}")
    elif not _op._have_triton():
        _say_slow("no Triton")


# --- masks that somebody else made ---------------------------------------------------------------------------------


class _RowsOfMask(Rows):
    """Read off a mask: positions are not known, and compressors say in a bias who sees their entries."""


_read: Any = WeakTensorKeyDictionary()


def _rows_in(mask: Any, hidden_states: Tensor, window: int) -> Rows | str:
    """The windows in a mask of ``[1 or batch, 1, seqlen, seqlen]``, or why they can't be read off it.

    Upstream makes such a mask where ``transformers.deepseek-v4-packing`` is not applied; a caller may with it. To look
    costs a device-to-host copy, once for each mask.
    """
    seqlen = hidden_states.shape[1]
    square = isinstance(mask, Tensor) and mask.is_floating_point() and mask.ndim == 4
    if not square or mask.shape[0] not in (1, hidden_states.shape[0]) or mask.shape[1:] != (1, seqlen, seqlen):
        what = f"a mask of shape {tuple(mask.shape)}, {mask.dtype}" if isinstance(mask, Tensor) else type(mask).__name__
        return f"found {what} in place of an additive one of shape {(hidden_states.shape[0], 1, seqlen, seqlen)}"
    if torch.compiler.is_compiling():
        return "a graph can't look whether a given mask is a window"
    version = 0 if mask.is_inference() else mask._version
    of_version, found = _read.get(mask, (None, None))
    if of_version != version:
        found = _windows_of(mask[:, 0])
        _read[mask] = version, found
    if found is None:
        return (
            "the mask holds more than a window of side by side tokens for each token, as padding does; "
            "transformers.deepseek-v4-packing hands on what the rows are instead"
        )
    return _RowsOfMask(found, found, None, None)


def _windows_of(mask: Tensor) -> Tensor | None:
    """The first column that each token sees, int64 ``[rows, seqlen]``, where it sees all from there to its own."""
    columns = torch.arange(mask.shape[-1], device=mask.device)
    seen = mask == 0
    starts = seen.int().argmax(-1)
    window = (columns >= starts[..., None]) & (columns <= columns[:, None])
    # Somewhat hidden is neither. Half of the smallest number is what masks that were added up still have.
    hidden = mask <= torch.finfo(mask.dtype).min / 2
    return starts if bool(((seen == window) & (seen | hidden)).all()) else None


def _ranges_of(bias: Tensor) -> Tensor:
    """The entries whose bias is 0, which lie side by side, as ranges ``[first, last + 1)``."""
    seen = bias[:, 0] == 0
    first = seen.int().argmax(-1)
    return torch.stack((first, first + seen.sum(-1)), dim=-1)
