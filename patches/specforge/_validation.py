"""What the SpecForge patches are measured by."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fsdp_sink_patches import Measurement
from fsdp_sink_patches.ops import block_masks

GROWTH_LIMIT = {"cpu": 16.0, "cuda": 50.0}
"""MiB that building the mask may add; a dense grid of booleans is 32 and 672 MiB in the cases below."""


def dflash_block_mask(device: str) -> Measurement:
    from specforge.algorithms.common import dflash_family_model as family

    wrong = 0
    for window in (None, 1, 37, 300):
        generator = torch.Generator().manual_seed(5)
        anchors = torch.randint(0, 500, (3, 21), generator=generator).sort(1).values.to(device)
        keep = (torch.rand(3, 21, generator=generator) > 0.2).to(device)
        mask = family.create_dflash_block_mask(anchors, keep, 501, 7, torch.device(device), window)
        rule = family.create_dflash_sdpa_mask(anchors, keep, 501, 7, torch.device(device), window)
        wrong += int((block_masks.dense(mask) != rule).sum())
    blocks, context, size = (512, 4096, 8) if device == "cpu" else (3072, 4096, 8)
    anchors = torch.arange(blocks, device=device)[None] * context // blocks
    keep = torch.ones_like(anchors, dtype=torch.bool)
    time_ms, peak_bytes = _time(
        lambda: family.create_dflash_block_mask(anchors, keep, context, size, torch.device(device)), device
    )
    grid = blocks * size * (context + blocks * size)
    errors = {"elements": float(wrong), "MiB added": peak_bytes / 2**20}
    limits = {"elements": 0.0, "MiB added": GROWTH_LIMIT[device]}
    details = {"timed": f"{blocks} anchors of {size} behind {context} tokens", "dense grid MiB": grid / 2**20}
    return Measurement(errors, limits, time_ms, peak_bytes if device == "cuda" else 0, details)


def draft_rotary_fp32(device: str) -> Measurement:
    from specforge.modeling.draft.llama3_eagle import LlamaMutiRotaryEmbedding, LlamaRotaryEmbedding

    dim, long = 64, 6000
    exact = torch.arange(long, dtype=torch.float64)[:, None] * 10000.0 ** -(
        torch.arange(0, dim, 2, dtype=torch.float64) / dim
    )
    errors = {}
    for name, module, trained in (
        ("cast", LlamaRotaryEmbedding(dim, 8192), long),
        ("grown", LlamaRotaryEmbedding(dim, 512), long),
    ):
        module = module.to(device).to(torch.bfloat16)
        x = torch.empty(0, device=device, dtype=torch.float32)
        # upstream compiles this forward, which would take longer than all the rest
        with torch.compiler.set_stance("force_eager"):
            cos, sin = module(x, seq_len=trained)
        errors[name] = _worst_angle(cos[0, 0, :, : dim // 2], sin[0, 0, :, : dim // 2], exact)
    axes = LlamaMutiRotaryEmbedding(dim, 8192).to(device).to(torch.bfloat16)
    positions = torch.arange(long, device=device).expand(3, 1, -1)
    cos, sin = axes(torch.empty(0, device=device, dtype=torch.float32), positions)
    errors["three axes"] = _worst_angle(cos[0, 0, :, : dim // 2], sin[0, 0, :, : dim // 2], exact)
    time_ms, peak_bytes = _time(lambda: LlamaRotaryEmbedding(dim, 512).to(device).to(torch.bfloat16), device)
    details = {"positions": long, "unit": "radians, the worst of all channels"}
    return Measurement(errors, dict.fromkeys(errors, 2e-3), time_ms, peak_bytes, details)


def _worst_angle(cos: Tensor, sin: Tensor, exact: Tensor) -> float:
    """The largest angle between the table's and the exact direction, in radians."""
    found = torch.atan2(sin.double().cpu(), cos.double().cpu())
    return float(torch.remainder(found - exact + torch.pi, 2 * torch.pi).sub(torch.pi).abs().max())


def _time(run: Callable[[], Any], device: str) -> tuple[float, int]:
    """Median milliseconds, and bytes added at the highest: of the device on CUDA, of what torch allocates on a CPU."""
    times = []
    for _ in range(5):
        if device == "cuda":
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
        begin = time.perf_counter()
        kept = run()
        if device == "cuda":
            torch.cuda.synchronize()
            peak = torch.cuda.max_memory_allocated() - before
        times.append(1000 * (time.perf_counter() - begin))
        del kept
    if device == "cuda":
        return statistics.median(times), peak
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        run()
    largest = max((event.cpu_memory_usage for event in profile.events()), default=0)
    return statistics.median(times), int(largest)
