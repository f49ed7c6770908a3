"""DeepSeek-V4-Flash's attention core, forward and backward, sliding, CSA and HCA: ``python
benchmarks/compressed_attention.py``.

64 heads, head_dim 512, window 128, 512 picks of entries of 4 tokens or all entries of 128, bf16, one document of 8192
tokens on random data. Prints device time by kernel, TFLOP/s of what the mask needs, and the ratio to the goals; for
sequences that fit, transformers' eager formula beside it. ``--tune`` tries tiles for each kernel first, those in use
before others, for ``--tune-seconds`` a kernel and layer: a compilation takes about three.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from triton.runtime.errors import OutOfResources

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from _timing import peak_bytes, side_by_side

from fsdp_sink_patches.ops.compressed_attention import _kernels, compressed_attention
from tests.gpu.test_gpu_compressed_attention import eager
from tests.ops.compressed_oracle import KINDS, case, sinks_of

HEADS, DIM, WINDOW, PICKS = 64, 512, 128, 512
RATES = {"sliding": 4, "csa": 4, "hca": 128}
GOALS = {"sliding": (0.5, 2.0), "csa": (2.2, 9.0), "hca": (0.7, 3.0)}
PEAK = 790e12


def drawn(kind: str, tokens: int) -> tuple[list[Tensor], dict[str, Tensor], Tensor]:
    given, sees, dout = case(
        kind, [tokens], HEADS, DIM, torch.bfloat16, window=WINDOW, rate=RATES[kind], picks=PICKS, device="cuda"
    )
    return [*given, sinks_of("random", HEADS, "cuda")], sees, dout


def pairs(sees: dict[str, Tensor]) -> int:
    """Query-key pairs that the mask has."""
    starts = sees["window_starts"]
    found = int((torch.arange(len(starts), device=starts.device) + 1 - starts).sum())
    if "entry_ranges" in sees:
        found += int((sees["entry_ranges"][:, 1] - sees["entry_ranges"][:, 0]).sum())
    if "topk_indices" in sees:
        found += int((sees["topk_indices"] >= 0).sum())
    return found


def by_kernel(run: Callable[[], Any], calls: int = 5) -> dict[str, float]:
    """Device milliseconds a call of each kernel, the longest first."""
    run()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(calls):
            run()
        torch.cuda.synchronize()
    found = {e.key[:40]: e.self_device_time_total / calls / 1e3 for e in profile.key_averages()}
    return {name: round(ms, 3) for name, ms in sorted(found.items(), key=lambda item: -item[1]) if ms > 0.005}


def tune(tokens: int, seconds: float) -> None:
    """Times tiles of each kernel on the layers that it works hardest in, and leaves the fastest first. Shared memory
    leaves out what the compiler says no H200 holds: a row of 512 channels is 1 KiB, of 227."""
    grids = {
        "forward_tiles": [
            {"BLOCK_N": n, "num_warps": w, "num_stages": s}
            for n, w, s in itertools.product((32, 64), (4, 8), (1, 2, 3))
        ],
        "query_tiles": [
            {"BLOCK_N": n, "num_warps": w, "num_stages": s}
            for n, w, s in itertools.product((16, 32, 64), (4, 8), (1, 2))
            if 128 + n * s <= 227
        ],
        "pick_tiles": [
            {"BLOCK_N": n, "num_warps": w, "num_stages": 1} for n, w in itertools.product((16, 32, 64), (4, 8))
        ],
        "key_tiles": [
            {"BLOCK_N": n, "BLOCK_H": h, "num_warps": w, "num_stages": s}
            for n, h, w, s in itertools.product((32, 64, 128), (16, 32, 64), (4, 8), (1, 2, 3))
            if n + 2 * h * min(s, 2) <= 227
        ],
    }
    kernel_of = {
        "forward_tiles": "_forward_kernel", "query_tiles": "_query_kernel", "pick_tiles": "_pick_kernel",
        "key_tiles": "_key_kernel",
    }  # fmt: skip
    for name, grid in grids.items():
        in_use = best = getattr(_kernels, name)(DIM)
        for kind in KINDS:
            if name == ("key_tiles" if kind == "csa" else "pick_tiles"):
                continue
            given, sees, dout = drawn(kind, tokens)
            leaves = [t.requires_grad_() for t in given]
            timed, tried, end = [], 0, time.monotonic() + seconds
            for options in [*(o for o in in_use if o in grid), *(o for o in grid if o not in in_use)]:
                if time.monotonic() > end:
                    break
                tried += 1
                setattr(_kernels, name, lambda dim, options=options: [options])

                def step(leaves: list[Tensor] = leaves, sees: dict[str, Tensor] = sees, dout: Tensor = dout) -> None:
                    torch.autograd.grad(compressed_attention(*leaves, **sees), leaves, dout, materialize_grads=True)

                try:
                    found = by_kernel(step, 2)
                    timed.append((sum(ms for k, ms in found.items() if k.startswith(kernel_of[name])), options))
                except (RuntimeError, OutOfResources) as error:
                    print(f"  {name} {kind} {options}: {str(error)[:60]}", flush=True)
            timed.sort(key=lambda pair: pair[0])
            fastest = "; ".join(f"{ms:.3f} {options}" for ms, options in timed[:5])
            print(f"{name} {kind}, {tried} of {len(grid)} tried: {fastest}", flush=True)
            if timed and kind == ("sliding" if name == "key_tiles" else "csa"):
                best = [options for _, options in timed]
        setattr(_kernels, name, lambda dim, best=best: best)


def measure(kind: str, tokens: int) -> list[dict[str, Any]]:
    given, sees, dout = drawn(kind, tokens)
    leaves = [t.requires_grad_() for t in given]
    flops = 4 * pairs(sees) * HEADS * DIM
    rows = []
    functions = {"ours": compressed_attention}
    if tokens <= 8192:
        functions["eager formula"] = eager
    for name, function in functions.items():
        out = function(*leaves, **sees)

        def backward(out: Tensor = out) -> Any:
            return torch.autograd.grad(out, leaves, dout, retain_graph=True, materialize_grads=True)

        def forward(function: Any = function) -> Any:
            return function(*leaves, **sees)

        times = side_by_side({"forward": forward, "backward": backward}, rounds=2)
        for pass_, work, goal in (("forward", flops, GOALS[kind][0]), ("backward", 2.5 * flops, GOALS[kind][1])):
            ms = times[pass_]
            row = {
                "variant": name, "kind": kind, "tokens": tokens, "pass": pass_, "ms": ms,
                "tflops": work / ms / 1e9, "of_peak": work / ms * 1e3 / PEAK,
                "peak_mib": peak_bytes(forward if pass_ == "forward" else backward) / 2**20,
            }  # fmt: skip
            row["kernels"] = by_kernel(forward if pass_ == "forward" else backward)
            if tokens == 8192:
                row["of_goal"] = ms / goal
            rows.append(row)
            kernels = ", ".join(f"{k} {v}" for k, v in list(row["kernels"].items())[:5])
            print(
                f"{tokens:7d} {kind:8s} {name:14s} {pass_:8s} {ms:9.3f} ms {row['tflops']:6.0f} TFLOP/s "
                f"{100 * row['of_peak']:4.0f} % x{row.get('of_goal', float('nan')):5.2f} of the goal "
                f"{row['peak_mib']:8.0f} MiB  {kernels}",
                flush=True,
            )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, nargs="+", default=[8192])
    parser.add_argument("--tune", action="store_true")
    parser.add_argument("--tune-seconds", type=float, default=30)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    if arguments.tune:
        tune(arguments.tokens[0], arguments.tune_seconds)
    rows = [row for tokens in arguments.tokens for kind in KINDS for row in measure(kind, tokens)]
    if arguments.json:
        card = torch.cuda.get_device_name()
        arguments.json.write_text(json.dumps({"card": card, "torch": torch.__version__, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
