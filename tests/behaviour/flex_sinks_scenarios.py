"""Sinks under flex attention, measured in a process of its own; prints one line of JSON.

python flex_sinks_scenarios.py [--apply IDS] NAME...

What a scenario raises is its result.
"""

from __future__ import annotations

import argparse
import importlib
import json
import logging
import math
import types
from collections.abc import Callable
from typing import Any

import models
import torch
from torch import Tensor

import fsdp_sink_patches
from fsdp_sink_patches import _fingerprint, _registry
from fsdp_sink_patches.ops import block_masks

SCENARIOS: dict[str, Callable[[], Any]] = {}
DOCUMENTS = (130, 1, 19)


def scenario(function: Callable[[], Any]) -> Callable[[], Any]:
    SCENARIOS[function.__name__] = function
    return function


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--apply", default="")
    parser.add_argument("names", nargs="+")
    arguments = parser.parse_args()
    # transformers compiles the making of masks, which takes a CPU longer than all the rest here.
    torch._dynamo.config.disable = True
    ids = [id for id in arguments.apply.split(",") if id]
    if ids:
        unknown = [id for id in ids if not _fingerprint.match(_registry.get(id)).known]
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


def helper() -> Any:
    return importlib.import_module("fsdp_sink_patches.patches.transformers._flex_sinks")


def against_the_oracle(model: Any) -> dict[str, float]:
    """A training step on one row of one document, longer than a block and no multiple of it."""
    ids = models.tokens(1, sum(DOCUMENTS))
    documents = [(0, slice(0, sum(DOCUMENTS)))]
    expected = models.step_alone(models.oracle_of(model), documents, ids)
    return models.worst(models.step(model, documents, ids, use_cache=False), expected)


@scenario
def every_model() -> Any:
    """Each model that passes sinks to flex attention; what raises is the result of that model."""
    found: dict[str, Any] = {}
    for name in models.here(models.SINK_MODELS):
        try:
            found[name] = against_the_oracle(models.build(name, "flex_attention"))
        except (ValueError, NotImplementedError, RuntimeError) as error:
            found[name] = {"raises": f"{type(error).__name__}: {error}"}
    return found


@scenario
def packed() -> Any:
    """gpt-oss on a packed row; needs transformers.packed-masks, which makes the masks."""
    model = models.build("gpt_oss", "flex_attention")
    ids, positions = models.tokens(1, sum(DOCUMENTS)), models.restarting(DOCUMENTS)
    documents, start = [], 0
    for length in DOCUMENTS:
        documents.append((0, slice(start, start + length)))
        start += length
    expected = models.step_alone(models.oracle_of(model), documents, ids)
    return models.worst(models.step(model, documents, ids, position_ids=positions, use_cache=False), expected)


@scenario
def padded() -> Any:
    """Left padding: rows of the mask that see nothing stand in the batch and must stay finite."""
    model = models.build("gpt_oss", "flex_attention")
    ids, mask = models.tokens(2, 40), torch.ones(2, 40, dtype=torch.long)
    mask[1, :9] = 0
    documents = [(0, slice(0, 40)), (1, slice(9, 40))]
    expected = models.step_alone(models.oracle_of(model), documents, ids)
    batch = {"attention_mask": mask, "position_ids": (mask.cumsum(-1) - 1).clamp(min=0), "use_cache": False}
    found = models.step(model, documents, ids, **batch)
    return {**models.worst(found, expected), "finite": all(bool(t.isfinite().all()) for t in found.values())}


@scenario
def prepared_mask() -> Any:
    """A 4-D boolean mask, which transformers.additive-mask-to-block-mask makes a BlockMask."""
    model = models.build("gpt_oss", "flex_attention", layer_types=["full_attention"] * 2)
    ids = models.tokens(1, 40)
    documents = [(0, slice(0, 40))]
    expected = models.step_alone(models.oracle_of(model), documents, ids)
    mask = torch.ones(40, 40, dtype=torch.bool).tril()[None, None]
    return models.worst(models.step(model, documents, ids, attention_mask=mask, use_cache=False), expected)


