"""Runs scenarios of DeepSeek-V4's rope in a process of its own and prints what each measured, as one line of JSON.

    python rope_scenarios.py [--apply ID,ID] [--after] NAME...

``--after`` imports the modelling file before the patches are applied. Without ``--apply`` it is upstream that is
measured. ``bits of ...`` are digests of tensors, to compare between processes.
"""

from __future__ import annotations

import argparse
import copy
import gc
import hashlib
import importlib
import json
import math
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import fsdp_sink_patches
from fsdp_sink_patches import _fingerprint, _registry, monitor, settings
from fsdp_sink_patches.ops.rope import tables

SCENARIOS: dict[str, Callable[[], Any]] = {}
LABELS = ("main", "compress")
SLIDING, CSA, HCA = "sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"
LAYERS = (SLIDING, CSA, HCA, CSA)
DTYPES = (torch.float32, torch.bfloat16)


def scenario(function: Callable[[], Any]) -> Callable[[], Any]:
    SCENARIOS[function.__name__] = function
    return function


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--apply", default="")
    parser.add_argument("--after", action="store_true")
    parser.add_argument("names", nargs="+")
    arguments = parser.parse_args()
    ids = [name for name in arguments.apply.split(",") if name]
    if arguments.after:
        modelling()
    if ids:
        # A release whose source is recorded must be recognised; one that is not is tried all the same.
        unknown = [id for id in ids if not _fingerprint.match(_registry.get(id)).known]
        fsdp_sink_patches.apply(*ids, allow_drift=unknown)
    results: dict[str, Any] = {}
    for name in arguments.names:
        monitor.reset()
        try:
            results[name] = SCENARIOS[name]()
        except Exception as error:
            results[name] = {"raises": f"{type(error).__name__}: {error}"}
    if ids:
        fsdp_sink_patches.assert_applied(*ids)
    print(json.dumps(results))


def modelling() -> Any:
    return importlib.import_module("transformers.models.deepseek_v4.modeling_deepseek_v4")


