"""A tiny gpt-oss trains on packed text under FSDP2.

    torchrun --nproc-per-node 2 demo/train.py --attn eager                          the accepted workaround today
    torchrun --nproc-per-node 2 demo/train.py --attn flash_attention_2 --patched    with this package

The model is transformers' own class, the text is the help that ships with Python, the rows are packed: several
documents a row, ``position_ids`` restarting at each. Rank 0 prints a JSON line a step. Every ``--measure-every`` steps
it writes ``measure-NNNN.pt`` (weights, log-probs of held-out rows, gradient of the sinks), from which ``demo/run.py``
works out how far this training is from the model that fp64 eager attention computes, one document at a time.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import resource
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

BEGIN_OF_DOCUMENT = 256  # after the 256 byte values
VOCAB = 257


@dataclass(frozen=True)
class Row:
    """One packed row: documents end to end, ``position_ids`` restarting at each. Both ``[1, seq_len]``, int64."""

    input_ids: Tensor
    position_ids: Tensor

    def documents(self) -> list[slice]:
        starts = [*torch.nonzero(self.position_ids[0] == 0).flatten().tolist(), self.input_ids.shape[1]]
        return [slice(a, b) for a, b in itertools.pairwise(starts)]

    def to(self, device: torch.device) -> Row:
        return Row(self.input_ids.to(device), self.position_ids.to(device))


def texts() -> list[bytes]:
    """The help topics that ship with Python, cut at blank lines into documents of about 50 to 160 bytes."""
    documents, current = [], ""
    for paragraph in "\n\n".join(text for _, text in sorted(topics.items())).split("\n\n"):
        current = (current + "\n\n" + paragraph).strip()
        if len(current) >= 50:
            documents.append(current.encode()[:160])
            current = ""
    return documents


def rows(documents: list[bytes], seq_len: int, seed: int) -> Iterator[Row]:
    """Packed rows without end, from shuffled documents; the last document of a row is cut where the row is full."""
    shuffled = random.Random(seed)
    ids: list[int] = []
    positions: list[int] = []
    while True:
        document = [BEGIN_OF_DOCUMENT, *shuffled.choice(documents)]
        ids += document
        positions += range(len(document))
        if len(ids) >= seq_len:
            yield Row(torch.tensor([ids[:seq_len]]), torch.tensor([positions[:seq_len]]))
            ids, positions = [], []


def build_model(attn_implementation: str, seed: int = 0) -> Any:
    """transformers' gpt-oss: 4 layers, every other one with a window of 64, sinks drawn around 4."""
    from transformers import GptOssConfig, GptOssForCausalLM

    torch.manual_seed(seed)
    config = GptOssConfig(
        vocab_size=VOCAB, hidden_size=128, intermediate_size=128, num_hidden_layers=4,
        num_attention_heads=8, num_key_value_heads=2, head_dim=64, sliding_window=64,
        num_local_experts=4, num_experts_per_tok=2, use_cache=False,
        pad_token_id=None, bos_token_id=BEGIN_OF_DOCUMENT, eos_token_id=None,
    )  # fmt: skip
    model = GptOssForCausalLM._from_config(config, attn_implementation=attn_implementation)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.sinks.normal_(4.0, 1.0)
    return model


def token_logprobs(model: Any, row: Row) -> Tensor:
    """Log-probability of each token given the ones before it in its document, fp32 or fp64 ``[tokens]``, in nats."""
    logits = model(input_ids=row.input_ids, position_ids=row.position_ids).logits[0, :-1]
    logp = torch.log_softmax(logits.to(torch.promote_types(logits.dtype, torch.float32)), dim=-1)
    logp = logp.gather(1, row.input_ids[0, 1:, None])[:, 0]
    return logp[row.position_ids[0, 1:] != 0]  # the first token of a document has nothing before it


def logprobs_alone(model: Any, row: Row) -> list[Tensor]:
    """The same, one list entry a document: each is run by itself, so that it can see nothing else."""
    return [token_logprobs(model, Row(row.input_ids[:, d], row.position_ids[:, d])) for d in row.documents()]


def sink_gradients(model: Any) -> Tensor:
    """Gradient of every layer's sinks, ``[layers, heads]``; FSDP2 keeps it sharded, so this is a collective."""
    grads = [layer.self_attn.sinks.grad for layer in model.model.layers]
    return torch.stack([g.full_tensor() if hasattr(g, "full_tensor") else g for g in grads])


