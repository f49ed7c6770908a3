"""A DFlash draft as a LoRA of its target: one sequence in, blocks filled in parallel, and what three changes save.

    python examples/dflash_lora.py                                      # a tiny Qwen3, on a CPU too
    torchrun --nproc-per-node 8 examples/dflash_lora.py --model qwen3-8b --seq-len 4096
    python examples/dflash_lora.py --compare --model qwen3-8b --layers 8 --seq-len 4096

The row is cut into blocks. Of each block only the first token, the anchor, is given; the others are mask tokens, and
the model fills them in at once: a position sees everything before its block's end, so the context is causal and a block
bidirectional (``Q_LEN == KV_LEN == seq_len``). The three changes, each with the switch that undoes it:

    --attention-backend additive   a dense 4-D additive mask and sdpa, instead of a BlockMask and flex attention
    --lm-head-chunk-size 0         all logits at once, instead of a chunked loss
    --sharding SHARD_GRAD_OP       parameters stay whole on each GPU after the forward, instead of FULL_SHARD

``--compare`` measures the run without any of them, then adds one after the other, each in a process of its own, and
prints a table; ``--plot FILE`` draws it. Needs peft.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from fsdp_sink_patches.ops import block_masks
from fsdp_sink_patches.ops.chunked_loss import linear_cross_entropy

SHAPES: dict[str, dict[str, int]] = {
    "tiny": {
        "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 512,
    },
    "qwen3-8b": {
        "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32,
        "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936,
    },
}  # fmt: skip
CHANGES = (
    ("as it was", ("--attention-backend", "additive", "--lm-head-chunk-size", "0", "--sharding", "SHARD_GRAD_OP")),
    ("BlockMask", ("--lm-head-chunk-size", "0", "--sharding", "SHARD_GRAD_OP")),
    ("and chunked loss", ("--sharding", "SHARD_GRAD_OP")),
    ("and FULL_SHARD", ()),
)


def build(arguments: argparse.Namespace, device: torch.device) -> Any:
    """The target with random weights, frozen, and a LoRA on its attention."""
    from peft import LoraConfig, get_peft_model
    from transformers import Qwen3Config, Qwen3ForCausalLM

    shape = dict(SHAPES[arguments.model])
    if arguments.layers:
        shape["num_hidden_layers"] = arguments.layers
    # A CPU differentiates no flex attention: there sdpa is shown the same BlockMask as a dense one.
    flex = arguments.attention_backend == "flex_attention" and device.type == "cuda"
    torch.manual_seed(0)
    with device:
        model = Qwen3ForCausalLM._from_config(
            Qwen3Config(**shape, tie_word_embeddings=False, max_position_embeddings=arguments.seq_len),
            attn_implementation="flex_attention" if flex else "sdpa",
            dtype=torch.bfloat16 if device.type == "cuda" else torch.float32,
        )
    lora = LoraConfig(r=16, lora_alpha=32, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"])
    torch.manual_seed(1)
    return get_peft_model(model, lora).train()


def shard(model: Any, sharding: str) -> None:
    """FSDP2 over every rank: FULL_SHARD frees a layer's parameters after its forward, SHARD_GRAD_OP keeps them."""
    from torch.distributed.fsdp import fully_shard

    options = {"reshard_after_forward": sharding == "FULL_SHARD"}
    for layer in model.base_model.model.model.layers:
        fully_shard(layer, **options)
    fully_shard(model, **options)


