"""DeepSeek-V4's compressors per document; see :mod:`deepseek_v4_packing`.

Everything follows from one ``position_ids`` tensor that the model's forward makes afresh and hands to every layer:
int64 ``[1 or batch, seqlen]``, -1 for padding. What is computed from it is remembered as long as it lives, so that all
layers, and their recomputation under activation checkpointing, share the same tensors.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import transformers
import transformers.models.deepseek_v4.modeling_deepseek_v4 as modelling
from packaging.version import Version
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary
from transformers.cache_utils import DynamicCache

from fsdp_sink_patches import _engine, settings
from fsdp_sink_patches.ops.compressed_layout import CompressedLayout, compressed_layout, window_starts
from fsdp_sink_patches.ops.index_scores import top_entries

ID = "transformers.deepseek-v4-packing"
PADDING = -1

_CACHE = (
    "cache" if "cache" in inspect.signature(modelling.DeepseekV4Attention.forward).parameters else "past_key_values"
)
_ALWAYS_CACHES = Version(transformers.__version__) < Version("5.14")
"""These releases build a cache even with ``use_cache=False``, and hand it to the compressors."""
_ROUNDS_POSITION_BIAS = not hasattr(modelling, "DeepseekV4IndexerScorer")
"""Before 5.10.1 position_bias is cast to the gate's dtype, and the indexer scores without a module of its own."""

# What a cache that this patch filled went through, as an attribute of the cache.
_FILLED_BY = "_filled_by_deepseek_v4_packing"
_UNPADDED, _LEFT_PADDED = "unpadded rows", "left-padded rows"
_OTHER = "packed, cut, right-padded or gapped rows"
_STAYED_EMPTY = (
    " If generate made this mask, its cache stayed empty, because gradient checkpointing in training mode drops it: "
    "call model.eval() or model.gradient_checkpointing_disable() before generate."
)


# --- the model -----------------------------------------------------------------------------------------------------


def model_forward(
    original: Callable[..., Any],
    self: Any,
    input_ids: Tensor | None,
    attention_mask: Any,
    position_ids: Tensor | None,
    *a: Any,
    **k: Any,
) -> Any:
    """``DeepseekV4Model.forward``; ``a`` and ``k`` are the cache, ``inputs_embeds``, ``use_cache`` and layers' own.

    Raises:
        NotImplementedError: the attention implementation takes no additive mask, or the cache can't be continued.
        ValueError: ``position_ids`` or a 2-D mask that don't fit the tokens.
    """
    given = {**dict(zip((_CACHE, "inputs_embeds", "use_cache"), a, strict=False)), **k}
    if "past_key_values" in given:  # 5.24 takes the old name too
        given[_CACHE] = given.pop("past_key_values")
    cache, inputs_embeds = given.get(_CACHE), given.get("inputs_embeds")
    tokens = input_ids if inputs_embeds is None else inputs_embeds
    if tokens is None or (input_ids is not None and inputs_embeds is not None):
        return original(self, input_ids, attention_mask, position_ids, *a, **k)  # upstream says what is wrong
    past = 0 if cache is None else int(cache.get_seq_length())
    filled_by = getattr(cache, _FILLED_BY, None) if past else None
    if filled_by == _OTHER:
        raise NotImplementedError(
            f"{ID}: found a cache of {past} tokens that {_OTHER} went through, and more tokens; expected a cache of "
            "one whole document a row, with padding on the left alone. Give each document a row and an attention_mask "
            "that says so before going on from its cache."
        )
    implementation = self.config._attn_implementation or "eager"
    additive = implementation == "eager"
    if past and filled_by is None and tokens.shape[1] > 1 and isinstance(attention_mask, Tensor):
        _refuse_padding_after(attention_mask, past)
    if past and filled_by is None and additive:
        return original(self, input_ids, attention_mask, position_ids, *a, **k)

    mask, prepared = _split(attention_mask, implementation)
    positions = _positions(position_ids, mask, tokens, past, guess=filled_by != _LEFT_PADDED)
    if past and filled_by is not None and tokens.shape[1] > 1:
        _check_goes_on(positions, mask, past, filled_by)
    fused = not past and prepared is None and _attention_is_fused(self, tokens.device, given)
    kept = cache is not None or _wants_cache(self, given.get("use_cache"))
    if kept and not past:
        rows = _UNPADDED if position_ids is None and mask is None else _rows(positions)
        if rows == _UNPADDED and settings.pooling_dtype == "activation":
            if hasattr(cache, _FILLED_BY):  # it was reset
                delattr(cache, _FILLED_BY)
            if additive and not fused:
                return original(self, input_ids, attention_mask, position_ids, *a, **k)
        else:
            cache = DynamicCache(config=self.config) if cache is None else cache
            setattr(cache, _FILLED_BY, rows)
    elif not kept:
        given["use_cache"] = False
        if _ALWAYS_CACHES:
            cache = DynamicCache(config=self.config)
            setattr(cache, _FILLED_BY, _OTHER)
    given[_CACHE] = cache

    def masks(dtype: torch.dtype) -> dict[str, Tensor]:
        return {"sliding_attention": _mask(positions, tokens.shape[0], past, self.config.sliding_window, dtype)}

    if fused:
        unpadded = position_ids is None and mask is None
        prepared = {"sliding_attention": rows_of(positions, self.config.sliding_window, unpadded)}
    if prepared is not None:
        return original(self, input_ids, prepared, positions, **given)
    if inputs_embeds is not None:
        return original(self, input_ids, masks(inputs_embeds.dtype), positions, **given)
    if torch.compiler.is_compiling():
        return original(self, input_ids, masks(self.embed_tokens.weight.dtype), positions, **given)
    # The mask has the embeddings' dtype, which under FSDP is not the weight's. Upstream embeds input_ids itself (hash
    # routers need them), and reads the dict after that.
    late: dict[str, Tensor] = {}
    hook = self.embed_tokens.register_forward_hook(lambda _, __, embeds: late.update(masks(embeds.dtype)))
    try:
        return original(self, input_ids, late, positions, **given)
    finally:
        hook.remove()


