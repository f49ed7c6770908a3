"""DeepSeek-V4 in bf16, in a process of its own; prints what each scenario measured as one line of JSON.

    python low_precision_scenarios.py [--apply ID,ID] NAME...

What a scenario raises is its result, so that a process without the patch tells what a user meets.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import functools
import hashlib
import json
from collections.abc import Callable
from typing import Any

import torch
import transformers
import transformers.models.deepseek_v4.modeling_deepseek_v4 as modelling
from fsdp_sink_patches.patches.transformers import _deepseek_v4_low_precision as precision
from fsdp_sink_patches.patches.transformers import deepseek_v4_low_precision as patch
from fsdp_sink_patches.patches.transformers._deepseek_v4_models import CSA, HCA, SLIDING
from torch import Tensor

import fsdp_sink_patches
from fsdp_sink_patches import _fingerprint, _registry
from fsdp_sink_patches.ops.sink_attention.oracle import relative_error

SCENARIOS: dict[str, Callable[[], Any]] = {}
IDS = torch.randint(0, 512, (2, 96), generator=torch.Generator().manual_seed(5))


def scenario(function: Callable[[], Any]) -> Callable[[], Any]:
    SCENARIOS[function.__name__] = function
    return function


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--apply", default="")
    parser.add_argument("names", nargs="+")
    arguments = parser.parse_args()
    transformers.utils.logging.disable_progress_bar()
    ids = [name for name in arguments.apply.split(",") if name]
    # A release that is not recorded is tried all the same: passing here is what lets it be recorded.
    unknown = [id for id in ids if not _fingerprint.match(_registry.get(id)).known]
    if ids:
        fsdp_sink_patches.apply(*ids, allow_drift=unknown)
    results: dict[str, Any] = {}
    for name in arguments.names:
        try:
            results[name] = SCENARIOS[name]()
        except Exception as error:
            results[name] = {"raises": f"{type(error).__name__}: {error}"}
    if ids:
        fsdp_sink_patches.assert_applied(*ids)
    print(json.dumps(results))


@functools.cache
def _saved() -> Any:
    return precision.saved_in_fp32()


def _loaded() -> Any:
    return precision.load(_saved())


@functools.cache
def _expected() -> tuple[Tensor, dict[str, Tensor]]:
    """Logits and gradients of the fp32 model, in which nothing is rounded and which the patch does not touch."""
    return _step(_saved())


def _step(model: Any, autocast: bool = False) -> tuple[Tensor, dict[str, Tensor]]:
    model.zero_grad()
    with torch.autocast("cpu", torch.bfloat16) if autocast else contextlib.nullcontext():
        out = model(input_ids=IDS, labels=IDS, use_cache=False)
    torch.autograd.backward(out.loss)
    return out.logits.detach(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def _compared(logits: Tensor, gradients: dict[str, Tensor]) -> dict[str, Any]:
    """Relative errors against the fp32 model: of the logits, and of the gradients of each kind of parameter together.

    Together, because a single one may be nothing but rounding: the streams are equal at first, so that mixing them
    changes nothing.
    """
    expected, exact = _expected()
    kinds = ("sinks", "position_bias", "norm.weight", "_hc.", "hc_head.", "proj", "lm_head.", "embed_tokens.")
    errors = {}
    for kind in kinds:
        names = [name for name in exact if kind in name]
        found, wanted = (torch.cat([g[n].flatten().float() for n in names]) for g in (gradients, exact))
        errors[kind] = relative_error(found, wanted)
    missing = sorted(exact.keys() - gradients.keys())
    return {"logits": relative_error(logits, expected), "dtype": str(logits.dtype), "missing": missing, "of": errors}


def _digest(*tensors: Tensor) -> str:
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(tensor.detach().contiguous().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


@scenario
def kept() -> Any:
    """Of a bf16 load: the error of what is meant to be fp32, by name, and the dtypes of all else."""
    loaded = _loaded()
    rounded = precision.rounded(_saved(), loaded)
    others = {name: str(p.dtype) for name, p in loaded.named_parameters() if name not in rounded}
    types = {str(p.dtype) for name, p in loaded.named_parameters() if name in rounded}
    return {"errors": rounded, "types": sorted(types), "others": sorted(set(others.values())), "of": len(others)}


@scenario
def step() -> Any:
    return _compared(*_step(_loaded()))


@scenario
def step_under_autocast() -> Any:
    return _compared(*_step(_loaded(), autocast=True))


@scenario
def fp32_model_under_autocast() -> Any:
    return _compared(*_step(_saved(), autocast=True))


@scenario
def checkpointed() -> Any:
    """Activation checkpointing recomputes the same bits, with and without autocast."""
    model = _loaded()
    found = {}
    for autocast in (False, True):
        logits, gradients = _step(model, autocast)
        model.gradient_checkpointing_enable()
        again, recomputed = _step(model, autocast)
        model.gradient_checkpointing_disable()
        same = gradients.keys() == recomputed.keys() and all(
            torch.equal(g, recomputed[n]) for n, g in gradients.items()
        )
        found[f"autocast {autocast}"] = torch.equal(logits, again) and same
    return found


@scenario
def generated() -> Any:
    """Twelve greedy tokens with a cache, and the logits that chose them against the fp32 model's on the same tokens."""
    settings = {"do_sample": False, "max_new_tokens": 12, "min_new_tokens": 12, "pad_token_id": 0}
    out = _loaded().eval().generate(IDS[:1, :50], output_logits=True, return_dict_in_generate=True, **settings)
    with torch.no_grad():
        expected = _saved()(input_ids=out.sequences, use_cache=False).logits[:, 49:-1]
    return {"tokens": out.sequences.shape[1] - 50, "logits": relative_error(torch.stack(out.logits, 1), expected)}


