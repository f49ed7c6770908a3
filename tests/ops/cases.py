"""Inputs that the tests of ``ops`` share."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

LENGTHS = [2, 37, 0, 37, 5, 1]
"""Packed documents: one empty, one of a single token, one repeated."""

WINDOWS = [(-1, -1), (-1, 0), (0, 0), (7, 0), (3, 2)]
SINKS = ("4", "8", "20", "random")


def sinks_of(kind: str, heads: int, dtype: torch.dtype = torch.float64) -> Tensor:
    if kind == "random":
        return (4 * torch.randn(heads, generator=torch.Generator().manual_seed(7), dtype=torch.float64)).to(dtype)
    return torch.full((heads,), float(kind), dtype=dtype)


def starts(lengths: Sequence[int]) -> Tensor:
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)


def draw(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)


def leaves(*tensors: Tensor) -> list[Tensor]:
    return [t.detach().clone().requires_grad_() for t in tensors]