def _wants_cache(self: Any, use_cache: bool | None) -> bool:
    """As upstream decides: the config's default, never under activation checkpointing."""
    checkpoints = getattr(self, "gradient_checkpointing", False) and self.training and torch.is_grad_enabled()
    return bool(self.config.use_cache if use_cache is None else use_cache) and not checkpoints


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _attention_is_ours() -> bool:
    """``transformers.deepseek-v4-attention`` is in place: only its forward knows what :class:`Rows` are."""
    return _engine.holder(vars(modelling.DeepseekV4Attention)["forward"]) == "transformers.deepseek-v4-attention"


def _attention_is_fused(self: Any, device: torch.device, given: dict[str, Any]) -> bool:
    if not _attention_is_ours():
        return False
    from ._deepseek_v4_attention import upstreams_because

    return upstreams_because(self.config, device, self.training, given.get("output_attentions")) is None


def _split(attention_mask: Any, implementation: str) -> tuple[Tensor | None, Any]:
    """The 2-D mask, and the mask that the caller prepared; at most one of them.

    Upstream adds the compressors' bias to a tensor only: with None or a BlockMask every entry, of whatever document and
    of the future, would be attended to (transformers 5.8.0-5.24.0).
    """
    mask = next(iter(attention_mask.values()), None) if isinstance(attention_mask, dict) else attention_mask
    if "flash" in implementation or "flex" in implementation or not (mask is None or isinstance(mask, Tensor)):
        raise NotImplementedError(
            f"{ID}: found attn_implementation={implementation!r} and a mask of type {type(mask).__name__}, with which "
            "transformers drops the bias of DeepSeek-V4's compressed entries; expected an implementation and a mask "
            'that are additive. Use attn_implementation="eager", or register one that takes a 4-D mask.'
        )
    if mask is None or mask.ndim == 2:
        return mask, None
    return None, attention_mask


