"""Draws a result of ``sink_attention.py``: ``python benchmarks/plot_sink_attention.py RESULT.json PICTURE.png``."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

COLOURS = {
    "torch FA2, no sink": "#9a9a9a",
    "ours, torch": "#1f77b4",
    "ours, flash-attn-4": "#2ca02c",
    "flash-attn-4's own call": "#98df8a",
    "flex + fp32 rescale": "#ff7f0e",
}


def panel(axes: Any, rows: list[dict[str, Any]], title: str) -> None:
    names = [name for name in COLOURS if any(r["variant"] == name for r in rows)]
    by_name = {r["variant"]: r for r in rows}
    for i, name in enumerate(reversed(names)):
        row = by_name[name]
        axes.barh(i, row["forward_ms"], color=COLOURS[name])
        axes.barh(i, row["backward_ms"], left=row["forward_ms"], color=COLOURS[name], alpha=0.45)
        total = row["forward_ms"] + row["backward_ms"]
        label = f" {row['forward_ms']:.2f} + {row['backward_ms']:.2f} ms"
        axes.text(total, i, label, va="center", fontsize=8)
    axes.set_yticks(range(len(names)), list(reversed(names)), fontsize=8)
    axes.set_xlim(0, 1.25 * max(r["forward_ms"] + r["backward_ms"] for r in rows if r["variant"] in COLOURS))
    if "eager" in by_name:
        title += f"; eager: {by_name['eager']['forward_ms']:.0f} + {by_name['eager']['backward_ms']:.0f} ms, not drawn"
    axes.set_title(title, fontsize=9)
    axes.spines[["top", "right"]].set_visible(False)


def main() -> None:
    result, picture = Path(sys.argv[1]), Path(sys.argv[2])
    document = json.loads(result.read_text())
    cases = list(dict.fromkeys((r["seqlen"], r["window"]) for r in document["rows"]))
    figure, grid = plt.subplots(len(cases), 1, figsize=(8, 1.9 * len(cases) + 0.6))
    for axes, (seqlen, window) in zip([grid] if len(cases) == 1 else grid, cases, strict=True):
        rows = [r for r in document["rows"] if (r["seqlen"], r["window"]) == (seqlen, window)]
        panel(axes, rows, f"{seqlen} tokens, {window}: forward (solid) + backward (light), ms")
    figure.suptitle(f"One layer of gpt-oss-20b attention, {document['card']}, torch {document['torch']}", fontsize=10)
    figure.tight_layout()
    figure.savefig(picture, dpi=110)


if __name__ == "__main__":
    main()
