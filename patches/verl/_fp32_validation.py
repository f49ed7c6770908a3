"""What ``verl.fp32-islands`` is measured by: DeepSeek-V4 through verl's own cast, wrap and load, on two ranks."""

from __future__ import annotations

import functools
import importlib
import json
import statistics
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from fsdp_sink_patches.patches.transformers import _deepseek_v4_low_precision
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from torch.multiprocessing.spawn import ProcessRaisedException, spawn

import fsdp_sink_patches
from fsdp_sink_patches import Measurement
from fsdp_sink_patches.ops.sink_attention.oracle import relative_error

TOKENS = 96

LIMITS = {"loaded": 0.0, "sinks": 0.0, "mixing": 1e-5, "dmixing": 1e-5}
"""``loaded``: every fp32 tensor of the checkpoint, as the optimizer has it; ``sinks``: as the attention sees them;
``mixing``: what the hyper-connections compute; ``dmixing``: the gradient of their projection. Where a bf16 number is
anywhere in the way, these are 1e-3 and more."""


def fp32_islands(device: str, size: int = 2) -> Measurement:
    """A training step as verl makes it, ``model_dtype=bf16``; ``transformers`` is as it is either way.

    Args:
        device: ``"cuda"`` puts a rank on each GPU (NCCL) where there are enough; else the ranks are CPU processes
            (gloo), where FSDP2 does the same.
        size: how many ranks.
    """
    importlib.import_module("verl.utils.fsdp_utils")  # so that the state is more than "armed"
    here = fsdp_sink_patches.status()["verl.fp32-islands"]
    ids = (here.id,) if here.state == "applied" else ()
    allowed = (here.id,) if here.fingerprint == "allowed" else ()
    cuda = device != "cpu" and torch.cuda.device_count() >= size
    with tempfile.TemporaryDirectory() as folder:
        _deepseek_v4_low_precision.saved_in_fp32().save_pretrained(f"{folder}/model")
        try:
            spawn(_rank, args=(size, folder, cuda, ids, allowed), nprocs=size)  # type: ignore[no-untyped-call]
        except ProcessRaisedException as error:
            # Its text is a whole traceback; the last line is what the rank raised.
            raise RuntimeError(str(error).strip().splitlines()[-1]) from error
        found: dict[str, Any] = json.loads((Path(folder) / "found.json").read_text(encoding="utf-8"))
    details = {
        "ranks": f"{size}, {'NCCL' if cuda else 'gloo on the CPU'}",
        "layers": _deepseek_v4_low_precision.LAYERS,
        "tokens": TOKENS,
    }
    return Measurement(found["errors"], LIMITS, found["time_ms"], found["peak_bytes"], details)