@scenario
def flips() -> Any:
    """train, eval with generation, train again, on flex throughout."""
    model = models.build("gpt_oss", "flex_attention")
    before = against_the_oracle(model)
    model.eval()
    ids = models.tokens(1, 20)
    made = model.generate(ids, max_new_tokens=6, do_sample=False, attention_mask=torch.ones_like(ids))
    exact = models.oracle_of(model)
    wanted = ids
    for _ in range(6):
        wanted = torch.cat([wanted, exact(wanted, use_cache=False).logits[:, -1:].argmax(-1)], 1)
    model.train()
    return {**before, "again": max(against_the_oracle(model).values()), "same": made.tolist() == wanted.tolist()}


@scenario
def sinkless() -> Any:
    """A model without sinks must run upstream's code: the result bit by bit, which the control is compared with."""
    model = models.build("qwen3", "flex_attention").eval()
    flex = importlib.import_module("torch.nn.attention.flex_attention")
    upstream = importlib.import_module("transformers.integrations.flex_attention")
    upstream.WrappedFlexAttention.__call__ = lambda self: flex.flex_attention
    flex._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG = True
    with torch.no_grad():
        return float(model(models.tokens(1, 40), use_cache=False).logits.double().square().sum())


@scenario
def refusals() -> Any:
    """What can't be computed, and what is said."""
    given = helper()
    q, k, v, sinks, _ = given.inputs("cpu", torch.float32, 40)
    short, whole = block_masks.causal(30), block_masks.causal(40)
    cases: dict[str, tuple[Tensor, Any, dict[str, Any]]] = {
        "short mask": (sinks, short, {}),
        "sinks": (sinks[:3], whole, {}),
        "dropout": (sinks, whole, {"dropout": 0.1}),
        "indices": (sinks, whole, {"indices": torch.zeros(1, 40, 4, dtype=torch.int32)}),
    }
    found = {}
    for name, (s, mask, more) in cases.items():
        try:
            given.layer(q, k, v, s, mask, **more)
            found[name] = "nothing raised"
        except (ValueError, NotImplementedError) as error:
            found[name] = f"{type(error).__name__}: {error}"
    return found


@scenario
def refused_models() -> Any:
    """Models whose attention is not plain attention stay refused."""
    found = {}
    cls = importlib.import_module("transformers.modeling_utils").PreTrainedModel
    for name in ("mimo_v2_flash", "hy_v4", "deepseek_v4"):
        model = types.SimpleNamespace(config=types.SimpleNamespace(model_type=name), _supports_flex_attn=False)
        try:
            found[name] = cls._flex_attn_can_dispatch(model)
        except ValueError as error:
            found[name] = str(error)
    return found


@scenario
def compilations() -> Any:
    """30 batches of other lengths and documents, train and eval, through the kernel's code on a counting backend."""
    given, kernel = helper(), importlib.import_module("fsdp_sink_patches.ops.flex_attention._kernel")
    reference = importlib.import_module("fsdp_sink_patches.ops.flex_attention.reference")
    torch._dynamo.config.disable = False
    kernel.BACKEND = lambda graph, inputs, **k: graph.forward
    worst, before = 0.0, kernel.compilations()
    for i in range(30):
        length = 140 + 13 * (i * 7 % 30)
        q, k, v, sinks, _ = given.inputs("cpu", torch.float32, length)
        starts = torch.tensor([0, 50 + i, *range(90, 91 + i % 3)])
        mask = block_masks.causal(length, documents=starts, window=64 if i % 2 else None)
        with torch.set_grad_enabled(i % 3 != 2):
            out, lse = kernel.forward(q, k, v, sinks, mask, None, None, None, 0.125, None)
        exact = reference.forward(q, k, v, sinks, mask, None, None, 0.0, 0.125)
        worst = max(worst, float((out - exact).norm() / exact.norm()))
        assert lse.dtype == torch.float32
    return {"compilations": kernel.compilations() - before, "error": worst}


