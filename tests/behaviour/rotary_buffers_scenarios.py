"""What a job does to a model's buffers, in a process of its own; prints what is left of the frequencies as JSON.

    python rotary_buffers_scenarios.py [--apply ID,ID] NAME...

A name is a scenario, or a model for the table of every corruption on it: whether its frequencies are bit-equal to those
of a fresh fp32 model, and whether its logits are.
"""

from __future__ import annotations

import argparse
import copy
import gc
import hashlib
import json
import logging
import math
import pickle
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp._runtime_utils import _cast_buffers_to_dtype_and_device

import fsdp_sink_patches
from fsdp_sink_patches import _fingerprint, _registry

ID = "transformers.rotary-buffers"
SCENARIOS: dict[str, Callable[[], Any]] = {}
MODELS: dict[str, Callable[[], nn.Module]] = {}
LOG: list[str] = []
TEXT: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


def scenario(function: Callable[[], Any]) -> Callable[[], Any]:
    SCENARIOS[function.__name__] = function
    return function


def model(build: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    MODELS[build.__name__] = build
    SCENARIOS[build.__name__] = lambda: _table(build)
    return build


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--apply", default="")
    parser.add_argument("names", nargs="+")
    arguments = parser.parse_args()
    handler = logging.Handler()
    handler.emit = lambda record: LOG.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("fsdp_sink_patches").addHandler(handler)
    ids = [name for name in arguments.apply.split(",") if name]
    if ids:
        # A release whose source is recorded must be recognised; another is tried, and passing lets it be recorded.
        unknown = [id for id in ids if not _fingerprint.match(_registry.get(id)).known]
        fsdp_sink_patches.apply(*ids, allow_drift=unknown)
    results = {name: SCENARIOS[name]() for name in arguments.names}
    if ids:
        fsdp_sink_patches.assert_applied(*ids)
    print(json.dumps(results))


# --- models ----------------------------------------------------------------------------------------------------------


def _config(name: str, **settings: Any) -> Any:
    import transformers

    return getattr(transformers, name)(**{**TEXT, **settings}, attn_implementation="eager")


def _model(name: str, config: Any) -> nn.Module:
    import transformers

    torch.manual_seed(0)
    return getattr(transformers, name)(config).eval()


@model
def gpt_oss() -> nn.Module:
    return _model("GptOssForCausalLM", _config("GptOssConfig", num_local_experts=2, num_experts_per_tok=2))


@model
def llama() -> nn.Module:
    scaling = {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 128, "rope_theta": 500000.0,
    }  # fmt: skip
    return _model("LlamaForCausalLM", _config("LlamaConfig", rope_scaling=scaling, max_position_embeddings=1024))


@model
def qwen3() -> nn.Module:
    return _model("Qwen3ForCausalLM", _config("Qwen3Config"))


@model
def gemma3() -> nn.Module:
    layers = ["sliding_attention", "full_attention"]
    return _model("Gemma3ForCausalLM", _config("Gemma3TextConfig", layer_types=layers, sliding_window=16))


@model
def mimo_v2_flash() -> nn.Module:
    settings = {"v_head_dim": 16, "n_routed_experts": 2, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    layers = ["full_attention", "sliding_attention"]
    return _model("MiMoV2FlashForCausalLM", _config("MiMoV2FlashConfig", **settings, layer_types=layers))


@model
def deepseek_v4() -> nn.Module:
    from fsdp_sink_patches.patches.transformers._deepseek_v4_models import CSA, HCA, SLIDING, build

    return build((SLIDING, CSA, HCA)).eval()


@model
def qwen2_5_vl() -> nn.Module:
    import transformers

    vision = {
        "depth": 2, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 64, "patch_size": 4,
        "spatial_merge_size": 1, "window_size": 8, "fullatt_block_indexes": [1],
    }  # fmt: skip
    sections = {"rope_type": "default", "mrope_section": [4, 6, 6]}
    text = {**TEXT, "num_attention_heads": 2, "rope_scaling": sections}
    config = transformers.Qwen2_5_VLConfig(
        text_config=text, vision_config=vision, attn_implementation="eager", image_token_id=3, video_token_id=4,
        vision_start_token_id=5, vision_end_token_id=6,
    )  # fmt: skip
    return _model("Qwen2_5_VLForConditionalGeneration", config)


@model
def phi3_longrope() -> nn.Module:
    scaling = {"short_factor": [1.0 + 0.01 * i for i in range(16)], "long_factor": [2.0 + i for i in range(16)]}
    config = _config(
        "Phi3Config",
        rope_scaling={"type": "longrope", **scaling},
        original_max_position_embeddings=64,
        max_position_embeddings=512,
        num_attention_heads=2,
    )
    return _model("Phi3ForCausalLM", config)


@model
def llama_dynamic() -> nn.Module:
    scaling = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}
    return _model("LlamaForCausalLM", _config("LlamaConfig", rope_scaling=scaling, max_position_embeddings=64))


# --- what is looked at -----------------------------------------------------------------------------------------------


def _frequencies(model: nn.Module) -> dict[str, Tensor]:
    """As whoever walks over the model meets them; ``original_inv_freq`` is no buffer before 5.0."""
    found = {name: buffer for name, buffer in _buffers(model) if name.endswith("inv_freq")}
    for path, module in model.named_modules():
        if isinstance(vars(module).get("original_inv_freq"), Tensor):
            found[f"{path}.original_inv_freq"] = module.original_inv_freq
    return found


def _buffers(model: nn.Module) -> list[tuple[str, Tensor]]:
    return list(model.named_buffers(remove_duplicate=False))  # upstream's dynamic types are one tensor by two names


def _equal(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> bool:
    """Bit-equal, as fp32, and none missing."""
    return found.keys() == wanted.keys() and all(
        tensor.dtype == torch.float32 and tensor.device == wanted[name].device and torch.equal(tensor, wanted[name])
        for name, tensor in found.items()
    )


def _ids(length: int) -> Tensor:
    return torch.randint(7, 64, (1, length), generator=torch.Generator().manual_seed(length))


@torch.no_grad()
def _output(model: nn.Module, length: int = 48) -> Tensor:
    logits: Tensor = model(input_ids=_ids(length), use_cache=False).logits
    visual = getattr(getattr(model, "model", None), "visual", None)
    if visual is None:
        return logits
    patches = torch.randn(64, 3 * 2 * 4 * 4, generator=torch.Generator().manual_seed(0))
    seen = visual(patches, grid_thw=torch.tensor([[1, 8, 8]]))
    seen = seen if isinstance(seen, Tensor) else seen.last_hidden_state
    return torch.cat([logits.flatten(), seen.flatten()])


def _sorted(tensors: dict[str, Tensor]) -> list[Tensor]:
    """By name: gemma3 lists its labels in the order of a set of strings, another one in each process."""
    return [tensors[name] for name in sorted(tensors)]


def _digest(*tensors: Tensor) -> str:
    parts = [tensor.detach().flatten().contiguous().view(torch.uint8).numpy().tobytes() for tensor in tensors]
    return hashlib.sha256(b"".join(parts)).hexdigest()[:16]


# --- corruptions -----------------------------------------------------------------------------------------------------


def _again(reference: nn.Module) -> nn.Module:
    """A new model of the same config, as its class builds it."""
    return type(reference)(copy.deepcopy(reference.config)).eval()


def _on_meta(reference: nn.Module) -> nn.Module:
    with torch.device("meta"):
        return _again(reference)


def _spoil(model: nn.Module, value: float = 1e30) -> None:
    """What ``to_empty`` may leave; written so that no version counter shows it."""
    for tensor in _frequencies(model).values():
        if tensor.device.type != "meta":
            tensor.data.fill_(value)


def _loaded(model: nn.Module, reference: nn.Module, **options: Any) -> nn.Module:
    model.load_state_dict(reference.state_dict(), **options)
    return _given(model, reference)


def _given(model: nn.Module, reference: nn.Module) -> nn.Module:
    """Everything but the frequencies is the reference's, by no call that walks over the modules."""
    for name, parameter in model.named_parameters():
        parameter.data = reference.get_parameter(name).data
    for name, buffer in model.named_buffers():
        if not name.endswith("inv_freq"):
            buffer.data = reference.get_buffer(name).data
    return model


def cast_and_back(reference: nn.Module) -> nn.Module:
    return _loaded(_again(reference).to(torch.bfloat16).float(), reference)


def half(reference: nn.Module) -> nn.Module:
    return _loaded(_again(reference).half().float(), reference)


def bfloat16_parameters_restored_by_hand(reference: nn.Module) -> nn.Module:
    """No call that walks over the modules after the cast."""
    model = _again(reference).bfloat16()
    return _given(model, reference)


def cast_of_every_module_alone(reference: nn.Module) -> nn.Module:
    model = _again(reference)
    for module in list(model.modules())[::-1]:
        module.to(torch.bfloat16)
    return _loaded(model.float(), reference)


def cast_inside_a_wrapper(reference: nn.Module) -> nn.Module:
    wrapper = nn.Sequential(_again(reference)).to(torch.bfloat16).float()
    return _loaded(wrapper[0], reference)


def fsdp1_buffer_dtype(reference: nn.Module) -> nn.Module:
    """What FSDP1 does before the root's first forward, by its own function."""
    model = _loaded(_again(reference), reference)
    buffers = list(model.buffers())
    _cast_buffers_to_dtype_and_device(buffers, [torch.bfloat16] * len(buffers), torch.device("cpu"))
    _output(model)
    return model


def to_empty_and_load(reference: nn.Module) -> nn.Module:
    model = _on_meta(reference).to_empty(device="cpu")
    _spoil(model)
    return _loaded(model, reference)


def to_empty_and_assign(reference: nn.Module) -> nn.Module:
    model = _on_meta(reference).to_empty(device="cpu")
    _spoil(model, math.nan)
    return _loaded(model, reference, assign=True)


def meta_cast_and_to_empty_by_module(reference: nn.Module) -> nn.Module:
    """As FSDP's ``param_init_fn`` does it: each module alone, after the model was cast on meta."""
    model = _on_meta(reference).to(torch.bfloat16)
    for module in model.modules():
        module.to_empty(device="cpu", recurse=False)
    return _loaded(model.float(), reference)


def to_empty_and_initialize_weights(reference: nn.Module) -> nn.Module:
    model: Any = _on_meta(reference).to_empty(device="cpu")
    _spoil(model)
    model.initialize_weights()
    return _given(model, reference)


def to_empty_of_a_real_model(reference: nn.Module) -> nn.Module:
    model = _again(reference).to_empty(device="cpu")
    _spoil(model)
    return _loaded(model, reference)


def written_through_data(reference: nn.Module) -> nn.Module:
    """No call tells of it, so it is put right by the forward; and the forward itself never sees it."""
    model = _loaded(_again(reference), reference)
    model.first = _output(model)  # type: ignore[assignment]
    _spoil(model)
    if not torch.equal(_output(model), model.first):
        return model
    return model.to("cpu")


def written_in_place(reference: nn.Module) -> nn.Module:
    model = _loaded(_again(reference), reference)
    for tensor in _frequencies(model).values():
        tensor.fill_(1e30)
    _output(model)
    return model


def replaced(reference: nn.Module) -> nn.Module:
    """As loaders do that put tensors into ``_buffers`` themselves."""
    model = _loaded(_again(reference), reference)
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if name.endswith("inv_freq"):
                module._buffers[name] = torch.full_like(buffer, 1e30)  # type: ignore[arg-type]
    _output(model)
    return model


def deepcopy_then_cast(reference: nn.Module) -> nn.Module:
    return _loaded(copy.deepcopy(_again(reference)).to(torch.bfloat16).float(), reference)


def cast_then_deepcopy(reference: nn.Module) -> nn.Module:
    return _loaded(copy.deepcopy(_again(reference).to(torch.bfloat16)).float(), reference)


def cast_then_pickle(reference: nn.Module) -> nn.Module:
    model = pickle.loads(pickle.dumps(_again(reference).to(torch.bfloat16)))
    return _given(model, reference)


def cast_and_moved(reference: nn.Module) -> nn.Module:
    model = _again(reference).to(torch.bfloat16).to("meta").to_empty(device="cpu").cpu()
    return _loaded(model.float(), reference)


# These change nothing upstream either.


def shared_memory(reference: nn.Module) -> nn.Module:
    model = _loaded(_again(reference), reference).share_memory()
    assert all(tensor.is_shared() for tensor in [*model.buffers(), *model.parameters()])
    return model


def built_under_bf16(reference: nn.Module) -> nn.Module:
    torch.set_default_dtype(torch.bfloat16)
    try:
        model = _again(reference)
    finally:
        torch.set_default_dtype(torch.float32)
    return _given(model, reference)


def from_pretrained_in_bf16(reference: nn.Module) -> nn.Module:
    with tempfile.TemporaryDirectory() as folder:
        reference.save_pretrained(folder)  # type: ignore[operator]
        model = type(reference).from_pretrained(folder, dtype=torch.bfloat16, attn_implementation="eager").eval()  # type: ignore[attr-defined]
    return _given(model, reference)


CORRUPTIONS = (
    cast_and_back, half, bfloat16_parameters_restored_by_hand, cast_of_every_module_alone, cast_inside_a_wrapper,
    fsdp1_buffer_dtype, to_empty_and_load, to_empty_and_assign, meta_cast_and_to_empty_by_module,
    to_empty_and_initialize_weights, to_empty_of_a_real_model, written_through_data, written_in_place, replaced,
    deepcopy_then_cast, cast_then_deepcopy, cast_then_pickle, cast_and_moved,
    shared_memory, built_under_bf16, from_pretrained_in_bf16,
)  # fmt: skip


def _table(build: Callable[[], nn.Module]) -> dict[str, Any]:
    reference = build()
    wanted = {name: tensor.clone() for name, tensor in _frequencies(reference).items()}
    logits = _output(reference)
    found: dict[str, Any] = {"names": sorted(wanted), "fresh": _digest(*_sorted(wanted), logits)}
    for corruption in CORRUPTIONS:
        try:
            model = corruption(reference)
            found[corruption.__name__] = {
                "frequencies": _equal(_frequencies(model), wanted),
                "logits": torch.equal(_output(model), logits),
            }
        except Exception as error:
            found[corruption.__name__] = {"raises": f"{type(error).__name__}: {error}"}
    return found


# --- frequencies that follow the row ---------------------------------------------------------------------------------

ROWS = (8, 100, 40, 300, 120, 8, 70, 65, 64, 63, 500, 20)
"""Lengths around 64, up to which both models were trained: growth, rows in between, and back."""


def _rows(build: Callable[[], nn.Module], between: Callable[[nn.Module, nn.Module], nn.Module] | None) -> list[str]:
    """Digests of the logits and the frequencies of each row, with something done to the model before each."""
    reference = build()
    model = _loaded(_again(reference), reference)
    found = []
    for length in ROWS:
        if between is not None:
            model = between(model, reference)
        logits = _output(model, length)
        found.append(_digest(logits, *_sorted(_frequencies(model))))
    return found


def _everything(model: nn.Module, reference: nn.Module) -> nn.Module:
    model = _loaded(model.to(torch.bfloat16).float(), reference)
    buffers = list(model.buffers())
    _cast_buffers_to_dtype_and_device(buffers, [torch.bfloat16] * len(buffers), torch.device("cpu"))
    _spoil(model, math.nan)
    return _loaded(copy.deepcopy(model).to_empty(device="cpu"), reference)


def _following(build: Callable[[], nn.Module]) -> dict[str, Any]:
    return {"healthy": _rows(build, None), "corrupted": _rows(build, _everything)}


@scenario
def dynamic_rows() -> Any:
    return _following(llama_dynamic)


@scenario
def longrope_rows() -> Any:
    return _following(phi3_longrope)


@scenario
def labelled_dynamic_rows() -> Any:
    def build() -> nn.Module:
        rope = {
            "full_attention": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        }
        layers = ["sliding_attention", "full_attention"]
        settings = {"rope_parameters": rope, "layer_types": layers, "sliding_window": 16, "max_position_embeddings": 64}
        return _model("Gemma3ForCausalLM", _config("Gemma3TextConfig", **settings))

    return _following(build)


@scenario
def dynamic_rows_after_a_break() -> Any:
    """Rows that grew while the patch was off, then a deep copy or none, then a cast."""

    results = []
    for copies in (False, True):
        model, healthy = llama_dynamic(), llama_dynamic()
        fsdp_sink_patches.unapply(ID)
        _output(model, 200), _output(healthy, 200)
        fsdp_sink_patches.apply(ID, allow_drift=(ID,))
        if copies:
            model = copy.deepcopy(model)
        model.to(torch.bfloat16).float()
        results.append(_equal(_frequencies(model), _frequencies(healthy)))
        for length in (120, 250, 8):
            _output(model, length), _output(healthy, length)
            results.append(_equal(_frequencies(model), _frequencies(healthy)))
    return results


# --- cases A2, A3 and A6 ---------------------------------------------------------------------------------------------


@scenario
def case_a2() -> Any:
    """Tiny DeepSeek-V4 on meta, ``to_empty``, every floating buffer filled with 1e30, weights loaded."""
    reference = deepseek_v4()
    model = _on_meta(reference).to_empty(device="cpu")
    for buffer in model.buffers():
        if buffer.is_floating_point():
            buffer.fill_(1e30)
    model.load_state_dict(reference.state_dict())
    found, wanted = _frequencies(model), _frequencies(reference)
    return {name: _equal({name: found[name]}, {name: tensor}) for name, tensor in wanted.items()}


def _phases(cos: Tensor, sin: Tensor, exact: Tensor) -> list[float]:
    error = (torch.atan2(sin.double(), cos.double()) - exact + math.pi).remainder(2 * math.pi) - math.pi
    return [float(row.abs().max()) for row in error]


@scenario
def case_a3() -> Any:
    """DeepSeek-V4's rotary module with 64 dims after a cast: phase error in radians at four positions, by label."""
    from fsdp_sink_patches.patches.transformers._deepseek_v4_models import SLIDING, build

    plain = {
        label: {"rope_type": "default", "rope_theta": theta, "partial_rotary_factor": 0.5}
        for label, theta in THETAS.items()
    }
    model = build((SLIDING,), head_dim=128, qk_rope_head_dim=64, rope_parameters=plain).to(torch.bfloat16)
    positions = torch.tensor([[0, 511, 4095, 65535]])
    found = {}
    for label, theta in THETAS.items():
        cos, sin = model.model.rotary_emb(torch.zeros(1), positions, layer_type=label)
        exact = positions[0, :, None] * theta ** (-torch.arange(0, 64, 2, dtype=torch.float64) / 64)
        found[label] = _phases(cos[0], sin[0], exact)
    return found


THETAS = {"main": 10000.0, "compress": 160000.0}


@scenario
def case_a6() -> Any:
    """Which rope each label has after every corruption at once: digests of its table at two positions."""
    reference: Any = deepseek_v4()
    model: Any = _everything(_loaded(_again(reference), reference), reference)
    positions = torch.tensor([[1000, 70000]])
    found = {}
    for label in ("main", "compress"):
        for name, one in (("reference", reference), ("model", model)):
            tables = [
                torch.cat(module(torch.zeros(1), positions, layer_type=label))
                for module in one.modules()
                if type(module).__name__ == "DeepseekV4RotaryEmbedding"
            ]
            found[f"{label} {name}"] = sorted({_digest(table) for table in tables})
        found[f"{label} theta"] = reference.config.rope_parameters[label]["rope_theta"]
        found[f"{label} type"] = reference.config.rope_parameters[label]["rope_type"]
    return found


# --- what must not change --------------------------------------------------------------------------------------------


@scenario
def compiled() -> Any:
    """``fullgraph`` where upstream compiles so; graphs built for three forwards and after a cast."""
    import torch._dynamo
    from torch._dynamo.testing import CompileCounter

    reference = llama()
    counter = CompileCounter()
    model = torch.compile(reference, fullgraph=True, backend=counter)
    wanted = _output(reference)
    same = [torch.equal(_output(model), wanted) for _ in range(3)]
    once = counter.frame_count
    reference.to(torch.bfloat16).float()
    _loaded(reference, llama())
    same.append(torch.equal(_output(model), wanted))
    return {"same": same, "graphs": once, "more": counter.frame_count - once}


@scenario
def checkpointed() -> Any:
    """Gradients with activation checkpointing, bit-equal to those without."""
    found = []
    for checkpointing in (False, True):
        model: Any = gpt_oss().train()
        if checkpointing:
            model.gradient_checkpointing_enable()
        model.to(torch.bfloat16)
        _loaded(model.float(), gpt_oss())
        model(input_ids=_ids(48), labels=_ids(48), use_cache=False).loss.backward()
        found.append(_digest(*(p.grad for p in model.parameters() if p.grad is not None)))
    return found


@scenario
def generated() -> Any:
    model: Any = llama()
    return model.generate(_ids(9), max_new_tokens=6, do_sample=False).tolist()


@scenario
def random_state() -> Any:
    """Building models draws the same random numbers as upstream's, also on the way out of a composite model."""
    torch.manual_seed(0)
    digests = [_digest(*(p for p in build().parameters())) for build in (gpt_oss, qwen2_5_vl)]
    return [*digests, torch.rand(4).tolist()]


@scenario
def after_unapply() -> Any:
    model = gpt_oss()
    twin, copied = gpt_oss(), copy.deepcopy(model)
    fsdp_sink_patches.unapply(ID)
    wanted = _frequencies(gpt_oss())
    inert = {}
    for name, one in (("model", model), ("copy", copied), ("copied now", copy.deepcopy(twin))):
        before = _equal(_frequencies(one), wanted)
        one.to(torch.bfloat16)
        inert[name] = [before, {buffer.dtype for buffer in one.buffers()} == {torch.bfloat16}]
    spoilt = gpt_oss()
    good = _output(spoilt)
    _spoil(spoilt)
    inert["forward"] = not torch.equal(_output(spoilt), good)
    fsdp_sink_patches.apply(ID, allow_drift=(ID,))
    model.float()
    inert["again"] = _equal(_frequencies(model), wanted)
    return inert


@scenario
def pickled() -> Any:
    """What a process without this package makes of a pickle: the frequencies of a model that was cast."""
    model = gpt_oss()
    wanted = _digest(*_frequencies(model).values())
    model.to(torch.bfloat16)
    code = (
        "import sys, pickle, hashlib\n"
        "class Blocked:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.partition('.')[0] == 'fsdp_sink_patches': raise ImportError(name)\n"
        "sys.meta_path.insert(0, Blocked())\n"
        "for file in sys.argv[1:]:\n"
        "    model = pickle.load(open(file, 'rb'))\n"
        "    kinds = {type(m).__module__.partition('.')[0] for m in model.modules()}\n"
        "    found = [t for n, t in model.named_buffers() if n.endswith('inv_freq')]\n"
        "    found += [m.original_inv_freq for m in model.modules() if 'original_inv_freq' in vars(m)]\n"
        "    print(sorted(kinds), hashlib.sha256(b''.join(t.numpy().tobytes() for t in found)).hexdigest()[:16])\n"
    )
    with tempfile.TemporaryDirectory() as folder:
        files = [f"{folder}/{protocol}" for protocol in (0, 2, pickle.HIGHEST_PROTOCOL)]
        for file in files:
            with open(file, "wb") as out:
                pickle.dump(model, out, int(file.rpartition("/")[2]))
        done = subprocess.run([sys.executable, "-c", code, *files], capture_output=True, text=True, check=False)
    return {"wanted": f"['torch', 'transformers'] {wanted}", "found": done.stdout.split("\n")[:-1], "log": done.stderr}


@scenario
def unpickled() -> Any:
    """A pickle that comes back to a process with the patch is upstream's until ``initialize_weights()``."""
    model = pickle.loads(pickle.dumps(gpt_oss().to(torch.bfloat16)))
    model.to(torch.bfloat16)
    lost = _equal(_frequencies(model), _frequencies(gpt_oss()))
    model.initialize_weights()
    return [lost, _equal(_frequencies(model), _frequencies(gpt_oss()))]


@scenario
def double() -> Any:
    """An fp64 model computes what upstream's does: its buffers are fp64, of the same values."""
    model = llama().double()
    found = _frequencies(model)
    same = {name: tensor.float() for name, tensor in found.items()}
    return {
        "dtypes": sorted({str(buffer.dtype) for buffer in model.buffers()}),
        "same": _equal(same, _frequencies(llama())),
        "logits": _digest(_output(model)),
        "dynamic": [_digest(_output(doubled, n)) for doubled in [llama_dynamic().double()] for n in (8, 100, 40, 8)],
    }


@scenario
def built_of_fakes() -> Any:
    """A second model of one config, built and run under a mode that makes its tensors fake, as estimators do."""
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

    real = llama()
    found, said = [], len(LOG)
    for options in ({}, {"allow_non_fake_inputs": True}):
        with FakeTensorMode(**options):  # type: ignore[arg-type]
            one = _again(real)
            logits = one(input_ids=torch.zeros(1, 8, dtype=torch.long), use_cache=False).logits
        found.append(isinstance(logits, FakeTensor) and all(isinstance(b, FakeTensor) for b in one.buffers()))
    return [*found, _equal(_frequencies(_again(real)), _frequencies(real)), LOG[said:]]


@scenario
def changed_by_hand() -> Any:
    """Frequencies that somebody scales by 8 in a built model, four ways; what holds, and what is said."""
    import transformers

    eighth, said = {}, len(LOG)
    for way in ("assigned", "in place", "registered", "built again"):
        model: Any = qwen3()
        rotary = model.model.rotary_emb
        truth = rotary.inv_freq.clone()
        if way == "assigned":
            rotary.inv_freq = truth / 8
        elif way == "in place":
            rotary.inv_freq.div_(8)
        elif way == "registered":
            rotary.register_buffer("inv_freq", truth / 8, persistent=False)
        else:
            scaling = {"rope_type": "linear", "factor": 8.0, "rope_theta": model.config.rope_theta} if (
                transformers.__version__ < "5"
            ) else {**model.config.rope_parameters, "rope_type": "linear", "factor": 8.0}  # fmt: skip
            rotary.__init__(_config("Qwen3Config", rope_scaling=scaling))
        _output(model)
        eighth[way] = torch.equal(rotary.inv_freq * 8, truth)
    return {"eighth": eighth, "said": LOG[said:]}


@scenario
def initialized_again() -> Any:
    """The first frequency after ``initialize_weights()``: of a module that keeps its factor of 8 nowhere, of a model
    whose config was changed, and of one whose config was not."""
    import transformers
    from transformers.models.llama.modeling_llama import LlamaPreTrainedModel

    class Scaled(nn.Module):
        def __init__(self, config: Any, factor: float = 1.0) -> None:
            super().__init__()
            self.config = config
            self.register_buffer("inv_freq", factor / torch.arange(1, 9).float(), persistent=False)

    class Model(LlamaPreTrainedModel):
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.scaled = Scaled(config, 8.0)
            self.post_init()

    unkept: Any = Model(_config("LlamaConfig"))
    unkept.initialize_weights()
    same: Any = qwen3()
    same.initialize_weights()
    changed: Any = qwen3()
    rotary = changed.model.rotary_emb
    if transformers.__version__ >= "5":
        rotary.config.rope_parameters = {**rotary.config.rope_parameters, "rope_theta": 100.0}
    else:
        rotary.config.rope_theta = 100.0
    changed.initialize_weights()
    last = [float(model.model.rotary_emb.inv_freq[-1]) for model in (same, changed)]
    return {"unkept": float(unkept.scaled.inv_freq[0]), "follows": last[1] > 2 * last[0]}


@scenario
def owners() -> Any:
    """Modules with more than frequencies: how many are constructed on the way, and whether theirs are held."""
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaPreTrainedModel

    built = {"model": 0, "attention": 0}

    class Attention(nn.Module):
        def __init__(self, config: LlamaConfig) -> None:
            super().__init__()
            built["attention"] += 1
            self.config = config
            self.query = nn.Linear(4, 4)
            self.register_buffer("inv_freq", 1.0 / torch.arange(1, 9).float(), persistent=False)

    class Model(LlamaPreTrainedModel):
        def __init__(self, config: LlamaConfig) -> None:
            super().__init__(config)
            built["model"] += 1
            self.attention = Attention(config)
            self.register_buffer("inv_freq", 1.0 / torch.arange(1, 9).float(), persistent=False)
            self.post_init()

    model = Model(_config("LlamaConfig"))
    wanted = {name: tensor.clone() for name, tensor in _frequencies(model).items()}
    held = _equal(_frequencies(model.to(torch.bfloat16)), wanted)
    return {"built": built, "held": held, "said": [line for line in LOG if "owners" in line]}


@scenario
def double_is_steady() -> Any:
    """Forwards of an fp64 model leave its buffers and what is kept outside them where they are."""
    model: Any = llama().double()
    _output(model)
    before = dict(model.named_buffers())
    _output(model)
    return all(buffer is before[name] for name, buffer in model.named_buffers())


@scenario
def inference_then_training() -> Any:
    """A rollout in inference mode, in which the buffers are cast, and its update."""
    model = gpt_oss()
    with torch.inference_mode():
        buffers = list(model.buffers())
        _cast_buffers_to_dtype_and_device(buffers, [torch.bfloat16] * len(buffers), torch.device("cpu"))
        _output(model)
    model(input_ids=_ids(12), labels=_ids(12)).loss.backward()
    return _equal(_frequencies(model), _frequencies(gpt_oss()))


@scenario
def threads() -> Any:
    """Eight threads run forwards of one model; every output is right."""
    model = _loaded(_again(qwen3()), qwen3())
    wanted, wrong = _output(model, 12), []

    def run() -> None:
        for _ in range(4):
            if not torch.equal(_output(model, 12), wanted):
                wrong.append(1)

    workers = [threading.Thread(target=run) for _ in range(8)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return {"wrong": len(wrong), "frequencies": _equal(_frequencies(model), _frequencies(qwen3()))}


@scenario
def shared_module() -> Any:
    """One rotary module in two models: each survives what is done to the other."""
    one, two = llama(), llama()
    two.model.rotary_emb = one.model.rotary_emb  # type: ignore[union-attr]
    wanted, logits = _frequencies(llama()), _output(one)
    two.to(torch.bfloat16)
    results = [_equal(_frequencies(one), wanted), torch.equal(_output(one), logits)]
    del one
    gc.collect()
    return [*results, torch.equal(_output(_loaded(two.float(), llama())), logits)]


@scenario
def handed_out() -> Any:
    """Tensors read off a module can be written to without a trace in what the forward computes."""
    model: Any = llama()
    logits = _output(model)
    taken = [model.model.rotary_emb.inv_freq, *model.buffers(), *_frequencies(model).values()]
    for tensor in taken:
        tensor.data.fill_(math.nan)
        tensor.data = tensor.data.to(torch.bfloat16)
    again = _output(model)
    model.to("cpu")
    return [torch.equal(again, logits), _equal(_frequencies(model), _frequencies(llama()))]


@scenario
def old_checkpoint() -> Any:
    """A state dict with an ``inv_freq`` key, as old ones have: what load_state_dict says, and the frequencies after."""
    model = llama()
    state = {**model.state_dict(), "model.rotary_emb.inv_freq": torch.full((16,), 7.0)}
    found = model.load_state_dict(state, strict=False)
    try:
        model.load_state_dict(state)
    except RuntimeError as error:
        refused = "Unexpected key" in str(error)
    return [list(found.unexpected_keys), refused, _equal(_frequencies(model), _frequencies(llama()))]


@scenario
def on_meta() -> Any:
    """A model on meta stays there, with buffers of the dtype that they will have."""
    model = _on_meta(llama()).to(torch.bfloat16)
    return sorted({f"{b.device} {b.dtype}" for n, b in model.named_buffers() if n.endswith("inv_freq")})


@scenario
def unknown_module() -> Any:
    """A rotary module that does not keep its arguments: held if it was built with values, else named once."""
    from transformers import LlamaConfig, LlamaModel

    class OddRotary(nn.Module):
        def __init__(self, secret: float) -> None:
            super().__init__()
            self.register_buffer("inv_freq", secret ** -torch.arange(0, 1, 1 / 16), persistent=False)

        def forward(self, x: Tensor) -> Tensor:
            return x * self.inv_freq

    class OddModel(LlamaModel):
        def __init__(self, config: LlamaConfig) -> None:
            super().__init__(config)
            self.odd = OddRotary(77.0)
            self.post_init()

    config = _config("LlamaConfig")
    real = OddModel(config)
    wanted = {name: tensor.clone() for name, tensor in _frequencies(real).items()}
    real.to(torch.bfloat16)
    with torch.device("meta"):
        OddModel(config)
        meta = OddModel(config)
    meta.to_empty(device="cpu")
    return {"held": _equal(_frequencies(real), wanted), "said": [line for line in LOG if "OddRotary" in line]}


@scenario
def classes() -> Any:
    """What a module that is taken on looks like from outside."""
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    rotary = llama().model.rotary_emb  # type: ignore[union-attr]
    return {
        "isinstance": isinstance(rotary, LlamaRotaryEmbedding),
        "name": [type(rotary).__module__, type(rotary).__qualname__],
        "repr": repr(rotary),
        "state": sorted(name for name in vars(rotary)),
        "scaling": rotary.attention_scaling,
    }


@scenario
def validated() -> Any:
    measured = _registry.module(ID).validate("cpu")
    return {"right": measured.right, "errors": dict(measured.errors), "limits": dict(measured.limits)}


if __name__ == "__main__":
    main()
