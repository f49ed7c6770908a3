"""Four layers of DeepSeek-V4-Flash's width, 8 experts, bf16, with and without our patches: ``python
benchmarks/deepseek_v4_step.py``.

Real transformers classes, packed rows. Prints for each set of patches the median training step, tokens a second, peak
memory and how many cos/sin tables a forward computes, and the error of the bf16 logits of one plain document against
the same weights in fp32.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import gc
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from fsdp_sink_patches.patches.transformers._deepseek_v4_models import CSA, HCA, SLIDING, build

import fsdp_sink_patches
from fsdp_sink_patches import monitor, settings
from fsdp_sink_patches.ops.sink_attention.oracle import relative_error

WIDTH: dict[str, Any] = {
    "vocab_size": 16384,
    "hidden_size": 4096,
    "moe_intermediate_size": 2048,
    "num_attention_heads": 64,
    "head_dim": 512,
    "qk_rope_head_dim": 64,
    "q_lora_rank": 1024,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "o_groups": 8,
    "o_lora_rank": 1024,
    "index_n_heads": 64,
    "index_head_dim": 128,
    "index_topk": 512,
    "sliding_window": 128,
    "compress_rates": {CSA: 4, HCA: 128},
    "initializer_range": 0.02,
}
LAYERS = (SLIDING, CSA, HCA, CSA)
SETS: dict[str, tuple[str, ...]] = {
    "upstream": (),
    "deepseek-v4-rope": ("transformers.deepseek-v4-rope",),
    "deepseek-v4-packing": ("transformers.deepseek-v4-packing",),
    "both": ("transformers.deepseek-v4-rope", "transformers.deepseek-v4-packing"),
    "deepseek-v4-attention": ("transformers.deepseek-v4-attention",),
    "attention, packing": ("transformers.deepseek-v4-attention", "transformers.deepseek-v4-packing"),
    "all three": (
        "transformers.deepseek-v4-attention",
        "transformers.deepseek-v4-packing",
        "transformers.deepseek-v4-rope",
    ),
}


def step_of(model: Any, seqlen: int, documents: int) -> tuple[Any, Any]:
    """A training step and a forward on one packed row."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, WIDTH["vocab_size"], (1, seqlen), generator=generator).cuda()
    positions = torch.arange(seqlen // documents, device="cuda").repeat(documents)[None]

    def forward() -> Any:
        return model(input_ids=ids, position_ids=positions, use_cache=False).logits

    def step() -> None:
        model.zero_grad(set_to_none=True)
        F.cross_entropy(forward()[0, :-1].float(), ids[0, 1:]).backward()

    return step, forward


def measure(name: str, model: Any, exact: Any, arguments: argparse.Namespace) -> dict[str, Any]:
    row: dict[str, Any] = {"patches": name, "seqlen": arguments.seqlen, "documents": arguments.documents}
    row["layers"] = arguments.layers
    step, forward = step_of(model, arguments.seqlen, arguments.documents)
    # applied() without ids applies every patch
    with fsdp_sink_patches.applied(*SETS[name]) if SETS[name] else contextlib.nullcontext():
        try:
            step()
            gc.collect()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            times = []
            for _ in range(arguments.repeats):
                torch.cuda.synchronize()
                begin = time.perf_counter()
                step()
                torch.cuda.synchronize()
                times.append(time.perf_counter() - begin)
            row["step_ms"] = 1000 * statistics.median(times)
            row["tokens_per_s"] = arguments.seqlen / statistics.median(times)
            row["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
            model.zero_grad(set_to_none=True)
            with torch.no_grad():
                before = monitor.rope_table_computations()
                forward()
                row["rope_table_computations"] = monitor.rope_table_computations() - before
                torch.cuda.synchronize()
                begin = time.perf_counter()
                forward()
                torch.cuda.synchronize()
                row["forward_ms"] = 1000 * (time.perf_counter() - begin)
                ids = torch.randint(
                    0, WIDTH["vocab_size"], (1, 1000), generator=torch.Generator().manual_seed(1)
                ).cuda()
                found = model(input_ids=ids, use_cache=False).logits
            row["logits_error"] = relative_error(found, exact)
        except torch.OutOfMemoryError:
            row["error"] = "out of memory"
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seqlen", type=int, default=4096)
    parser.add_argument("--documents", type=int, default=4)
    parser.add_argument("--layers", nargs="+", choices=(SLIDING, CSA, HCA), default=list(LAYERS))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--only", nargs="+", choices=list(SETS), default=list(SETS))
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    settings.use(compressed_attention="auto")
    with torch.no_grad():
        model = build(tuple(arguments.layers), torch.bfloat16, "cuda", **WIDTH)
        wide = copy.deepcopy(model).float()
        ids = torch.randint(0, WIDTH["vocab_size"], (1, 1000), generator=torch.Generator().manual_seed(1)).cuda()
        exact = wide(input_ids=ids, use_cache=False).logits
        del wide
    rows = []
    for name in arguments.only:
        rows.append(measure(name, model, exact, arguments))
        r = rows[-1]
        figures = r.get("error") or (
            f"step {r['step_ms']:7.1f} ms, forward {r['forward_ms']:7.1f} ms, {r['tokens_per_s']:8.0f} tokens/s, peak "
            f"{r['peak_gib']:5.1f} GiB, {r['rope_table_computations']} tables counted, logits off by "
            f"{r['logits_error']:.2e}"
        )
        print(f"{name:22s} {figures}", flush=True)
    if arguments.json:
        card = torch.cuda.get_device_name()
        arguments.json.write_text(json.dumps({"card": card, "torch": torch.__version__, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
