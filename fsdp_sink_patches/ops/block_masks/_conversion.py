"""A dense mask that somebody made already, as a BlockMask."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from ._lists import BLOCK, MaskMod, complaint, from_blocks, sizes

_CHUNK_ELEMENTS = 1 << 23


class NotAMaskError(ValueError):
    """An additive mask holds something else than 0 and "never", so that it is a bias, which no BlockMask can hold."""


def to_block_mask(mask: Tensor, *, block_size: int | tuple[int, int] = BLOCK) -> BlockMask:
    """A given dense mask as a BlockMask, read once in chunks of rows and never copied.

    The BlockMask keeps ``mask`` itself and reads it inside of partly visible blocks. A row that sees nothing gives
    output 0, as everywhere in flex attention; adding the lowest finite number to a whole row instead gives the mean of
    all values.

    Args:
        mask: ``[batch or 1, heads or 1, Q, KV]``; boolean (True is visible) or additive (0 is visible, ``-inf`` or the
            lowest number of a dtype is not). A dimension that is only expanded counts as 1.
        block_size: of queries and keys, as in ``create_block_mask``.

    Raises:
        NotAMaskError: an additive mask holds other numbers, or requires a gradient. To look for them waits for the
            device once; a boolean mask needs no look.
    """
    if mask.dim() != 4 or min(mask.shape) == 0:
        found, advice = f"a mask of shape {list(mask.shape)}", "add the missing dimensions"
        raise ValueError(complaint("to_block_mask", found, "[batch or 1, heads or 1, Q, KV]", advice))
    if mask.dtype != torch.bool and not mask.is_floating_point():
        found, advice = f"a mask of {mask.dtype}", "pass mask.bool() if 1 means visible"
        raise ValueError(complaint("to_block_mask", found, "a boolean or floating-point mask", advice))
    if mask.requires_grad:
        found, advice = "a mask that requires a gradient", "add a learned bias in score_mod"
        raise NotAMaskError(complaint("to_block_mask", found, "a constant mask", advice))
    for dimension in (0, 1):
        if mask.stride(dimension) == 0:
            mask = mask.narrow(dimension, 0, 1)
    q_block, kv_block = sizes(block_size)
    batch, heads, q_len, kv_len = mask.shape
    counts, strange = [], []
    for rows in _chunks(mask, q_block):
        visible = rows if rows.dtype == torch.bool else rows == 0
        if rows.dtype != torch.bool:
            strange.append((~(visible | (rows <= _never(rows.dtype)))).any())
        visible = F.pad(visible, (0, -kv_len % kv_block, 0, -visible.shape[2] % q_block))
        tiles = visible.view(batch, heads, -1, q_block, visible.shape[3] // kv_block, kv_block)
        counts.append(tiles.sum((3, 5), dtype=torch.int32))
    if strange and bool(torch.stack(strange).any()):
        found = f"an additive mask with values such as {_first_strange(mask, q_block)}"
        expected = "only 0 and -inf or the lowest number of its dtype, since a bias is not a mask"
        advice = "pass mask == 0 if every other number means invisible, or add the bias in score_mod"
        raise NotAMaskError(complaint("to_block_mask", found, expected, advice))
    count = torch.cat(counts, 2)
    full = count == q_block * kv_block
    return from_blocks((count > 0) & ~full, full, (q_len, kv_len), (q_block, kv_block), _given_mod(mask))


def _given_mod(mask: Tensor) -> MaskMod:
    rows, heads = mask.shape[0] > 1, mask.shape[1] > 1
    given = mask if rows and heads else mask[:, 0] if rows else mask[0] if heads else mask[0, 0]
    additive = mask.dtype != torch.bool

    def mask_mod(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        if rows:
            value = given[b, h, q, kv] if heads else given[b, q, kv]
        else:
            value = given[h, q, kv] if heads else given[q, kv]
        return value == 0 if additive else value

    return mask_mod


def _chunks(mask: Tensor, q_block: int) -> Iterator[Tensor]:
    """Views of some rows each: whole blocks of them, and as few as hold the temporaries small."""
    batch, heads, q_len, kv_len = mask.shape
    step = q_block * max(1, _CHUNK_ELEMENTS // (batch * heads * q_block * kv_len))
    for start in range(0, q_len, step):
        yield mask[:, :, start : start + step]


def _never(dtype: torch.dtype) -> float:
    """Numbers down from here mean "invisible"; a mask made in bf16 and cast up keeps bf16's lowest."""
    return torch.finfo(torch.float16 if dtype == torch.float16 else torch.bfloat16).min


def _first_strange(mask: Tensor, q_block: int) -> float:
    for rows in _chunks(mask, q_block):
        found = rows[(rows != 0) & ~(rows <= _never(rows.dtype))]
        if found.numel():
            return float(found[0])
    raise AssertionError("the mask changed while it was read")
