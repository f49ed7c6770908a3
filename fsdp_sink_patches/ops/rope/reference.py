"""The rotation in plain torch: what the kernel is tested against, and what runs where there is no kernel.

RoPE turns each pair of channels ``(a, b)`` of a token at position ``p`` by the angle ``p * inv_freq``:

    a' = a cos - b sin
    b' = b cos + a sin

Models differ in what a pair is. *Interleaved* (DeepSeek-V4, the original RoFormer): channels ``2i`` and ``2i + 1``.
*Half-split* (gpt-oss, Llama): channels ``i`` and ``i + half``.
"""

from __future__ import annotations

import torch
from torch import Tensor


def rotate(x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool, conjugate: bool = False) -> Tensor:
    """Rotate the trailing ``2 * half`` channels of every head; the channels before them come back as they are.

    Args:
        x: ``[batch, heads, tokens, dim]``, any floating dtype, any strides.
        cos, sin: ``[1 or batch, tokens, half]``, any floating dtype.
        interleaved: how channels pair up; see the module.
        conjugate: turn back, by the negative angle.

    Returns:
        A new tensor like ``x``. Products and sums are fp32 (fp64 for fp64), each rounded once as in transformers'
        ``(x * cos) + (rotate_half(x) * sin)``, then rounded once to ``x``'s dtype.
    """
    out = torch.empty_like(x)
    kept = x.shape[-1] - 2 * cos.shape[-1]
    out[..., :kept] = x[..., :kept]
    rotate_(out, x, cos, sin, interleaved=interleaved, conjugate=conjugate)
    return out


def rotate_(out: Tensor, x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool, conjugate: bool) -> None:
    """Write the rotated trailing channels of ``x`` to those of ``out``, which may be ``x`` itself."""
    half = cos.shape[-1]
    kept = x.shape[-1] - 2 * half
    if interleaved:
        first, second = slice(kept, None, 2), slice(kept + 1, None, 2)
    else:
        first, second = slice(kept, kept + half), slice(kept + half, None)
    exact = torch.promote_types(x.dtype, torch.float32)
    a, b = x[..., first].to(exact), x[..., second].to(exact)
    cos, sin = cos[:, None].to(exact), sin[:, None].to(exact)
    if conjugate:
        sin = -sin
    # Both are computed before either is written: out may be x.
    turned_a, turned_b = a * cos - b * sin, b * cos + a * sin
    out[..., first], out[..., second] = turned_a.to(x.dtype), turned_b.to(x.dtype)
