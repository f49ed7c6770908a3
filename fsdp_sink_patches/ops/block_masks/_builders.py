"""The builders: what each query sees as intervals of keys, and the block lists that follow from them."""

from __future__ import annotations

import functools
import operator

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from ._lists import BLOCK, MaskMod, check_size, complaint, from_blocks, sizes

Interval = tuple[Tensor, Tensor]


def causal(
    seq_len: int,
    *,
    documents: Tensor | None = None,
    window: int | None = None,
    sinks: int = 0,
    device: torch.device | str | None = None,
    block_size: int | tuple[int, int] = BLOCK,
) -> BlockMask:
    """Causal attention inside each document, optionally windowed, optionally with sink slots.

    Key ``k`` is visible to query ``q`` of the same document if ``k <= q`` and either ``k > q - window`` or ``k`` is one
    of the document's first ``sinks`` positions.

    Args:
        seq_len: queries and keys.
        documents: first position of each document, ``[batch, n]`` or ``[n]`` (``cu_seqlens``); None: one document.
            Tokens before the first start are a document too, and so is padding behind the last ``cu_seqlens``.
        window: keys that a query sees, itself included: transformers' ``sliding_window=W`` (``kv > q - W``), which is
            ``window_size=(W - 1, 0)`` for flash-attn. None: all.
        sinks: keys at the start of each document that stay visible outside of the window.
        device: for ``documents=None``; else theirs.
        block_size: of queries and keys, as in ``create_block_mask``.

    Returns:
        a BlockMask of ``[batch, 1, seq_len, seq_len]``; with batch 1 it serves every batch size.
    """
    check_size("causal", "seq_len", seq_len)
    _check_window("causal", window)
    if sinks < 0:
        raise ValueError(complaint("causal", f"sinks={sinks}", "a number of keys, 0 or more", "pass sinks=0 for none"))
    starts = None if documents is None else _rows("causal", "documents", documents)
    intervals = _causal_intervals(seq_len, starts, window, sinks, device)
    mask_mod = _causal_mod(window, sinks) if starts is None else None
    return _from_intervals(intervals, seq_len, block_size, mask_mod)


def dflash(
    anchors: Tensor,
    context_len: int,
    draft_block: int,
    *,
    documents: Tensor | None = None,
    window: int | None = None,
    causal_blocks: bool = False,
    queries: str = "drafts",
    block_size: int | tuple[int, int] = BLOCK,
) -> BlockMask:
    """Draft training with the drafts behind their context: ``KV = [context, drafts]``.

    Draft block ``i`` holds the positions ``anchors[i] + 0 ... draft_block - 1`` and stands at keys ``context_len + i *
    draft_block`` on. Each of its queries sees the context before the anchor, ``k < anchors[i]``, and its own block in
    both directions. This is SpecForge's ``create_dflash_block_mask``; with a window, SpecForge also makes the blocks
    causal: ``window=W, causal_blocks=True``.

    Args:
        anchors: ``[batch, n]`` or ``[n]``; a negative one is padding, whose queries see nothing and which nobody sees.
        context_len: tokens of context.
        draft_block: tokens of a draft block.
        documents: first position of each document of the context; a block sees only the document of its anchor.
        window: limits the context to ``k > position - window``; a query's own block is never cut.
        causal_blocks: a query sees its own block only up to itself.
        queries: ``"drafts"``: ``Q_LEN = n * draft_block``; ``"all"``: the context is queries as well, causal and
            windowed, in front of the drafts.
        block_size: of queries and keys, as in ``create_block_mask``.

    Returns:
        a BlockMask of ``[batch, 1, Q_LEN, context_len + n * draft_block]``.
    """
    check_size("dflash", "context_len", context_len)
    check_size("dflash", "draft_block", draft_block)
    _check_window("dflash", window)
    if queries not in ("drafts", "all"):
        raise ValueError(complaint("dflash", f"queries={queries!r}", '"drafts" or "all"', "name the tokens that ask"))
    anchors = _rows("dflash", "anchors", anchors)
    starts = None if documents is None else _rows("dflash", "documents", documents, anchors)
    drafts = anchors.shape[1] * draft_block
    if drafts == 0:
        shape = list(anchors.shape)
        raise ValueError(complaint("dflash", f"anchors of shape {shape}", "one anchor or more", "pad with -1"))

    anchors = anchors.clamp(max=context_len)
    document = torch.zeros_like(anchors)
    if starts is not None:
        document = _around(starts, anchors.clamp(0, context_len - 1), context_len)[0].clamp(min=0)
    anchor, first = _each(anchors, draft_block), _each(document, draft_block)
    index = torch.arange(drafts, dtype=torch.int32, device=anchors.device)[None]
    offset = index % draft_block
    if window is not None:
        first = torch.maximum(first, torch.minimum(anchor + offset - (window - 1), anchor))
    context = _interval(first, anchor, anchor >= 0)
    own = context_len + index - offset
    block = _interval(own, context_len + index + 1 if causal_blocks else own + draft_block, anchor >= 0)
    intervals = [context, block]
    if queries == "all":
        before = _causal_intervals(context_len, starts, window, 0, anchors.device)[0]
        nothing = _interval(torch.zeros_like(before[0]), torch.zeros_like(before[0]))
        intervals = [_joined(before, context), _joined(nothing, block)]
    return _from_intervals(intervals, context_len + drafts, block_size)


