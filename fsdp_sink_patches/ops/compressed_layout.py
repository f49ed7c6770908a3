"""Where the compressed entries of DeepSeek-V4 lie in rows that pack, pad or cut documents.

DeepSeek-V4 (arXiv 2606.19348, 2.3) pools every ``rate`` tokens of a document into one entry: entry ``w`` of a document
covers its positions ``w * rate ... w * rate + rate - 1``, is rotated to the first of them, and is seen by the queries
at position ``t`` with ``w < (t + 1) // rate``. Everything here is that sentence for rows of many documents: it follows
from ``position_ids`` alone, with shapes that don't depend on the data and without a device-to-host copy.

What ``position_ids`` say (``[rows, seqlen]``, any integer dtype): a document runs as long as positions go up by one, so
a row may start in the middle of one (``[5, 6, 7, 0, 1]``); a negative position is padding, wherever it stands, and the
token behind it starts a document: close rows up first if documents should go on over padding.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class CompressedLayout(NamedTuple):
    """The entries of each row, in the order in which their windows close.

    A row of ``seqlen`` tokens has ``entries = seqlen // rate`` slots, and never closes more windows; the slots that are
    left over are not ``live``, lie in no query's range, and hold zeros in the other fields.
    """

    starts: Tensor
    """int64 ``[rows, entries]``: column of the first token of the entry's window, which is ``rate`` columns long."""
    positions: Tensor
    """int64 ``[rows, entries]``: the position of that token in its document, where the entry is rotated to."""
    live: Tensor
    """bool ``[rows, entries]``: a window closed into this slot."""
    overlaps: Tensor
    """bool ``[rows, entries]``: the slot before holds the window just before in the same document, so that an
    overlapping compressor takes that window's first series (Ca) too."""
    ranges: Tensor
    """int64 ``[rows, seqlen, 2]``: the slots ``[first, last + 1)`` that each token may attend to, those of its own
    document that closed up to and with it. Empty for padding."""


def first_columns(position_ids: Tensor) -> Tensor:
    """The column where each token's document starts in its row, int64 ``[rows, seqlen]``; padding stands alone.

    Args:
        position_ids: ``[rows, seqlen]`` as the module describes them.
    """
    columns = torch.arange(position_ids.shape[1], device=position_ids.device).expand(position_ids.shape)
    real = position_ids >= 0
    goes_on = torch.zeros_like(real)
    goes_on[:, 1:] = real[:, 1:] & real[:, :-1] & (position_ids.diff(dim=1) == 1)
    return torch.where(goes_on, 0, columns).cummax(dim=1).values


def window_starts(position_ids: Tensor, window: int) -> Tensor:
    """The first column that each token may attend to in a sliding window, int64 ``[rows, seqlen]``.

    The last is its own, so a token attends to ``window`` columns, or to those that its document has so far.

    Args:
        position_ids: ``[rows, seqlen]`` as the module describes them.
        window: keys in the window, the query's own among them, as transformers' ``sliding_window`` counts them.
    """
    columns = torch.arange(position_ids.shape[1], device=position_ids.device)
    return torch.maximum(first_columns(position_ids), columns - (window - 1))


def compressed_layout(position_ids: Tensor, rate: int) -> CompressedLayout:
    """Lay out the entries of each row.

    A window whose first tokens are not in the row, because the row starts in the middle of a document, has no entry.

    Args:
        position_ids: ``[rows, seqlen]`` as the module describes them.
        rate: tokens in an entry (4 for CSA and 128 for HCA in the released models).

    Raises:
        ValueError: ``position_ids`` are not two-dimensional integers, or ``rate`` is not positive.
    """
    if position_ids.ndim != 2 or position_ids.is_floating_point() or rate < 1:
        raise ValueError(
            f"compressed_layout: found position_ids of shape {tuple(position_ids.shape)} and {position_ids.dtype}, and "
            f"rate {rate}; expected integers of shape [rows, seqlen] and a rate of at least 1. Pass those."
        )
    rows, seqlen = position_ids.shape
    entries = seqlen // rate
    positions = position_ids.long()
    columns = torch.arange(seqlen, device=positions.device).expand(rows, seqlen)
    first = first_columns(positions)
    closes = (positions >= 0) & (positions % rate == rate - 1) & (columns - first >= rate - 1)
    closed = closes.cumsum(1)
    slots = torch.where(closes, closed - 1, entries)  # the last slot takes what closes nothing, and is cut off
    starts = positions.new_zeros(rows, entries + 1).scatter(1, slots, columns - (rate - 1))[:, :entries]
    live = torch.arange(entries, device=positions.device) < closed[:, -1:]
    starts = torch.where(live, starts, 0)
    overlaps = live & (starts - rate >= first.gather(1, starts)) & (positions.gather(1, starts) >= rate)
    before = (closed - closes.long()).gather(1, first)
    return CompressedLayout(
        starts=starts,
        positions=torch.where(live, positions.gather(1, starts), 0),
        live=live,
        overlaps=overlaps,
        ranges=torch.stack((before, closed), dim=-1),
    )
