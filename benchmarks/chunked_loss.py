"""Loss of a large head, forward and backward together, every way side by side: ``python benchmarks/chunked_loss.py``.

16384 tokens, hidden 2880, bf16, the vocabularies of gpt-oss, DeepSeek-V4 and Qwen3. Prints medians, ratios against all
logits at once, memory (with gradients, and what is left of it without the weight's), and errors against fp64 (by our
own code in fp64, which ``tests/ops`` hold against all logits). ``--json FILE`` keeps the numbers. ``--tune`` tries
chunk sizes and vocabulary blocks instead.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from _timing import peak_bytes, side_by_side

from fsdp_sink_patches.ops.chunked_loss import _tiles, backends, linear_cross_entropy, linear_log_probs, reference
from fsdp_sink_patches.ops.sink_attention.oracle import relative_error

Step = Callable[[], list[Tensor]]


def case(tokens: int, vocab: int, size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Logits with a spread of 2, as an untrained head has them; every tenth label ignored."""
    torch.manual_seed(vocab)
    hidden = torch.randn(tokens, size, device="cuda", dtype=torch.bfloat16)
    weight = (2 * size**-0.5 * torch.randn(vocab, size, device="cuda")).bfloat16()
    labels = torch.randint(0, vocab, (tokens,), device="cuda")
    labels[::10] = -100
    return hidden, weight, labels


def step(loss: Callable[[Tensor, Tensor], Tensor], hidden: Tensor, weight: Tensor, frozen: bool = False) -> Step:
    """One call of a loss with its backward: the loss, the gradient of hidden, and of the weight unless frozen."""

    def run() -> list[Tensor]:
        h, w = hidden.detach().requires_grad_(), weight.detach().requires_grad_(not frozen)
        value = loss(h, w)
        return [value.detach(), *torch.autograd.grad(value, [h] if frozen else [h, w])]

    return run


def variants(hidden: Tensor, weight: Tensor, labels: Tensor) -> dict[str, Step]:
    def log_prob_loss(h: Tensor, w: Tensor) -> Tensor:
        log_probs, entropies = linear_log_probs(h, w, labels)
        return (log_probs - 0.01 * entropies).sum()

    def all_log_probs_loss(h: Tensor, w: Tensor) -> Tensor:
        log_probs, entropies = reference.log_probs(h, w, labels)
        return (log_probs - 0.01 * entropies).sum()

    def ours(**options: Any) -> Callable[[Tensor, Tensor], Tensor]:
        return lambda h, w: linear_cross_entropy(h, w, labels, **options)

    found = {
        "all logits": step(lambda h, w: reference.cross_entropy(h, w, labels), hidden, weight),
        "ours": step(ours(), hidden, weight),
        "ours, recompute=False": step(ours(recompute=False), hidden, weight),
        "ours, no weight gradient": step(ours(), hidden, weight, frozen=True),
        "all logits, log-probs + entropy": step(all_log_probs_loss, hidden, weight),
        "ours, log-probs + entropy": step(log_prob_loss, hidden, weight),
    }
    for name, state in backends().items():
        if name != "torch" and state == "available":
            found[f"{name}, by our call"] = step(ours(backend=name), hidden, weight)
    if backends()["liger"] == "available":
        from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

        found["liger, its defaults"] = step(lambda h, w: liger_fused_linear_cross_entropy(h, w, labels), hidden, weight)
    if backends()["cut-cross-entropy"] == "available":
        import cut_cross_entropy

        found["cut-cross-entropy, its defaults"] = step(
            lambda h, w: cut_cross_entropy.linear_cross_entropy(h, w, labels), hidden, weight
        )
    return found


def yardstick(name: str) -> str:
    return "all logits, log-probs + entropy" if "log-probs" in name else "all logits"