def _positions(position_ids: Tensor | None, mask: Tensor | None, tokens: Tensor, past: int, guess: bool) -> Tensor:
    """A fresh tensor of positions, int64 ``[1 or batch, seqlen]``, :data:`PADDING` where there is no token."""
    batch, seqlen = tokens.shape[:2]
    device = tokens.device
    if mask is not None and (mask.shape[0] not in (1, batch) or mask.shape[1] not in (seqlen, past + seqlen)):
        raise ValueError(
            f"{ID}: found an attention_mask of shape {tuple(mask.shape)} for {batch} rows of {seqlen} tokens after "
            f"{past}; expected {(batch, past + seqlen)}. Pass 1 for every token and 0 for padding."
            + ("" if past or mask.shape[1] <= seqlen else _STAYED_EMPTY)
        )
    real = None if mask is None else mask.to(device).bool()
    if position_ids is not None:
        positions = position_ids[None] if position_ids.ndim == 1 else position_ids
        if positions.ndim != 2 or positions.shape[0] not in (1, batch) or positions.shape[1] != seqlen:
            raise ValueError(
                f"{ID}: found position_ids of shape {tuple(position_ids.shape)} for {batch} rows of {seqlen} tokens; "
                f"expected {(batch, seqlen)} or {(1, seqlen)}. Pass the position of every token in its document."
            )
        positions = positions.to(device=device, dtype=torch.int64)
    elif real is not None and real.shape[1] == past + seqlen:
        positions = (real.long().cumsum(1) - 1)[:, past:]
    elif guess:
        positions = torch.arange(past, past + seqlen, device=device)[None]
    else:
        raise ValueError(
            f"{ID}: found a cache of {_LEFT_PADDED}, and more tokens without position_ids or a mask over all of them; "
            f"expected one. Pass attention_mask of shape {(batch, past + seqlen)}, as generate does."
        )
    token = positions >= 0 if real is None else (positions >= 0) & real[:, -seqlen:]
    if position_ids is not None and seqlen > 1:
        positions = _counted_over_tokens(positions, token)
    return torch.where(token, positions, PADDING)


def _counted_over_tokens(positions: Tensor, real: Tensor) -> Tensor:
    """The positions that documents have without the padding inside them, which ``positions`` may or may not count."""
    positions, real = torch.broadcast_tensors(positions, real)  # type: ignore[no-untyped-call]
    columns = torch.arange(real.shape[1], device=real.device).expand(real.shape)
    before = F.pad(torch.where(real, columns, -1).cummax(1).values[:, :-1], (1, 0), value=-1)
    step = positions - positions.gather(1, before.clamp(min=0))
    goes_on = (before >= 0) & ((step == 1) | (step == columns - before))
    first = torch.where(real & ~goes_on, columns, 0).cummax(1).values
    rank = real.long().cumsum(1)
    return positions.gather(1, first) + rank - rank.gather(1, first)


def _rows(positions: Tensor) -> str:
    """What the rows are: one document each, :data:`_UNPADDED` or :data:`_LEFT_PADDED`; or :data:`_OTHER`.

    Asked only when a cache is kept, once a forward: it costs a device-to-host copy.
    """
    columns = torch.arange(positions.shape[1], device=positions.device)
    pads = (positions < 0).sum(1, keepdim=True)
    left = (positions == torch.where(columns < pads, PADDING, columns - pads)).all()
    is_left, is_padded = torch.stack((left, pads.any())).tolist()
    return _OTHER if not is_left else _LEFT_PADDED if is_padded else _UNPADDED


def _refuse_padding_after(mask: Tensor, past: int) -> None:
    """Raise if a 2-D mask has padding before a token: the cache's rows have none, and upstream takes it for a token."""
    if mask.ndim == 2 and bool((~mask[:, :-1].bool() & mask[:, 1:].bool()).any()):
        raise NotImplementedError(
            f"{ID}: found a cache of {past} tokens of {_UNPADDED}, and an attention_mask with padding before more "
            "tokens; expected rows that go on without padding. Pad the whole rows on the left and fill the cache with "
            "them, or continue one row at a time."
        )