def measure(model: Any, held_out: list[Row], rank: int, path: Path) -> None:
    """Write what this training process computes on the held-out rows (one a rank), and with which weights."""
    device = next(model.parameters()).device
    row = held_out[rank].to(device)
    logp = token_logprobs(model, row)
    (-logp.mean()).backward()
    sinks = sink_gradients(model)
    model.zero_grad()
    with torch.no_grad():
        alone = logprobs_alone(model, row)
        # Every forward gathers shards from all ranks, so a rank with fewer documents in its row runs some more.
        for _ in range(max(len(r.documents()) for r in held_out) - len(alone)):
            token_logprobs(model, Row(row.input_ids[:, :8], row.position_ids[:, :8]))
    weights = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    mine = {"logprobs": logp.detach().cpu(), "alone": torch.cat(alone).cpu()}
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    if rank == 0:
        found = {"weights": weights, "sink_gradients": sinks.cpu(), "rows": [vars(r) for r in held_out]}
        torch.save(found | {k: [each[k] for each in everyone] for k in mine}, path)


def highest_peak(allocated: int, device: torch.device) -> int:
    """Bytes, the highest of all ranks: ``allocated`` on CUDA, elsewhere resident memory of the process's whole life."""
    peak = allocated
    if device.type != "cuda":
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    highest = torch.tensor(peak, device=device)
    dist.all_reduce(highest, dist.ReduceOp.MAX)
    return int(highest)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--attn", default="flash_attention_2", help="attn_implementation, as in from_pretrained")
    parser.add_argument("--patched", action="store_true", help="the two lines: import fsdp_sink_patches; apply()")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--measure-every", type=int, default=10)
    parser.add_argument("--seq-len", type=int, default=512)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], help="compute dtype (CPU float32, CUDA bfloat16)")
    parser.add_argument("--out", type=Path, default=Path("demo_out/train"))
    args = parser.parse_args()
    device = torch.device(args.device)
    args.out.mkdir(parents=True, exist_ok=True)

    if args.patched:
        import fsdp_sink_patches

        fsdp_sink_patches.apply()

    dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    model = build_model(args.attn).to(device)
    # On a GPU the usual recipe: fp32 weights, bf16 compute, fp32 reduction.
    dtype = getattr(torch, args.dtype or ("bfloat16" if device.type == "cuda" else "float32"))
    precision = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    shard = partial(fully_shard, mesh=init_device_mesh(device.type, (world,)), mp_policy=precision)
    for layer in model.model.layers:
        shard(layer)
    shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)

    documents = texts()
    held_out = list(itertools.islice(rows(documents[::10], args.seq_len, seed=1), world))
    del documents[::10]
    stream = itertools.islice(rows(documents, args.seq_len, seed=2), rank, None, world)

    seconds: list[float] = []
    allocated = 0  # by a training step at its peak, without what measure() needs
    for step in range(args.steps + 1):
        if step % args.measure_every == 0 or step == args.steps:
            measure(model, held_out, rank, args.out / f"measure-{step:04d}.pt")
        if args.patched and step == 0:
            # verl and others assign their own functions after the model is built, so this belongs at step 0.
            fsdp_sink_patches.assert_applied("transformers.flash-sinks", "transformers.packed-masks")
        if step == args.steps:
            break
        row = next(stream).to(device)
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        begin = time.perf_counter()
        loss = -token_logprobs(model, row).mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach().clone()
        dist.all_reduce(total)
        mean = total.item() / world  # waits for the device
        seconds.append(time.perf_counter() - begin)
        if device.type == "cuda":
            allocated = max(allocated, torch.cuda.max_memory_allocated(device))
        if rank == 0:
            print(json.dumps({"step": step + 1, "loss": round(mean, 4), "seconds": round(seconds[-1], 4)}), flush=True)

    peak = highest_peak(allocated, device)
    if rank == 0:
        result = {
            "attn_implementation": args.attn,
            "patched": args.patched,
            "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
            "compute_dtype": str(dtype).removeprefix("torch."),
            "ranks": world,
            "seq_len": args.seq_len,
            "documents_per_row": [len(r.documents()) for r in held_out],
            "tokens_per_second": world * args.seq_len / statistics.median(seconds[2:] or seconds or [float("nan")]),
            "peak_bytes": peak,
        }
        (args.out / "result.json").write_text(json.dumps(result, indent=2) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