def build(*layers: str, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    from fsdp_sink_patches.patches.transformers import _deepseek_v4_models

    return _deepseek_v4_models.build(layers or LAYERS, dtype, **changes)


def flash_rotary(**changes: Any) -> Any:
    """The rotary module of the released V4-Flash: 64 rotary channels of 512; ``changes`` by label."""
    from transformers import DeepseekV4Config

    yarn = {
        "rope_type": "yarn",
        "factor": 16,
        "original_max_position_embeddings": 65536,
        "beta_fast": 32,
        "beta_slow": 1,
    }
    config = DeepseekV4Config(head_dim=512, qk_rope_head_dim=64, rope_parameters=yarn)
    for label, change in changes.items():
        config.rope_parameters[label].update(change)
    return modelling().DeepseekV4RotaryEmbedding(config)


def ids_of(rows: int, tokens: int) -> Tensor:
    return torch.randint(3, 512, (rows, tokens), generator=torch.Generator().manual_seed(3))


def positions(first: int, tokens: int = 64, rows: int = 1) -> Tensor:
    return torch.arange(first, first + tokens).expand(rows, tokens).clone()


def bits(*tensors: Tensor) -> str:
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


def step(model: Any, **batch: Any) -> tuple[Tensor, list[Tensor]]:
    """Logits and every gradient of one training step."""
    model.zero_grad(set_to_none=True)
    batch.setdefault("input_ids", ids_of(2, 70))
    logits = model(**batch, use_cache=False).logits
    logits.float().square().mean().backward()
    return logits, [p.grad for p in model.parameters() if p.grad is not None]


# --- tables --------------------------------------------------------------------------------------------------------


def independent_frequencies(label: str) -> Tensor:
    """fp64, from the paper's numbers alone: theta 10000, plain; theta 160000 with yarn of factor 16 over 65536."""
    base = {"main": 10000.0, "compress": 160000.0}[label]
    plain = base ** -(torch.arange(0, 64, 2, dtype=torch.float64) / 64)
    if label == "main":
        return plain

    def channel(turns: float) -> float:
        return 64 * math.log(65536 / (turns * 2 * math.pi)) / (2 * math.log(base))

    low, high = math.floor(channel(32)), math.ceil(channel(1))
    ramp = ((torch.arange(32, dtype=torch.float64) - low) / (high - low)).clamp(0, 1)
    return plain / 16 * ramp + plain * (1 - ramp)


@scenario
def exact_tables() -> Any:
    """Case A4 and A6: largest error of a table by label and position, and of the table that the other label has."""
    rotary, found = flash_rotary(), {}
    x = torch.zeros(1, 1, 1, dtype=torch.bfloat16)
    for first in (0, 1000, 70000):
        where = positions(first)
        for label in LABELS:
            cos, sin = rotary(x, position_ids=where, layer_type=label)
            row: dict[str, Any] = {"dtype": str(cos.dtype)}
            for name, other in (("error", label), ("error of the other label", LABELS[label == "main"])):
                inv_freq = getattr(rotary, f"{other}_inv_freq").double()
                angles = where[..., None].double() * inv_freq
                row[name] = max(float((cos - angles.cos()).abs().max()), float((sin - angles.sin()).abs().max()))
            angles = where[..., None].double() * independent_frequencies(label)
            row["error of the formula"] = float((cos - angles.cos()).abs().max())
            found[f"{label} {first}"] = row
    return found


@scenario
def rounded_tables() -> Any:
    """``activation``: digests of the tables of both labels, dtypes, positions and batches."""
    rotary, found = flash_rotary(), {}
    with settings.using(rope_dtype="activation"):
        for dtype in (*DTYPES, torch.float16, torch.float64):
            for first in (0, 1000, 70000, 1048000):
                for rows in (1, 3):
                    where = positions(first, 500, rows)
                    for label in LABELS:
                        cos, sin = rotary(torch.zeros(1, dtype=dtype), position_ids=where, layer_type=label)
                        found[f"{dtype} {first} {rows} {label}"] = bits(cos, sin)
    return found


@scenario
def exact_tables_on_this_release() -> Any:
    """Whether fp32 tables are bit for bit what upstream computes before it rounds."""
    rotary = flash_rotary()
    return {
        f"{label} {first}": bits(*rotary(torch.zeros(1), position_ids=positions(first, 500), layer_type=label))
        for label in LABELS
        for first in (0, 70000)
    }


@scenario
def dynamic_types() -> Any:
    """Frequencies that follow the longest row and shrink back after it, by digest.

    Before 5.13 longrope fails in upstream's own code at the second long row (an unbound name): the same error then.
    """
    found: dict[str, str] = {}

    def keep(name: str, rotary: Any, dtype: torch.dtype, tokens: int, label: str) -> None:
        try:
            table = rotary(torch.zeros(1, dtype=dtype), position_ids=positions(0, tokens), layer_type=label)
        except UnboundLocalError as error:
            found[name] = str(error)
        else:
            found[name] = bits(*(half.to(dtype) for half in table))

    kinds = {
        "dynamic": {"rope_type": "dynamic", "factor": 4.0},
        "longrope": {
            "rope_type": "longrope", "factor": 4.0, "original_max_position_embeddings": 128,
            "short_factor": [1.0] * 32, "long_factor": [4.0] * 32,
        },
    }  # fmt: skip
    for kind, change in kinds.items():
        rotary = flash_rotary(main=change)
        rotary.original_max_seq_len = rotary.max_seq_len_cached = 128
        for when, tokens in (("short", 64), ("long", 256), ("long again", 256), ("short again", 64)):
            for label in LABELS:
                with settings.using(rope_dtype="activation"):
                    keep(f"{kind} {label} {when}", rotary, torch.float32, tokens, label)
        # fp32 tables, rounded here
        keep(f"{kind} rounded", rotary, torch.bfloat16, 256, "main")
    return found


@scenario
def corrupted_buffers() -> Any:
    """Buffers cast to bf16: what upstream makes of them, and apart from the tables of a sound module."""
    sound, cast = flash_rotary(), flash_rotary().to(torch.bfloat16)
    where, found = positions(1000), {}
    with settings.using(rope_dtype="activation"):
        for name, rotary in (("sound", sound), ("cast", cast)):
            for label in LABELS:
                found[f"{name} {label}"] = bits(*rotary(torch.zeros(1), position_ids=where, layer_type=label))
    return found


@scenario
def other_models() -> Any:
    """One tensor of positions, one label, another theta: no table in common."""
    where, x = positions(1000), torch.zeros(1)
    first, second = flash_rotary(), flash_rotary(main={"rope_theta": 500.0})
    cos, other = (rotary(x, position_ids=where, layer_type="main")[0] for rotary in (first, second))
    changed = float((cos - other).abs().max())
    with torch.no_grad():
        first.main_inv_freq.copy_(second.main_inv_freq)
    return {"differ": changed, "after the buffer": float((first(x, where, layer_type="main")[0] - other).abs().max())}


# --- the model -----------------------------------------------------------------------------------------------------


@scenario
def as_upstream() -> Any:
    """``activation``: digests of logits, of gradients in fp32, of generated tokens."""
    found = {}
    with settings.using(rope_dtype="activation"):
        for dtype in DTYPES:
            logits, gradients = step(build(dtype=dtype))
            found[f"logits {dtype}"] = bits(logits)
            if dtype == torch.float32:
                found["gradients"] = bits(*gradients)
        model = build().eval()
        with torch.no_grad():
            found["generated"] = bits(model.generate(ids_of(1, 21), max_new_tokens=12, do_sample=False))
            found["padded"] = bits(model(input_ids=ids_of(2, 40), attention_mask=torch.ones(2, 40).long()).logits)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            found["autocast"] = bits(build()(input_ids=ids_of(1, 40), use_cache=False).logits)
    return found


@scenario
def logits_error() -> Any:
    """Relative error of bf16 logits against the same weights in fp64."""
    from fsdp_sink_patches.patches.transformers import _deepseek_v4_rope_validation

    from fsdp_sink_patches.ops.sink_attention.oracle import relative_error

    model = build(dtype=torch.bfloat16)
    batch = {"input_ids": ids_of(1, 200), "use_cache": False}
    with torch.no_grad():
        return relative_error(model(**batch).logits, _deepseek_v4_rope_validation.exact_model(model)(**batch).logits)


@scenario
def counts() -> Any:
    """Table computations of a forward and of its backward."""
    found: dict[str, Any] = {}
    for name, arguments in (("plain", None), ("reentrant", True), ("not reentrant", False)):
        model = build(SLIDING, SLIDING, CSA, HCA, CSA, HCA)
        if arguments is not None:
            model.gradient_checkpointing_enable({"use_reentrant": arguments})
        monitor.reset()
        logits = model(input_ids=ids_of(1, 40), use_cache=False).logits
        forward = monitor.rope_table_computations()
        logits.sum().backward()
        found[name] = [forward, monitor.rope_table_computations() - forward]
    return found


@scenario
def counts_with_shared_positions() -> Any:
    """Every rotary module of a model asked for both labels of one tensor, in two rounds, and of another tensor."""
    model = build()
    modules = [m for m in model.modules() if isinstance(m, modelling().DeepseekV4RotaryEmbedding)]
    found, x = [len(modules)], torch.zeros(1, dtype=torch.bfloat16)
    first, second = positions(0), positions(0)
    for where in (first, first, second):
        monitor.reset()
        for module in (*modules, copy.deepcopy(model).model.rotary_emb):
            for label in LABELS:
                module(x, position_ids=where, layer_type=label)
        found.append(monitor.rope_table_computations())
    return found


@scenario
def checkpointed() -> Any:
    """Largest difference of a gradient with activation checkpointing from without."""
    found = {}
    for dtype in DTYPES:
        _, expected = step(build(dtype=dtype))
        for reentrant in (True, False):
            model = build(dtype=dtype)
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
            if reentrant:
                model.enable_input_require_grads()
            _, gradients = step(model)
            found[f"{dtype} {reentrant}"] = [
                len(gradients) == len(expected),
                max(float((a - b).abs().max()) for a, b in zip(gradients, expected, strict=True)),
            ]
    return found


@scenario
def freed() -> Any:
    """What is left of the tables after a forward, and after the user's own positions are gone."""
    model, where = build(), positions(0, 40)
    with torch.no_grad():
        model(input_ids=ids_of(1, 40), use_cache=False)
    left = [len(tables._memory.tables)]
    loss = model(input_ids=ids_of(1, 40), position_ids=where, use_cache=False).logits.sum()
    rotary = model.model.rotary_emb
    refs = [weakref.ref(rotary(torch.zeros(1), position_ids=where, layer_type=label)[0]) for label in LABELS]
    left.append(len(tables._memory.tables))
    loss.backward()
    del loss, where
    gc.collect()
    return {"left": [*left, len(tables._memory.tables)], "alive": [ref() is not None for ref in refs]}


@scenario
def positions_changed_in_place() -> Any:
    """A user's tensor of positions that moves on between two forwards."""
    model, where = build(), positions(0, 40)
    batch = {"input_ids": ids_of(1, 40), "use_cache": False}
    with torch.no_grad():
        model(position_ids=where, **batch)
        where += 5000
        moved = model(position_ids=where, **batch).logits
        return float((moved - model(position_ids=positions(5000, 40), **batch).logits).abs().max())


@scenario
def hooked() -> Any:
    """What a hook kept of a query norm's output is what the norm put out, not its rotation."""
    model, kept = build(SLIDING), []
    norm = model.model.layers[0].self_attn.q_b_norm
    norm.register_forward_hook(lambda module, given, out: kept.append((out, out.clone())) or None)
    with torch.no_grad():
        model(input_ids=ids_of(1, 20), use_cache=False)
    return [float((out - before).abs().max()) for out, before in kept]


@scenario
def compiled() -> Any:
    """Largest difference of compiled from eager: tables and rotation as one graph, and each layer's attention."""
    rotary, m = flash_rotary(), modelling()

    def turned(x: Tensor, where: Tensor) -> Tensor:
        found = []
        for label in LABELS:
            cos, sin = rotary(x, position_ids=where, layer_type=label)
            found.append(m.apply_rotary_pos_emb(m.apply_rotary_pos_emb(x, cos, sin), cos, -sin))
            found.append(m.apply_rotary_pos_emb(x, cos, sin))
        return torch.cat(found)

    graph, worst = torch.compile(turned, fullgraph=True, backend="aot_eager"), 0.0
    for first in (0, 500):
        x, where = torch.randn(1, 2, 30, 512), positions(first, 30)
        worst = max(worst, float((graph(x, where) - turned(x, where)).abs().max()))
    del where
    model, seen = build(SLIDING, CSA, HCA), []
    for compile_ in (False, True):
        if compile_:  # the attention alone: upstream's experts don't compile in every release
            for layer in model.model.layers:
                layer.self_attn.compile(backend="aot_eager", fullgraph=True)
        model.zero_grad()
        logits = model(input_ids=ids_of(1, 40), use_cache=False).logits
        logits.square().mean().backward()
        # A graph gives the indexer, which has no gradient, zeros in some releases.
        gradients = torch.cat([(0 * p if p.grad is None else p.grad).flatten() for p in model.parameters()])
        seen.append((logits.detach(), gradients.detach()))
    (logits, gradients), (compiled_logits, compiled_gradients) = seen
    return {
        "graph": worst,
        "logits": float((logits - compiled_logits).abs().max()),
        "gradients": float((gradients - compiled_gradients).abs().max()),
        "left": len(tables._memory.tables),
    }


@scenario
def unusual_arguments() -> Any:
    """Calls that no layer makes, by digest."""
    apply = modelling().apply_rotary_pos_emb
    generator = torch.Generator().manual_seed(5)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    x, cos, sin = draw(2, 3, 7, 20), draw(2, 7, 6), draw(2, 7, 6)
    found = {
        "heads last": bits(apply(x.transpose(1, 2), cos, sin, unsqueeze_dim=2)),
        "by place": bits(apply(x.transpose(1, 2), cos, sin, 2)),
        "conjugate": bits(apply(x, cos, -sin)),
        "one row of tables": bits(apply(x, cos[:1], sin[:1])),
        "one token of tables": bits(apply(x, cos[:, :1], sin[:, :1])),
        "heads as a batch": bits(apply(x[0], cos[0], sin[0], unsqueeze_dim=0)),
        "bf16": bits(apply(x.bfloat16(), cos.bfloat16(), sin.bfloat16())),
        "expanded": bits(apply(x[:, :1].expand(-1, 3, -1, -1), cos, sin)),
        "every channel": bits(apply(x[..., :12], cos, sin)),
        "no tokens": bits(apply(x[:, :, :0], cos[:, :0], sin[:, :0])),
    }
    trained = cos.clone().requires_grad_()
    apply(x, trained, sin).sum().backward()
    found["a gradient of tables"] = bits(trained.grad)
    with torch.device("meta"):
        found["meta"] = str(apply(torch.empty(1, 2, 3, 8), torch.empty(1, 3, 2), torch.empty(1, 3, 2)).shape)
    rotary = flash_rotary()
    rotary.main_inv_freq.requires_grad_()
    cos, _ = rotary(torch.zeros(1), position_ids=positions(3), layer_type="main")
    found["trained frequencies"] = [cos.requires_grad, bits(cos)]
    return found


@scenario
def deepcopied_and_pickled() -> Any:
    """A model that has run can be copied and saved, with nothing of the tables in it."""
    model = build(SLIDING, HCA)
    expected = model(input_ids=ids_of(1, 20), use_cache=False).logits
    again = copy.deepcopy(model)(input_ids=ids_of(1, 20), use_cache=False).logits
    return [torch.equal(expected, again), sorted(model.state_dict()) == sorted(build(SLIDING, HCA).state_dict())]


@scenario
def validated() -> Any:
    measured = _registry.module("transformers.deepseek-v4-rope").validate("cpu")
    return {"right": measured.right, "errors": dict(measured.errors)}


@scenario
def rounded_on_the_way() -> Any:
    """What is logged when a wrapper casts the tables between the model and its layers; twice each, in this order."""
    import logging

    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("fsdp_sink_patches").addHandler(handler)
    x, cos = torch.randn(1, 2, 4, 8, dtype=torch.bfloat16), torch.randn(1, 4, 2)
    found = {}
    with settings.using(rope_dtype="activation"):
        modelling().apply_rotary_pos_emb(x, cos.bfloat16(), cos.bfloat16())
    found["asked for"] = len(said)
    modelling().apply_rotary_pos_emb(x, cos, cos)
    found["exact"] = len(said)
    for _ in range(2):
        modelling().apply_rotary_pos_emb(x, cos.bfloat16(), cos.bfloat16())
    return {**found, "said": said}


if __name__ == "__main__":
    main()