def measure(vocab: int, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    tokens, size = arguments.tokens, arguments.hidden
    hidden, weight, labels = case(tokens, vocab, size)
    runs = variants(hidden, weight, labels)
    if arguments.skip_all_logits:
        runs = {name: run for name, run in runs.items() if not name.startswith("all logits")}
    wide = hidden.double(), weight.double()
    exact = {
        "all logits": step(lambda h, w: linear_cross_entropy(h, w, labels, chunk_size=256), *wide)(),
        "all logits, log-probs + entropy": step(
            lambda h, w: (lambda a, b: (a - 0.01 * b).sum())(*linear_log_probs(h, w, labels, chunk_size=256)), *wide
        )(),
    }
    exact = {name: [t.float() for t in found] for name, found in exact.items()}
    del wide
    torch.cuda.empty_cache()
    times = side_by_side(runs, rounds=arguments.rounds)
    rows = []
    for name, run in runs.items():
        twin = yardstick(name)
        errors = [relative_error(a, b) for a, b in zip(run(), exact[twin], strict=False)]
        peak = peak_bytes(run)
        kept = 0 if name.endswith("no weight gradient") else 2 * vocab * size
        row = {
            "vocab": vocab, "tokens": tokens, "hidden": size, "variant": name, "ms": times[name],
            "ratio": times[name] / times[twin] if twin in times else None, "against": twin,
            "peak_mib": peak / 2**20, "peak_without_dweight_mib": (peak - kept) / 2**20,
            "of_all_fp32_logits": peak / (4 * tokens * vocab),
            "error_loss": errors[0], "error_dhidden": errors[1], "error_dweight": errors[2] if errors[2:] else None,
        }  # fmt: skip
        rows.append(row)
        print(
            f"{vocab:6d} {name:32s} {row['ms']:7.2f} ms x{row['ratio'] or 0:.3f}  {row['peak_mib']:7.0f} MiB, "
            f"{row['of_all_fp32_logits']:.3f} of the logits ({row['peak_without_dweight_mib']:.0f} without dW)  errors",
            *(f"{error:.2e}" for error in errors),
            flush=True,
        )
    return rows


def tune(vocab: int, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    hidden, weight, labels = case(arguments.tokens, vocab, arguments.hidden)
    rows = []
    for chunk, block in itertools.product((128, 256, 512, 1024), (2048, 4096, 8192)):
        _tiles.VOCAB_BLOCK = block
        runs = {
            name: step(
                lambda h, w, r=recompute, c=chunk: linear_cross_entropy(h, w, labels, chunk_size=c, recompute=r),
                hidden, weight, frozen,
            )
            for name, recompute, frozen in (
                ("recompute", True, False), ("kept", False, False), ("frozen, recompute", True, True),
                ("frozen, kept", False, True),
            )
            if block == 4096 or recompute
        }  # fmt: skip
        for name, milliseconds in side_by_side(runs, rounds=1).items():
            peak = peak_bytes(runs[name]) / 2**20
            rows.append(
                {"vocab": vocab, "chunk": chunk, "block": block, "variant": name, "ms": milliseconds, "peak_mib": peak}
            )
            print(
                f"{vocab:7d} chunk {chunk:5d} block {block:5d} {name:18s} {milliseconds:8.2f} ms {peak:8.0f} MiB",
                flush=True,
            )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--vocab", type=int, nargs="+", default=[201088, 129280, 151936])
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--hidden", type=int, default=2880)
    parser.add_argument("--rounds", type=int, default=3, help="turns that each variant takes; the median counts")
    parser.add_argument("--skip-all-logits", action="store_true", help="where they do not fit")
    parser.add_argument("--tune", action="store_true")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    rows = []
    for vocab in arguments.vocab:
        rows += (tune if arguments.tune else measure)(vocab, arguments)
        torch.cuda.empty_cache()
        if arguments.json:
            card = torch.cuda.get_device_name()
            document = {"card": card, "torch": torch.__version__, "backends": backends(), "rows": rows}
            arguments.json.write_text(json.dumps(document, indent=1))


if __name__ == "__main__":
    main()