def mask_of(arguments: argparse.Namespace, device: torch.device, dtype: torch.dtype) -> Any:
    """What the model is given as ``attention_mask``."""
    if arguments.attention_backend == "additive":
        position = torch.arange(arguments.seq_len, device=device)
        seen = position < ((position // arguments.draft_block + 1) * arguments.draft_block)[:, None]
        return torch.zeros(seen.shape, device=device, dtype=dtype).masked_fill(~seen, torch.finfo(dtype).min)[
            None, None
        ]
    mask = block_masks.dflash_lora(arguments.seq_len, arguments.draft_block, device=device)
    return mask if device.type == "cuda" else block_masks.dense(mask)


def batch(arguments: argparse.Namespace, vocab: int, step: int, device: torch.device) -> tuple[Any, Any]:
    """A row with its blocks masked, and labels, -100 at the anchors. A pattern that can be learnt."""
    generator = torch.Generator().manual_seed(1000 * step + (dist.get_rank() if dist.is_initialized() else 0))
    start = torch.randint(0, vocab - 1, (1, 1), generator=generator)
    tokens = ((start + 7 * torch.arange(arguments.seq_len)) % (vocab - 1)).to(device)
    anchors = torch.arange(arguments.seq_len, device=device) % arguments.draft_block == 0
    return torch.where(anchors, tokens, vocab - 1), tokens.masked_fill(anchors, -100)


def loss_of(hidden: Any, head: Any, labels: Any, chunk: int) -> Any:
    """Mean cross-entropy of the masked tokens; ``chunk`` rows of logits at a time, or 0 for all at once."""
    if chunk == 0:
        return F.cross_entropy(head(hidden).float().flatten(0, -2), labels.flatten())
    return linear_cross_entropy(hidden, head.weight, labels, chunk_size=chunk)


def train(arguments: argparse.Namespace) -> dict[str, Any]:
    """Losses, and on CUDA the memory of each step in GiB."""
    distributed = "RANK" in os.environ
    cuda = torch.cuda.is_available() and not arguments.cpu
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    if distributed:
        dist.init_process_group("nccl" if cuda else "gloo")
    model = build(arguments, device)
    inner = model.base_model.model
    vocab, dtype = inner.config.vocab_size, next(inner.parameters()).dtype
    if distributed:
        shard(model, arguments.sharding)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=arguments.lr)
    chief = not distributed or dist.get_rank() == 0
    console = Console(stderr=True, quiet=not chief)
    found: dict[str, Any] = {"losses": [], "gib": [], "step_ms": []}
    with Progress(console=console) as progress:
        task = progress.add_task("training", total=arguments.steps)
        for step in range(arguments.steps):
            if cuda:
                torch.cuda.reset_peak_memory_stats()
            begin = time.perf_counter()
            tokens, labels = batch(arguments, vocab, step, device)
            mask = mask_of(arguments, device, dtype)
            loss = model(
                input_ids=tokens, attention_mask=mask, use_cache=False, labels=labels,
                chunk=arguments.lm_head_chunk_size,
            )  # fmt: skip
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            shown = loss.detach().clone()
            if distributed:
                dist.all_reduce(shown)
                shown /= dist.get_world_size()
            found["losses"].append(float(shown))  # waits for the device
            found["step_ms"].append(1000 * (time.perf_counter() - begin))
            line = f"step {step}: loss {found['losses'][-1]:.4f}"
            if cuda:
                found["gib"].append(torch.cuda.max_memory_allocated() / 2**30)
                line += f", {found['gib'][-1]:.2f} GiB at the highest, {torch.cuda.memory_allocated() / 2**30:.2f} kept"
            progress.console.print(line)
            progress.advance(task)
    if distributed:
        dist.destroy_process_group()
    return found if chief else {}


def with_own_loss(model_class: Any) -> None:
    """The causal model's forward, ended by :func:`loss_of`: FSDP gathers its parameters for a forward, so the loss
    belongs inside of one."""

    def forward(
        self: Any, input_ids: Any, attention_mask: Any, use_cache: bool, labels: Any, chunk: int, **_: Any
    ) -> Any:
        hidden = self.model(input_ids=input_ids, attention_mask=attention_mask, use_cache=use_cache).last_hidden_state
        return loss_of(hidden, self.lm_head, labels, chunk)

    model_class.forward = forward


def compare(arguments: argparse.Namespace, given: list[str]) -> list[dict[str, Any]]:
    """One process a row; each adds a change."""
    kept = [word for word in given if word not in ("--compare", "--json")]
    rows = []
    for name, switches in CHANGES:
        command = [sys.executable, __file__, *kept, *switches, "--json"]
        if arguments.processes > 1:
            command[1:2] = ["-m", "torch.distributed.run", "--nproc-per-node", str(arguments.processes), __file__]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            rows.append({"name": name, "error": done.stderr.strip().splitlines()[-1]})
            continue
        found = json.loads(done.stdout.strip().splitlines()[-1])
        rows.append({"name": name, **found})
    table = Table("", "highest, GiB", "median step, ms", "last loss")
    for row in rows:
        if "error" in row:
            table.add_row(row["name"], row["error"], "", "")
            continue
        later = sorted(row["step_ms"][1:]) or row["step_ms"]
        highest = f"{max(row['gib']):.2f}" if row["gib"] else "not counted on a CPU"
        table.add_row(row["name"], highest, f"{later[len(later) // 2]:.0f}", f"{row['losses'][-1]:.4f}")
    Console().print(table)
    if arguments.plot:
        plot(rows, arguments.plot)
    return rows


def plot(rows: list[dict[str, Any]], file: Path) -> None:
    """The memory of the last run, and on top of it what each change saved."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    peaks = [(row["name"], max(row["gib"])) for row in rows if row.get("gib")]
    if not peaks:
        raise SystemExit("examples/dflash_lora.py: found no memory to draw; expected runs on CUDA. Leave --plot out.")
    figure, axes = pyplot.subplots(figsize=(5, 5))
    bottom = peaks[-1][1]
    axes.bar(["peak memory"], [bottom], label="left")
    for (_, before), (name, after) in reversed(list(itertools.pairwise(peaks))):
        saved = max(before - after, 0)
        axes.bar(["peak memory"], [saved], bottom=bottom, label=f"saved by {name.removeprefix('and ')}")
        bottom += saved
    axes.set_ylabel("GiB")
    axes.legend()
    figure.savefig(file, dpi=120, bbox_inches="tight")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=list(SHAPES), default="tiny")
    parser.add_argument("--layers", type=int, help="instead of the model's own number")
    parser.add_argument("--seq-len", type=int, default=128)
    parser.add_argument("--draft-block", type=int, default=16)
    parser.add_argument("--attention-backend", choices=("flex_attention", "additive"), default="flex_attention")
    parser.add_argument("--lm-head-chunk-size", type=int, default=256, help="rows of logits at a time; 0 for all")
    parser.add_argument("--sharding", choices=("FULL_SHARD", "SHARD_GRAD_OP"), default="FULL_SHARD")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--cpu", action="store_true", help="also where there is a GPU")
    parser.add_argument("--json", action="store_true", help="one JSON object on the last line")
    parser.add_argument("--compare", action="store_true")
    parser.add_argument("--processes", type=int, default=1, help="ranks of each run of --compare")
    parser.add_argument("--plot", type=Path, help="with --compare: a stacked bar")
    arguments = parser.parse_args()
    if arguments.seq_len % arguments.draft_block:
        parser.error(f"--seq-len {arguments.seq_len} is no multiple of --draft-block {arguments.draft_block}")
    if arguments.compare:
        result: Any = compare(arguments, sys.argv[1:])
    else:
        from transformers import Qwen3ForCausalLM

        with_own_loss(Qwen3ForCausalLM)
        result = train(arguments)
    if arguments.json and result:
        print(json.dumps(result))


if __name__ == "__main__":
    main()
