"""Scenarios of transformers.deepseek-v4-attention; run as ``scenarios.py`` is.

The fused path runs on the CPU with ``settings.compressed_attention = "fused"``, as plain torch. Two truths: upstream's
eager attention on plain rows, and each document alone, through eager attention in fp64.
"""

from __future__ import annotations

import contextlib
import copy
import io
import logging
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from packing_scenarios import (
    PAD,
    _alone,
    _build,
    _cache,
    _digest,
    _exact,
    _gradients,
    _ids,
    _kinds,
    _logits,
    _modelling,
    _raised,
    _restarting,
)
from scenarios import APPLIED, main, scenario
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import fsdp_sink_patches
from fsdp_sink_patches import settings
from fsdp_sink_patches.ops.sink_attention.oracle import relative_error

ID = "transformers.deepseek-v4-attention"


@contextlib.contextmanager
def _fused() -> Iterator[list[int]]:
    """The fused path, and how many tokens each call of it attended with."""
    calls: list[int] = []
    if ID not in APPLIED:
        with settings.using(compressed_attention="fused"):
            yield calls
        return
    from fsdp_sink_patches.patches.transformers import _deepseek_v4_attention as attention

    attend = attention.compressed_attention

    def counted(q: Tensor, *a: Any, **k: Any) -> Any:
        calls.append(q.shape[0])
        return attend(q, *a, **k)

    attention.compressed_attention = counted
    try:
        with settings.using(compressed_attention="fused"):
            yield calls
    finally:
        attention.compressed_attention = attend


def _eager() -> Any:
    return settings.using(compressed_attention="eager")