def dflash_lora(
    seq_len: int,
    draft_block: int,
    *,
    anchors: Tensor | None = None,
    documents: Tensor | None = None,
    window: int | None = None,
    device: torch.device | str | None = None,
    block_size: int | tuple[int, int] = BLOCK,
) -> BlockMask:
    """Draft training inside one sequence, the LoRA form: ``Q_LEN == KV_LEN == seq_len``.

    A position sees everything before it and its own block in both directions. A block starts at each anchor, is
    ``draft_block`` long, and ends early where the next block or document starts. A position in no block is causal.

    Args:
        seq_len: queries and keys.
        draft_block: tokens of a draft block.
        anchors: first position of each block, ``[batch, n]`` or ``[n]``, a negative one is padding; None: blocks tile
            each document from its start.
        documents: first position of each document, as in :func:`causal`; nothing outside of the document is seen.
        window: limits what is seen before the query to ``k > q - window``; a query's own block is never cut.
        device: for neither anchors nor documents; else theirs.
        block_size: of queries and keys, as in ``create_block_mask``.

    Returns:
        a BlockMask of ``[batch, 1, seq_len, seq_len]``; with batch 1 it serves every batch size.
    """
    check_size("dflash_lora", "seq_len", seq_len)
    check_size("dflash_lora", "draft_block", draft_block)
    _check_window("dflash_lora", window)
    blocks = None if anchors is None else _rows("dflash_lora", "anchors", anchors)
    starts = None if documents is None else _rows("dflash_lora", "documents", documents, blocks)

    marks = starts if blocks is None else blocks
    device = device if marks is None else marks.device
    position = torch.arange(seq_len, dtype=torch.int32, device=device)[None]
    document, document_end = torch.zeros_like(position), torch.full_like(position, seq_len)
    if starts is not None:
        document, document_end = _around(starts, position, seq_len)
        document = document.clamp(min=0)
    if blocks is None:
        first = position - (position - document) % draft_block
        end = torch.minimum(first + draft_block, document_end)
    else:
        anchor, following = _around(blocks, position, seq_len)
        end = torch.minimum(torch.minimum(anchor + draft_block, following), document_end)
        drafted = (anchor >= document) & (position < end)
        first, end = torch.where(drafted, anchor, position), torch.where(drafted, end, position + 1)
    if window is not None:
        document = torch.maximum(document, torch.minimum(first, position - (window - 1)))
    return _from_intervals([_interval(document, end)], seq_len, block_size)


# --- intervals -------------------------------------------------------------------------------------------------------


