"""Draws the pictures of docs/block-masks.md: ``python benchmarks/plot_block_masks.py docs``."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from fsdp_sink_patches.ops.block_masks import causal, dflash, dflash_lora, plot

DOCUMENTS = torch.tensor([0, 21, 50])
ANCHORS = torch.tensor([4, 13, 25, 37, -1])
BLOCK = 8
PICTURES = {
    "causal": (causal(64, block_size=BLOCK), "causal(64)"),
    "window": (causal(64, window=12, block_size=BLOCK), "causal(64, window=12)"),
    "packed": (causal(64, documents=DOCUMENTS, block_size=BLOCK), "causal(64, documents=[0, 21, 50])"),
    "sinks": (
        causal(64, documents=DOCUMENTS, window=8, sinks=3, block_size=BLOCK),
        "causal(64, documents=[0, 21, 50], window=8, sinks=3)",
    ),
    "dflash": (dflash(ANCHORS, 40, 6, block_size=BLOCK), "dflash([4, 13, 25, 37, -1], context_len=40, draft_block=6)"),
    "dflash-window": (
        dflash(ANCHORS, 40, 6, window=10, causal_blocks=True, block_size=BLOCK),
        "dflash(..., window=10, causal_blocks=True)",
    ),
    "dflash-all": (dflash(ANCHORS, 40, 6, queries="all", block_size=BLOCK), 'dflash(..., queries="all")'),
    "lora": (dflash_lora(64, 6, block_size=BLOCK), "dflash_lora(64, draft_block=6)"),
    "lora-anchors": (
        dflash_lora(64, 6, anchors=ANCHORS, documents=DOCUMENTS, window=12, block_size=BLOCK),
        "dflash_lora(64, 6, anchors=[...], documents=[...], window=12)",
    ),
}


def main() -> None:
    for name, (mask, title) in PICTURES.items():
        plot(mask, Path(sys.argv[1]) / f"block-mask-{name}.png", title=title)


if __name__ == "__main__":
    main()
