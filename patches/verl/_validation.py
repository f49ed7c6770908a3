"""What the verl patches are measured by: a real gpt-oss on two ranks through verl's own functions, and fp64 alone."""

from __future__ import annotations

import importlib
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from fsdp_sink_patches.patches.transformers._validation import TINY, build, packed_row
from torch import Tensor
from torch.multiprocessing.spawn import ProcessRaisedException, spawn

import fsdp_sink_patches
from fsdp_sink_patches import Measurement
from fsdp_sink_patches.ops.sink_attention.oracle import relative_error

LENGTHS = (200, 1, 57, 254)
"""Documents of the row that the ranks share; the first border of ranks lies inside the last document."""

LIMITS = {"logits": 1e-5, "dsink": 1e-5, "dq_proj": 1e-5}


def ulysses_sinks(device: str, size: int = 2) -> Measurement:
    """A training step of gpt-oss on ``size`` ranks; ``transformers.flash-sinks`` computes the attention either way.

    Args:
        device: ``"cuda"`` puts a rank on each GPU (NCCL) where there are enough; else the ranks are CPU processes
            (gloo): what the patch does is the same there, and the kernels have records of their own.
        size: the sequence-parallel size.
    """
    importlib.import_module("verl.models.transformers.monkey_patch")  # so that the state is more than "armed"
    here = fsdp_sink_patches.status()["verl.ulysses-sinks"]
    ids = ("transformers.flash-sinks", *([here.id] if here.state == "applied" else []))
    allowed = (here.id,) if here.fingerprint == "allowed" else ()
    cuda = device != "cpu" and torch.cuda.device_count() >= size
    with tempfile.TemporaryDirectory() as folder:
        try:
            spawn(_rank, args=(size, folder, cuda, ids, allowed), nprocs=size)  # type: ignore[no-untyped-call]
        except ProcessRaisedException as error:
            # Its text is a whole traceback; the last line is what the rank raised.
            raise RuntimeError(str(error).strip().splitlines()[-1]) from error
        found: dict[str, Any] = json.loads((Path(folder) / "found.json").read_text(encoding="utf-8"))
    details = {
        "ranks": f"{size}, {'NCCL' if cuda else 'gloo on the CPU'}",
        "documents": LENGTHS,
        "sinks": "4, 8, 20, then 2 * randn",
        "timed": f"training step of {TINY['num_hidden_layers']} layers, hidden {TINY['hidden_size']}",
    }
    return Measurement(found["errors"], LIMITS, found["time_ms"], found["peak_bytes"], details)


def _rank(rank: int, size: int, folder: str, cuda: bool, patches: tuple[str, ...], allowed: tuple[str, ...]) -> None:
    fsdp_sink_patches.apply(*patches, allow_drift=allowed)
    from verl.models.transformers.monkey_patch import apply_monkey_patch
    from verl.utils.ulysses import set_ulysses_sequence_parallel_group

    fsdp_sink_patches.assert_applied(*patches)
    device = f"cuda:{rank}" if cuda else "cpu"
    if cuda:
        torch.cuda.set_device(rank)
    dist.init_process_group(
        "nccl" if cuda else "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=size
    )
    model = build(TINY, "flash_attention_2", torch.float32, device)
    apply_monkey_patch(model, ulysses_sp_size=size, use_remove_padding=True)
    set_ulysses_sequence_parallel_group(dist.group.WORLD)
    ids, positions, labels = packed_row(LENGTHS, TINY["vocab_size"], device)
    mine = slice(rank * ids.shape[1] // size, (rank + 1) * ids.shape[1] // size)

    def step() -> Tensor:
        model.zero_grad(set_to_none=True)
        logits: Tensor = model(input_ids=ids[:, mine], position_ids=positions[:, mine], use_cache=False).logits
        torch.autograd.backward(_loss(logits, labels[:, mine], ids.shape[1]))
        return logits.detach()

    logits = step()
    parts = [torch.empty_like(logits) for _ in range(size)]
    dist.all_gather(parts, logits)
    gradients = {ending: _gradients(model, ending) for ending in ("sinks", "q_proj.weight")}
    for gradient in gradients.values():
        dist.all_reduce(gradient)
    times, peak = [], 0
    for _ in range(5):
        if cuda:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        begin = time.perf_counter()
        step()
        if cuda:
            torch.cuda.synchronize()
            peak = torch.cuda.max_memory_allocated()  # here, for the fp64 oracle below runs on the same card
        times.append(1000 * (time.perf_counter() - begin))
    set_ulysses_sequence_parallel_group(None)
    if rank == 0:
        errors = _errors(model, ids, labels, torch.cat(parts, 1), gradients)
        found = {"errors": errors, "time_ms": statistics.median(times[1:]), "peak_bytes": peak}
        (Path(folder) / "found.json").write_text(json.dumps(found), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


def _errors(model: Any, ids: Tensor, labels: Tensor, logits: Tensor, gradients: dict[str, Tensor]) -> dict[str, float]:
    """Against the same weights in fp64, every document alone and in eager attention, on one rank."""
    oracle = model.double()
    oracle.set_attn_implementation("eager")
    oracle.zero_grad(set_to_none=True)
    alone, start = [], 0
    for length in LENGTHS:
        part = slice(start, start + length)
        out = oracle(input_ids=ids[:, part], use_cache=False).logits
        torch.autograd.backward(_loss(out, labels[:, part], ids.shape[1]))
        alone.append(out.detach())
        start += length
    return {
        "logits": relative_error(logits, torch.cat(alone, 1)),
        "dsink": relative_error(gradients["sinks"], _gradients(oracle, "sinks")),
        "dq_proj": relative_error(gradients["q_proj.weight"], _gradients(oracle, "q_proj.weight")),
    }


def _loss(logits: Tensor, labels: Tensor, tokens: int) -> Tensor:
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / tokens


def _gradients(model: Any, ending: str) -> Tensor:
    return torch.cat([p.grad.flatten().double() for n, p in model.named_parameters() if n.endswith(ending)])
