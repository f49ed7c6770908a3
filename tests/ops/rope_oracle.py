"""What a rotation is, said another way: multiplication of complex numbers in fp64."""

from __future__ import annotations

import torch
from torch import Tensor


def rotated(x: Tensor, angles: Tensor, *, interleaved: bool, conjugate: bool = False) -> Tensor:
    """``x`` ``[batch, heads, tokens, dim]`` in fp64 with its trailing channels turned by ``angles`` ``[batch, tokens,
    half]``."""
    x, angles = x.double(), angles.double()[:, None]
    half = angles.shape[-1]
    kept, part = x[..., : x.shape[-1] - 2 * half], x[..., x.shape[-1] - 2 * half :]
    pairs = part.unflatten(-1, (half, 2) if interleaved else (2, half))
    pairs = pairs if interleaved else pairs.transpose(-1, -2)
    turned = torch.complex(pairs[..., 0], pairs[..., 1]) * torch.exp(1j * (-angles if conjugate else angles))
    pairs = torch.view_as_real(turned)
    pairs = pairs if interleaved else pairs.transpose(-1, -2)
    return torch.cat((kept, pairs.flatten(-2)), -1)


def draw(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)


def tables(angles: Tensor, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    return angles.double().cos().to(dtype), angles.double().sin().to(dtype)


LAYOUTS = (
    "heads first",
    "tokens first",
    "padded rows",
    "every other head",
    "every other channel",
    "batch last",
)
"""Memory under one and the same ``[batch, heads, tokens, dim]``."""


def laid_out(x: Tensor, layout: str) -> Tensor:
    """The values of ``x`` in other memory: what transposes, slices and strided views hand over."""
    batch, heads, tokens, dim = x.shape
    if layout == "heads first":
        return x.clone(memory_format=torch.contiguous_format)
    if layout == "tokens first":
        made = x.new_full((batch, tokens, heads, dim), float("nan")).transpose(1, 2)
    elif layout == "padded rows":
        made = x.new_full((batch, heads, tokens, dim + 3), float("nan"))[..., 3:]
    elif layout == "every other head":
        made = x.new_full((batch, 2 * heads, tokens, dim), float("nan"))[:, 1::2]
    elif layout == "every other channel":
        made = x.new_full((batch, heads, tokens, 2 * dim), float("nan"))[..., ::2]
    else:
        made = x.new_full((heads, tokens, batch, dim), float("nan")).permute(2, 0, 1, 3)
    return made.copy_(x)
