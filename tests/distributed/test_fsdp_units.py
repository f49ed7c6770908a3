"""fsdp.shard_fp32_units over two gloo ranks: every check against one process that holds the whole model.

The ranks start once and run all checks in order, each rank on its own rows; a test here reads what one of them found.
"""

from __future__ import annotations

import copy
import itertools
import json
import multiprocessing
import os
import traceback
from collections.abc import Callable, Iterable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

import fsdp_sink_patches
from fsdp_sink_patches.fsdp import fp32_units, freeze_without_gradient, shard_fp32_units

transformers = pytest.importorskip("transformers")
if not hasattr(transformers, "DeepseekV4ForCausalLM"):
    pytest.skip("this transformers has no DeepSeek-V4", allow_module_level=True)

FULL = StateDictOptions(full_state_dict=True, cpu_offload=True)
BROADCAST = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
PRELOAD = [
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.fsdp",
    "transformers.models.deepseek_v4.modeling_deepseek_v4",
    "transformers.models.gpt_oss.modeling_gpt_oss",
]
CHECKS: dict[str, Callable[[Job], None]] = {}


class Job:
    """What a check works with: the mesh, this rank's rows, models by name."""

    def __init__(self, rank: int, size: int, folder: Path, mesh: DeviceMesh) -> None:
        self.rank, self.size, self.folder, self.mesh = rank, size, folder, mesh
        self.ids = torch.randint(0, 128, (size, 40), generator=torch.Generator().manual_seed(3))
        self.mine = self.ids[rank : rank + 1]

    def load(self, dtype: torch.dtype = torch.bfloat16, model: str = "deepseek_v4", attention: str = "eager") -> Any:
        auto = transformers.AutoModelForCausalLM
        loaded = auto.from_pretrained(self.folder / model, dtype=dtype, attn_implementation=attention)
        return runnable(loaded).train()

    def shard(self, model: Any, dtype: torch.dtype = torch.bfloat16, **options: Any) -> Any:
        """The whole recipe: units, layers, root."""
        shard_fp32_units(model, self.mesh, **options)
        return self.shard_as_always(model, dtype)

    def shard_as_always(
        self, model: Any, dtype: torch.dtype = torch.bfloat16, cast: bool = False, **options: Any
    ) -> Any:
        policy = MixedPrecisionPolicy(dtype, torch.float32, cast_forward_inputs=cast)
        for layer in model.model.layers:
            fully_shard(layer, mesh=self.mesh, mp_policy=policy, **options)
        return fully_shard(model, mesh=self.mesh, mp_policy=policy, **options)


def runnable(model: Any) -> Any:
    """DeepSeek-V4 up to 5.19 does not run in bf16 (transformers.deepseek-v4-low-precision): there, under autocast."""
    if needs_autocast(model):
        model.forward = torch.autocast("cpu", torch.bfloat16)(model.forward)
    return model


def needs_autocast(model: Any) -> bool:
    """Its norms return the fp32 of their weight, so that layers hand fp32 to each other."""
    if "deepseek" not in model.config.model_type or model.dtype == torch.float32:
        return False
    norm = type(model.model.norm)(4)
    return bool(norm(torch.ones(4, dtype=torch.bfloat16)).dtype == torch.float32)


def check(function: Callable[[Job], None]) -> Callable[[Job], None]:
    CHECKS[function.__name__] = function
    return function


