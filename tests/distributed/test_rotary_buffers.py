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

import pytest

import fsdp_sink_patches

ROOT = Path(fsdp_sink_patches.__file__).resolve().parent.parent

RANK = """
import copy, json, os, sys
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, MixedPrecisionPolicy, fully_shard
import fsdp_sink_patches

rank, store, patched, name = int(sys.argv[1]), sys.argv[2], sys.argv[3] == "patched", sys.argv[4]
if patched:
    fsdp_sink_patches.apply("transformers.rotary-buffers")
sys.path.insert(0, sys.argv[5])
import rotary_buffers_scenarios as scenarios

dist.init_process_group("gloo", init_method="file://" + store, rank=rank, world_size=2)
reference = scenarios.MODELS[sys.argv[6]]()
wanted = {name: tensor.clone() for name, tensor in scenarios._frequencies(reference).items()}
logits = scenarios._output(reference)
found = {}


def look(model):
    now = {name.replace("_fsdp_wrapped_module.", ""): tensor for name, tensor in scenarios._frequencies(model).items()}
    return scenarios._equal(now, wanted)


if name == "broadcast":
    # Rank 0 holds the weights; rank 1 was built on meta and cast. State is sent in fp32, as loaders do.
    if rank == 0:
        model = copy.deepcopy(reference)
    else:
        with torch.device("meta"):
            model = type(reference)(copy.deepcopy(reference.config)).eval()
        model = model.to(torch.bfloat16).to_empty(device="cpu")
        for parameter in model.parameters():
            parameter.data = parameter.data.float()
    found["dtypes"] = sorted({str(tensor.dtype) for tensor in scenarios._frequencies(model).values()})
    for tensor in [*model.parameters(), *(buffer for _, buffer in scenarios._buffers(model))]:
        sent = tensor.detach().float() if tensor.is_floating_point() else tensor.detach()
        dist.broadcast(sent, 0)
        tensor.data.copy_(sent)
    found["frequencies"] = look(model)
    found["logits"] = torch.equal(scenarios._output(model), logits)
elif name == "fsdp1":
    precision = MixedPrecision(buffer_dtype=torch.bfloat16)
    model = FullyShardedDataParallel(
        copy.deepcopy(reference), device_id=torch.device("cpu"), use_orig_params=True, mixed_precision=precision
    )
    found["logits"] = torch.allclose(scenarios._output(model), logits, rtol=0, atol=1e-6)
    found["frequencies"] = look(model)
elif name == "fsdp2":
    mesh = init_device_mesh("cpu", (2,))
    policy = MixedPrecisionPolicy(param_dtype=torch.float32)
    with torch.device("meta"):
        model = type(reference)(copy.deepcopy(reference.config)).train()
    model.to(torch.bfloat16).float()
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    model.to_empty(device="cpu")
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
    set_model_state_dict(model, reference.state_dict(), options=StateDictOptions(full_state_dict=True))
    model.train()
    out = model(input_ids=scenarios._ids(48), use_cache=False).logits
    found["logits"] = torch.allclose(out.detach(), logits, rtol=0, atol=1e-6)
    out.float().square().mean().backward()
    found["gradients"] = all(p.grad is not None for n, p in model.named_parameters() if "q_proj" in n or "q_a" in n)
    found["frequencies"] = look(model)
print("RESULT" + json.dumps(found), flush=True)
dist.barrier()
os._exit(0)  # torch's own teardown may end a process that has done its work with SIGABRT
"""


def ranks(tmp_path: Path, patched: bool, name: str, model: str) -> list[dict[str, Any]]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("FSDP_SINK_PATCHES")}
    inherited = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    environment |= {"PYTHONPATH": os.pathsep.join([*inherited, str(ROOT)]), "OMP_NUM_THREADS": "1"}
    arguments = [str(tmp_path / "store"), "patched" if patched else "control", name]
    arguments += [str(ROOT / "tests" / "behaviour"), model]
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(rank), *arguments],
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


@pytest.mark.parametrize("model", ["gpt_oss", "deepseek_v4"])
def test_rank_0_in_fp32_and_rank_1_from_meta_in_bf16(tmp_path: Path, model: str) -> None:
    zero, one = ranks(tmp_path, True, "broadcast", model)
    assert zero == one == {"dtypes": ["torch.float32"], "frequencies": True, "logits": True}


def test_without_the_patch_the_ranks_differ(tmp_path: Path) -> None:
    zero, one = ranks(tmp_path, False, "broadcast", "deepseek_v4")
    assert zero == {"dtypes": ["torch.float32"], "frequencies": True, "logits": True}
    assert one == {"dtypes": ["torch.bfloat16"], "frequencies": False, "logits": False}


@pytest.mark.parametrize("patched", [True, False], ids=["patched", "control"])
def test_fsdp1_with_a_buffer_dtype(tmp_path: Path, patched: bool) -> None:
    for found in ranks(tmp_path, patched, "fsdp1", "deepseek_v4"):
        assert found == {"frequencies": patched, "logits": patched}


@pytest.mark.parametrize("patched", [True, False], ids=["patched", "control"])
def test_fsdp2_from_meta(tmp_path: Path, patched: bool) -> None:
    for found in ranks(tmp_path, patched, "fsdp2", "gpt_oss"):
        assert found == {"frequencies": patched, "logits": patched, "gradients": True}