def _check_goes_on(positions: Tensor, mask: Tensor | None, past: int, filled_by: str) -> None:
    """Raise unless every row of more than one token goes on with its one document; costs a device-to-host copy.

    With a mask over all tokens a row is padded before its first token alone, and counted over the mask. Without, rows
    of an unpadded cache go on at ``past``; a padded row goes on at any position but 0, or starts behind its padding.
    """
    seqlen = positions.shape[1]
    columns = torch.arange(seqlen, device=positions.device)
    if mask is not None and mask.shape[1] == past + seqlen:
        real = mask.to(positions.device).bool()
        count = real.long().cumsum(1) - 1
        expected = torch.where(real, count, PADDING)[:, past:]
        right = (positions == expected).all() & ~(real[:, :-1] & ~real[:, 1:]).any()
    elif filled_by == _UNPADDED:
        right = (positions == past + columns).all()
    else:
        pads = (positions < 0).sum(1, keepdim=True)
        start = torch.where(pads > 0, -pads, positions[:, :1])
        right = (positions == torch.where(columns < pads, PADDING, start + columns)).all() & (start != 0).all()
    if not bool(right):
        raise NotImplementedError(
            f"{ID}: found a cache of {past} tokens of {filled_by}, and {seqlen} tokens that do not go on with its rows "
            "(padding after a row's first token, or positions that restart or jump); expected one whole document a "
            "row, with padding on its left alone. Continue one row at a time, or fill a fresh cache with whole rows."
        )


def _mask(positions: Tensor, batch: int, past: int, window: int, dtype: torch.dtype) -> Tensor:
    """The sliding-window mask that eager attention adds, ``[batch, 1, queries, keys]``: 0 or the smallest of ``dtype``.

    The window counts a document's tokens, not the padding among them. With ``past``, rows hold one document each, and
    keys begin ``window - 1`` tokens before the queries at most.
    """
    seqlen = positions.shape[1]
    queries = torch.arange(past, past + seqlen, device=positions.device)
    keys = torch.arange(past - min(past, window - 1), past + seqlen, device=positions.device)
    if past:
        first = queries - positions.clamp(min=0, max=window - 1)
        seen = (keys <= queries[:, None]) & (keys >= first[..., None])
    else:
        closed, order, rank = _closed_up(positions)
        first = order.gather(1, window_starts(closed, window).gather(1, rank))
        seen = (keys <= queries[:, None]) & (keys >= first[..., None])
        seen = seen & ((positions >= 0)[:, None] | (keys == queries[:, None]))
    blank = torch.zeros((), dtype=dtype, device=positions.device)
    return torch.where(seen, blank, torch.finfo(dtype).min)[:, None].expand(batch, -1, -1, -1)


class Rows(NamedTuple):
    """What the fused attention gets in place of a mask: no tensor of ``[queries, keys]`` exists.

    ``order`` and ``rank`` are None where no document goes on over padding. Where one does, its window holds tokens that
    don't lie side by side: ``starts`` are columns of the closed-up row, in its order; see :func:`_closed_up`.
    """

    positions: Tensor
    starts: Tensor
    order: Tensor | None
    rank: Tensor | None

    def mask(self, batch: int, window: int, dtype: torch.dtype) -> Tensor:
        """The mask of the same rows, for upstream's attention."""
        return _mask(self.positions, batch, 0, window, dtype)


def rows_of(positions: Tensor, window: int, unpadded: bool) -> Rows:
    """The windows of ``positions``; ``unpadded`` is known without looking at them.

    Otherwise it costs a device-to-host copy a forward to see that nothing has to be closed up, which saves copies of
    queries and outputs in every layer. A graph can't look, and closes up.
    """
    if unpadded:
        return Rows(positions, window_starts(positions, window), None, None)
    closed, order, rank = _closed_up(positions)
    starts = window_starts(closed, window)
    if not (torch.compiler.is_compiling() or (positions.is_cuda and torch.cuda.is_current_stream_capturing())):
        apart = window_starts(positions, window)
        goes_over_padding = (order.gather(1, starts.gather(1, rank)) != apart) & (positions >= 0)
        if not bool(goes_over_padding.any()):
            return Rows(positions, apart, None, None)
    return Rows(positions, starts, order, rank)


# --- what is remembered of positions --------------------------------------------------------------------------------


class _Windows(NamedTuple):
    """A layout, and the columns of every window's tokens, ``[rows, entries * rate]``.

    Without context ``layout.starts`` are columns of the closed-up row; ``columns`` and ``layout.ranges`` the row's own.
    """

    layout: CompressedLayout
    columns: Tensor


_remembered: Any = WeakTensorKeyDictionary()


