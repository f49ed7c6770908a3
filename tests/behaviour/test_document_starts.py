"""Where documents start, by hand."""

from __future__ import annotations

import pytest
import torch
from fsdp_sink_patches.patches.transformers._documents import document_starts


@pytest.mark.parametrize(
    ("positions", "starts"),
    [
        ([0, 1, 2, 3], [1, 0, 0, 0]),
        ([0, 1, 0, 1], [1, 0, 1, 0]),
        ([5, 6, 7, 0, 1], [1, 0, 0, 1, 0]),
        ([2, 3, 4, 2, 3], [1, 0, 0, 1, 0]),
        ([0, 0, 0], [1, 1, 1]),
        ([0, 1, 7, 8], [1, 0, 1, 0]),
        ([3], [1]),
    ],
)
def test_without_padding(positions: list[int], starts: list[int]) -> None:
    assert document_starts(torch.tensor([positions])).int().tolist() == [starts]


@pytest.mark.parametrize(
    ("positions", "real", "starts"),
    [
        ([0, 1, 2, 3], [1, 1, 1, 1], [1, 0, 0, 0]),
        ([1, 1, 0, 1, 2], [0, 0, 1, 1, 1], [0, 0, 1, 0, 0]),
        ([0, 1, 2, 3, 4], [0, 0, 1, 1, 1], [0, 0, 1, 0, 0]),
        ([0, 1, 2, 0, 0], [1, 1, 1, 0, 0], [1, 0, 0, 0, 0]),
        ([0, 1, 0, 1, 2], [1, 1, 1, 1, 0], [1, 0, 1, 0, 0]),
        ([0, 1, 1, 2, 3], [1, 1, 0, 1, 1], [1, 0, 0, 0, 0]),
        ([0, 1, 2, 3, 4], [1, 1, 0, 1, 1], [1, 0, 0, 0, 0]),
        ([0, 1, 2], [0, 0, 0], [0, 0, 0]),
    ],
)
def test_with_padding(positions: list[int], real: list[int], starts: list[int]) -> None:
    found = document_starts(torch.tensor([positions]), torch.tensor([real], dtype=torch.bool))
    assert found.int().tolist() == [starts]


def test_rows_are_looked_at_one_by_one() -> None:
    found = document_starts(torch.tensor([[0, 1, 2], [0, 1, 0]]))
    assert found.int().tolist() == [[1, 0, 0], [1, 0, 1]]