def full(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def backward(model: Any, ids: torch.Tensor) -> dict[str, torch.Tensor]:
    """The whole gradients of the mean loss, by name."""
    model(input_ids=ids, labels=ids).loss.backward()
    return gradients(model)


def gradients(model: Any) -> dict[str, torch.Tensor]:
    return {name: full(value.grad) for name, value in model.named_parameters() if value.grad is not None}


def error(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> float:
    """The largest relative error of any tensor."""
    assert found.keys() == wanted.keys(), found.keys() ^ wanted.keys()
    return max(relative(found[name], wanted[name]) for name in wanted)


def distance(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> float:
    """Root of the summed squares of every tensor's relative error: what bf16 costs."""
    assert found.keys() == wanted.keys(), found.keys() ^ wanted.keys()
    return sum(relative(found[name], wanted[name]) ** 2 for name in wanted) ** 0.5


def relative(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return ((found.double() - wanted.double()).norm() / wanted.double().norm()).item()


def parameters(model: Any) -> dict[str, torch.Tensor]:
    return {name: full(value) for name, value in model.named_parameters()}


def assert_equal(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert found.keys() == wanted.keys(), found.keys() ^ wanted.keys()
    other = [name for name, value in wanted.items() if found[name].dtype != value.dtype]
    other += [name for name, value in wanted.items() if not torch.equal(found[name], value)]
    assert not other, other


# ---------------------------------------------------------------------------------------------------------------------
# What upstream does today


@check
def upstream_refuses_the_bf16_model(job: Job) -> None:
    model = job.shard_as_always(job.load())
    with pytest.raises(AssertionError, match="uniform original parameter dtype"):
        model(input_ids=job.mine)


@check
def left_out_parameters_are_not_reduced(job: Job) -> None:
    """The usual advice, ``ignored_params``: each rank then has another gradient of the same sinks."""
    model = job.load(torch.float32)
    loose = {value for name, value in model.named_parameters() if name.endswith("sinks")}
    job.shard_as_always(model, torch.float32, ignored_params=loose)
    alone = backward(model, job.mine)["model.layers.0.self_attn.sinks"]
    both = [torch.empty_like(alone) for _ in range(job.size)]
    dist.all_gather(both, alone)
    assert relative(both[0], both[1]) > 0.1
    with pytest.raises(RuntimeError, match=r"mixed torch.Tensor and DTensor"):
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)


# ---------------------------------------------------------------------------------------------------------------------
# DeepSeek-V4


@check
def forward_is_bitwise_the_same_and_fp32_stays(job: Job) -> None:
    whole, model = job.load(), job.load()
    wanted = {name for name, value in whole.named_parameters() if value.dtype == torch.float32}
    names, keys, units = [name for name, _ in model.named_parameters()], list(model.state_dict()), fp32_units(model)
    job.shard(model)
    assert fp32_units(model) == units
    assert [name for name, _ in model.named_parameters()] == names
    assert list(model.state_dict()) == keys
    assert all(isinstance(value, DTensor) for value in model.parameters())
    assert {name for name, value in model.named_parameters() if value.dtype == torch.float32} == wanted

    seen: dict[str, torch.dtype] = {}
    for name, module in model.named_modules():
        module.register_forward_pre_hook(
            lambda module, _args, name=name: seen.update(
                {f"{name}.{key}": value.dtype for key, value in module.named_parameters(recurse=False)}
            )
        )
    logits = model(input_ids=job.mine).logits
    assert torch.equal(logits, whole(input_ids=job.mine).logits)
    assert logits.dtype == torch.bfloat16
    assert {name for name, dtype in seen.items() if dtype == torch.float32} == wanted
    assert {dtype for name, dtype in seen.items() if name not in wanted} == {torch.bfloat16}

    if not needs_autocast(whole):  # upstream's activations are bf16 between layers, so the default cast changes nothing
        model = job.load()
        shard_fp32_units(model, job.mesh)
        job.shard_as_always(model, cast=True)
        assert torch.equal(model(input_ids=job.mine).logits, logits)


@check
def the_default_cast_of_a_layer_unit_rounds_fp32_tables(job: Job) -> None:
    """cos and sin are inputs of a layer: with transformers.deepseek-v4-rope in fp32, until the layer's policy casts."""
    for cast in (True, False):
        model, seen = job.load(), []
        model.model.rotary_emb.register_forward_hook(
            lambda _module, _args, pair: tuple(table.float() for table in pair)
        )
        model.model.layers[1].self_attn.register_forward_pre_hook(
            lambda _module, _args, kwargs, seen=seen: seen.append(kwargs["position_embeddings"]["main"][0].dtype),
            with_kwargs=True,
        )
        shard_fp32_units(model, job.mesh)
        job.shard_as_always(model, cast=cast)
        model(input_ids=job.mine)
        assert seen == [torch.bfloat16 if cast else torch.float32]


@check
def fp32_gradients_equal_one_process(job: Job) -> None:
    whole, model = job.load(torch.float32), job.load(torch.float32)
    assert len(fp32_units(model).parameters) == 6
    job.shard(model, torch.float32)
    assert error(backward(model, job.mine), backward(whole, job.ids)) <= 2e-5


@check
def bf16_gradients_are_as_near_to_fp32_as_one_process(job: Job) -> None:
    exact = backward(job.load(torch.float32), job.ids)
    whole = backward(job.load(), job.ids)
    found = backward(job.shard(job.load()), job.mine)
    assert {name: value.dtype for name, value in found.items()} == {name: value.dtype for name, value in whole.items()}
    assert distance(found, exact) <= 1.1 * distance(whole, exact)


@check
def offloaded_and_compiled_gradients_are_the_same(job: Job) -> None:
    wanted = backward(job.load(torch.float32), job.ids)
    model, offload = job.load(torch.float32), CPUOffloadPolicy(pin_memory=False)
    shard_fp32_units(model, job.mesh, offload_policy=offload, reshard_after_forward=False)
    job.shard_as_always(model, torch.float32, offload_policy=offload)
    assert error(backward(model, job.mine), wanted) <= 2e-5

    torch._dynamo.config.recompile_limit = 64
    model = job.shard(job.load(torch.float32), torch.float32)
    for layer in model.model.layers:
        layer.compile(backend="eager")
    assert error(backward(model, job.mine), wanted) <= 2e-5


@check
def generation_is_the_same(job: Job) -> None:
    options = {"max_new_tokens": 4, "do_sample": False}
    whole, model = job.load(torch.float32).eval(), job.shard(job.load(torch.float32), torch.float32).eval()
    assert torch.equal(model.generate(job.ids[:1], **options), whole.generate(job.ids[:1], **options))
    assert list(model.state_dict()) == list(whole.state_dict())
    assert get_model_state_dict(model).keys() == whole.state_dict().keys()


@check
def a_cast_model_gets_its_fp32_back(job: Job) -> None:
    """verl's model_dtype=bf16: module.to(bf16) has cast everything; what the model asks for still goes to fp32."""
    kept = {name for name, value in job.load().named_parameters() if value.dtype == torch.float32}
    model = job.load().to(torch.bfloat16)
    job.shard(model)
    assert {name for name, value in model.named_parameters() if value.dtype == torch.float32} == kept
    assert model(input_ids=job.mine).logits.isfinite().all()


@check
def gradient_checkpointing_changes_nothing(job: Job) -> None:
    plain = backward(job.shard(job.load()), job.mine)
    for reentrant in (False, True):
        model = job.load()
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        job.shard(model)
        assert error(backward(model, job.mine), plain) <= 1e-2, reentrant
        exact = job.load(torch.float32)
        exact.gradient_checkpointing_enable({"use_reentrant": reentrant})
        wanted = backward(job.load(torch.float32), job.ids)
        assert error(backward(job.shard(exact, torch.float32), job.mine), wanted) <= 2e-5, reentrant


@check
def frozen_parameters_stay(job: Job) -> None:
    """Only the sinks and one norm train: fp32 units with frozen ones inside, bf16 units without any trainable one."""

    def freeze(model: Any) -> Any:
        for name, value in model.named_parameters():
            value.requires_grad_(name.endswith("sinks") or name == "model.layers.1.input_layernorm.weight")
        return model

    whole, model = freeze(job.load(torch.float32)), job.shard(freeze(job.load(torch.float32)), torch.float32)
    wanted = backward(whole, job.ids)
    assert len(wanted) == 4
    assert error(backward(model, job.mine), wanted) <= 2e-5
    mixed = backward(job.shard(freeze(job.load())), job.mine)
    assert distance(mixed, wanted) <= 1.1 * distance(backward(freeze(job.load()), job.ids), wanted)


@check
def accumulation_without_reduction_is_one_sum(job: Job) -> None:
    whole, model = job.load(torch.float32), job.shard(job.load(torch.float32), torch.float32)
    again = job.ids.flip(1)
    wanted = backward(whole, job.ids)
    wanted = backward(whole, again)  # .grad adds up
    model.set_requires_gradient_sync(False)
    model(input_ids=job.mine, labels=job.mine).loss.backward()
    assert all(value.grad is None for value in model.parameters())
    model.set_requires_gradient_sync(True)
    assert error(backward(model, job.mine.flip(1)), wanted) <= 2e-5


def train(model: Any, rows: Iterable[torch.Tensor], **settings: Any) -> tuple[Any, list[float]]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-4, **settings)
    norms = []
    for ids in rows:
        model(input_ids=ids, labels=ids).loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        norms.append(full(norm).item())
        optimizer.step()
        optimizer.zero_grad()
    return optimizer, norms


@check
def clipped_steps_equal_one_process(job: Job) -> None:
    whole, model = job.load(torch.float32), job.shard(job.load(torch.float32), torch.float32)
    _, wanted = train(whole, [job.ids, job.ids.flip(1), job.ids])
    _, found = train(model, [job.mine, job.mine.flip(1), job.mine])
    assert found == pytest.approx(wanted, rel=1e-5)
    start = parameters(job.load(torch.float32))
    moved = {name: value - start[name] for name, value in parameters(whole).items()}
    assert error({n: v - start[n] for n, v in parameters(model).items() if moved[n].any()},
                 {n: v for n, v in moved.items() if v.any()}) <= 1e-3  # fmt: skip

    mixed = job.shard(job.load())
    _, found = train(mixed, [job.mine] * 3)
    assert found[0] == pytest.approx(wanted[0], rel=0.02)
    every = [torch.empty(1) for _ in range(job.size)]
    dist.all_gather(every, torch.tensor([found[-1]]))
    assert len(set(map(float, every))) == 1


@check
def state_dicts_have_upstream_names_and_resume_bitwise(job: Job) -> None:
    def prepared() -> Any:
        model = job.load()
        freeze_without_gradient(model)
        return job.shard(model)

    model = prepared()
    optimizer, _ = train(model, [job.mine, job.mine.flip(1)])
    state, slots = get_model_state_dict(model, options=FULL), get_optimizer_state_dict(model, optimizer, options=FULL)
    names = set(dict(job.load().named_parameters()))
    if job.rank == 0:
        assert set(state) == set(job.load().state_dict())
        assert {name: value.dtype for name, value in state.items()} == {
            name: value.dtype for name, value in job.load().state_dict().items()
        }
        alone = job.load()
        alone.load_state_dict(state)
        assert_equal(parameters(alone), {name: state[name] for name in names})
        assert set(slots["state"]) == {name for name in names if ".indexer." not in name}  # no gradient, no state
        assert set(itertools.chain.from_iterable(group["params"] for group in slots["param_groups"])) == names
    now = parameters(model)

    other = prepared()
    resumed = torch.optim.AdamW(other.parameters(), lr=1e-3, eps=1e-4)
    set_model_state_dict(other, dict(state), options=BROADCAST)  # it writes into what it is given
    # A file would part them: on the CPU, rank 0 is given the very tensors that the first optimizer counts its steps in.
    set_optimizer_state_dict(other, resumed, copy.deepcopy(slots), options=BROADCAST)
    assert_equal(parameters(other), now)
    for each, its in ((model, optimizer), (other, resumed)):
        each(input_ids=job.mine, labels=job.mine).loss.backward()
        its.step()
    assert_equal(parameters(other), parameters(model))

    plain = prepared()
    plain.load_state_dict(model.state_dict())
    assert_equal(parameters(plain), parameters(model))

    dcp.save({"model": get_model_state_dict(model)}, checkpoint_id=job.folder / "dcp")
    read = prepared()
    into = get_model_state_dict(read)
    dcp.load({"model": into}, checkpoint_id=job.folder / "dcp")
    set_model_state_dict(read, into)
    assert_equal(parameters(read), parameters(model))


@check
def a_model_on_meta_is_sharded_and_then_loaded(job: Job) -> None:
    whole = job.load()
    with torch.device("meta"):
        empty = type(whole)._from_config(whole.config, attn_implementation="eager", dtype=torch.bfloat16)
    model = runnable(empty).train()
    job.shard(model)
    model.to_empty(device="cpu")
    set_model_state_dict(model, whole.state_dict() if job.rank == 0 else {}, options=BROADCAST)
    for (_, buffer), (_, value) in zip(model.named_buffers(), whole.named_buffers(), strict=True):
        buffer.copy_(value)  # frequencies are in no state dict: transformers.rotary-buffers
    assert_equal(parameters(model), parameters(whole))
    assert torch.equal(model(input_ids=job.mine).logits, whole(input_ids=job.mine).logits)
    assert backward(model, job.mine).keys() == backward(whole, job.mine).keys()


@check
def full_parameters_do_not_outlive_the_sharding(job: Job) -> None:
    model = job.load()
    full_size = sum(value.numel() for value in model.parameters())
    job.shard(model)
    local = sum(value.to_local().numel() for value in model.parameters())
    assert local <= 0.51 * full_size
    rest = model.get_submodule("model.layers.0.rest_of_self_attn")
    assert all(reference() is None for _, _, reference in rest._unsharded)


@check
def the_indexer_can_be_frozen_first(job: Job) -> None:
    model = job.load()
    names = freeze_without_gradient(model)
    assert len(names) == 6
    assert all(".indexer." in name for name in names)
    job.shard(model)
    found = backward(model, job.mine)
    assert set(found) == {name for name, value in model.named_parameters() if value.requires_grad}


@check
def a_trainable_indexer_makes_optimizer_checkpoints_that_do_not_load(job: Job) -> None:
    """Why the user is told: upstream's own refusal, at the resume, when it is too late."""
    model = job.shard(job.load())
    optimizer, _ = train(model, [job.mine])
    slots = get_optimizer_state_dict(model, optimizer)
    other = job.shard(job.load())
    with pytest.raises(RuntimeError, match=r"Missing optimizer state for parameter .*indexer"):
        set_optimizer_state_dict(other, torch.optim.AdamW(other.parameters()), slots)


# ---------------------------------------------------------------------------------------------------------------------
# Other models


@check
def gpt_oss_keeps_its_bf16_sinks_unless_asked(job: Job) -> None:
    model = job.load(model="gpt_oss")
    assert not fp32_units(model)
    job.shard(model)
    assert not any(isinstance(layer.self_attn, FSDPModule) for layer in model.model.layers)
    assert model.model.layers[0].self_attn.sinks.dtype == torch.bfloat16

    def upcast(whole: Any) -> Any:
        for name, value in whole.named_parameters():
            if name.endswith("sinks"):
                value.data = value.data.float()
        return whole

    whole, model = upcast(job.load(model="gpt_oss")), job.load(model="gpt_oss")
    job.shard(model, also=("sinks",))
    assert model.lm_head.weight is model.model.embed_tokens.weight  # tied, in the root's unit
    assert torch.equal(model(input_ids=job.mine).logits, whole(input_ids=job.mine).logits)
    found = backward(model, job.mine)
    assert found["model.layers.0.self_attn.sinks"].dtype == torch.float32
    exact = backward(job.load(torch.float32, "gpt_oss"), job.ids)
    assert relative(found["model.layers.0.self_attn.sinks"], exact["model.layers.0.self_attn.sinks"]) <= 0.05
    model = job.load(torch.float32, "gpt_oss")
    assert error(backward(job.shard(model, torch.float32, also=("sinks",)), job.mine), exact) <= 2e-5


@check
def flash_sinks_work_on_sharded_sinks(job: Job) -> None:
    """The patch transformers.flash-sinks, against eager in one process."""
    exact = backward(job.load(torch.float32, "gpt_oss"), job.ids)
    with fsdp_sink_patches.applied("transformers.flash-sinks"):
        for dtype in (torch.float32, torch.bfloat16):
            model = job.load(dtype, "gpt_oss", "flash_attention_2")
            found = backward(job.shard(model, dtype, also=("sinks",)), job.mine)
            sinks = "model.layers.0.self_attn.sinks"
            assert relative(found[sinks], exact[sinks]) <= (2e-5 if dtype == torch.float32 else 0.05)


@(check if hasattr(transformers, "MiMoV2FlashForCausalLM") else lambda function: function)
def mimo_routers_are_units(job: Job) -> None:
    whole, model = job.load(model="mimo_v2_flash"), job.load(model="mimo_v2_flash")
    asked = "mlp.gate.weight" in model._keep_in_fp32_modules_strict  # not yet in 5.17
    assert fp32_units(model).modules == (("model.layers.1.mlp.gate",) if asked else ())
    job.shard(model)
    assert torch.equal(model(input_ids=job.mine).logits, whole(input_ids=job.mine).logits)
    wanted = backward(job.load(torch.float32, "mimo_v2_flash"), job.ids)
    model = job.load(torch.float32, "mimo_v2_flash")
    assert error(backward(job.shard(model, torch.float32, also=("sinks",)), job.mine), wanted) <= 2e-5


@check
def llama_is_left_alone(job: Job) -> None:
    model = job.load(model="llama")
    before = [type(module) for module in model.modules()]
    assert not shard_fp32_units(model, job.mesh)
    assert [type(module) for module in model.modules()] == before


class Gate(nn.Module):
    """A bare bf16 weight beside a bare fp32 one (transformers' Inkling routers, Kimi-Linear's attention)."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8, dtype=torch.bfloat16))
        self.scale = nn.Parameter(torch.randn(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.weight) * self.scale


class Gates(nn.Module):
    """Two gates in a ModuleList, with a projection of their own tied to nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.gates = nn.ModuleList([Gate(), Gate()])
        self.out = nn.Linear(8, 8, dtype=torch.bfloat16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for gate in self.gates:
            x = gate(x.bfloat16())
        return self.out(x.bfloat16())


@check
def bare_bf16_beside_bare_fp32_in_a_list(job: Job) -> None:
    torch.manual_seed(5)
    whole = Gates()
    model = copy.deepcopy(whole)
    names = shard_fp32_units(model, job.mesh)
    assert names.parameters == ("gates.0.scale", "gates.1.scale")
    assert len(model.gates) == 2
    fully_shard(model, mesh=job.mesh)
    x = torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(job.rank))
    both = [torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(rank)) for rank in range(job.size)]
    assert torch.equal(model(x), whole(x))
    model(x).float().square().mean().backward()
    whole(torch.cat(both)).float().square().mean().backward()
    assert set(gradients(model)) == set(dict(whole.named_parameters()))
    assert error(gradients(model), gradients(whole)) <= 2e-2
    assert set(model.state_dict()) == set(whole.state_dict())


# ---------------------------------------------------------------------------------------------------------------------
# What is refused


@check
def misuse_is_told(job: Job) -> None:
    model = job.load()
    with pytest.raises(ValueError, match=r"found mp_policy.param_dtype=torch.bfloat16"):
        shard_fp32_units(model, job.mesh, mp_policy=MixedPrecisionPolicy(torch.bfloat16))
    shard_fp32_units(model, job.mesh)
    with pytest.raises(ValueError, match=r"in an FSDP2 unit already.*call shard_fp32_units once"):
        shard_fp32_units(model, job.mesh)
    with pytest.raises(RuntimeError, match=r"found 5 weights of model.layers.0.self_attn that no FSDP unit has"):
        model(input_ids=job.mine)

    model = job.shard_as_always(job.load())
    with pytest.raises(ValueError, match=r"in an FSDP2 unit already.*before the first fully_shard"):
        shard_fp32_units(model, job.mesh)

    gate = Gate()
    with pytest.raises(ValueError, match=r"bare fp32 parameter directly in the model \(Gate\)"):
        shard_fp32_units(gate, job.mesh)
    tied = Gates()
    tied.gates[1].scale = tied.gates[0].scale
    with pytest.raises(ValueError, match=r"one fp32 parameter shared by gates.0 and gates.1"):
        shard_fp32_units(tied, job.mesh)
    layers = Gates()
    layers._no_split_modules = ["Gate"]
    with pytest.raises(ValueError, match=r"directly in gates.0 \(Gate\)"):
        shard_fp32_units(layers, job.mesh)
    assert not any(isinstance(module, FSDPModule) for module in (*gate.modules(), *tied.modules(), *layers.modules()))


# ---------------------------------------------------------------------------------------------------------------------


def save_models(folder: Path) -> None:
    from fsdp_sink_patches.patches.transformers import _deepseek_v4_models as v4

    tiny = v4.build((v4.SLIDING, v4.CSA, v4.HCA), vocab_size=128, hidden_size=64, moe_intermediate_size=32)
    tiny.save_pretrained(folder / "deepseek_v4")
    small = {
        "vocab_size": 128, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 16, "pad_token_id": 0,
    }  # fmt: skip
    experts = {"num_local_experts": 2, "num_experts_per_tok": 2, "sliding_window": 16, "tie_word_embeddings": True}
    torch.manual_seed(1)
    models = {
        "gpt_oss": transformers.GptOssForCausalLM(transformers.GptOssConfig(**small, **experts)),
        "llama": transformers.LlamaForCausalLM(transformers.LlamaConfig(**small)),
    }
    if hasattr(transformers, "MiMoV2FlashForCausalLM"):
        config = transformers.MiMoV2FlashConfig(
            **small, n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=8
        )
        models["mimo_v2_flash"] = transformers.MiMoV2FlashForCausalLM(config)
    for name, model in models.items():
        with torch.no_grad():
            for key, value in model.named_parameters():
                if key.endswith("sinks"):
                    value.copy_(torch.tensor([4.0, 8.0, 20.0, 1.3]))
        model.save_pretrained(folder / name)


def run_rank(rank: int, size: int, shape: tuple[int, ...], names: list[str], folder: str) -> None:
    torch.set_num_threads(1)
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=size, timeout=timedelta(seconds=60))
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
    job, results = Job(rank, size, Path(folder), mesh), {}
    for name in names:
        try:
            CHECKS[name](job)
            dist.barrier()
            results[name] = "ok"
        except (Exception, pytest.fail.Exception):
            results[name] = traceback.format_exc()
            break  # the other rank may wait in a collective; leaving ends its wait
    (Path(folder) / f"results-{rank}.json").write_text(json.dumps(results))
    if all(result == "ok" for result in results.values()):
        dist.barrier()
        dist.destroy_process_group()
    os._exit(0)  # torch's own teardown ends the process with SIGABRT now and then


def ranks(folder: Path, shape: tuple[int, ...], names: list[str]) -> list[dict[str, str]]:
    size = torch.Size(shape).numel()
    multiprocessing.set_forkserver_preload(PRELOAD)  # torch and transformers are imported once, not once a rank
    arguments = (size, shape, names, str(folder))
    mp.start_processes(run_rank, args=arguments, nprocs=size, start_method="forkserver")
    return [json.loads((folder / f"results-{rank}.json").read_text()) for rank in range(size)]


@pytest.fixture(scope="module")
def two_ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    folder = tmp_path_factory.mktemp("two")
    save_models(folder)
    here = [item for item in request.session.items if item.path == request.path]
    asked = [item.callspec.params["name"] for item in here if item.originalname == "test_two_ranks"]
    return ranks(folder, (2,), asked)


@pytest.mark.parametrize("name", list(CHECKS))
def test_two_ranks(two_ranks: list[dict[str, str]], name: str) -> None:
    found = [results.get(name, "not run: a check before it failed") for results in two_ranks]
    assert found == ["ok", "ok"], "\n".join(found)


def test_hsdp_on_four_ranks(tmp_path: Path) -> None:
    """Two replicas of two shards: gradients and clipped steps against one process that has all four rows."""
    save_models(tmp_path)
    names = ["fp32_gradients_equal_one_process", "clipped_steps_equal_one_process"]
    assert ranks(tmp_path, (2, 2), names) == [dict.fromkeys(names, "ok")] * 4
