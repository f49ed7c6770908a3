"""What fsdp.fp32_units and fsdp.without_gradient name, and what FSDP1 does to parameters without gradient."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecision, fully_shard
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP  # noqa: N817
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from fsdp_sink_patches import fsdp
from fsdp_sink_patches.fsdp import (
    Fp32Units,
    auto_wrap_policy,
    fp32_units,
    freeze_without_gradient,
    ignored_modules,
    without_gradient,
)

transformers = pytest.importorskip("transformers")
if not hasattr(transformers, "DeepseekV4ForCausalLM"):
    pytest.skip("this transformers has no DeepSeek-V4", allow_module_level=True)

from fsdp_sink_patches.patches.transformers import _deepseek_v4_models as v4  # noqa: E402

IDS = torch.randint(0, 128, (1, 40), generator=torch.Generator().manual_seed(3))


def tiny(*layers: str) -> Any:
    return v4.build(layers or (v4.SLIDING, v4.CSA), vocab_size=128, hidden_size=64, moe_intermediate_size=32)


def names(units: Fp32Units, model: nn.Module) -> set[str]:
    """Every parameter that the units cover."""
    covered = {
        f"{module}.{name}" for module in units.modules for name, _ in model.get_submodule(module).named_parameters()
    }
    return covered | set(units.parameters)


def test_deepseek_v4_names_what_from_pretrained_keeps(tmp_path: Path) -> None:
    tiny().save_pretrained(tmp_path)
    mixed = transformers.DeepseekV4ForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    kept = {name for name, value in mixed.named_parameters() if value.dtype == torch.float32}
    assert kept
    units = fp32_units(mixed)
    assert names(units, mixed) == kept
    bare = (
        "model.layers.0.self_attn.sinks",
        "model.layers.1.self_attn.sinks",
        "model.layers.1.self_attn.compressor.position_bias",
        "model.layers.1.self_attn.compressor.indexer.position_bias",
    )
    assert units.parameters == (bare if "sinks" in mixed._keep_in_fp32_modules_strict else ())
    asked = fp32_units(mixed, also=("sinks", "position_bias"))
    assert asked == Fp32Units(units.modules, bare)
    assert "fp32 parameter: model.layers.*.self_attn.sinks (2)" in str(asked).splitlines()
    assert "fp32 module: model.layers.*.attn_hc (2)" in str(units).splitlines()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_model_itself_says_it_in_any_dtype(dtype: torch.dtype) -> None:
    """The strict list alone, as in 5.10.1 and newer; 5.8 and 5.9 list neither sinks nor position_bias nor hc_head."""
    model = tiny().to(dtype)
    found = names(fp32_units(model), model)
    assert {name.rpartition(".")[2] for name in found} >= {"fn", "base", "scale", "weight"}
    asked = type(model)._keep_in_fp32_modules_strict
    assert {"sinks" in name for name in found} == ({True, False} if "sinks" in asked else {False})
    assert not any("proj" in name for name in found)  # the non-strict list has no effect at bf16


def test_sub_models_speak_for_their_own_part() -> None:
    class Tower(nn.Module):
        _keep_in_fp32_modules_strict = ("norm", "blocks.*.scale")

        def __init__(self) -> None:
            super().__init__()
            self.norm, self.up_norm = nn.LayerNorm(4), nn.LayerNorm(4)
            self.blocks = nn.ModuleList([nn.ParameterDict({"scale": torch.ones(1), "weight": torch.ones(1)})])

    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tower, self.norm = Tower(), nn.LayerNorm(4)

    whole = Whole().bfloat16()
    assert fp32_units(whole) == Fp32Units(("tower.norm",), ("tower.blocks.0.scale",))
    assert fp32_units(whole, also=("norm",)) == Fp32Units(("tower.norm", "norm"), ("tower.blocks.0.scale",))
    whole.tower._keep_in_fp32_modules = ["up_norm"]
    assert "tower.up_norm" not in fp32_units(whole).modules
    assert "tower.up_norm" in fp32_units(whole.half()).modules


def test_one_dtype_needs_nothing() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
    assert not fp32_units(model)
    assert str(fp32_units(model)).startswith("no fp32 units")
    model[0].bfloat16()
    assert fp32_units(model) == Fp32Units(("1",), ())


def test_without_gradient_is_what_backward_finds() -> None:
    model = tiny()
    known = without_gradient(model)
    loss = model(input_ids=IDS, labels=IDS).loss
    assert without_gradient(model, loss) == known
    assert len(known) == 6
    assert {name.split(".indexer.")[0] for name in known} == {"model.layers.1.self_attn.compressor"}
    assert without_gradient(tiny(v4.SLIDING, v4.HCA)) == ()
    assert freeze_without_gradient(model) == known
    assert without_gradient(model) == ()


@pytest.fixture
def one_rank(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("one_rank")
def test_a_trainable_indexer_is_told_once(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fsdp, "_said", set())
    mesh = init_device_mesh("cpu", (1,))
    frozen = tiny(v4.CSA)
    freeze_without_gradient(frozen)
    fsdp.shard_fp32_units(frozen, mesh)
    assert not caplog.messages
    for _ in range(2):
        fsdp.shard_fp32_units(tiny(v4.CSA), mesh)
    assert [message.split(", expected")[0] for message in caplog.messages] == [
        "fsdp_sink_patches.fsdp: found 6 trainable parameters of DeepSeek-V4's indexer"
    ]


class Layer(nn.Module):
    """What a layer of a tower is made of; its scale is in a ParameterDict, which nobody calls."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4, dtype=dtype)
        self.extra = nn.ParameterDict({"scale": torch.ones(4)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x.to(self.linear.weight.dtype)) * self.extra["scale"]


@pytest.mark.usefixtures("one_rank")
def test_an_fp32_tower_is_gathered_layer_by_layer_and_a_parameter_dict_is_read_by_its_module() -> None:
    model = nn.Sequential(
        nn.Sequential(Layer(torch.float32), Layer(torch.float32)), nn.Sequential(Layer(torch.bfloat16))
    )
    whole = copy.deepcopy(model)
    model._no_split_modules = ["Layer"]
    with pytest.raises(ValueError, match=r"bare fp32 parameter directly in 1.0 \(Layer\)"):
        fsdp.shard_fp32_units(model, init_device_mesh("cpu", (1,)))
    del model._no_split_modules
    model[0]._no_split_modules = ["Layer"]
    model[1][0].__class__ = type("Block", (Layer,), {})
    mesh = init_device_mesh("cpu", (1,))
    units = fsdp.shard_fp32_units(model, mesh)
    assert units == Fp32Units(("0",), ("1.0.extra.scale",))
    sharded = [name for name, module in model.named_modules() if isinstance(module, FSDPModule)]
    assert sharded == ["0", "0.0", "0.1", "1.0"]
    fully_shard(model, mesh=mesh)
    x = torch.randn(2, 4)
    assert torch.equal(model(x), whole(x))


class Mixer(nn.Module):
    """Hands the weight of a child to a kernel, as the hybrid models do with ``conv1d``; ``norm`` is called."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(4, 4, dtype=torch.bfloat16)
        self.conv1d, self.norm = nn.Conv1d(4, 4, 1, groups=4, bias=False), nn.LayerNorm(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.kernel_forward(self.proj(x.to(self.proj.weight.dtype)))

    def kernel_forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x.to(self.norm.weight.dtype) * self.conv1d.weight.view(-1))


@pytest.mark.usefixtures("one_rank")
def test_a_child_whose_weight_the_parent_reads_is_gathered_with_the_parent() -> None:
    model = nn.Sequential(nn.Sequential(Mixer()))
    whole = copy.deepcopy(model)
    mesh = init_device_mesh("cpu", (1,))
    assert fsdp.shard_fp32_units(model, mesh) == Fp32Units(("0.0.norm",), ("0.0.conv1d.weight",))
    fully_shard(model, mesh=mesh)
    x = torch.randn(2, 4)
    assert torch.equal(model(x), whole(x))
    model(x).square().sum().backward()
    whole(x).square().sum().backward()
    for name, value in whole.named_parameters():
        assert torch.equal(model.get_parameter(name).grad.full_tensor(), value.grad), name


@pytest.mark.usefixtures("one_rank")
def test_fp32_adapters_of_target_parameters_are_refused() -> None:
    class ParamWrapper(nn.Module):  # PEFT's, which reads self.lora_A[adapter].weight
        def __init__(self) -> None:
            super().__init__()
            self.base_layer = nn.Linear(4, 4, dtype=torch.bfloat16)
            self.lora_A = nn.ModuleDict({"default": nn.Linear(4, 2)})

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.base_layer(x)

    model = nn.Sequential(ParamWrapper())
    with pytest.raises(ValueError, match=r"found fp32 adapters in 0.lora_A.*autocast_adapter_dtype=False"):
        fsdp.shard_fp32_units(model, init_device_mesh("cpu", (1,)))
    assert not any(isinstance(module, FSDPModule) for module in model.modules())
    model[0].lora_A.bfloat16()
    assert not fsdp.shard_fp32_units(model, init_device_mesh("cpu", (1,)))


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("freeze", [False, True])
def test_fsdp1_decays_an_indexer_that_is_not_frozen(freeze: bool) -> None:
    """One rank, so that FSDP1 runs on a CPU: its flat parameter hands zeros, not None, to AdamW."""
    model = tiny(v4.CSA)
    if freeze:
        freeze_without_gradient(model)
    start = model.model.layers[0].self_attn.compressor.indexer.kv_proj.weight.detach().clone()
    policy = ModuleWrapPolicy({type(model.model.layers[0])})
    wrapped = FSDP(model, auto_wrap_policy=policy, use_orig_params=True, device_id=torch.device("cpu"))
    optimizer = torch.optim.AdamW(wrapped.parameters(), lr=1e-2, weight_decay=0.1)
    for _ in range(10):
        wrapped(input_ids=IDS, labels=IDS).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    with FSDP.summon_full_params(wrapped):
        now = next(value for name, value in wrapped.named_parameters() if name.endswith("indexer.kv_proj.weight"))
        moved = ((now - start).norm() / start.norm()).item()
    assert moved == (0 if freeze else pytest.approx(1 - (1 - 1e-3) ** 10, rel=1e-3))


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("ours", [False, True])
def test_fsdp1_keeps_frequencies_and_fp32_modules(ours: bool) -> None:
    """Upstream's way, a policy by class and no ignored module, rounds the frequencies and runs every norm in bf16."""
    model = tiny()
    before = [buffer.clone() for name, buffer in model.named_buffers() if "inv_freq" in name]
    options: dict[str, Any] = {"auto_wrap_policy": ModuleWrapPolicy({type(model.model.layers[0])})}
    if ours:
        options = {"auto_wrap_policy": auto_wrap_policy(model), "ignored_modules": ignored_modules(model)}
        assert {type(module).__name__ for module in options["ignored_modules"]} == {"DeepseekV4RotaryEmbedding"}
    policy = MixedPrecision(torch.bfloat16, torch.float32, torch.bfloat16)
    wrapped = FSDP(model, mixed_precision=policy, use_orig_params=True, device_id=torch.device("cpu"), **options)

    seen: dict[str, torch.dtype] = {}

    def look(name: str, module: nn.Module) -> None:
        seen.update({f"{name}.{key}": value.dtype for key, value in module._parameters.items() if value is not None})

    for name, module in model.named_modules():
        last = name.removesuffix("._fsdp_wrapped_module").rpartition(".")[2]
        if last in ("q_a_norm", "attn_hc", "q_a_proj", "self_attn", "kv_proj"):
            module.register_forward_pre_hook(lambda module, _args, last=last: look(last, module))
    with torch.autocast("cpu", torch.bfloat16):  # releases up to 5.19 do not run in bf16 without
        wrapped(input_ids=IDS)
    after = [buffer for name, buffer in model.named_buffers() if "inv_freq" in name]
    assert all(torch.equal(*pair) for pair in zip(before, after, strict=True)) is ours
    fp32 = {name for name, dtype in seen.items() if dtype == torch.float32}
    assert fp32 == ({"q_a_norm.weight", "attn_hc.fn", "attn_hc.base", "attn_hc.scale"} if ours else set())


class Slots(nn.Module):
    """Sink slots of fixed shape; the values are no bf16 numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("slot_k", torch.full((2, 4), 1 + 2**-12))
        self.register_buffer("slot_v", torch.full((2, 4), 1 + 2**-12), persistent=False)


class Schedule(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("begin", torch.tensor([10001.0, 40001.0]))
        self.register_buffer("slots", torch.tensor([0, 64]))


class MaskBuilder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("bias", torch.full((8,), -1 - 2**-12), persistent=False)
        self.register_buffer("visible", torch.ones(8, 8, dtype=torch.bool).tril())


class Slotted(nn.Module):
    """A layer with all of them inside, in a container beside weights as well."""

    def __init__(self) -> None:
        super().__init__()
        self.proj, self.norm = nn.Linear(8, 8), nn.LayerNorm(8)  # flat parameters pad to 16 bytes
        self.slots, self.masks = Slots(), MaskBuilder()
        self.mixed = nn.ModuleDict({"schedule": Schedule(), "proj": nn.Linear(8, 8)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.mixed["proj"](self.norm(self.proj(x)))


class SlottedModel(nn.Module):
    _no_split_modules = ("Slotted",)

    def __init__(self) -> None:
        super().__init__()
        self.masks, self.schedule = MaskBuilder(), Schedule()
        self.layers = nn.ModuleList([Slotted(), Slotted()])
        self.layers[1].register_buffer("bare", torch.full((2,), 1 + 2**-12))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers[1](self.layers[0](x))


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("ours", [False, True])
def test_fsdp1_leaves_slots_schedules_and_mask_builders_alone(ours: bool) -> None:
    """A policy by class rounds each of their floating buffers; either way flat parameters hold parameters alone."""
    model = SlottedModel()
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    floating = {name for name, buffer in before.items() if buffer.is_floating_point()}
    assert len(floating) == 11
    parameters = sum(parameter.numel() for parameter in model.parameters())
    options: dict[str, Any] = {"auto_wrap_policy": ModuleWrapPolicy({Slotted})}
    if ours:
        options = {"auto_wrap_policy": auto_wrap_policy(model), "ignored_modules": ignored_modules(model)}
        assert len(options["ignored_modules"]) == 8
    policy = MixedPrecision(torch.bfloat16, torch.float32, torch.bfloat16)
    wrapped = FSDP(model, mixed_precision=policy, use_orig_params=True, device_id=torch.device("cpu"), **options)
    wrapped(torch.randn(3, 8)).float().square().sum().backward()
    after = {name.replace("_fsdp_wrapped_module.", ""): buffer for name, buffer in wrapped.named_buffers()}
    changed = {name for name, buffer in before.items() if not torch.equal(buffer, after[name])}
    # What FSDP1 has no word for: a buffer of a module that has parameters (docs/fsdp.md).
    assert changed == ({"layers.1.bare"} if ours else floating)
    handles = [module._handle for module in FSDP.fsdp_modules(wrapped) if module._handle is not None]
    assert sum(handle.flat_param.numel() for handle in handles) == parameters


class _Masks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("offsets", torch.arange(8) * 1.001)
        self.register_buffer("allowed", torch.ones(8, dtype=torch.bool))


class _Schedule(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.step = nn.Parameter(torch.tensor(3), requires_grad=False)
        self.scale = nn.Parameter(torch.tensor(1.001), requires_grad=False)
        self.inner = nn.ModuleList([_Masks()])


class _Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(8, 8)
        self.sinks = nn.Parameter(torch.tensor([4.0, 8.0]))
        self.register_buffer("slots", torch.full((8,), 1.001))  # beside weights
        self.slot_cache = _Masks()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = self.proj(x) * self.sinks.sum() + self.slots + self.slot_cache.offsets
        return found.where(self.slot_cache.allowed, 0)


class _Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attn, self.schedule = _Attention(), _Schedule()
        self.frozen = nn.Linear(8, 8).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.frozen(self.attn(x)) * self.schedule.scale * self.schedule.step


class _UsersModel(nn.Module):
    _no_split_modules = ("_Layer",)

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.head = nn.ModuleList([_Layer(), _Layer()]), nn.Linear(8, 8)
        self.masks, self.schedule = _Masks(), _Schedule()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x) * self.schedule.scale + self.masks.offsets


@pytest.mark.usefixtures("one_rank")
def test_fsdp1_leaves_mask_builders_slots_and_schedules_alone() -> None:
    model = _UsersModel()
    ignored = ignored_modules(model)
    assert [type(module).__name__ for module in ignored] == ["_Masks", "_Schedule"] * 3
    assert model.layers[0].frozen not in ignored
    state = {name: value.detach().clone() for module in ignored for name, value in _state(module).items()}
    sharded = MixedPrecision(torch.bfloat16, torch.float32, torch.float32)  # fp32 for the slots beside weights
    wrapped = FSDP(
        model,
        auto_wrap_policy=auto_wrap_policy(model),
        ignored_modules=ignored,
        use_orig_params=True,
        mixed_precision=sharded,
        device_id=torch.device("cpu"),
    )
    with torch.autocast("cpu", torch.bfloat16):
        wrapped(torch.randn(2, 8)).sum().backward()
    after = {name: value for module in ignored for name, value in _state(module).items()}
    assert after.keys() == state.keys()
    assert {n: v.dtype for n, v in after.items()} == {n: v.dtype for n, v in state.items()}
    assert all(torch.equal(after[name], value) for name, value in state.items())
    assert all(torch.equal(layer.attn.slots, torch.full((8,), 1.001)) for layer in model.layers)
    flat = {name for handle in FSDP.fsdp_modules(wrapped) for name in handle._handle.flat_param._fqns}
    assert not [name for name in flat if "schedule" in name or "masks" in name or "slot" in name]
    assert any(name.endswith("sinks") for name in flat)
    assert any("frozen" in name for name in flat)


@pytest.mark.usefixtures("one_rank")
def test_fsdp1_refuses_schedules_that_are_not_ignored() -> None:
    model = _UsersModel()
    with pytest.raises(ValueError, match="FSDP doesn't support scalar parameters"):
        FSDP(model, auto_wrap_policy=ModuleWrapPolicy({_Layer}), use_orig_params=True, device_id=torch.device("cpu"))


def _state(module: nn.Module) -> dict[str, torch.Tensor]:
    return {f"{id(module)}.{name}": value for name, value in [*module.named_parameters(), *module.named_buffers()]}


def test_what_is_found_and_what_is_listed(tmp_path: Path) -> None:
    """``found=False``: fp32 adapters of a bf16 model are nobody's business; buffers are listed beside parameters."""
    tiny().save_pretrained(tmp_path)
    mixed = transformers.DeepseekV4ForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    mixed.model.layers[0].self_attn.add_module("lora_A", nn.Linear(4, 2))
    adapter = "model.layers.0.self_attn.lora_A"
    assert adapter in fp32_units(mixed).modules
    assert not [name for name in fsdp.listed_in_fp32(mixed) if "lora" in name]
    listed = fp32_units(mixed, found=False)
    assert adapter not in listed.modules
    assert names(listed, mixed) < set(fsdp.listed_in_fp32(mixed))
    buffers = {name for name, _ in mixed.named_buffers()} & set(fsdp.listed_in_fp32(mixed))
    assert buffers == {f"model.layers.{i}.mlp.gate.e_score_correction_bias" for i in range(2)}


def test_fsdp1_policy_refuses_what_fsdp1_cannot_flatten(tmp_path: Path) -> None:
    tiny().save_pretrained(tmp_path)
    mixed = transformers.DeepseekV4ForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    for layer in mixed.model.layers:
        layer.self_attn.sinks.data = layer.self_attn.sinks.data.float()  # upstream does it from 5.10.1 on
    with pytest.raises(ValueError, match=r"found model.layers.0.self_attn.sinks in fp32.*use FSDP2"):
        auto_wrap_policy(mixed)
    with pytest.raises(ValueError, match="_no_split_modules"):
        auto_wrap_policy(nn.Linear(2, 2))


def test_quantised_weights_are_no_counters() -> None:
    """Left out of the shards without a word they would lie whole on every rank."""
    layer = nn.Module()
    layer.weight = nn.Parameter(torch.zeros(128, 128, dtype=torch.uint8), requires_grad=False)
    layer.register_buffer("absmax", torch.ones(128))
    assert ignored_modules(nn.ModuleList([layer])) == []