def _worst(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    assert actual.keys() == expected.keys()
    return max(relative_error(actual[name], e) for name, e in expected.items())


def _all(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Relative error of all gradients as one vector."""
    assert actual.keys() == expected.keys()
    return relative_error(*(torch.cat([x[n].double().flatten() for n in expected]) for x in (actual, expected)))


def _step(model: Any, ids: Tensor, **batch: Any) -> tuple[Tensor, dict[str, Tensor]]:
    logits = model(input_ids=ids, **batch).logits
    return logits.detach(), _gradients(model, logits)


class _Largest(TorchDispatchMode):
    """The largest tensor that an operation returned, in elements."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for each in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(each, Tensor):
                self.elements = max(self.elements, each.untyped_storage().nbytes() // each.element_size())
        return out


# --- the same numbers ----------------------------------------------------------------------------------------------


@scenario
def plain() -> Any:
    """Logits and every gradient of rows of one document, against upstream's attention in the same dtype."""
    found = {}
    for kind in _kinds():
        for shape in ((2, 67), (1, 3)) if kind == "mixed" else ((2, 67),):
            model = _build(kind)
            for dtype, each in (("fp32", model), ("fp64", _exact(model))):
                with _eager():
                    expected = _step(each, _ids(*shape), use_cache=False)
                with _fused() as calls:
                    actual = _step(each, _ids(*shape), use_cache=False)
                # In fp32 the smallest gradients, of hyper-connections' scales, are cancellation: they are one vector.
                compare = _worst if dtype == "fp64" else _all
                found[f"{kind}, {shape}, {dtype}"] = {
                    "logits": relative_error(actual[0], expected[0]),
                    "gradient": compare(actual[1], expected[1]),
                    "calls": calls,
                }
    return found


@scenario
def sinks_matter() -> Any:
    """How far logits move when the sinks are dropped: what a test at this precision would see."""
    model = _build("mixed")
    with _fused():
        expected = _logits(model, _ids(1, 150), use_cache=False)
        with torch.no_grad():
            for layer in model.model.layers:
                layer.self_attn.sinks.fill_(-1e4)
        return relative_error(_logits(model, _ids(1, 150), use_cache=False), expected)


@scenario
def packed() -> Any:
    """Packed rows, with and without a cache, and each document alone in fp64; fp32 logits, fp64 gradients."""
    found: dict[str, Any] = {}
    rows = ((37, 75, 16), (64, 49, 15))
    ids, positions = _ids(2, 128), _restarting(*rows)
    for kind in _kinds():
        model = _build(kind)
        exact = _exact(model)
        with _eager():
            alone = [
                exact(input_ids=d, use_cache=False).logits for r in (0, 1) for d in ids[r : r + 1].split(rows[r], 1)
            ]
            expected = _gradients(exact, torch.cat([part[0] for part in alone])[None])
        flat = torch.cat([part.detach()[0] for part in alone])
        with _fused() as calls:
            errors = {
                f"use_cache={cached}": relative_error(
                    _logits(model, ids, position_ids=positions, use_cache=cached).flatten(0, 1), flat
                )
                for cached in (False, True)
            }
            actual = _step(exact, ids, position_ids=positions, use_cache=False)[1]
            errors["gradient"] = _all(actual, expected)
        with _eager():
            upstreams = _step(exact, ids, position_ids=positions, use_cache=False)[1]
        found[kind] = {**errors, "calls": calls, "gradient against eager": _worst(actual, upstreams)}
    return found


@scenario
def packed_briefly() -> Any:
    """A packed row of all three layers, against each document alone in fp64."""
    model = _build()
    ids, positions = _ids(1, 96), _restarting((37, 59))
    with _eager():
        expected = torch.cat(_alone(_exact(model), ids.split((37, 59), 1)), 1)
    with _fused() as calls:
        logits = _logits(model, ids, position_ids=positions, use_cache=False)
    return {"rel": relative_error(logits, expected), "calls": calls}


@scenario
def padded() -> Any:
    """Padding on the left, on the right, between documents and inside of them; real tokens only."""
    found: dict[str, Any] = {}
    document = _ids(1, 90)
    gaps = torch.ones(1, 90, dtype=torch.long)
    gaps[0, [0, 1, 30, 55, 56, 57, 89]] = 0
    for kind in ("sliding", "CSA, top-k", "HCA", "mixed"):
        model = _build(kind)
        exact = _exact(model)
        for left, right in ((7, 0), (0, 9), (5, 3)):
            ids = F.pad(document, (left, right), value=PAD)
            mask = F.pad(torch.ones_like(document), (left, right))
            with _eager():
                expected = _alone(exact, [document])[0]
            with _fused() as calls:
                for cached in (False, True):
                    logits = _logits(model, ids, attention_mask=mask, use_cache=cached)[:, left : left + 90]
                    found[f"{kind}, {left}, {right}, {cached}"] = relative_error(logits, expected)
            assert calls == [ids.shape[1]] * 6
        real = gaps.bool()
        with _eager():
            whole = exact(input_ids=document[real][None], use_cache=False).logits
            wanted = _gradients(exact, whole)
        with _fused():
            logits = exact(input_ids=document, attention_mask=gaps, use_cache=False).logits
            found[f"{kind}, gaps"] = relative_error(logits[real], whole[0])
            found[f"{kind}, gaps, gradient"] = _all(_gradients(exact, logits[real][None]), wanted)
            both = torch.cat((document, _ids(1, 90, seed=5)))
            batch = {"attention_mask": torch.cat((gaps, torch.ones_like(gaps))), "use_cache": False}
            rows = _logits(exact, both, **batch)
            found[f"{kind}, gaps beside none"] = relative_error(rows[0][real[0]], whole[0])
    return found


@scenario
def leaks() -> Any:
    """How far the second document moves with the first, and the tokens before with a later one: by nothing."""
    found = {}
    ids, positions = _ids(1, 96), _restarting((37, 59))
    for kind in _kinds():
        model = _build(kind)
        with _fused():
            row = _logits(model, ids, position_ids=positions, use_cache=False)
            first = torch.cat((_ids(1, 37, seed=5), ids[:, 37:]), 1)
            later = torch.cat((ids[:, :80], _ids(1, 16, seed=5)), 1)
            found[kind] = [
                (_logits(model, first, position_ids=positions, use_cache=False) - row)[:, 37:].abs().max().item(),
                (_logits(model, later, position_ids=positions, use_cache=False) - row)[:, :80].abs().max().item(),
            ]
    return found


# --- caches ----------------------------------------------------------------------------------------------------------


@scenario
def continued() -> Any:
    """A fused prefill, then upstream's steps: against the whole document; unpadded and padded on the left."""
    found = {}
    for kind in ("sliding", "CSA, top-k", "HCA", "mixed"):
        model = _build(kind).eval()
        documents = _ids(2, 80)
        exact = _exact(model)
        with _eager():
            expected = [_alone(exact, [d[None]])[0] for d in documents]
        for pads in ((0, 0), (7, 0)):
            ids = torch.stack(
                [F.pad(d[: 80 - pad], (pad, 0), value=PAD) for d, pad in zip(documents, pads, strict=True)]
            )
            mask = torch.stack([F.pad(torch.ones(80 - p, dtype=torch.long), (p, 0)) for p in pads])
            cache, start, outputs, attended = _cache(model), 0, [], []
            with _fused() as calls, torch.no_grad():
                for size in (45, 9, *(1,) * 20, 6):
                    batch = {} if pads == (0, 0) else {"attention_mask": mask[:, : start + size]}
                    out = model(input_ids=ids[:, start : start + size], past_key_values=cache, use_cache=True, **batch)
                    start += size
                    outputs.append(out.logits)
                    attended.append(len(calls))
            logits = torch.cat(outputs, 1)
            found[f"{kind}, {pads}"] = {
                "rel": max(relative_error(logits[i, p:], expected[i][0, : 80 - p]) for i, p in enumerate(pads)),
                "fused calls": [attended[0], attended[-1]],
            }
    return found


@scenario
def generated() -> Any:
    """Greedy tokens are upstream's."""
    model = _build().eval()
    ids = _ids(2, 50)
    how = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": PAD, "eos_token_id": None}
    with _eager():
        expected = model.generate(ids, attention_mask=torch.ones_like(ids), **how)
    with _fused() as calls:
        found = model.generate(ids, attention_mask=torch.ones_like(ids), **how)
    return {"equal": torch.equal(found, expected), "calls": calls}


# --- who decides ---------------------------------------------------------------------------------------------------


@scenario
def decided() -> Any:
    """Which attention runs, the log lines, and what is refused."""
    model = _build()
    ids = _ids(1, 96)
    found: dict[str, Any] = {}
    log, said = logging.getLogger("fsdp_sink_patches"), io.StringIO()
    handler = logging.StreamHandler(said)
    log.addHandler(handler)
    level = log.level
    log.setLevel(logging.INFO)

    def counted(name: str, **batch: Any) -> Any:
        with _fused() as calls:
            settings.use(compressed_attention=name)
            out = model(input_ids=ids, use_cache=False, **batch)
            return len(calls), out

    try:
        found["auto"] = counted("auto")[0]
        found["eager"] = counted("eager")[0]
        found["fused"] = counted("fused")[0]
        calls, out = counted("fused", output_attentions=True)
        found["output_attentions"] = calls, len(out.attentions), list(out.attentions[1].shape)
        with _eager():
            upstreams = model(input_ids=ids, use_cache=False, output_attentions=True).attentions
        found["attentions"] = max(relative_error(a, b) for a, b in zip(out.attentions, upstreams, strict=True))
        for module in model.modules():
            if hasattr(module, "attention_dropout"):
                module.attention_dropout = 0.1
        model.config.attention_dropout = 0.1
        found["dropout"] = _raised(lambda: counted("fused"))
        found["dropout, eager"] = counted("eager")[0]
        model.eval()
        found["dropout, eval"] = counted("fused")[0]
        model.config.attention_dropout = 0.0
        modelling = _modelling()
        modelling.ALL_ATTENTION_FUNCTIONS.register("like_eager", modelling.eager_attention_forward)
        for module in model.modules():
            if hasattr(module, "config"):
                module.config._attn_implementation_internal = "like_eager"
        found["like_eager"] = counted("fused")[0]
    finally:
        log.removeHandler(handler)
        log.setLevel(level)
    found["log"] = said.getvalue().strip().splitlines()
    return found


@scenario
def given_masks() -> Any:
    """Masks that a caller made: read where they are windows, upstream's attention where they are not."""
    model = _build()
    ids, positions = _ids(1, 96), _restarting((37, 59))
    document = torch.arange(2).repeat_interleave(torch.tensor((37, 59)))
    columns = torch.arange(96)
    distance = columns[:, None] - columns
    seen = (document[:, None] == document) & (distance >= 0) & (distance < 16)
    least = torch.finfo(torch.float32).min
    window = torch.where(seen, 0.0, least)[None, None]
    holed = window.clone()
    holed[..., 20:, 19] = least
    soft = window.clone()
    soft[0, 0, 40, 39] = -1.5
    found = {}
    for name, mask in {
        "window": window,
        "infinite": window.masked_fill(~seen, float("-inf")),
        "holed": holed,
        "soft": soft,
    }.items():
        with _eager():
            expected = _logits(model, ids, position_ids=positions, attention_mask=mask, use_cache=False)
        with _fused() as calls:
            actual = _logits(model, ids, position_ids=positions, attention_mask=mask, use_cache=False)
        found[name] = {"rel": relative_error(actual, expected), "calls": len(calls)}
    written = window.clone()
    with _fused() as calls:
        attention = model.model.layers[0].self_attn
        for _ in range(2):
            _logits(model, ids, position_ids=positions, attention_mask=written, use_cache=False)
            written.copy_(holed)
        found["written to"] = {"rel": 0.0, "calls": len(calls)}
    assert attention is not None
    return found


@scenario
def alone() -> Any:
    """Plain rows and rows padded on the left, as they are without transformers.deepseek-v4-packing."""
    model = _build()
    ids = _ids(2, 80)
    mask = torch.ones_like(ids)
    mask[1, :5] = 0
    found: dict[str, Any] = {}
    for name, batch in {
        "plain": {},
        "ones": {"attention_mask": torch.ones_like(ids)},
        "padded": {"attention_mask": mask},
    }.items():
        for cached in (False, True):
            with _eager():
                expected = _step(model, ids, use_cache=cached, **batch)
            with _fused() as calls:
                actual = _step(model, ids, use_cache=cached, **batch)
            found[f"{name}, {cached}"] = {
                "logits": relative_error(actual[0], expected[0]),
                "gradient": _all(actual[1], expected[1]),
                "calls": len(calls),
            }
    return found


# --- what jobs do with a model -------------------------------------------------------------------------------------


@scenario
def checkpointed() -> Any:
    """Activation checkpointing still happens, and its recompute gives the same bits."""
    found = {}
    ids, positions = _ids(1, 96), _restarting((37, 59))
    model = _build()
    with _fused():
        expected = _gradients(model, model(input_ids=ids, position_ids=positions).logits)
    for reentrant in (False, True):
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        model.enable_input_require_grads()
        with _fused() as calls:
            actual = _gradients(model, model(input_ids=ids, position_ids=positions).logits)
        found[f"reentrant={reentrant}"] = {
            "calls": len(calls),
            "equal": actual.keys() == expected.keys() and all(torch.equal(actual[n], e) for n, e in expected.items()),
        }
    return found


@scenario
def compiled() -> Any:
    """The whole model without experts, whose loops are not for dynamo, in one graph, packed; forward and backward."""
    found: dict[str, Any] = {}
    ids, positions = _ids(1, 96), _restarting((37, 59))
    for kind in ("mixed", "CSA, all entries"):
        model = _build(kind)
        for layer in model.model.layers:
            layer.mlp.forward = lambda x, input_ids=None: x
        results = []
        for function in (model.model, torch.compile(model.model, backend="aot_eager", fullgraph=True)):
            model.zero_grad(set_to_none=True)
            with _fused():
                out = function(input_ids=ids, position_ids=positions, use_cache=False).last_hidden_state
                out.square().sum().backward()
            results.append([out.detach(), *(p.grad for p in model.model.parameters() if p.grad is not None)])
        found[kind] = max(relative_error(a, b) for a, b in zip(*reversed(results), strict=True))
        torch._dynamo.reset()
    return found


@scenario
def half_precision() -> Any:
    """bf16 models and autocast, logits and all gradients against fp64; eager's own errors beside it.

    No layer picks: rounding turns into another choice of entries, whoever attends to them.
    """
    found: dict[str, Any] = {}
    ids = _ids(2, 96)
    for kind in ("sliding", "CSA, all entries", "HCA"):
        model = _build(kind)
        with _eager():
            exact, expected = _step(_exact(model), ids, use_cache=False)
        for way in ("autocast", "bf16"):
            low = copy.deepcopy(model)
            if way == "bf16":
                low = low.bfloat16()
            low.set_experts_implementation("eager")
            for name, how in (("eager", _eager), ("fused", _fused)):
                with how():
                    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=way == "autocast"):
                        logits = low(input_ids=ids, use_cache=False).logits
                    gradients = _gradients(low, logits.float())
                found[f"{kind}, {way}, {name}"] = [relative_error(logits, exact), _all(gradients, expected)]
                found[f"{kind}, {way}, {name}, dtype"] = str(logits.dtype)
    return found


@scenario
def memory() -> Any:
    """Elements of the largest tensor that a step writes, at two lengths; experts and logits are small."""
    found: dict[str, Any] = {}
    for kind in _kinds():
        model = _build(kind, vocab_size=64, index_topk=8)
        for layer in model.model.layers:
            layer.mlp.forward = lambda x, input_ids=None: x
        for length in (512, 1024):
            ids, positions = _ids(1, length) % 64, _restarting((length // 4, length // 2, length // 4))
            with _fused(), _Largest() as largest:
                model(input_ids=ids, position_ids=positions, use_cache=False).logits.square().sum().backward()
            found[f"{kind}, {length}"] = largest.elements
    return found


@scenario
def untouched() -> Any:
    """On the CPU by default: digests of logits and gradients, to compare with a process without the patch."""
    found = {}
    for kind in _kinds():
        logits, gradients = _step(_build(kind), _ids(2, 67), use_cache=False)
        found[kind] = [_digest(logits), _digest(*gradients.values())]
    return found


@scenario
def validated() -> Any:
    from fsdp_sink_patches import _registry

    measured: Any = _registry.module(ID)
    measured = measured.validate("cpu")
    return {"right": measured.right, "errors": dict(measured.errors), "limits": dict(measured.limits)}


@scenario
def held() -> Any:
    """The patch is where it should be, and goes without a trace; without it packing makes masks again."""
    modelling = _modelling()
    ours = modelling.DeepseekV4Attention.forward
    model, ids = _build(), _ids(1, 96)
    with _fused() as calls:
        fsdp_sink_patches.unapply(ID)
        try:
            gone = modelling.DeepseekV4Attention.forward is ours.__wrapped__
            without = _logits(model, ids, use_cache=False)
        finally:
            fsdp_sink_patches.apply(ID, allow_drift=[ID])
        before = len(calls)
        error = relative_error(_logits(model, ids, use_cache=False), without)
    return {"gone": gone, "rel": error, "calls": [before, len(calls)]}


if __name__ == "__main__":
    main()