def windows(position_ids: Tensor, rate: int, context: int = 0) -> _Windows:
    """The windows in ``position_ids`` and ``context`` columns of the same documents before; remembered with the tensor.

    Args:
        position_ids: ``[rows, seqlen]``, negative for padding.
        rate: tokens in an entry.
        context: columns before, in the rows of a cache: one document each.
    """
    if torch.compiler.is_compiling() or (position_ids.is_cuda and torch.cuda.is_current_stream_capturing()):
        # A graph has to compute them: on replay the same tensor holds other positions.
        return _windows(position_ids, rate, context)
    version = 0 if position_ids.is_inference() else position_ids._version
    of_version, known = _remembered.get(position_ids, (None, {}))
    if of_version != version:  # new, or written to: what is known of older positions is let go
        known = {}
        _remembered[position_ids] = version, known
    key = (rate, context)
    if key not in known:
        known[key] = _windows(position_ids, rate, context)
    found: _Windows = known[key]
    return found


def _closed_up(positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Positions with all padding moved behind the tokens, the column that each came from, and where each column went.

    A token that is masked inside a document (an end-of-turn token that is the padding token as well) must not end it:
    the row is worth what it is without that token.
    """
    order = (positions < 0).to(torch.int8).argsort(dim=1, stable=True)
    columns = torch.arange(positions.shape[1], device=positions.device).expand(positions.shape)
    return positions.gather(1, order), order, torch.zeros_like(order).scatter(1, order, columns)


def _windows(position_ids: Tensor, rate: int, context: int) -> _Windows:
    if context:  # rows of one document each, padded before it alone
        before = torch.arange(-context, position_ids.shape[1], device=position_ids.device)
        offset = torch.where(position_ids >= 0, position_ids - before[context:], -before.shape[0])
        position_ids = (before + offset.amax(1, keepdim=True)).clamp(min=PADDING)
        layout = compressed_layout(position_ids, rate)
        columns = layout.starts[..., None] + torch.arange(rate, device=position_ids.device)
        return _Windows(layout, columns.flatten(1))
    closed, order, rank = _closed_up(position_ids)
    layout = compressed_layout(closed, rate)
    columns = layout.starts[..., None] + torch.arange(rate, device=position_ids.device)
    ranges = layout.ranges.gather(1, rank[..., None].expand(-1, -1, 2))
    return _Windows(layout._replace(ranges=ranges), order.gather(1, columns.flatten(1)))


# --- the compressors ------------------------------------------------------------------------------------------------


def hca_forward(
    original: Callable[..., Any],
    self: Any,
    hidden_states: Tensor,
    q_residual: Tensor,
    position_ids: Tensor,
    *a: Any,
    **k: Any,
) -> tuple[Tensor, Tensor | None]:
    """``DeepseekV4HCACompressor.forward``.

    Returns:
        Entries ``[batch, 1, entries, head_dim]`` and the bias that says who sees them, ``[batch, 1, seqlen, entries]``;
        for the fused attention, which passes ``compact=True``, the ranges that say the same, ``[rows, seqlen, 2]``.
    """
    compact = k.pop("compact", False)
    cache, layer_idx = _cache_and_layer(*a, **k)
    if _is_upstreams(cache):
        upstreams: tuple[Tensor, Tensor | None] = original(
            self, hidden_states, q_residual, position_ids, cache, layer_idx
        )
        return (upstreams[0], _ranges(self, position_ids, cache)) if compact else upstreams
    entries = _entries(self, hidden_states, position_ids, cache, layer_idx, "compressor", overlap=False)
    if compact:
        return entries.unsqueeze(1), _ranges(self, position_ids, cache)
    if entries.shape[1] == 0:
        return entries.unsqueeze(1), None
    seen = _seen(self, position_ids, entries, cache)
    bias = entries.new_zeros((entries.shape[0], 1, *seen.shape[1:]))
    return entries.unsqueeze(1), bias.masked_fill(~seen.unsqueeze(1), float("-inf"))


def csa_forward(
    original: Callable[..., Any],
    self: Any,
    hidden_states: Tensor,
    q_residual: Tensor,
    position_ids: Tensor,
    *a: Any,
    **k: Any,
) -> tuple[Tensor, Tensor]:
    """``DeepseekV4CSACompressor.forward``: as HCA's; the bias is 0 for what the indexer picked.

    For the fused attention, which passes ``compact=True``, the picks themselves, integers ``[batch, seqlen, picks]``.
    """
    compact = k.pop("compact", False)
    cache, layer_idx = _cache_and_layer(*a, **k)
    if _is_upstreams(cache):
        upstreams: tuple[Tensor, Tensor] = original(self, hidden_states, q_residual, position_ids, cache, layer_idx)
        return (upstreams[0], picks_of(upstreams[1], self.indexer.index_topk)) if compact else upstreams
    entries = _entries(self, hidden_states, position_ids, cache, layer_idx, "compressor", overlap=True)
    if compact:
        return entries.unsqueeze(1), self.indexer(
            hidden_states, q_residual, position_ids, cache, layer_idx, compact=True
        )
    picks = self.indexer(hidden_states, q_residual, position_ids, cache, layer_idx)
    batch, count, _ = entries.shape
    bias = entries.new_full((batch, 1, hidden_states.shape[1], count + 1), float("-inf"))
    bias = bias.scatter(-1, torch.where(picks >= 0, picks, count).unsqueeze(1), 0.0)
    return entries.unsqueeze(1), bias[..., :count]


def indexer_forward(
    original: Callable[..., Any],
    self: Any,
    hidden_states: Tensor,
    q_residual: Tensor,
    position_ids: Tensor,
    *a: Any,
    **k: Any,
) -> Tensor:
    """``DeepseekV4Indexer.forward``: entries that each token picks, int64 ``[batch, seqlen, picks]``, -1 for none.

    With ``compact=True`` scores exist for a chunk of tokens at a time, and no graph is made: nothing flows back.
    """
    compact = k.pop("compact", False)
    cache, layer_idx = _cache_and_layer(*a, **k)
    if _is_upstreams(cache):
        upstreams: Tensor = original(self, hidden_states, q_residual, position_ids, cache, layer_idx)
        return upstreams
    if compact:
        with torch.no_grad():
            return _picks(self, hidden_states, q_residual, position_ids, cache, layer_idx)
    q, entries = _index_vectors(self, hidden_states, q_residual, position_ids, cache, layer_idx)
    scores = _scores(self, q, entries, hidden_states)
    seen = _seen(self, position_ids, entries, cache).expand(scores.shape)
    picks = scores.masked_fill(~seen, float("-inf")).topk(min(self.index_topk, entries.shape[1]), dim=-1).indices
    return torch.where(seen.gather(-1, picks), picks, -1)


def _index_vectors(
    self: Any, hidden_states: Tensor, q_residual: Tensor, position_ids: Tensor, cache: Any, layer_idx: int
) -> tuple[Tensor, Tensor]:
    """The indexer's queries ``[batch, seqlen, heads, dim]`` and entries ``[batch, entries, dim]``."""
    entries = _entries(self, hidden_states, position_ids, cache, layer_idx, "indexer", overlap=True)
    batch, seqlen, _ = hidden_states.shape
    cos, sin = self.rotary_emb(hidden_states, position_ids=position_ids, layer_type=self.rope_layer_type)
    q = self.q_b_proj(q_residual).view(batch, seqlen, -1, self.head_dim).transpose(1, 2)
    return modelling.apply_rotary_pos_emb(q, cos, sin).transpose(1, 2), entries


def _picks(
    self: Any, hidden_states: Tensor, q_residual: Tensor, position_ids: Tensor, cache: Any, layer_idx: int
) -> Tensor:
    """What upstream's scores pick, int32 ``[batch, seqlen, picks]`` in ascending order, then -1."""
    q, entries = _index_vectors(self, hidden_states, q_residual, position_ids, cache, layer_idx)
    scorer = self if _ROUNDS_POSITION_BIAS else self.scorer
    weights = scorer.weights_proj(hidden_states).float() * scorer.weights_scaling
    device = q.device.type
    rounded = torch.is_autocast_enabled(device)  # as upstream's product in fp32 then is
    dtype = torch.get_autocast_dtype(device) if rounded else torch.float32 if q.dtype == torch.float64 else q.dtype
    ranges, scale = _ranges(self, position_ids, cache), float(scorer.softmax_scale)
    return top_entries(q.to(dtype), entries.to(dtype), weights, ranges, self.index_topk, scale, rounded)


def picks_of(bias: Tensor, k: int) -> Tensor:
    """The entries whose bias is 0, at most ``k`` of them, int64 ``[batch, seqlen, picks]``, -1 for none."""
    best = bias[:, 0].topk(min(k, bias.shape[-1]), dim=-1)
    return torch.where(best.values == 0, best.indices, -1)


def _cache_and_layer(*a: Any, **k: Any) -> tuple[Any, int]:
    """The last two arguments of a compressor; the cache's name depends on the release."""
    given = {**dict(zip((_CACHE, "layer_idx"), a, strict=False)), **k}
    if "past_key_values" in given:
        given[_CACHE] = given.pop("past_key_values")
    return given[_CACHE], given["layer_idx"]


def _is_upstreams(cache: Any) -> bool:
    """Filled by upstream's code, which only it can continue."""
    return cache is not None and not hasattr(cache, _FILLED_BY)


def _goes_on(cache: Any) -> bool:
    """The cache keeps what is needed to continue its rows."""
    return getattr(cache, _FILLED_BY, None) in (_UNPADDED, _LEFT_PADDED)


def _seen(self: Any, position_ids: Tensor, entries: Tensor, cache: Any) -> Tensor:
    """Which entries each token may attend to, bool ``[1 or batch, seqlen, entries]``."""
    slots = torch.arange(entries.shape[1], device=entries.device)
    if _goes_on(cache):
        return slots < ((position_ids + 1) // int(self.compress_rate))[..., None]
    first, end = windows(position_ids, self.compress_rate).layout.ranges.unsqueeze(2).unbind(-1)
    return (slots >= first) & (slots < end)


def _ranges(self: Any, position_ids: Tensor, cache: Any) -> Tensor:
    """The same as ranges ``[first, last + 1)``, int64 ``[1 or batch, seqlen, 2]``."""
    if _is_upstreams(cache) or _goes_on(cache):
        end = (position_ids + 1) // int(self.compress_rate)
        return torch.stack((torch.zeros_like(end), end), dim=-1)
    return windows(position_ids, self.compress_rate).layout.ranges


def _entries(
    self: Any, hidden_states: Tensor, position_ids: Tensor, cache: Any, layer_idx: int, name: str, overlap: bool
) -> Tensor:
    """The entries of all tokens so far, ``[batch, entries, head_dim]``."""
    if position_ids.shape[-1] != hidden_states.shape[1]:
        raise ValueError(
            f"{ID}: found {hidden_states.shape[1]} tokens and position_ids of shape {tuple(position_ids.shape)} in a "
            "compressed layer; expected a position for every token, and every token of a window. Don't split rows "
            "between ranks before these layers (sequence parallelism)."
        )
    kv, gate = _projected(self, hidden_states)
    if not _goes_on(cache):
        return _pooled(self, kv, gate, windows(position_ids, self.compress_rate), hidden_states, overlap)
    # The layer's fields hold, instead of upstream's: the last tokens, of which a window that is still open may need up
    # to 2 * rate - 1, and the entries, each in the slot that is its number in the row's document.
    layer = cache.layers[layer_idx]
    rate, total, context = self.compress_rate, layer.get_seq_length(), 0
    goes_on = total > hidden_states.shape[1]  # attention has counted these tokens already
    if goes_on:
        context = layer.buffer_kv[name].shape[1]
        kv = torch.cat((layer.buffer_kv[name], kv), dim=1)
        gate = torch.cat((layer.buffer_gate[name], gate), dim=1)
    found = windows(position_ids, rate, context)
    fresh = _pooled(self, kv, gate, found, hidden_states, overlap)
    if goes_on:
        entries, count, layout = layer.compressed_kv[name], total // rate, found.layout
        closes_now = layout.live & (layout.starts + rate > context)
        slots = torch.where(closes_now, layout.positions // rate, count)[..., None].expand(fresh.shape)
        fresh = F.pad(entries, (0, 0, 0, count + 1 - entries.shape[1])).scatter(1, slots, fresh)[:, :count]
    keep = 2 * rate - 1
    layer.buffer_kv[name], layer.buffer_gate[name] = kv[:, -keep:], gate[:, -keep:]
    layer.compressed_kv[name], layer.entry_count[name] = fresh, fresh.shape[1]
    return fresh


def _projected(self: Any, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
    """What is pooled and how it is weighted, ``[batch, seqlen, features]``."""
    if settings.pooling_dtype == "activation":
        return self.kv_proj(hidden_states), self.gate_proj(hidden_states)
    for projection in (self.kv_proj, self.gate_proj):
        if type(projection) is not torch.nn.Linear:
            raise NotImplementedError(
                f"{ID}: found settings.pooling_dtype='fp32' and a compressor whose projection is a "
                f"{type(projection).__name__}; expected a plain torch.nn.Linear, to take its weight in fp32. Leave "
                "these projections out of adapters, quantisation and FSDP units of their own, or use 'activation'."
            )
    with torch.autocast(hidden_states.device.type, enabled=False):
        hidden_states = hidden_states.float()
        return (
            F.linear(hidden_states, self.kv_proj.weight.float()),
            F.linear(hidden_states, self.gate_proj.weight.float()),
        )


def _pooled(self: Any, kv: Tensor, gate: Tensor, found: _Windows, hidden_states: Tensor, overlap: bool) -> Tensor:
    """Pool each window into an entry, normalise and rotate it, ``[batch, entries, head_dim]``.

    The sums and their order are upstream's, so that a plain document gives the same bits, gradients included.
    """
    batch, seqlen, features = kv.shape
    layout, columns = found
    count, rate, d = layout.starts.shape[1], self.compress_rate, self.head_dim
    if count == 0:
        return kv.new_zeros((batch, 0, d), dtype=_activation_dtype(kv, hidden_states))
    rows = (columns + torch.arange(0, batch * seqlen, seqlen, device=columns.device)[:, None]).flatten()
    bias = self.position_bias.to(gate.dtype) if _ROUNDS_POSITION_BIAS else self.position_bias
    kv = kv.flatten(0, 1).index_select(0, rows).view(batch, count, rate, features)
    gate = gate.flatten(0, 1).index_select(0, rows).view(batch, count, rate, features) + bias
    if overlap:  # the window before gives its first series, this one its second
        alone = ~layout.overlaps[..., None, None]
        before = F.pad(kv[:, :-1, :, :d], (0, 0, 0, 0, 1, 0)).masked_fill(alone, 0.0)
        kv = torch.cat((before, kv[..., d:]), dim=2)
        before = F.pad(gate[:, :-1, :, :d], (0, 0, 0, 0, 1, 0)).masked_fill(alone, float("-inf"))
        gate = torch.cat((before, gate[..., d:]), dim=2)
    pooled = (kv * gate.softmax(dim=2, dtype=torch.float32).to(kv.dtype)).sum(dim=2)
    entries = self.kv_norm(pooled.to(_activation_dtype(kv, hidden_states)))
    cos, sin = self.rotary_emb(entries, position_ids=layout.positions, layer_type=self.rope_layer_type)
    rotated: Tensor = modelling.apply_rotary_pos_emb(entries.unsqueeze(1), cos, sin).squeeze(1)
    return rotated


def _activation_dtype(kv: Tensor, hidden_states: Tensor) -> torch.dtype:
    """What upstream's projections give, which is what the rest of the layer computes in."""
    if settings.pooling_dtype == "activation":
        return kv.dtype
    device = hidden_states.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden_states.dtype


def _scores(self: Any, q: Tensor, entries: Tensor, hidden_states: Tensor) -> Tensor:
    """Index scores, fp32 ``[batch, seqlen, entries]``; the picks carry no gradient, whatever scores them."""
    if not _ROUNDS_POSITION_BIAS:
        scores: Tensor = self.scorer(q, entries, hidden_states)
        return scores
    heads = F.relu(q.float() @ entries.transpose(-1, -2).float().unsqueeze(1)) * float(self.softmax_scale)
    weights: Tensor = self.weights_proj(hidden_states).float() * self.weights_scaling
    return (heads * weights.unsqueeze(-1)).sum(dim=2)
