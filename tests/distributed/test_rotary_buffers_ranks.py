"""Rotary frequencies over two gloo ranks: FSDP1 with a buffer dtype, FSDP2, and rank 0 in fp32 beside meta and bf16.

Each runs with the patch and, as a control, without.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import fsdp_sink_patches

ROOT = Path(fsdp_sink_patches.__file__).resolve().parent.parent

RANK = """
import copy, json, os, sys
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, fully_shard
import fsdp_sink_patches

rank, store, patched = int(sys.argv[1]), sys.argv[2], sys.argv[3] == "patched"
if patched:
    fsdp_sink_patches.apply("transformers.rotary-buffers")
sys.path.insert(0, sys.argv[4])
import rotary_buffers_scenarios as scenarios

dist.init_process_group("gloo", init_method="file://" + store, rank=rank, world_size=2)


def broadcast(reference):
    # Rank 0 holds the weights; rank 1 was built on meta and cast. What is sent is sent in fp32, as loaders do.
    if rank == 0:
        model = copy.deepcopy(reference)
    else:
        model = scenarios._on_meta(reference).to(torch.bfloat16).to_empty(device="cpu")
        for parameter in model.parameters():
            parameter.data = parameter.data.float()
    for tensor in [*model.parameters(), *(buffer for _, buffer in scenarios._buffers(model))]:
        sent = tensor.detach().float() if tensor.is_floating_point() else tensor.detach()
        dist.broadcast(sent, 0)
        tensor.data.copy_(sent)
    return model


def fsdp1(reference):
    return FullyShardedDataParallel(
        copy.deepcopy(reference), device_id=torch.device("cpu"), use_orig_params=True,
        mixed_precision=MixedPrecision(buffer_dtype=torch.bfloat16),
    )


def fsdp2(reference):
    mesh = init_device_mesh("cpu", (2,))
    model = scenarios._on_meta(reference).to(torch.bfloat16).float()
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    model.to_empty(device="cpu")
    set_model_state_dict(model, reference.state_dict(), options=StateDictOptions(full_state_dict=True))
    loss = model.train()(input_ids=scenarios._ids(48), use_cache=False).logits.float().square().mean()
    loss.backward()
    assert all(p.grad is not None for n, p in model.named_parameters() if "q_proj" in n)
    return model.eval()


found = {}
for build, shard in (
    (scenarios.deepseek_v4, broadcast), (scenarios.gpt_oss, broadcast), (scenarios.deepseek_v4, fsdp1),
    (scenarios.gpt_oss, fsdp2),
):
    reference = build()
    wanted = {name: tensor.clone() for name, tensor in scenarios._frequencies(reference).items()}
    logits = scenarios._output(reference)
    model = shard(reference)
    same = torch.allclose(scenarios._output(model), logits, rtol=0, atol=1e-6)
    now = {name.replace("_fsdp_wrapped_module.", ""): tensor for name, tensor in scenarios._frequencies(model).items()}
    found[f"{shard.__name__} {build.__name__}"] = {"frequencies": scenarios._equal(now, wanted), "logits": same}
print("RESULT" + json.dumps(found), flush=True)
dist.barrier()
os._exit(0)  # torch's own teardown may end a process that has done its work with SIGABRT
"""
RIGHT = {"frequencies": True, "logits": True}
WRONG = {"frequencies": False, "logits": False}


def ranks(folder: Path, which: str) -> list[dict[str, Any]]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("FSDP_SINK_PATCHES")}
    inherited = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    environment |= {"PYTHONPATH": os.pathsep.join([*inherited, str(ROOT)]), "OMP_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(rank), str(folder / "store"), which, str(ROOT / "tests" / "behaviour")],
            env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        done = [process.communicate(timeout=200) for process in processes]
    finally:
        for process in processes:
            process.kill()
    lines = [[line for line in out.splitlines() if line.startswith("RESULT")] for out, _ in done]
    assert all(lines), [error[-2000:] for _, error in done]
    return [json.loads(line.removeprefix("RESULT")) for (line,) in lines]


def test_frequencies_survive_on_every_rank(tmp_path: Path) -> None:
    names = ["broadcast deepseek_v4", "broadcast gpt_oss", "fsdp1 deepseek_v4", "fsdp2 gpt_oss"]
    assert ranks(tmp_path, "patched") == [dict.fromkeys(names, RIGHT)] * 2


def test_without_the_patch_they_do_not(tmp_path: Path) -> None:
    zero, one = ranks(tmp_path, "control")
    broadcast = ("broadcast deepseek_v4", "broadcast gpt_oss")
    assert [zero[name] for name in broadcast] == [RIGHT] * 2  # rank 0 never changed
    assert [one[name] for name in broadcast] == [WRONG] * 2
    for found in (zero, one):
        assert found["fsdp1 deepseek_v4"] == found["fsdp2 gpt_oss"] == WRONG
