"""The function: checks, casts, fits the mask, and picks the kernel or the reference."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from fsdp_sink_patches.ops.block_masks import to_block_mask
from fsdp_sink_patches.ops.block_masks._lists import from_blocks, states
from fsdp_sink_patches.ops.flex_attention import _kernel, reference
from fsdp_sink_patches.ops.sink_attention.interface import _check_sinks


def flex_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sinks: Tensor | None = None,
    *,
    mask: BlockMask | Tensor | None = None,
    position_bias: Tensor | None = None,
    softcap: float | None = None,
    scale: float | None = None,
    kernel_options: dict[str, Any] | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Attention with one extra logit per head in the softmax, through a BlockMask.

    ``P = softmax([scores, sink])`` without its last column is ``softmax(scores) * sigmoid(lse - sink)``, with ``lse``
    the log-sum-exp of the scores (https://github.com/huggingface/transformers/pull/41249). A row that sees no key
    gives 0.

    Args:
        query: ``[batch, heads, Q, head_dim]``, floating point. fp32 under autocast is cast to autocast's dtype.
        key, value: ``[batch, kv_heads, KV, head_dim]``; ``kv_heads`` divides ``heads``; value may have another
            head_dim.
        sinks: ``[heads]`` in any floating dtype, or None.
        mask: a BlockMask; a boolean tensor ``[batch or 1, heads or 1, Q, KV or more]``, True where visible; or a
            floating point one that is added to the scores. A BlockMask made for more tokens is cut to the batch.
        position_bias: ``[batch, heads, Q, KV]``, added to the scores; may carry a gradient.
        softcap: scores become ``softcap * tanh(scores / softcap)``; the sink is not capped.
        scale: default ``head_dim ** -0.5``.
        kernel_options: flex attention's own, which go before what is found here for head_dim above 256.

    Returns:
        ``out`` ``[batch, heads, Q, value's head_dim]`` in the kernel's dtype, and the scores' log-sum-exp ``[batch,
        heads, Q]`` in fp32 without the sinks and without a gradient; None on a CPU.

    Raises:
        ValueError: an argument does not fit; the message names it, what came and what was expected.
        NotImplementedError: ``kernel_options`` asks for the FLASH backend, whose log-sum-exp is not to be relied on.
    """
    sinks = _check_sinks(sinks, query.shape[1], query.device)
    device = query.device.type
    if query.dtype == torch.float32 and torch.is_autocast_enabled(device):
        query = query.to(torch.get_autocast_dtype(device))
    if torch.is_autocast_enabled(device):
        key, value = key.to(query.dtype), value.to(query.dtype)
    if not query.dtype == key.dtype == value.dtype:
        raise ValueError(
            f"query, key and value must have one dtype; got {query.dtype}, {key.dtype}, {value.dtype}. Cast them, or "
            "run under autocast"
        )
    scale = query.shape[-1] ** -0.5 if scale is None else float(scale)
    added = None
    if isinstance(mask, Tensor):
        mask = mask[..., : key.shape[2]]
        if mask.dtype == torch.bool:
            mask = to_block_mask(mask)
        else:
            mask, added = None, mask
    if mask is not None:
        mask = fitted(mask, query, key)
    if device == "cpu":
        out = reference.forward(query, key, value, sinks, mask, added, position_bias, softcap or 0.0, scale)
        return out, None
    return _kernel.forward(query, key, value, sinks, mask, added, position_bias, softcap or None, scale, kernel_options)


def fitted(mask: BlockMask, query: Tensor, key: Tensor) -> BlockMask:
    """The mask for just these queries and keys.

    ``BlockMask._adjust`` counts entries by their value instead of their place, and so keeps blocks behind the cut where
    a mask looks ahead.
    """
    batch, heads = mask.kv_num_blocks.shape[:2]
    if batch not in (1, query.shape[0]) or heads not in (1, query.shape[1]):
        raise ValueError(
            f"the BlockMask has batch {batch} and {heads} heads; expected 1 or {query.shape[0]}, and 1 or "
            f"{query.shape[1]}. Build it for this batch, with head dimension 1 where the heads share it"
        )
    lengths = query.shape[2], key.shape[2]
    of_mask = mask.seq_lengths
    if tuple(of_mask) == lengths:
        return mask
    if of_mask[0] < lengths[0] or of_mask[1] < lengths[1]:
        raise ValueError(
            f"the BlockMask was made for {of_mask[0]} queries and {of_mask[1]} keys; expected at least {lengths[0]} "
            f"and {lengths[1]}, the lengths of this batch. Build the mask for the batch"
        )
    rows, columns = (-(-length // block) for length, block in zip(lengths, mask.BLOCK_SIZE, strict=True))
    partial, full = (blocks[:, :, :rows, :columns] for blocks in states(mask))
    return from_blocks(partial, full, lengths, mask.BLOCK_SIZE, mask.mask_mod)
