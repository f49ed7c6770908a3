"""DFlash's draft mask is written down from the anchors instead of evaluated over every pair of tokens.

What breaks for the user: on flex attention SpecForge builds its mask by ``create_block_mask`` in eager mode, which
evaluates the rule on the whole ``[batch, 1, queries, keys]`` grid, at every micro-step and for each kind of mask: 1.9
GiB and 2.6 s on a CPU at 8192 queries and 24576 keys. Here the same lists of blocks follow from the anchors in
``O(queries + blocks)``, without waiting for the device.

Left as it is: sdpa and eager attention, whose mask is dense by nature.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fsdp_sink_patches import Measurement, Patch, Target

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch
    from torch import Tensor


def create_dflash_block_mask(
    original: Callable[..., Any],
    anchor_positions: Tensor,
    block_keep_mask: Tensor,
    S: int,
    block_size: int,
    device: torch.device,
    sliding_window: int | None = None,
) -> Any:
    """The BlockMask of ``[batch, 1, anchors * block_size, S + anchors * block_size]``.

    ``anchor_positions`` and ``block_keep_mask``: ``[batch, anchors]``; a block that is not kept sees nothing. With a
    window SpecForge makes the blocks causal too.
    """
    import torch

    from fsdp_sink_patches.ops import block_masks

    anchors = torch.where(block_keep_mask.to(torch.bool), anchor_positions, -1).to(device)
    return block_masks.dflash(anchors, S, block_size, window=sliding_window, causal_blocks=sliding_window is not None)


PATCH = Patch(
    id="specforge.dflash-block-mask",
    gives="draft masks built without dense grids",
    distribution="specforge",
    requires=">=0.2",
    fixed_in=None,
    link="https://github.com/sgl-project/SpecForge/pull/453",
    remove_when="SpecForge builds this mask from its anchors, or compiles create_block_mask for it",
    targets=(
        Target("specforge.algorithms.common.dflash_family_model:create_dflash_block_mask", create_dflash_block_mask),
    ),
    relies_on=("specforge.algorithms.common.dflash_family_model:create_dflash_sdpa_mask",),
)


def validate(device: str) -> Measurement:
    """Elements that differ from the dense rule, and the memory that building the mask adds."""
    from . import _validation

    return _validation.dflash_block_mask(device)
