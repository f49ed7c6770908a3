"""Block lists: from which blocks hold something, and back."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_mask

BLOCK = 128

MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def from_blocks(
    partial: Tensor, full: Tensor, seq_lengths: tuple[int, int], block_size: tuple[int, int], mask_mod: MaskMod
) -> BlockMask:
    """``partial`` and ``full`` are bool ``[batch, heads, Q blocks, KV blocks]``.

    ``BlockMask.from_kv_blocks`` would turn the lists back into this to transpose them for the backward pass.
    """
    lists = [_listed(blocks) for blocks in (partial, full, partial.transpose(2, 3), full.transpose(2, 3))]
    (kv_num, kv), (full_kv_num, full_kv), (q_num, q), (full_q_num, full_q) = lists
    return BlockMask(
        seq_lengths=seq_lengths,
        kv_num_blocks=kv_num,
        kv_indices=kv,
        full_kv_num_blocks=full_kv_num,
        full_kv_indices=full_kv,
        q_num_blocks=q_num,
        q_indices=q,
        full_q_num_blocks=full_q_num,
        full_q_indices=full_q,
        BLOCK_SIZE=block_size,
        mask_mod=mask_mod,
    )


def _listed(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Of each row, how many blocks are listed and which, in ascending order, the others behind them; int32."""
    order = blocks.to(torch.int32).argsort(dim=-1, descending=True, stable=True)
    return blocks.sum(-1, dtype=torch.int32), order.to(torch.int32).contiguous()


def dense(mask: BlockMask) -> Tensor:
    """What a BlockMask shows, element by element, as flex attention reads it: bool ``[batch, heads, Q, KV]``.

    A block in neither list is invisible, a full block is visible, ``mask_mod`` decides inside of the others. It
    materialises the mask, so it is for tests and pictures.
    """
    batch, heads = mask.kv_num_blocks.shape[:2]
    q_len, kv_len = mask.shape[-2:]
    element = create_mask(mask.mask_mod, batch, heads, q_len, kv_len, mask.kv_num_blocks.device)
    partial, full = (per_element(state, mask) for state in states(mask))
    return (partial & element) | full


def states(mask: BlockMask) -> tuple[Tensor, Tensor]:
    """Which blocks are listed as partial and as full, bool ``[batch, heads, Q blocks, KV blocks]``."""
    columns = -(-mask.shape[-1] // mask.BLOCK_SIZE[1])
    partial = _unlisted(mask.kv_num_blocks, mask.kv_indices, columns)
    if mask.full_kv_num_blocks is None or mask.full_kv_indices is None:
        return partial, torch.zeros_like(partial)
    return partial, _unlisted(mask.full_kv_num_blocks, mask.full_kv_indices, columns)


def _unlisted(number: Tensor, indices: Tensor, columns: int) -> Tensor:
    """The inverse of :func:`_listed`; entries behind the number are undefined and fall into a column of their own."""
    used = torch.arange(indices.shape[-1], device=indices.device) < number[..., None]
    blocks = torch.zeros(*indices.shape[:-1], columns + 1, dtype=torch.bool, device=indices.device)
    blocks.scatter_(-1, torch.where(used, indices, columns).long(), True)
    return blocks[..., :-1]


def per_element(blocks: Tensor, mask: BlockMask) -> Tensor:
    q_block, kv_block = mask.BLOCK_SIZE
    q_len, kv_len = mask.shape[-2:]
    return blocks.repeat_interleave(q_block, 2).repeat_interleave(kv_block, 3)[:, :, :q_len, :kv_len]


def sizes(block_size: int | tuple[int, int]) -> tuple[int, int]:
    q_block, kv_block = (block_size, block_size) if isinstance(block_size, int) else block_size
    check_size("BlockMask", "block_size", min(q_block, kv_block))
    return q_block, kv_block


def check_size(function: str, name: str, value: int) -> None:
    if value < 1:
        raise ValueError(complaint(function, f"{name}={value}", "1 or more", f"check how {name} is computed"))


def complaint(function: str, found: str, expected: str, advice: str) -> str:
    return f"block_masks.{function}: found {found}; expected {expected}. What to do: {advice}."