def _causal_intervals(
    length: int, starts: Tensor | None, window: int | None, sinks: int, device: torch.device | str | None
) -> list[Interval]:
    position = torch.arange(length, dtype=torch.int32, device=device if starts is None else starts.device)[None]
    document = torch.zeros_like(position) if starts is None else _around(starts, position, length)[0].clamp(min=0)
    if window is None:
        return [_interval(document, position + 1)]
    first = torch.maximum(document, position - (window - 1))
    near = _interval(first, position + 1)
    return [near] if sinks == 0 else [_interval(document, torch.minimum(document + sinks, first)), near]


def _around(marks: Tensor, positions: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """The last mark at or before each position (-1: none) and the first one behind it (``length``: none).

    Args:
        marks: int32 ``[batch or 1, n]`` in any order; negative ones and those from ``length`` on count for nothing.
        positions: int32 ``[batch or 1, m]``, each in ``[0, length)``.
    """
    rows = max(marks.shape[0], positions.shape[0])
    ordered = torch.where(marks < 0, length, marks).clamp(max=length).sort(dim=1).values.expand(rows, -1).contiguous()
    wanted = positions.expand(rows, -1).contiguous()
    count = torch.searchsorted(ordered, wanted, right=True)
    edged = F.pad(F.pad(ordered, (1, 0), value=-1), (0, 1), value=length)
    return edged.gather(1, count), edged.gather(1, count + 1)


def _each(values: Tensor, times: int) -> Tensor:
    """Every column ``times`` times over."""
    return values[:, :, None].expand(-1, -1, times).flatten(1)


def _interval(low: Tensor, high: Tensor, real: Tensor | None = None) -> Interval:
    """``[low, high)`` of one shape; empty where ``high <= low``, and ``[0, 0)`` where it is not real."""
    high = torch.maximum(low, high)
    low = low.expand_as(high)
    if real is None:
        return low, high
    return torch.where(real, low, 0), torch.where(real, high, 0)


def _joined(before: Interval, behind: Interval) -> Interval:
    """The intervals of some queries, then of others."""
    rows = max(before[0].shape[0], behind[0].shape[0])
    low, high = (torch.cat([a.expand(rows, -1), b.expand(rows, -1)], 1) for a, b in zip(before, behind, strict=True))
    return low, high


# --- mask_mods: what flex attention evaluates inside of partly visible blocks ----------------------------------------


def _causal_mod(window: int | None, sinks: int) -> MaskMod:
    if window is None:
        return lambda b, h, q, kv: kv <= q
    if sinks == 0:
        return lambda b, h, q, kv: (kv <= q) & (kv > q - window)
    return lambda b, h, q, kv: (kv <= q) & ((kv > q - window) | (kv < sinks))


def _interval_mod(intervals: tuple[Interval, ...]) -> MaskMod:
    if intervals[0][0].shape[0] == 1:
        # One row of borders serves every batch size, so the batch index is not looked at.
        single = tuple((low[0], high[0]) for low, high in intervals)

        def of_any_row(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
            return functools.reduce(operator.or_, [(kv >= low[q]) & (kv < high[q]) for low, high in single])

        return of_any_row

    def of_row(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return functools.reduce(operator.or_, [(kv >= low[b, q]) & (kv < high[b, q]) for low, high in intervals])

    return of_row


# --- block lists -----------------------------------------------------------------------------------------------------


def _from_intervals(
    intervals: list[Interval],
    kv_len: int,
    block_size: int | tuple[int, int],
    mask_mod: MaskMod | None = None,
) -> BlockMask:
    """The BlockMask of queries that see one or two disjoint intervals of keys, each ``[batch, Q]``, in ascending order.

    Which key blocks a block of queries touches is a sum of steps: each interval adds 1 where its first block is and
    takes it away behind its last. The same with the blocks that an interval covers whole counts the queries that see a
    block whole; when all of them do, the block is full. Queries behind Q_LEN see nothing, so that, as in
    ``create_block_mask``, a block that reaches over an edge is never full.
    """
    q_block, kv_block = sizes(block_size)
    rows = max(low.shape[0] for low, _ in intervals)
    q_len = intervals[0][0].shape[1]
    q_blocks, kv_blocks = -(-q_len // q_block), -(-kv_len // kv_block)
    # The kernel may ask mask_mod about the queries that fill up the last block.
    padded = tuple(
        (
            F.pad(low.expand(rows, -1), (0, -q_len % q_block)).contiguous(),
            F.pad(high.expand(rows, -1), (0, -q_len % q_block)).contiguous(),
        )
        for low, high in intervals
    )
    device = padded[0][0].device
    line = torch.arange(rows * q_blocks, device=device).view(rows, q_blocks, 1) * (kv_blocks + 1)

    def count(spans: list[Interval]) -> Tensor:
        steps = torch.zeros(rows * q_blocks * (kv_blocks + 1), dtype=torch.int32, device=device)
        one = steps.new_ones(()).expand(rows * q_blocks * q_block)
        for low, high in spans:
            # index_add_ of a flat tensor has a deterministic version on CUDA, scatter_add_ of a deeper one has none.
            steps.index_add_(0, (low.view(rows, q_blocks, q_block) + line).flatten(), one)
            steps.index_add_(0, (high.view(rows, q_blocks, q_block) + line).flatten(), one, alpha=-1)
        return steps.view(rows, q_blocks, kv_blocks + 1).cumsum(-1, dtype=torch.int32)[..., :-1]

    touched = count([_blocks_touched(low, high, kv_block) for low, high in padded]) > 0
    full = count([_blocks_covered(low, high, kv_block) for low, high in _merged(padded)]) == q_block
    return from_blocks(
        (touched & ~full)[:, None],
        full[:, None],
        (q_len, kv_len),
        (q_block, kv_block),
        _interval_mod(padded) if mask_mod is None else mask_mod,
    )


def _merged(intervals: tuple[Interval, ...]) -> tuple[Interval, ...]:
    """Two intervals that touch become one, and the other one empty: a block across the seam is seen whole."""
    if len(intervals) == 1:
        return intervals
    (low, high), (low2, high2) = intervals
    touch = (high == low2) & (low < high)
    return (low, torch.where(touch, low, high)), (torch.where(touch, low, low2), high2)


def _blocks_touched(low: Tensor, high: Tensor, size: int) -> Interval:
    first = low // size
    return first, torch.where(high > low, (high + (size - 1)) // size, first)


def _blocks_covered(low: Tensor, high: Tensor, size: int) -> Interval:
    first, end = (low + (size - 1)) // size, high // size
    return torch.minimum(first, end), end


# --- arguments -------------------------------------------------------------------------------------------------------


def _rows(function: str, name: str, marks: Tensor, like: Tensor | None = None) -> Tensor:
    """int32 ``[batch, n]`` of positions; with ``like``, of as many rows."""
    if marks.dim() not in (1, 2) or marks.is_floating_point() or marks.dtype == torch.bool:
        found = f"{name} of shape {list(marks.shape)} and dtype {marks.dtype}"
        advice = f"pass the first positions, {name}.nonzero()[:, 0] for one row of flags"
        raise ValueError(complaint(function, found, "positions as integers, [batch, n] or [n]", advice))
    marks = (marks if marks.dim() == 2 else marks[None]).to(torch.int32)
    if like is not None and like.shape[0] != marks.shape[0] and 1 not in (like.shape[0], marks.shape[0]):
        found = f"{name} for {marks.shape[0]} rows beside anchors for {like.shape[0]}"
        raise ValueError(complaint(function, found, "as many rows, or one for all", "build both from the same batch"))
    return marks


def _check_window(function: str, window: int | None) -> None:
    if window is not None and window < 1:
        advice = "pass window=None for no window, not -1 or 0"
        raise ValueError(complaint(function, f"window={window}", "1 key or more", advice))
