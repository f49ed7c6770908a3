"""How everything here is timed: medians, variants taking turns within one run, on random data."""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable, Mapping
from typing import Any

import torch
from triton.testing import do_bench


def side_by_side(
    variants: Mapping[str, Callable[[], Any]], *, rounds: int = 3, warmup_ms: int = 50, rep_ms: int = 150
) -> dict[str, float]:
    """Median milliseconds of each variant; the variants take turns, so a drift of the card's clock hits all alike."""
    times: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(rounds):
        for name, run in variants.items():
            times[name].append(do_bench(run, warmup=warmup_ms, rep=rep_ms, return_mode="median"))
    return {name: statistics.median(found) for name, found in times.items()}


def peak_bytes(run: Callable[[], Any]) -> int:
    """Device memory that ``run`` adds at its highest, in bytes."""
    gc.collect()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    kept = run()
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before
    del kept
    return peak
