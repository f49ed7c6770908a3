"""What it costs to make a BlockMask: ``python benchmarks/block_masks.py [--json FILE]``.

Draft training with 3072 anchors, blocks of 8 and a context of 4096 (Q 24576, KV 28672), and the other builders at that
size, against ``create_block_mask`` of the same rule, compiled and eager. Median milliseconds of one build, and the
memory that it adds at its highest, as torch's allocators count it. On CUDA also attention through both masks, forward
and backward, since the two mask_mods differ.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from fsdp_sink_patches.ops import block_masks

ANCHORS, DRAFT, CONTEXT, WINDOW = 3072, 8, 4096, 512
DRAFTS = ANCHORS * DRAFT
TOTAL = CONTEXT + DRAFTS
HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128
LISTS = (
    "kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices",
    "q_num_blocks", "q_indices", "full_q_num_blocks", "full_q_indices",
)  # fmt: skip

Case = tuple[Callable[[], BlockMask], Callable[..., Tensor], int]


def cases(device: str) -> dict[str, Case]:
    """Name -> (our builder, the rule as a mask_mod, Q_LEN); all with KV_LEN 28672."""
    generator = torch.Generator().manual_seed(0)
    anchors = torch.randint(1, CONTEXT, (1, ANCHORS), generator=generator).sort(1).values.to(device)
    starts = torch.randint(1, TOTAL, (1, 63), generator=generator).sort(1).values.to(device)
    starts = torch.cat([torch.zeros_like(starts[:, :1]), starts], 1)
    owner = torch.searchsorted(starts, torch.arange(TOTAL, device=device)[None], right=True)

    def drafts(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        own = (kv >= CONTEXT) & ((kv - CONTEXT) // DRAFT == q // DRAFT)
        return ((kv < CONTEXT) & (kv < anchors[b, q // DRAFT])) | own

    def windowed(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        anchor = anchors[b, q // DRAFT]
        own = (kv >= CONTEXT) & ((kv - CONTEXT) // DRAFT == q // DRAFT) & (kv - CONTEXT <= q)
        return ((kv < CONTEXT) & (kv < anchor) & (kv > anchor + q % DRAFT - WINDOW)) | own

    def lora(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return kv // DRAFT <= q // DRAFT

    def packed(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return (kv <= q) & (owner[b, q] == owner[b, kv])

    return {
        "drafts": (lambda: block_masks.dflash(anchors, CONTEXT, DRAFT), drafts, DRAFTS),
        "drafts, window 512": (
            lambda: block_masks.dflash(anchors, CONTEXT, DRAFT, window=WINDOW, causal_blocks=True), windowed, DRAFTS,
        ),
        "LoRA form": (lambda: block_masks.dflash_lora(TOTAL, DRAFT, device=device), lora, TOTAL),
        "64 packed documents": (lambda: block_masks.causal(TOTAL, documents=starts), packed, TOTAL),
    }  # fmt: skip


def measure(build: Callable[[], BlockMask], device: str, repeats: int) -> dict[str, float]:
    build()
    times = []
    for _ in range(repeats):
        _wait(device)
        begin = time.perf_counter()
        build()
        _wait(device)
        times.append(1000 * (time.perf_counter() - begin))
    return {"ms": statistics.median(times), "added_mib": _added_bytes(build, device) / 2**20}


def attention(mask: BlockMask, q_len: int) -> dict[str, float]:
    """Forward and backward of compiled flex attention, bf16, on CUDA."""
    q, k, v, dout = (
        torch.randn(1, heads, length, HEAD_DIM, device="cuda", dtype=torch.bfloat16, requires_grad=grad)
        for heads, length, grad in (
            (HEADS, q_len, True), (KV_HEADS, TOTAL, True), (KV_HEADS, TOTAL, True), (HEADS, q_len, False)
        )
    )  # fmt: skip
    compiled: Any = torch.compile(flex_attention)
    times: dict[str, list[float]] = {"forward_ms": [], "backward_ms": []}
    for _ in range(12):
        _wait("cuda")
        begin = time.perf_counter()
        out = compiled(q, k, v, block_mask=mask, enable_gqa=True)
        _wait("cuda")
        middle = time.perf_counter()
        torch.autograd.grad(out, (q, k, v), dout)
        _wait("cuda")
        times["forward_ms"].append(1000 * (middle - begin))
        times["backward_ms"].append(1000 * (time.perf_counter() - middle))
    return {name: statistics.median(found[2:]) for name, found in times.items()}


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def _added_bytes(build: Callable[[], BlockMask], device: str) -> int:
    gc.collect()
    if device == "cuda":
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        build()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        build()
    changes = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    changes.sort(key=lambda event: event.start_ns())
    return max(itertools.accumulate((event.nbytes() for event in changes), initial=0))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--repeats", type=int, default=20, help="builds whose median counts; a tenth of it when slow")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    device, rows = arguments.device, []
    name = (
        torch.cuda.get_device_name()
        if device == "cuda"
        else f"CPU ({platform.machine()}), {torch.get_num_threads()} thread(s)"
    )
    for case, (build, rule, q_len) in cases(device).items():
        create: Any = torch.compile(create_block_mask)
        variants: dict[str, Callable[[], BlockMask]] = {
            "ours": build,
            "create_block_mask, compiled": lambda: create(rule, 1, None, q_len, TOTAL, device),  # noqa: B023
            "create_block_mask, eager": lambda: create_block_mask(rule, 1, None, q_len, TOTAL, device),  # noqa: B023
        }
        ours, theirs = build(), variants["create_block_mask, compiled"]()
        different = [n for n in LISTS if not torch.equal(getattr(ours, n), getattr(theirs, n))]
        if different:
            raise SystemExit(f"{case}: the lists differ from create_block_mask's: {', '.join(different)}")
        for variant, run in variants.items():
            repeats = arguments.repeats if variant == "ours" or device == "cuda" else max(2, arguments.repeats // 10)
            row: dict[str, Any] = {"case": case, "variant": variant, **measure(run, device, repeats)}
            if device == "cuda" and variant != "create_block_mask, eager":
                row |= attention(run(), q_len)
            rows.append(row)
            numbers = "  ".join(f"{key} {value:.2f}" for key, value in row.items() if isinstance(value, float))
            print(f"{case:22} {variant:28} {numbers}", flush=True)
        if arguments.json:
            document = {"device": name, "torch": torch.__version__, "rows": rows}
            arguments.json.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
