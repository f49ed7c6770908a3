"""The layout of compressed entries against a loop over documents that knows nothing of columns and cumulative sums."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fsdp_sink_patches.ops.compressed_layout import compressed_layout, first_columns, window_starts


@dataclass(frozen=True)
class Piece:
    """Tokens ``start ... start + length - 1`` of a document, or padding where start is negative."""

    start: int
    length: int


def _row(pieces: list[Piece]) -> list[int]:
    return [
        position
        for p in pieces
        for position in (range(p.start, p.start + p.length) if p.start >= 0 else [-1] * p.length)
    ]


def _expected(pieces: list[Piece], rate: int) -> tuple[list[tuple[int, int, bool]], list[tuple[int, int]], list[int]]:
    """(start column, position, overlaps) of each entry; (first, end) slot of each token; first column of each token."""
    entries: list[tuple[int, int, bool]] = []
    ranges: list[tuple[int, int]] = []
    first: list[int] = []
    column = 0
    for piece in pieces:
        if piece.start < 0:
            first += range(column, column + piece.length)
            ranges += [(len(entries), len(entries))] * piece.length
            column += piece.length
            continue
        here = {piece.start + i: column + i for i in range(piece.length)}
        begin = len(entries)
        for position in here:
            whole = [w for w in range(position + 1) if w % rate == 0 and all(w + i in here for i in range(rate))]
            closed = [w for w in whole if w + rate - 1 == position]
            entries += [(here[w], w, w - rate in whole) for w in closed]
            ranges.append((begin, len(entries)))
        first += [column] * piece.length
        column += piece.length
    return entries, ranges, first


def _separate(pieces: list[Piece]) -> list[Piece]:
    """Without the pieces that would just go on where the one before ended."""
    kept: list[Piece] = []
    for piece in pieces:
        goes_on = kept and kept[-1].start >= 0 and piece.start == kept[-1].start + kept[-1].length
        if not goes_on:
            kept.append(piece)
    return kept


PIECES = st.lists(
    st.builds(
        Piece, start=st.one_of(st.just(0), st.just(0), st.just(-1), st.integers(0, 40)), length=st.integers(1, 23)
    ),
    min_size=1,
    max_size=6,
).map(_separate)


@given(
    pieces=PIECES, rate=st.integers(1, 9), window=st.integers(1, 12), dtype=st.sampled_from((torch.int64, torch.int32))
)
@example(
    pieces=[Piece(0, 6), Piece(0, 10)], rate=4, window=3, dtype=torch.int64
)  # one whole window and a half, then two and a half
@example(pieces=[Piece(5, 3), Piece(0, 2)], rate=4, window=3, dtype=torch.int64)
@example(pieces=[Piece(4, 4), Piece(12, 4)], rate=4, window=3, dtype=torch.int64)  # windows apart: no overlap
@example(pieces=[Piece(-1, 7), Piece(0, 9), Piece(-1, 3)], rate=1, window=3, dtype=torch.int64)
@example(pieces=[Piece(0, 3)], rate=4, window=3, dtype=torch.int64)  # no entry at all
@settings(max_examples=300, deadline=None)
def test_against_a_loop_over_documents(pieces: list[Piece], rate: int, window: int, dtype: torch.dtype) -> None:
    position_ids = torch.tensor([_row(pieces)], dtype=dtype)
    layout = compressed_layout(position_ids, rate)
    entries, ranges, first = _expected(pieces, rate)
    slots = position_ids.shape[1] // rate
    assert len(entries) <= slots
    dead = [(0, 0, False)] * (slots - len(entries))
    assert list(zip(*(f[0].tolist() for f in (layout.starts, layout.positions, layout.overlaps)), strict=True)) == [
        *entries,
        *dead,
    ]
    assert layout.live[0].tolist() == [True] * len(entries) + [False] * len(dead)
    assert [tuple(r) for r in layout.ranges[0].tolist()] == ranges
    assert first_columns(position_ids)[0].tolist() == first
    assert window_starts(position_ids, window)[0].tolist() == [max(f, i - window + 1) for i, f in enumerate(first)]


@given(rows=st.lists(PIECES, min_size=2, max_size=4), rate=st.integers(1, 6))
@settings(max_examples=50, deadline=None)
def test_rows_know_nothing_of_each_other(rows: list[list[Piece]], rate: int) -> None:
    positions = [_row(pieces) for pieces in rows]
    longest = max(len(row) for row in positions)
    together = torch.tensor([row + [-1] * (longest - len(row)) for row in positions])
    layout = compressed_layout(together, rate)
    for i in range(len(rows)):
        for field, alone in zip(layout, compressed_layout(together[i : i + 1], rate), strict=True):
            assert torch.equal(field[i : i + 1], alone)


@pytest.mark.parametrize(
    ("position_ids", "rate"),
    [(torch.arange(8), 4), (torch.zeros(1, 8), 4), (torch.arange(8)[None], 0)],
    ids=["one dimension", "floats", "no rate"],
)
def test_refused(position_ids: torch.Tensor, rate: int) -> None:
    with pytest.raises(ValueError, match="compressed_layout: found position_ids"):
        compressed_layout(position_ids, rate)


def test_no_data_dependence_in_a_graph() -> None:
    """One graph for every row of a length: no branch on data, no shape from data."""
    graph = torch.compile(compressed_layout, backend="eager", fullgraph=True)
    for row in ([0, 1, 2, 3, 0, 1, 2, 3], [-1, -1, 5, 6, 7, 8, 0, 1]):
        position_ids = torch.tensor([row])
        for mine, plain in zip(graph(position_ids, 4), compressed_layout(position_ids, 4), strict=True):
            assert torch.equal(mine, plain)
