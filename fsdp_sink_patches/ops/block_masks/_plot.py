"""A picture of a BlockMask."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch.nn.attention.flex_attention import BlockMask

from ._lists import complaint, dense, per_element, states

_ELEMENTS = 1 << 24
_COLOURS = {
    "full block": "#2f6b9a",
    "partial block, visible": "#6fb1de",
    "partial block, hidden": "#dcebf6",
    "empty block": "#ffffff",
}


def plot(mask: BlockMask, path: str | Path | None = None, *, batch: int = 0, head: int = 0, title: str = "") -> Any:
    """Draws a mask: visible elements over the colours of full, partial and empty blocks, with the blocks' borders.

    Args:
        mask: of at most 2^24 elements per batch and head.
        path: where the picture is written; its ending gives the format.
        batch, head: which row and head of the mask.
        title: above the picture.

    Returns:
        matplotlib's Figure.
    """
    from matplotlib.colors import ListedColormap
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    q_len, kv_len = mask.shape[-2:]
    if q_len * kv_len > _ELEMENTS:
        found, advice = f"a mask of {q_len} x {kv_len}", "draw the same rule at a smaller size"
        raise ValueError(complaint("plot", found, "2^24 elements or fewer", advice))
    visible = dense(mask)[batch, head].cpu()
    partial, full = (per_element(state, mask)[batch, head].cpu() for state in states(mask))
    shade = torch.full((q_len, kv_len), 3)
    shade[partial & ~visible], shade[partial & visible], shade[full] = 2, 1, 0
    scale = 4.2 / max(q_len, kv_len)
    figure = Figure(figsize=(scale * kv_len + 0.9, scale * q_len + 1.2), layout="constrained")
    axes = figure.add_subplot()
    axes.imshow(shade.numpy(), cmap=ListedColormap(list(_COLOURS.values())), vmin=0, vmax=3, interpolation="nearest")
    q_block, kv_block = mask.BLOCK_SIZE
    for border in range(q_block, q_len, q_block):
        axes.axhline(border - 0.5, color="#555555", linewidth=0.5)
    for border in range(kv_block, kv_len, kv_block):
        axes.axvline(border - 0.5, color="#555555", linewidth=0.5)
    axes.set_xlabel("key")
    axes.set_ylabel("query")
    axes.set_title(title, fontsize=9)
    axes.tick_params(labelsize=7)
    legend = [Patch(facecolor=colour, edgecolor="#555555", label=name) for name, colour in _COLOURS.items()]
    figure.legend(handles=legend, loc="outside lower center", ncols=2, fontsize=7, frameon=False)
    if path is not None:
        figure.savefig(path, dpi=100)
    return figure
