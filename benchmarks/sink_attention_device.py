"""What the card alone spends on one layer of gpt-oss-20b attention, by kernel: ``python
benchmarks/sink_attention_device.py``.

``sink_attention.py`` times calls. A sliding layer is so short that a busy host is slower than the card, so this adds
up the kernels that the profiler saw, each forward and backward with sinks beside the same call without.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from sink_attention import HEAD_DIM, HEADS, KV_HEADS

from fsdp_sink_patches.ops.sink_attention import backends, flash_attn_func

CALLS = 20


def kernels(run: Callable[[], Any]) -> tuple[float, list[tuple[str, float]]]:
    """Milliseconds of device time a call, in all and by kernel."""
    for _ in range(3):
        run()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(CALLS):
            run()
        torch.cuda.synchronize()
    found = [
        (event.key[:50], round(event.self_device_time_total / CALLS / 1e3, 4))
        for event in profile.key_averages()
        if event.self_device_time_total > 0
    ]
    return round(sum(ms for _, ms in found), 4), found


def main() -> None:
    available = [name for name, state in backends().items() if state == "available" and name != "reference"]
    for seqlen in (8192, 32768):
        for left in (-1, 127):
            q, k, v = (
                torch.randn(1, seqlen, h, HEAD_DIM, device="cuda", dtype=torch.bfloat16, requires_grad=True)
                for h in (HEADS, KV_HEADS, KV_HEADS)
            )
            sinks, dout = torch.randn(HEADS, device="cuda", requires_grad=True), torch.randn_like(q)
            bound = (left, 0) if left >= 0 else (-1, -1)

            def ours(s: Any, backend: str, q: Any = q, k: Any = k, v: Any = v, bound: Any = bound) -> Any:
                return flash_attn_func(q, k, v, causal=True, window_size=bound, s_aux=s, backend=backend)

            variants: dict[str, tuple[Callable[[Any], Any], Any]] = {}
            for name in available:
                variants[f"ours, {name}, sinks"] = (lambda s, name=name: ours(s, name)), sinks
                variants[f"ours, {name}, none"] = (lambda s, name=name: ours(s, name)), None
            if "flash-attn-4" in available:
                from flash_attn.cute import flash_attn_func as own

                limits = (left, 0) if left >= 0 else (None, None)
                variants["flash-attn-4's own call, sinks"] = (
                    lambda s, q=q, k=k, v=v, left=left, limits=limits: own(
                        q, k, v, causal=left < 0, window_size=limits, learnable_sink=s
                    )[0],
                    sinks,
                )
            for name, (run, given) in variants.items():
                leaves = [q, k, v] + ([] if given is None else [given])
                out = run(given)
                forward = kernels(lambda run=run, given=given: run(given))
                backward = kernels(
                    lambda out=out, leaves=leaves, dout=dout: torch.autograd.grad(out, leaves, dout, retain_graph=True)
                )
                print(seqlen, left, name, "forward", *forward, "backward", *backward, flush=True)


if __name__ == "__main__":
    main()