def _rank(rank: int, size: int, folder: str, cuda: bool, patches: tuple[str, ...], allowed: tuple[str, ...]) -> None:
    if patches:
        fsdp_sink_patches.apply(*patches, allow_drift=allowed)
    importlib.import_module("verl.utils.fsdp_utils")
    if patches:
        fsdp_sink_patches.assert_applied(*patches)
    kind = "cuda" if cuda else "cpu"
    if cuda:
        torch.cuda.set_device(rank)
    dist.init_process_group(
        "nccl" if cuda else "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=size
    )
    model = sharded(f"{folder}/model", kind, size)
    wanted = _deepseek_v4_low_precision.saved_in_fp32()
    seen: dict[str, Tensor] = {}
    attention, mixer = model.model.layers[0].self_attn, model.model.layers[0].attn_hc
    hooks = [
        attention.register_forward_pre_hook(lambda module, _: seen.update(sinks=module.sinks.detach().clone())),
        mixer.register_forward_hook(functools.partial(_note, seen)),
    ]
    ids = torch.randint(0, wanted.config.vocab_size, (1, TOKENS), generator=torch.Generator().manual_seed(rank))
    ids = ids.to(kind)
    step(model, ids)
    for hook in hooks:
        hook.remove()
    errors = _errors(model, wanted, seen)
    times, peak = [], 0
    for _ in range(5):
        if cuda:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        begin = time.perf_counter()
        step(model, ids)
        if cuda:
            torch.cuda.synchronize()
            peak = torch.cuda.max_memory_allocated()
        times.append(1000 * (time.perf_counter() - begin))
    if rank == 0:
        found = {"errors": errors, "time_ms": statistics.median(times[1:]), "peak_bytes": peak}
        (Path(folder) / "found.json").write_text(json.dumps(found), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


def sharded(path: str, kind: str, size: int) -> Any:
    """A model from ``path``, built, cast, wrapped and loaded by verl's own functions in the order that verl has."""
    from transformers import AutoModelForCausalLM
    from verl.utils import fsdp_utils

    mesh = init_device_mesh(kind, (size,), mesh_dim_names=("fsdp",))
    context = fsdp_utils.get_init_weight_context_manager(use_meta_tensor=True, mesh=mesh)
    with context(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16, attn_implementation="eager")
        model.to(torch.bfloat16)
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=True)
    options = {"mesh": mesh, "mp_policy": policy, "offload_policy": None, "reshard_after_forward": True}
    full_state = model.state_dict()
    fsdp_utils.apply_fsdp2(model, options, {})
    fsdp_utils.fsdp2_load_full_state_dict(model, full_state, mesh, None)
    return model.train()


def step(model: Any, ids: Tensor) -> None:
    """Forward and backward under autocast, as in verl; the gradients stay on the model."""
    model.zero_grad(set_to_none=True)
    with torch.autocast(ids.device.type, torch.bfloat16):
        logits = model(input_ids=ids, use_cache=False).logits
    torch.autograd.backward(logits.float().logsumexp(-1).mean())


def _note(seen: dict[str, Tensor], module: Any, args: tuple[Tensor, ...], result: tuple[Tensor, ...]) -> None:
    """What a hyper-connection was given and returned, and the gradients of what it returned."""
    seen["streams"] = args[0].detach()
    for name, tensor in zip(("post", "comb", "collapsed"), result, strict=True):
        seen[name] = tensor.detach()
        hook = functools.partial(_keep, seen, f"d{name}")
        tensor.register_hook(hook)  # type: ignore[no-untyped-call]


def _keep(seen: dict[str, Tensor], name: str, gradient: Tensor) -> None:
    seen[name] = gradient.detach()


def _errors(model: Any, wanted: Any, seen: dict[str, Tensor]) -> dict[str, float]:
    """Against the checkpoint's fp32 tensors, and against the first hyper-connection in fp64 on the same streams."""
    wanted.to(seen["streams"].device)
    loaded = dict([*model.named_parameters(), *model.named_buffers()])
    kept = [
        (name, value)
        for name, value in [*wanted.named_parameters(), *wanted.named_buffers()]
        if any(part in name for part in _deepseek_v4_low_precision.IN_FP32)
    ]
    mixer = wanted.model.layers[0].attn_hc
    post, comb, collapsed = _deepseek_v4_low_precision.exact_hyper_connection(mixer, seen["streams"])
    exact = {"post": post, "comb": comb, "collapsed": collapsed}
    (gradient,) = torch.autograd.grad(list(exact.values()), mixer.fn, [seen[f"d{name}"].double() for name in exact])
    dist.all_reduce(gradient)  # each rank's own tokens; FSDP2 takes the mean
    return {
        "loaded": max(relative_error(_whole(loaded[name]), value) for name, value in kept),
        "sinks": relative_error(seen["sinks"], wanted.model.layers[0].self_attn.sinks),
        "mixing": max(relative_error(seen[name], exact[name]) for name in ("post", "comb")),
        "dmixing": relative_error(_whole(loaded["model.layers.0.attn_hc.fn"].grad), gradient / dist.get_world_size()),
    }


def _whole(value: Tensor) -> Tensor:
    whole: Tensor = value.full_tensor() if isinstance(value, DTensor) else value
    return whole.detach()
