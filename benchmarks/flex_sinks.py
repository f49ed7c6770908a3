"""Sinks under flex attention, one layer: ``python benchmarks/flex_sinks.py [--json FILE]``.

gpt-oss-20b's attention (64 query heads, 8 key/value heads, head_dim 64, bf16), full and window 128, packed from four
documents, at 8192 and 32768 tokens: transformers' own flex function, ours, flex attention without any sink, and ours on
the flash kernels. Median milliseconds of a forward and of a forward with backward, variants taking turns in one run,
the memory that each adds at its highest, and how long 30 batches of other lengths take from an empty compile cache.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import transformers.integrations.flex_attention as upstream
from _timing import peak_bytes, side_by_side

from fsdp_sink_patches.ops import block_masks, sink_attention
from fsdp_sink_patches.ops.flex_attention import flex_attention

HEADS, KV_HEADS, HEAD_DIM, WINDOW, DOCUMENTS = 64, 8, 64, 128, 4
UPSTREAM, OURS, NO_SINK, FLASH = "flex, transformers'", "flex, ours", "flex, no sink", "ours on flash kernels"

Variant = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def variants(length: int, window: int | None) -> dict[str, Variant]:
    """Name -> attention of q, k, v ``[1, heads, length, head_dim]`` and sinks, as ``[1, length, heads, head_dim]``."""
    starts = torch.arange(0, length, length // DOCUMENTS, device="cuda")
    mask = block_masks.causal(length, documents=starts, window=window, device="cuda")
    cu_seqlens = torch.arange(0, length + 1, length // DOCUMENTS, device="cuda", dtype=torch.int32)
    module = types.SimpleNamespace(training=True)
    size = (-1, -1) if window is None else (window - 1, 0)

    def theirs(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Tensor:
        return upstream.flex_attention_forward(module, q, k, v, mask, scaling=HEAD_DIM**-0.5, s_aux=sinks)[0]

    def ours(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Tensor:
        return flex_attention(q, k, v, sinks, mask=mask)[0].transpose(1, 2).contiguous()

    def without(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Tensor:
        return upstream.flex_attention_forward(module, q, k, v, mask, scaling=HEAD_DIM**-0.5)[0]

    def flash(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Tensor:
        packed = (t.transpose(1, 2)[0] for t in (q, k, v))
        longest = length // DOCUMENTS
        out = sink_attention.flash_attn_varlen_func(
            *packed, cu_seqlens, cu_seqlens, longest, longest, causal=True, window_size=size, s_aux=sinks
        )
        assert isinstance(out, Tensor)
        return out[None]

    return {UPSTREAM: theirs, OURS: ours, NO_SINK: without, FLASH: flash}


def inputs(length: int) -> tuple[Any, Tensor]:
    generator = torch.Generator("cuda").manual_seed(0)
    shapes = [(1, length, h, HEAD_DIM) for h in (HEADS, KV_HEADS, KV_HEADS, HEADS)]
    q, k, v, dout = (torch.randn(s, device="cuda", generator=generator).bfloat16() for s in shapes)
    sinks = 2 * torch.randn(HEADS, device="cuda", generator=generator)
    sinks[:3] = torch.tensor([4.0, 8.0, 20.0])
    leaves = [t.transpose(1, 2).requires_grad_() for t in (q, k, v)]
    return [*leaves, sinks.bfloat16().requires_grad_()], dout


def step(attention: Variant, leaves: Any, dout: Tensor) -> None:
    q, k, v, sinks = leaves
    torch.autograd.grad(attention(q, k, v, sinks), leaves, dout, allow_unused=True)


def forward(attention: Variant, leaves: Any) -> Tensor:
    with torch.no_grad():
        q, k, v, sinks = leaves
        return attention(q, k, v, sinks)


def measure(length: int, window: int | None) -> list[dict[str, Any]]:
    leaves, dout = inputs(length)
    found = variants(length, window)
    forwards = side_by_side({n: lambda f=f: forward(f, leaves) for n, f in found.items()})
    steps = side_by_side({n: lambda f=f: step(f, leaves, dout) for n, f in found.items()})
    return [
        {
            "tokens": length,
            "window": window,
            "variant": name,
            "forward_ms": forwards[name],
            "step_ms": steps[name],
            "forward_ratio": forwards[name] / forwards[NO_SINK],
            "step_ratio": steps[name] / steps[NO_SINK],
            "peak_mib": peak_bytes(lambda f=attention: step(f, leaves, dout)) / 2**20,
        }
        for name, attention in found.items()
    ]


def storm(name: str, batches: int = 30) -> float:
    """Seconds of 30 batches of other lengths from an empty compile cache, train and eval taking turns."""
    torch._dynamo.reset()
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for i in range(batches):
        length = DOCUMENTS * (256 + 37 * (i * 7 % batches))
        leaves, dout = inputs(length)
        attention = variants(length, WINDOW)[name]
        if i % 3 == 2:
            forward(attention, leaves)
        else:
            step(attention, leaves, dout)
    torch.cuda.synchronize()
    return time.perf_counter() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, nargs="+", default=[8192, 32768])
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    rows = [row for length in arguments.tokens for window in (None, WINDOW) for row in measure(length, window)]
    for r in rows:
        layer = "full" if r["window"] is None else f"window {r['window']}"
        print(
            f"{r['tokens']:6d} {layer:10s} {r['variant']:22s} "
            f"forward {r['forward_ms']:8.3f} ms {r['forward_ratio']:5.2f}x  "
            f"step {r['step_ms']:8.3f} ms {r['step_ratio']:5.2f}x  {r['peak_mib']:7.0f} MiB",
            flush=True,
        )
    storms = {name: storm(name) for name in (UPSTREAM, OURS)}
    for name, seconds in storms.items():
        print(f"30 batches of other lengths  {name:22s} {seconds:6.1f} s")
    if arguments.json:
        found = {"card": torch.cuda.get_device_name(), "torch": torch.__version__, "rows": rows, "storm_s": storms}
        arguments.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