@scenario
def untouched() -> Any:
    """Digests of logits and gradients where upstream's own result has to stay."""
    found = {}
    models = {"fp32": _saved(), "fp32, loaded": precision.load(_saved(), torch.float32)}
    models["bf16 throughout"] = copy.deepcopy(_saved()).to(torch.bfloat16)
    for name, model in models.items():
        logits, gradients = _step(model)
        found[name] = _digest(logits, *gradients.values())
    return found


@scenario
def bf16_load_bits() -> Any:
    logits, gradients = _step(_loaded())
    return _digest(logits, *gradients.values())


@scenario
def mixing() -> Any:
    """Hyper-connections under autocast against fp64, and whether they give the bits that they give without it."""
    loaded = _loaded()
    streams = torch.randn(1, 32, 4, 128, generator=torch.Generator().manual_seed(7)).to(torch.bfloat16)
    site = loaded.model.layers[0].attn_hc
    with torch.no_grad():
        plain = site(streams)
        with torch.autocast("cpu", torch.bfloat16):
            cast = site(streams)
            still = torch.is_autocast_enabled("cpu")
    same = [torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(plain, cast, strict=True)]
    return {"errors": precision.mixing_errors(loaded), "same": same, "autocast afterwards": still}


@scenario
def norm() -> Any:
    """One norm with an fp32 weight on bf16 and fp32 activations: error against fp64, and dtype."""
    module = modelling.DeepseekV4RMSNorm(256)
    generator = torch.Generator().manual_seed(8)
    with torch.no_grad():
        module.weight.copy_(1 + 0.2 * torch.randn(256, generator=generator))
    found = {}
    for dtype in (torch.bfloat16, torch.float32):
        x = (3 * torch.randn(64, 256, generator=generator)).to(dtype)
        exact = x.double() * (x.double().square().mean(-1, keepdim=True) + module.variance_epsilon).rsqrt()
        out = module(x)
        found[str(dtype)] = [relative_error(out, module.weight.double() * exact), str(out.dtype)]
    return found


@scenario
def planted() -> Any:
    """What 5.8.1 to 5.19.0 do, planted in any release: their norm and their list; then the replacements around both."""
    model = _loaded()
    norm = modelling.DeepseekV4RMSNorm

    def older(self: Any, hidden_states: Tensor) -> Tensor:
        exact = hidden_states.float()
        exact = exact * torch.rsqrt(exact.square().mean(-1, keepdim=True) + self.variance_epsilon)
        return self.weight * exact.to(hidden_states.dtype)

    here, found = norm.forward, {}
    for name, forward in {
        "older": older,
        "patched": lambda self, hidden_states: patch.norm_forward(older, self, hidden_states),
    }.items():
        norm.forward = forward
        try:
            found[name] = _compared(*_step(model))
        except RuntimeError as error:
            found[name] = {"raises": str(error)}
        finally:
            norm.forward = here
    short = ["attn_hc", "ffn_hc", "e_score_correction_bias", "q_a_norm", "kv_norm", "input_layernorm"]
    short += ["post_attention_layernorm", "norm"]
    list_here = list(modelling.DeepseekV4PreTrainedModel._keep_in_fp32_modules_strict)
    return {**found, "names": sorted(patch.strict_names(short)), "names here": sorted(list_here)}


@scenario
def on_meta() -> Any:
    """Shapes on the meta device, where autocast can't be asked for."""
    with torch.device("meta"):
        site = modelling.DeepseekV4HyperConnection(_saved().config)
        norm = modelling.DeepseekV4RMSNorm(128)
        post, comb, collapsed = site(torch.empty(1, 8, 4, 128, dtype=torch.bfloat16))
        return [list(post.shape), list(comb.shape), str(norm(collapsed).dtype)]


@scenario
def compiled() -> Any:
    """A hyper-connection and a norm in one graph each, with and without autocast, bit for bit as without a graph."""
    layer = _loaded().model.layers[0]
    streams = torch.randn(1, 32, 4, 128, generator=torch.Generator().manual_seed(9)).to(torch.bfloat16)
    site = torch.compile(layer.attn_hc, backend="eager", fullgraph=True)
    norm = torch.compile(layer.input_layernorm, backend="eager", fullgraph=True)
    found = {}
    for autocast in (False, True):
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            pairs = [*zip(site(streams), layer.attn_hc(streams), strict=True)]
            pairs.append((norm(streams), layer.input_layernorm(streams)))
        found[f"autocast {autocast}"] = all(torch.equal(a, b) for a, b in pairs)
    return found


@scenario
def made_from_config() -> Any:
    """A bf16 model that was never loaded runs; what it keeps in fp32 is upstream's choice."""
    from fsdp_sink_patches.patches.transformers._deepseek_v4_models import TINY

    settings = {**TINY, "num_hidden_layers": 3, "layer_types": [SLIDING, CSA, HCA], "mlp_layer_types": ["moe"] * 3}
    settings["rope_parameters"] = dict(TINY["rope_parameters"])
    config = transformers.DeepseekV4Config(**settings)
    model = transformers.DeepseekV4ForCausalLM._from_config(config, attn_implementation="eager", dtype=torch.bfloat16)
    logits, gradients = _step(model.train())
    return {"finite": bool(logits.isfinite().all() and all(g.isfinite().all() for g in gradients.values()))}


@scenario
def validated() -> Any:
    measured = _registry.module("transformers.deepseek-v4-low-precision").validate("cpu")
    return {"right": measured.right, "errors": dict(measured.errors), "limits": dict(measured.limits)}


if __name__ == "__main__":
    main()
