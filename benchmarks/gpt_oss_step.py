"""A training step of four layers of gpt-oss-20b's width, every attention side by side: ``python
benchmarks/gpt_oss_step.py``.

Real transformers classes, 8 experts, vocabulary 25136, bf16. ``flash_attention_2`` runs through our patches, on the
best backend that is installed and (``ours, torch``) on torch's own kernels; eager and flex are transformers' own.
``no sinks, torch`` is the last with the sinks left out: wrong numbers, and the time and memory that sinks may cost.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import fsdp_sink_patches
from fsdp_sink_patches.ops import sink_attention
from fsdp_sink_patches.ops.sink_attention import _backends, backends

WIDTH: dict[str, Any] = {
    "num_hidden_layers": 4,
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "sliding_window": 128,
    "num_local_experts": 8,
    "num_experts_per_tok": 4,
    "vocab_size": 25136,
}


def build(implementation: str) -> Any:
    from transformers import GptOssConfig, GptOssForCausalLM

    torch.manual_seed(0)
    with torch.device("cuda"):
        model = GptOssForCausalLM._from_config(
            GptOssConfig(**WIDTH), attn_implementation=implementation, dtype=torch.bfloat16
        )
    return model.train()


def measure(name: str, implementation: str, seqlen: int, documents: int, repeats: int) -> dict[str, Any]:
    """Median step over ``repeats``; tokens a second and peak memory, or what stopped it."""
    row: dict[str, Any] = {"variant": name, "seqlen": seqlen, "documents": documents}
    torch.cuda.empty_cache()
    try:
        model = build(implementation)
        ids = torch.randint(0, WIDTH["vocab_size"], (1, seqlen), device="cuda")
        positions = torch.arange(seqlen // documents, device="cuda").repeat(documents)[None]
        times = []
        torch.cuda.reset_peak_memory_stats()
        for _ in range(repeats + 3):
            torch.cuda.synchronize()
            begin = time.perf_counter()
            model.zero_grad(set_to_none=True)
            logits = model(input_ids=ids, position_ids=positions, use_cache=False).logits
            F.cross_entropy(logits[0, :-1].float(), ids[0, 1:]).backward()
            torch.cuda.synchronize()
            times.append(time.perf_counter() - begin)
        step = statistics.median(times[3:])
        row |= {"step_ms": 1000 * step, "tokens_per_s": seqlen / step}
        row["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
    except torch.OutOfMemoryError:
        row["error"] = "out of memory"
    return row


def without_flash_packages() -> None:
    """Choose as a machine without any flash-attn package does."""
    known = _backends._unavailable
    _backends._unavailable = lambda name: "left out" if name.startswith("flash-attn") else known(name)  # type: ignore[assignment]
    _backends.select.cache_clear()


@contextlib.contextmanager
def sinks_left_out() -> Iterator[None]:
    """The same calls with no sinks."""
    names = "flash_attn_func", "flash_attn_varlen_func"
    kept = {name: getattr(sink_attention, name) for name in names}
    for name, function in kept.items():
        setattr(sink_attention, name, lambda *a, s_aux=None, _function=function, **k: _function(*a, **k))
    try:
        yield
    finally:
        for name, function in kept.items():
            setattr(sink_attention, name, function)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seqlen", type=int, nargs="+", default=[8192])
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument(
        "--only", nargs="+", metavar="NAME", help="of the variants, e.g. 'ours, torch' 'no sinks, torch'"
    )
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    fsdp_sink_patches.apply("transformers.flash-sinks", "transformers.packed-masks")
    rows = []
    cases = [(seqlen, documents) for seqlen in arguments.seqlen for documents in (1, 4)]
    best = next(name for name, state in backends().items() if state == "available")

    def show(name: str, implementation: str, seqlen: int, documents: int) -> None:
        if arguments.only and name not in arguments.only:
            return
        rows.append(measure(name, implementation, seqlen, documents, arguments.repeats))
        r = rows[-1]
        figures = r.get("error") or f"{r['step_ms']:8.1f} ms {r['tokens_per_s']:9.0f} tokens/s {r['peak_gib']:6.1f} GiB"
        print(f"{seqlen:6d} tokens, {documents} documents  {name:20s} {figures}", flush=True)

    for seqlen, documents in cases:
        show("eager", "eager", seqlen, documents)
        show("flex_attention", "flex_attention", seqlen, documents)
        if best != "torch":
            show(f"ours, {best}", "flash_attention_2", seqlen, documents)
    without_flash_packages()
    for seqlen, documents in cases:
        show("ours, torch", "flash_attention_2", seqlen, documents)
        with sinks_left_out():
            show("no sinks, torch", "flash_attention_2", seqlen, documents)
    if arguments.json:
        card = torch.cuda.get_device_name()
        arguments.json.write_text(json.dumps({"card": card, "torch": torch.__version__, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