@scenario
def near_the_limit() -> Any:
    """Batch sizes that change compile again; the warning comes before torch gives up, and names the shape."""
    given, kernel = helper(), importlib.import_module("fsdp_sink_patches.ops.flex_attention._kernel")
    torch._dynamo.config.disable = False
    torch._dynamo.config.automatic_dynamic_shapes = False
    kernel.BACKEND = lambda graph, inputs, **k: graph.forward
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logging.getLogger("fsdp_sink_patches").addHandler(handler)
    q, k, v, sinks, _ = given.inputs("cpu", torch.float32, 140)
    for rows in range(1, 7):
        before = len(said)
        kernel.forward(*(t.repeat(rows, 1, 1, 1) for t in (q, k, v)), sinks, None, None, None, None, 0.125, None)
        if rows < 6 and len(said) > before:
            return f"too early, at {rows}: {said[-1]}"
    return said[-1]


@scenario
def wide_heads() -> Any:
    """Block sizes for 227 KiB (H200), 99 KiB (consumer cards), and those that nothing fits."""
    kernel = importlib.import_module("fsdp_sink_patches.ops.flex_attention._kernel")
    found: dict[str, Any] = {}
    for limit in (232448, 101376):
        options = kernel.fitting_options(limit, 512, 2)
        rows, keys, stages = (options[f"fwd_{name}"] for name in ("BLOCK_M", "BLOCK_N", "num_stages"))
        found[str(limit)] = {"options": [rows, keys, stages], "bytes": (rows + 2 * stages * keys) * 1024}
    try:
        kernel.fitting_options(40000, 1024, 2)
    except ValueError as error:
        found["none"] = str(error)
    return found


@scenario
def chunks() -> Any:
    """The reference in many chunks, masks that are cut, rows that see nothing, and a bias with a gradient."""
    given = helper()
    flex = importlib.import_module("fsdp_sink_patches.ops.flex_attention")
    reference = importlib.import_module("fsdp_sink_patches.ops.flex_attention.reference")
    reference.SCORE_BYTES = 8 * given.HEADS * 150 * 40  # 40 rows of fp64
    found = {}
    for name, mask in masks(150).items():
        leaves = [t.double().requires_grad_() for t in given.inputs("cpu", torch.float32, 150)]
        bias = torch.randn(1, given.HEADS, 150, 150, dtype=torch.float64, requires_grad=True)
        q, k, v, sinks, dout = leaves
        out, _ = flex.flex_attention(q, k, v, sinks, mask=mask, position_bias=bias, softcap=5.0)
        visible = block_masks.dense(mask)[..., :150, :150]
        full_k, full_v = (t.repeat_interleave(given.HEADS // given.KV_HEADS, 1) for t in (k, v))
        scores = 5 * torch.tanh(q @ full_k.transpose(2, 3) / 40) + bias
        scores = scores.masked_fill(~visible, -math.inf)
        column = sinks.view(1, -1, 1, 1).expand(1, -1, 150, 1)
        exact = torch.softmax(torch.cat([scores, column], -1), -1)[..., :-1] @ full_v
        inputs = (q, k, v, sinks, bias)
        got, wanted = (
            (o.detach(), *torch.autograd.grad(o, inputs, dout.detach().transpose(1, 2))) for o in (out, exact)
        )
        found[name] = max(float((a - b).norm() / b.norm()) for a, b in zip(got, wanted, strict=True))
    return found


def masks(length: int) -> dict[str, Any]:
    from torch.nn.attention.flex_attention import create_block_mask

    def hole(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return (q >= kv) & ((q < 5) | (q > 140 - h)) & (q - kv < 100)

    def ahead(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return (kv < 100) | (kv > 900)

    return {
        "whole": block_masks.causal(length, window=30),
        "longer": block_masks.causal(600, documents=torch.tensor([0, 70, 300]), window=130),
        "longer, looks ahead": create_block_mask(ahead, 1, None, 1000, 1000, "cpu"),
        "per head, rows that see nothing": create_block_mask(hole, 1, 8, length, length, "cpu"),
        "sink slots": block_masks.causal(length + 200, window=20, sinks=3),
    }


@scenario
def validated() -> Any:
    measured = helper().measure("cpu")
    return {name: e if math.isfinite(e) else str(e) for name, e in measured.errors.items()}


if __name__ == "__main__":
    main()
