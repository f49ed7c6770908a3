"""Runs scenarios in a process of its own and prints what each measured, as one line of JSON.

    python scenarios.py [--apply ID,ID] [--after] [--flash] NAME...

``--after`` imports the model classes before the patches are applied; ``--flash`` pretends that there is a CUDA device,
which transformers asks for before it looks for the flash package on ``PYTHONPATH``. What a scenario raises is its
result, so that a process without the patches tells what a user meets.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import logging
import socket
import sys
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import fsdp_sink_patches
from fsdp_sink_patches import _fingerprint, _registry

SCENARIOS: dict[str, Callable[[], Any]] = {}
CONNECTIONS: list[str] = []
LOG: list[str] = []
APPLIED: list[str] = []
UPSTREAM: dict[str, Any] = {}
LENGTHS = (11, 1, 20, 8)


def scenario(function: Callable[[], Any]) -> Callable[[], Any]:
    SCENARIOS[function.__name__] = function
    return function


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--apply", default="")
    parser.add_argument("--after", action="store_true")
    parser.add_argument("--flash", action="store_true")
    parser.add_argument("names", nargs="+")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    logging.getLogger("fsdp_sink_patches").addHandler(_Keep())
    if arguments.flash:
        torch.cuda.is_available = lambda: True  # type: ignore[assignment]
        torch.cuda.get_device_capability = lambda *_: (9, 0)  # type: ignore[assignment]
        torch.version.cuda = "12.8"  # type: ignore[assignment]
    socket.socket.connect = _refuse  # type: ignore[method-assign,assignment]
    ids = [name for name in arguments.apply.split(",") if name]
    APPLIED.extend(ids)
    if arguments.after:
        _import_models()
        UPSTREAM.update(_held())
    if ids:
        _apply()
        _apply()  # a second call changes nothing
    _import_models()
    results: dict[str, Any] = {}
    for name in arguments.names:
        try:
            results[name] = SCENARIOS[name]()
        except Exception as error:
            results[name] = {"raises": f"{type(error).__name__}: {error}"}
    if ids:
        fsdp_sink_patches.assert_applied(*ids)
    print(json.dumps(results))


def _apply() -> None:
    # A release whose source is recorded must be recognised. One that is not is tried all the same: passing here is what
    # lets it be recorded. The flash stubs are never recorded.
    unknown = [id for id in APPLIED if not _fingerprint.match(_registry.get(id)).known]
    fsdp_sink_patches.apply(*APPLIED, allow_drift=unknown)


def _held() -> dict[str, Any]:
    """What every place that holds one of the patched functions holds now."""
    import transformers.integrations.flash_attention as layer
    import transformers.integrations.sdpa_attention as sdpa
    import transformers.modeling_flash_attention_utils as utils
    import transformers.modeling_utils as modeling
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssModel

    mapping = modeling.AttentionInterface._global_mapping
    return {
        "inner": utils._flash_attention_forward,
        "inner, by name": layer._flash_attention_forward,
        "inner, in verl": sys.modules["verl_like"]._flash_attention_forward,
        "layer": layer.flash_attention_forward,
        "layer, registered": mapping["flash_attention_2"],
        "sdpa": sdpa.sdpa_attention_forward,
        "sdpa, registered": mapping["sdpa"],
        "check": modeling.PreTrainedModel._check_and_adjust_attn_implementation,
        "model": GptOssModel.forward,
    }


class _Keep(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        LOG.append(record.getMessage())


def _refuse(_: Any, address: Any) -> None:
    CONNECTIONS.append(str(address))
    raise OSError("no network in tests")


def _import_models() -> None:
    """The model class, and a module that binds the inner function by name as verl's monkey_patch does."""
    from transformers.modeling_flash_attention_utils import _flash_attention_forward
    from transformers.models.gpt_oss import modeling_gpt_oss  # noqa: F401

    if "verl_like" in sys.modules:
        return
    module = types.ModuleType("verl_like")
    module.__dict__.update(_flash_attention_forward=_flash_attention_forward, calls=[])
    code = """
def ulysses(query_states, key_states, value_states, attention_mask, query_length, *args, position_ids=None, **kwargs):
    calls.append(1)
    return _flash_attention_forward(
        query_states, key_states, value_states, attention_mask, query_length, *args, position_ids=position_ids, **kwargs
    )
"""
    exec(compile(code, "verl_like.py", "exec"), module.__dict__)
    sys.modules["verl_like"] = module


def _row(lengths: tuple[int, ...], row: int = 0) -> list[tuple[int, slice]]:
    documents, start = [], 0
    for length in lengths:
        documents.append((row, slice(start, start + length)))
        start += length
    return documents


def _packed(model: Any, *rows: tuple[int, ...], **batch: Any) -> dict[str, float]:
    import models

    ids = models.tokens(len(rows), sum(rows[0]))
    documents = [document for i, lengths in enumerate(rows) for document in _row(lengths, i)]
    batch.setdefault("position_ids", models.restarting(*rows))
    expected = models.step_alone(models.oracle_of(model), documents, ids)
    return models.worst(models.step(model, documents, ids, **batch), expected)


def _padded(model: Any, side: str, **batch: Any) -> dict[str, float]:
    import models

    ids, lengths = models.tokens(3, 24), (24, 3, 17)
    mask = torch.zeros(3, 24, dtype=torch.long)
    documents = []
    for row, length in enumerate(lengths):
        columns = slice(0, length) if side == "right" else slice(24 - length, 24)
        mask[row, columns] = 1
        documents.append((row, columns))
    expected = models.step_alone(models.oracle_of(model), documents, ids, [c.start for _, c in documents])
    return models.worst(models.step(model, documents, ids, attention_mask=mask, **batch), expected)


def _digest(*tensors: Tensor) -> str:
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(tensor.detach().contiguous().numpy().tobytes())
    return found.hexdigest()


# --- gpt-oss under flash names ---------------------------------------------------------------------------------------


def _flash(**changes: Any) -> Any:
    import models

    return models.build("gpt_oss", "flash_attention_2", **changes)


@scenario
def packed() -> Any:
    return _packed(_flash(), LENGTHS)


@scenario
def packed_fa3() -> Any:
    import models

    return _packed(models.build("gpt_oss", "flash_attention_3"), LENGTHS)


@scenario
def packed_fa4() -> Any:
    import models

    return _packed(models.build("gpt_oss", "flash_attention_4"), LENGTHS)


@scenario
def packed_rows() -> Any:
    """Two rows, packed differently."""
    return _packed(_flash(), (11, 13), (1, 23))


@scenario
def packed_and_padded() -> Any:
    import models

    model, ids = _flash(), models.tokens(1, 24)
    mask, documents = torch.ones(1, 24, dtype=torch.long), _row((9, 11))
    mask[:, 20:] = 0
    expected = models.step_alone(models.oracle_of(model), documents, ids)
    places = models.restarting((9, 11, 4))
    return models.worst(models.step(model, documents, ids, position_ids=places, attention_mask=mask), expected)


@scenario
def starts_mid_document() -> Any:
    import models

    model, ids = _flash(), models.tokens(1, 15)
    documents, places = _row((6, 9)), torch.cat([torch.arange(5, 11), torch.arange(9)])[None]
    expected = models.step_alone(models.oracle_of(model), documents, ids, [5, 0])
    return models.worst(models.step(model, documents, ids, position_ids=places), expected)


@scenario
def given_borders() -> Any:
    """As a collator gives them: int64 borders, and lengths as 0-d tensors."""
    import models

    borders = torch.tensor([0, *LENGTHS]).cumsum(0)
    longest = torch.tensor(max(LENGTHS))
    positions = models.restarting(LENGTHS)
    return _packed(
        _flash(), LENGTHS, position_ids=positions,
        cu_seq_lens_q=borders, cu_seq_lens_k=borders, max_length_q=longest, max_length_k=longest,
    )  # fmt: skip


@scenario
def numpy_lengths() -> Any:
    """The longest document as a NumPy integer, which is what ``np.diff(borders).max()`` gives a collator."""
    import numpy as np

    borders = torch.tensor([0, *LENGTHS], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    longest = np.int64(max(LENGTHS))
    return _packed(
        _flash(), LENGTHS,
        cu_seq_lens_q=borders, cu_seq_lens_k=borders, max_length_q=longest, max_length_k=longest,
    )  # fmt: skip


@scenario
def padded_left() -> Any:
    return _padded(_flash(), "left")


@scenario
def padded_right() -> Any:
    return _padded(_flash(), "right")


@scenario
def checkpointed() -> Any:
    import models
    import transformers.integrations.flash_attention as layer

    model, calls = _flash(), []
    model.gradient_checkpointing_enable()
    inner = layer._flash_attention_forward
    oracle = models.oracle_of(model)
    oracle.gradient_checkpointing_disable()
    ids, documents = models.tokens(1, sum(LENGTHS)), _row(LENGTHS)
    expected = models.step_alone(oracle, documents, ids)
    layer._flash_attention_forward = models.counted(inner, calls)
    try:
        actual = models.step(model, documents, ids, position_ids=models.restarting(LENGTHS), use_cache=False)
    finally:
        layer._flash_attention_forward = inner
    return {**models.worst(actual, expected), "attention calls": len(calls)}


@scenario
def ulysses() -> Any:
    """verl puts its wrapper into the module after the model is built, and the wrapper calls what it bound at import."""
    import transformers.integrations.flash_attention as layer

    model, inner, verl = _flash(), layer._flash_attention_forward, sys.modules["verl_like"]
    layer._flash_attention_forward = verl.ulysses
    try:
        return {**_packed(model, LENGTHS), "calls": len(verl.calls)}
    finally:
        layer._flash_attention_forward = inner


@scenario
def compiled() -> Any:
    """A batch without padding in one graph, where upstream's own experts allow it."""
    import models
    import transformers

    fullgraph = transformers.__version__ >= "5"
    model, ids = _flash(), models.tokens(2, 20)
    expected = models.oracle_of(model)(input_ids=ids, use_cache=False).logits
    if fullgraph:
        model.config._experts_implementation = "batched_mm"
    graph = torch.compile(model, backend="eager", fullgraph=fullgraph)
    actual = graph(input_ids=ids, use_cache=False).logits
    return {"logits": models.relative_error(actual, expected), "fullgraph": fullgraph}


@scenario
def compiled_borders() -> Any:
    """Packed rows in one graph: the borders are given, so nothing depends on data."""
    import models
    import transformers

    fullgraph = transformers.__version__ >= "5"
    model, ids = _flash(), models.tokens(1, sum(LENGTHS))
    exact = models.oracle_of(model)
    expected = torch.cat([exact(input_ids=ids[:, columns]).logits for _, columns in _row(LENGTHS)], 1)
    if fullgraph:
        model.config._experts_implementation = "batched_mm"
    borders = torch.tensor([0, *LENGTHS], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    graph = torch.compile(model, backend="eager", fullgraph=fullgraph)
    actual = graph(
        input_ids=ids, position_ids=models.restarting(LENGTHS), use_cache=False,
        cu_seq_lens_q=borders, cu_seq_lens_k=borders, max_length_q=max(LENGTHS), max_length_k=max(LENGTHS),
    ).logits  # fmt: skip
    return {"logits": models.relative_error(actual, expected), "fullgraph": fullgraph}


@scenario
def generated() -> Any:
    """Greedy tokens from left-padded prompts, with growing and preallocated caches, against eager and one by one."""
    import models

    model, eager = _flash().eval(), models.build("gpt_oss", "eager").eval()
    lengths, ids = (3, 30, 13), models.tokens(3, 30)
    mask = torch.stack([(torch.arange(30) >= 30 - n).long() for n in lengths])

    def run(model: Any, ids: Tensor, mask: Tensor, **k: Any) -> Tensor:
        settings = {"do_sample": False, "max_new_tokens": 12, "min_new_tokens": 12, "pad_token_id": 0}
        return model.generate(ids, attention_mask=mask, **settings, **k)[:, ids.shape[1] :]

    static = {"cache_implementation": "static", "disable_compile": True}
    expected = run(eager, ids, mask)
    alone = [run(model, ids[i : i + 1, 30 - n :], torch.ones(1, n, dtype=torch.long)) for i, n in enumerate(lengths)]
    full = torch.ones(1, 30, dtype=torch.long)
    return {
        "growing": torch.equal(run(model, ids, mask), expected),
        "static": torch.equal(run(model, ids, mask, **static), expected),
        "static, no padding": torch.equal(run(model, ids[1:2], full, **static), expected[1:2]),
        "alone": torch.equal(torch.cat(alone), expected),
        "distinct tokens": len(expected.unique()),
    }


@scenario
def derived_once() -> Any:
    """Borders after a buffer is refilled behind autograd's back, and how often they are derived off the CPU."""
    import models
    from fsdp_sink_patches.patches.transformers import _sink_forward

    model, ids, places = _flash(), models.tokens(1, 24), models.restarting((9, 15))
    exact = models.oracle_of(model)

    def error(*lengths: int) -> float:
        actual = model(input_ids=ids, position_ids=places, use_cache=False).logits
        expected = [exact(input_ids=ids[:, columns]).logits for _, columns in _row(lengths)]
        return models.relative_error(actual, torch.cat(expected, 1))

    found: dict[str, Any] = {"first": error(9, 15)}
    places.data.copy_(models.restarting((16, 8)))
    found["through .data"] = error(16, 8)
    places.numpy()[:] = models.restarting((5, 19)).numpy()
    found["through NumPy"] = error(5, 19)

    calls: list[int] = []

    def count(tensor: Tensor, other: Tensor | None = None) -> int:
        for _ in range(4):  # layers
            _sink_forward._once("borders", lambda: calls.append(1), tensor, other)
        return len(calls)

    elsewhere, masks = torch.zeros(1, 24, device="meta"), torch.zeros(2, 24, device="meta").split(1)
    counts = [count(elsewhere), count(elsewhere)]
    elsewhere.zero_()
    counts += [count(elsewhere), count(elsewhere, masks[0]), count(elsewhere, masks[1])]
    kept = len(_sink_forward._derived)
    del elsewhere
    return {"errors": found, "calls": counts, "kept": [kept, len(_sink_forward._derived)]}


@scenario
def changed_in_place() -> Any:
    """set_attn_implementation on a model that was built with eager."""
    import models

    model = models.build("gpt_oss", "eager")
    model.set_attn_implementation("flash_attention_2")
    return {**_packed(model, LENGTHS), "implementation": model.config._attn_implementation}


@scenario
def autocast() -> Any:
    """fp32 weights under bf16 autocast: q, k, v become bf16, sinks stay what they are."""
    import models

    model, ids = _flash(), models.tokens(2, 24)
    exact = models.oracle_of(model)
    expected = exact(input_ids=ids, use_cache=False).logits
    with torch.autocast("cpu", torch.bfloat16):
        actual = model(input_ids=ids, use_cache=False).logits
    torch.autograd.backward(actual.float().square().mean())
    sinks = model.model.layers[0].self_attn.sinks
    return {"logits": models.relative_error(actual, expected), "dsink": str(sinks.grad.dtype)}


@scenario
def dropout() -> Any:
    import models

    return _flash(attention_dropout=0.1)(input_ids=models.tokens(1, 12)).logits.shape


# --- which function a name means -------------------------------------------------------------------------------------


@scenario
def resolved() -> Any:
    """What each name becomes on a model with sinks, without a network."""
    import models

    found = {}
    for name in ("flash_attention_2", "flash_attention_3", "flash_attention_4"):
        try:
            found[name] = models.build("gpt_oss", name).config._attn_implementation
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"
    lines = [line for line in LOG if line.startswith("transformers.flash-sinks")]
    return {"names": found, "log": lines, "connections": CONNECTIONS}


@scenario
def loaded() -> Any:
    """from_pretrained, as every trainer builds its model."""
    import tempfile

    import models
    from transformers import AutoModelForCausalLM

    model, ids = models.build("gpt_oss", "eager").eval(), models.tokens(2, 24)
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        found = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="flash_attention_2").float()
    error = models.relative_error(found(input_ids=ids).logits, models.oracle_of(model)(input_ids=ids).logits)
    return {"implementation": found.config._attn_implementation, "logits": error}


@scenario
def refused() -> Any:
    """Models whose attention is not plain attention, sdpa, and a model without sinks, where no package is installed."""
    import models
    from transformers import AutoConfig, AutoModelForCausalLM

    def attempt(make: Callable[[], Any]) -> str:
        try:
            return str(make().config._attn_implementation)
        except Exception as error:
            return f"{type(error).__name__}: {error}"

    found = {"llama": attempt(lambda: models.build("llama", "flash_attention_2"))}
    found["sdpa"] = attempt(lambda: models.build("gpt_oss", "sdpa"))
    for name in ("deepseek_v4", "hy_v4"):
        try:
            config = AutoConfig.for_model(name)
        except ValueError:  # not in this release
            continue
        config.num_hidden_layers = 0
        with torch.device("meta"):
            found[name] = attempt(
                lambda config=config: AutoModelForCausalLM.from_config(config, attn_implementation="flash_attention_2")
            )
    return found


@scenario
def sdpa_forced() -> Any:
    """The class refuses sdpa; a config that is written to directly does not ask the class."""
    import models

    model, ids = models.build("gpt_oss", "eager"), models.tokens(2, 24)
    expected = models.oracle_of(model)(input_ids=ids, use_cache=False).logits
    model.config._attn_implementation_internal = "sdpa"
    return {"logits": models.relative_error(model(input_ids=ids, use_cache=False).logits, expected)}


@scenario
def foreign_kernels() -> Any:
    """A loaded kernel that is none of ours: without a sink argument, and with one."""
    import transformers.modeling_flash_attention_utils as utils

    def without(q: Tensor, k: Tensor, v: Tensor, softmax_scale: Any = None, causal: bool = False) -> Tensor:
        return q * 0

    def native(
        q: Tensor, k: Tensor, v: Tensor, causal: bool = False, softmax_scale: Any = None, s_aux: Any = None
    ) -> Any:
        return q * 0 + s_aux[None, None, :, None]

    found = {}
    for name, kernel in (("without", without), ("native", native)):
        utils._flash_fn = utils._flash_varlen_fn = kernel
        utils._pad_fn = utils._unpad_fn = utils._flash_with_kvcache_fn = kernel
        utils._process_flash_kwargs_fn = utils._lazy_define_process_function(kernel)
        utils._loaded_implementation = "someone/kernel"
        q = torch.randn(1, 6, 4, 16)
        try:
            out = utils._flash_attention_forward(
                q, q, q, None, 6, True, s_aux=torch.ones(4), attn_implementation="someone/kernel"
            )
            found[name] = float(out.mean())
        except NotImplementedError as error:
            found[name] = str(error)
    return found


@scenario
def sink_sources() -> Any:
    """Every modelling file of the installed transformers that passes s_aux, and what it declares."""
    import importlib
    from pathlib import Path

    import transformers
    from fsdp_sink_patches.patches.transformers.flash_sinks import passes_sinks

    found = {}
    for file in sorted(Path(transformers.__file__).parent.glob("models/*/modeling_*.py")):
        if "s_aux" in file.read_text(encoding="utf-8") and "torch" in file.read_text(encoding="utf-8"):
            module = importlib.import_module(f"transformers.models.{file.parent.name}.{file.stem}")
            if "s_aux=" not in file.read_text(encoding="utf-8"):
                continue
            classes = [
                value
                for value in vars(module).values()
                if isinstance(value, type)
                and issubclass(value, transformers.PreTrainedModel)
                and value.__module__ == module.__name__
            ]
            found[file.parent.name] = sorted({passes_sinks(c) for c in classes})
    from transformers import LlamaForCausalLM, Qwen3Model

    return {"models": found, "sinkless": [passes_sinks(LlamaForCausalLM), passes_sinks(Qwen3Model)]}


@scenario
def restored() -> Any:
    """Everything that held upstream's function holds ours, one deep; then upstream's again; then ours again."""
    ours = _held()
    one_deep = [name for name, function in ours.items() if function.__wrapped__ is not UPSTREAM[name]]
    fsdp_sink_patches.unapply(*APPLIED)
    kept = [name for name, function in _held().items() if function is not UPSTREAM[name]]
    _apply()
    missed = [name for name, function in _held().items() if function.__wrapped__ is not UPSTREAM[name]]
    return {"not one deep": one_deep, "not restored": kept, "not applied again": missed, "then": packed()}


# --- the layer's function by itself ----------------------------------------------------------------------------------


class _Layer(torch.nn.Module):
    """What the attention function looks at in a layer."""

    def __init__(self, name: str = "flash_attention_2") -> None:
        super().__init__()
        self.config = types.SimpleNamespace(_attn_implementation=name)
        self.proj = torch.nn.Linear(2, 2)
        self.is_causal = True
        self.layer_idx = 0


def _attend(*a: Any, **k: Any) -> Any:
    import transformers.modeling_utils

    return transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS["flash_attention_2"](*a, **k)


@scenario
def window() -> Any:
    """How many keys each of 12 queries sees through a window of 4: values are one-hot, scores are all equal."""
    values = torch.eye(12, 16)[None, None].expand(1, 2, 12, 16)
    zeros, sinks = torch.zeros(1, 2, 12, 16), torch.zeros(2)
    found = {}
    for name, places in (("one document", None), ("packed", torch.tensor([[*range(5), *range(7)]]))):
        out, _ = _attend(_Layer(), zeros, zeros, values, None, sliding_window=4, s_aux=sinks, position_ids=places)
        found[name] = (out[0, :, 0] > 0).sum(-1).tolist()
    return found


@scenario
def wide_keys() -> Any:
    """q and k of head_dim 24, v of 16 (mimo), forward and backward."""
    import models

    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, h, 20, d, generator=g).requires_grad_() for h, d in ((4, 24), (2, 24), (2, 16)))
    sinks = torch.tensor([4.0, 8.0, 20.0, 0.5]).requires_grad_()
    exact = [x.detach().double().requires_grad_() for x in (q, k, v, sinks)]
    expected, _ = models.oracle_attention(*(x.transpose(1, 2) for x in exact[:3]), exact[3], causal=True)
    out, _ = _attend(_Layer(), q, k, v, None, s_aux=sinks)
    for o in (out, expected):
        torch.autograd.backward(o.cos().sum())
    errors = [models.relative_error(x.grad, y.grad) for x, y in zip((q, k, v, sinks), exact, strict=True)]
    return {"out": models.relative_error(out, expected), "gradient": max(errors), "shape": list(out.shape)}


@scenario
def precise_sinks() -> Any:
    """bf16 q, k, v with fp32 sinks that bf16 can't hold: the sink is used as it is."""
    import models

    g = torch.Generator().manual_seed(0)
    q = torch.zeros(1, 4, 64, 16, dtype=torch.bfloat16)
    v = torch.ones(1, 4, 64, 16, dtype=torch.bfloat16)
    sinks = (8.015 + 0.001 * torch.rand(4, generator=g)).requires_grad_()
    expected, _ = models.oracle_attention(*(x.transpose(1, 2) for x in (q, q, v)), sinks.detach(), causal=True)
    out, _ = _attend(_Layer(), q, q, v, None, s_aux=sinks)
    torch.autograd.backward(out.float().sum())
    return {"out": models.relative_error(out, expected), "dsink dtype": str(sinks.grad.dtype)}


@scenario
def unusual_arguments() -> Any:
    """Arguments that change what attention means, and shapes that don't fit, must not pass in silence."""
    q = torch.randn(1, 4, 6, 16)
    sinks = torch.ones(4)
    found = {}
    cases: dict[str, dict[str, Any]] = {
        "indices": {"indices": torch.zeros(1)},
        "block_table": {"block_table": torch.zeros(1)},
        "mask": {"attention_mask": torch.zeros(1, 1, 6, 6)},
        "position_ids": {"position_ids": torch.zeros(3, 1, 6, dtype=torch.long)},
        "sinks": {"s_aux": torch.ones(3)},
    }
    for name, case in cases.items():
        mask = case.pop("attention_mask", None)
        try:
            _attend(_Layer(), q, q, q, mask, **{"s_aux": sinks, **case})
            found[name] = "computed"
        except (ValueError, NotImplementedError) as error:
            found[name] = f"{type(error).__name__}: {error}"
    return found


# --- gpt-oss masks ---------------------------------------------------------------------------------------------------


def _eager() -> Any:
    import models

    return models.build("gpt_oss", "eager")


@scenario
def eager_packed() -> Any:
    return _packed(_eager(), LENGTHS, use_cache=False)


@scenario
def eager_packed_by_default() -> Any:
    """use_cache is on by default, and makes a cache that switches upstream's own detection off."""
    return _packed(_eager(), LENGTHS)


@scenario
def eager_packed_all_ones() -> Any:
    return _packed(_eager(), LENGTHS, attention_mask=torch.ones(1, sum(LENGTHS), dtype=torch.long))


@scenario
def eager_packed_rows() -> Any:
    return _packed(_eager(), (11, 13), (1, 23))


@scenario
def eager_packed_empty_cache() -> Any:
    from transformers import DynamicCache

    model = _eager()
    return _packed(model, LENGTHS, past_key_values=DynamicCache(config=model.config))


@scenario
def eager_packed_and_padded() -> Any:
    return _packed_and_padded(_eager())


def _packed_and_padded(model: Any) -> dict[str, float]:
    import models

    ids, mask = models.tokens(2, 24), torch.ones(2, 24, dtype=torch.long)
    mask[0, 20:], mask[1, :6] = 0, 0
    documents = [*_row((9, 11)), (1, slice(6, 11)), (1, slice(11, 24))]
    places = torch.stack([models.restarting((9, 11, 4))[0], models.restarting((6, 5, 13))[0]])
    expected = models.step_alone(models.oracle_of(model), documents, ids)
    return models.worst(models.step(model, documents, ids, position_ids=places, attention_mask=mask), expected)


@scenario
def eager_embeddings() -> Any:
    """inputs_embeds instead of input_ids, and arguments by position."""
    import models

    model, ids = _eager(), models.tokens(1, sum(LENGTHS))
    exact = models.oracle_of(model).model
    expected = torch.cat([exact(input_ids=ids[:, columns])[0] for _, columns in _row(LENGTHS)], 1)
    places = models.restarting(LENGTHS)
    named = model.model(inputs_embeds=model.model.embed_tokens(ids), position_ids=places)[0]
    placed = model.model(ids, None, places)[0]
    all_placed = model.model(None, None, places, None, model.model.embed_tokens(ids))[0]
    return {
        "named": models.relative_error(named, expected),
        "placed": models.relative_error(placed, expected),
        "all placed": models.relative_error(all_placed, expected),
    }


@scenario
def eager_compiled() -> Any:
    """In one graph where upstream's own experts allow it, so nothing may depend on whether the rows are packed."""
    import models
    import transformers

    fullgraph = transformers.__version__ >= "5"
    model, ids = _eager(), models.tokens(1, sum(LENGTHS))
    exact = models.oracle_of(model)
    expected = torch.cat([exact(input_ids=ids[:, columns]).logits for _, columns in _row(LENGTHS)], 1)
    if fullgraph:
        model.config._experts_implementation = "batched_mm"
    graph = torch.compile(model, backend="eager", fullgraph=fullgraph)
    actual = graph(input_ids=ids, position_ids=models.restarting(LENGTHS), use_cache=False).logits
    return {"logits": models.relative_error(actual, expected), "fullgraph": fullgraph}


@scenario
def eager_untouched() -> Any:
    """Rows that are not packed, padding, and generation: the digest must be upstream's own."""
    import models

    model, ids = _eager().eval(), models.tokens(2, 20)
    mask = torch.ones(2, 20, dtype=torch.long)
    mask[1, :7] = 0
    plain = model(input_ids=ids).logits
    placed = model(input_ids=ids, position_ids=torch.arange(20)[None].expand(2, -1)).logits
    padded = model(input_ids=ids, attention_mask=mask).logits
    settings = {"do_sample": False, "max_new_tokens": 6, "min_new_tokens": 6, "pad_token_id": 0}
    new = model.generate(ids, attention_mask=mask, **settings)
    return {"plain": _digest(plain), "placed": _digest(placed), "padded": _digest(padded), "generated": _digest(new)}


@scenario
def flex_masks() -> Any:
    """The BlockMasks that flex attention gets, evaluated densely, against the rule written out."""
    import models
    from torch.nn.attention.flex_attention import create_mask

    seen: dict[str, Tensor] = {}

    class Recorder(torch.nn.Module):
        def __init__(self, kind: str) -> None:
            super().__init__()
            self.attention_type = kind

        def forward(self, hidden_states: Tensor, attention_mask: Any = None, **_: Any) -> Tensor:
            seen[self.attention_type] = create_mask(attention_mask.mask_mod, 1, 1, total, total, device="cpu")[0, 0]
            return hidden_states

    total = sum(LENGTHS)
    model = models.build("gpt_oss", "flex_attention")
    model.model.layers = torch.nn.ModuleList(Recorder(kind) for kind in model.config.layer_types)
    model(input_ids=models.tokens(1, total), position_ids=models.restarting(LENGTHS))
    owner = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))
    i, j = torch.arange(total)[:, None], torch.arange(total)[None, :]
    rule = (owner[:, None] == owner[None, :]) & (j <= i)
    windowed = rule & (i - j < model.config.sliding_window)
    return {
        "full": int((seen["full_attention"] != rule).sum()),
        "sliding": int((seen["sliding_attention"] != windowed).sum()),
    }


# --- openai_privacy_filter masks -------------------------------------------------------------------------------------


def _encoder(implementation: str = "eager") -> Any:
    import models

    return models.build("openai_privacy_filter", implementation)


@scenario
def encoder_packed() -> Any:
    return _packed(_encoder(), LENGTHS)


@scenario
def encoder_packed_all_ones() -> Any:
    return _packed(_encoder(), LENGTHS, attention_mask=torch.ones(1, sum(LENGTHS), dtype=torch.long))


@scenario
def encoder_packed_rows() -> Any:
    return _packed(_encoder(), (11, 13), (1, 23))


@scenario
def encoder_packed_and_padded() -> Any:
    return _packed_and_padded(_encoder())


@scenario
def encoder_packed_checkpointed() -> Any:
    """The oracle recomputes too, without a patch's help: it never sees a packed row."""
    model = _encoder()
    model.gradient_checkpointing_enable()
    return _packed(model, LENGTHS)


@scenario
def encoder_leak() -> Any:
    """How far the other documents' logits move when only the second one's tokens change, and its own."""
    import models

    model, ids, places = _encoder().eval(), models.tokens(1, sum(LENGTHS)), models.restarting(LENGTHS)
    changed = ids.clone()
    own = _row(LENGTHS)[2][1]
    changed[:, own] = models.tokens(1, LENGTHS[2], seed=4)
    with torch.no_grad():
        moved = (model(input_ids=ids, position_ids=places).logits - model(changed, position_ids=places).logits).abs()
    return {"own": float(moved[:, own].max()), "others": float(torch.cat([moved[:, :12], moved[:, 32:]], 1).max())}


@scenario
def encoder_embeddings() -> Any:
    """inputs_embeds instead of input_ids, and arguments by position."""
    import models

    model, ids, places = _encoder(), models.tokens(1, sum(LENGTHS)), models.restarting(LENGTHS)
    exact = models.oracle_of(model).model
    expected = torch.cat([exact(input_ids=ids[:, columns])[0] for _, columns in _row(LENGTHS)], 1)
    embeds = model.model.embed_tokens(ids)
    found = {
        "named": model.model(inputs_embeds=embeds, position_ids=places)[0],
        "placed": model.model(ids, None, places)[0],
        "all placed": model.model(None, None, places, embeds)[0],
    }
    return {name: models.relative_error(out, expected) for name, out in found.items()}


@scenario
def encoder_compiled() -> Any:
    """In one graph; the experts, which loop over what the router picked, run outside of it."""
    import models

    model, ids, places = _encoder(), models.tokens(1, sum(LENGTHS)), models.restarting(LENGTHS)
    model.config._experts_implementation = "batched_mm"
    exact = models.oracle_of(model)
    exact.config._experts_implementation = "eager"
    expected = torch.cat([exact(input_ids=ids[:, columns]).logits for _, columns in _row(LENGTHS)], 1)
    graph = torch.compile(model, backend="eager", fullgraph=True)
    return {"logits": models.relative_error(graph(input_ids=ids, position_ids=places).logits, expected)}


@scenario
def encoder_untouched() -> Any:
    """Rows that are not packed, padding, and a mask that the caller prepared: the digest must be upstream's own."""
    import models

    model, ids = _encoder().eval(), models.tokens(2, 20)
    mask = torch.ones(2, 20, dtype=torch.long)
    mask[1, :7] = 0
    i, j = torch.arange(20)[:, None], torch.arange(20)[None, :]
    prepared = torch.zeros(2, 1, 20, 20).masked_fill((i - j).abs() > 3, torch.finfo(torch.float32).min)
    places = models.restarting((9, 11), (3, 17))
    return {
        "plain": _digest(model(input_ids=ids).logits),
        "placed": _digest(model(input_ids=ids, position_ids=torch.arange(20)[None].expand(2, -1)).logits),
        "padded": _digest(model(input_ids=ids, attention_mask=mask).logits),
        "prepared": _digest(model(input_ids=ids, attention_mask=prepared, position_ids=places).logits),
    }


@scenario
def encoder_flex_masks() -> Any:
    """The BlockMask that flex attention gets, evaluated densely, against the rule written out: wrong entries."""
    import models
    from torch.nn.attention.flex_attention import create_mask

    seen: list[Any] = []

    class Recorder(torch.nn.Module):
        def forward(self, hidden_states: Tensor, attention_mask: Any = None, **_: Any) -> Tensor:
            seen.append(attention_mask)
            return hidden_states

    total = sum(LENGTHS)
    model = _encoder("flex_attention")
    model.model.layers = torch.nn.ModuleList([Recorder()])
    padding = torch.ones(1, total, dtype=torch.long)
    padding[:, -3:] = 0
    owner = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))
    i, j = torch.arange(total)[:, None], torch.arange(total)[None, :]
    rule = (owner[:, None] == owner[None, :]) & ((i - j).abs() <= model.config.sliding_window)
    found = {}
    for name, mask in {"packed": None, "all ones": torch.ones_like(padding), "padded": padding}.items():
        seen.clear()
        model(input_ids=models.tokens(1, total), position_ids=models.restarting(LENGTHS), attention_mask=mask)
        dense = create_mask(seen[0].mask_mod, 1, 1, total, total, device="cpu")[0, 0]
        real = torch.ones(total, dtype=torch.bool) if mask is None else mask[0].bool()
        found[name] = int((dense[real] != (rule & real[None, :])[real]).sum())
    found["both ways"] = int(dense.triu(1).sum() > 0) + int(dense.tril(-1).sum() > 0)
    return found


# --- other models ----------------------------------------------------------------------------------------------------


@scenario
def every_model() -> Any:
    """One training step of each model with sinks, in plain rows, packed rows and padded rows."""
    import models

    found = {}
    for name in models.here(models.SINK_MODELS):
        model = models.build(name, "flash_attention_2")
        found[name] = {
            "plain": _packed(model, (24,), (24,), position_ids=None),
            "packed": _packed(model, LENGTHS),
            "left": _padded(model, "left"),
            "right": _padded(model, "right"),
        }
    return found


@scenario
def sinkless() -> Any:
    """Models without sinks under an installed flash package: digests of logits and gradients."""
    import models

    found = {}
    for name in models.SINKLESS:
        model = models.build(name, "flash_attention_2")
        ids, documents = models.tokens(1, sum(LENGTHS)), _row(LENGTHS)
        packed = models.step(model, documents, ids, position_ids=models.restarting(LENGTHS), use_cache=False)
        mask = torch.ones(2, 20, dtype=torch.long)
        mask[0, :5] = 0
        padded = model(input_ids=models.tokens(2, 20), attention_mask=mask).logits
        found[name] = [_digest(*packed.values()), _digest(padded)]
    q = torch.randn(1, 4, 6, 16, generator=torch.Generator().manual_seed(0))
    found["s_aux absent"] = [_digest(_attend(_Layer(), q, q, q, None)[0])]
    found["s_aux None"] = [_digest(_attend(_Layer(), q, q, q, None, s_aux=None)[0])]
    return found


@scenario
def sinks_given() -> Any:
    """The layer's function and the inner one, called with s_aux, where nothing in the model's class or config asks."""
    import models
    import transformers.modeling_flash_attention_utils as utils

    g = torch.Generator().manual_seed(0)
    total = sum(LENGTHS)
    q, k, v = (torch.randn(1, heads, total, 16, generator=g) for heads in (4, 2, 2))
    sinks = torch.tensor([*models.SINKS, 0.5])
    borders, places = torch.tensor([0, *LENGTHS]).cumsum(0).int(), models.restarting(LENGTHS)
    rows = [x.transpose(1, 2) for x in (q, k, v)]
    expected, _ = models.oracle_attention(
        *(x[0] for x in rows), sinks, cu_seqlens_q=borders, cu_seqlens_k=borders, causal=True, window_size=(7, 0)
    )
    layer, _ = _attend(_Layer(), q, k, v, None, sliding_window=8, s_aux=sinks, position_ids=places)
    inner = utils._flash_attention_forward(
        *rows, None, query_length=total, is_causal=True, sliding_window=8, s_aux=sinks, position_ids=places,
        attn_implementation="flash_attention_2",
    )  # fmt: skip
    return {"layer": models.relative_error(layer[0], expected), "inner": models.relative_error(inner[0], expected)}


# --- flash-attn called directly --------------------------------------------------------------------------------------


@scenario
def direct() -> Any:
    """All six functions with s_aux, and the varlen one with sink slots, forward and backward."""
    import flash_attn
    import models
    from flash_attn import flash_attn_interface

    g = torch.Generator().manual_seed(0)
    total, borders = sum(LENGTHS), torch.tensor([0, *LENGTHS], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    q = torch.randn(total, 4, 16, generator=g)
    k, v = torch.randn(2, total, 4, 16, generator=g)
    slots = tuple(torch.randn(2, 3, 4, 16, generator=g))
    sinks = torch.tensor([4.0, 8.0, 20.0, 0.5])
    longest = max(LENGTHS)
    options: dict[str, Any] = {"causal": True, "window_size": (7, 0)}
    packed = {"cu_seqlens_q": borders, "cu_seqlens_k": borders}
    calls: dict[str, tuple[dict[str, Any], Callable[..., Tensor]]] = {
        "flash_attn_func": ({}, lambda f, q, k, v, **o: f(q[None], k[None], v[None], **o)),
        "flash_attn_qkvpacked_func": ({}, lambda f, q, k, v, **o: f(torch.stack([q, k, v], 1)[None], **o)),
        "flash_attn_kvpacked_func": ({}, lambda f, q, k, v, **o: f(q[None], torch.stack([k, v], 1)[None], **o)),
        "flash_attn_varlen_func": (packed, lambda f, q, k, v, **o: f(q, k, v, borders, borders, longest, longest, **o)),
        "flash_attn_varlen_qkvpacked_func": (
            packed,
            lambda f, q, k, v, **o: f(torch.stack([q, k, v], 1), borders, longest, **o),
        ),
        "flash_attn_varlen_kvpacked_func": (
            packed,
            lambda f, q, k, v, **o: f(q, torch.stack([k, v], 1), borders, borders, longest, longest, **o),
        ),
    }

    def measure(name: str, sinks: Tensor | None, slots: Any) -> float:
        extra, call = calls[name]
        leaves = [x.clone().requires_grad_() for x in (q, k, v, *(() if sinks is None else (sinks,)), *(slots or ()))]
        exact = [x.detach().double().requires_grad_() for x in leaves]
        outs = []
        for run, parts in ((call, leaves), (None, exact)):
            qq, kk, vv, *rest = parts
            s_aux = rest.pop(0) if sinks is not None else None
            kept = tuple(rest) if slots else None
            if run is not None:
                out = run(getattr(flash_attn, name), qq, kk, vv, s_aux=s_aux, sink_kv=kept, **options)
            elif extra:
                out, _ = models.oracle_attention(qq, kk, vv, s_aux, sink_kv=kept, **extra, **options)
            else:
                out, _ = models.oracle_attention(qq[None], kk[None], vv[None], s_aux, sink_kv=kept, **options)
            outs.append(out)
            torch.autograd.backward(out.cos().sum())
        errors = [models.relative_error(a.grad, b.grad) for a, b in zip(leaves, exact, strict=True)]
        return max(models.relative_error(*outs), *errors)

    found: dict[str, Any] = {name: measure(name, sinks, None) for name in calls}
    found["slots"] = measure("flash_attn_varlen_func", None, slots)
    found["slots and sinks"] = measure("flash_attn_varlen_func", sinks, slots)
    found["re-exported"] = all(getattr(flash_attn, n) is getattr(flash_attn_interface, n) for n in calls)
    return found


@scenario
def direct_without_sinks() -> Any:
    """The digests of the package's own results, and how its own functions were called."""
    import flash_attn
    from flash_attn import flash_attn_interface

    q, k, v = torch.randn(3, 1, 12, 4, 16, generator=torch.Generator().manual_seed(0))
    borders = torch.tensor([0, 5, 12], dtype=torch.int32)
    flash_attn_interface.CALLS.clear()
    found = [
        flash_attn.flash_attn_func(q, k, v, causal=True),
        flash_attn.flash_attn_qkvpacked_func(torch.stack([q, k, v], 2), 0.0, None, True),
        flash_attn.flash_attn_kvpacked_func(q, torch.stack([k, v], 2), causal=True),
        flash_attn.flash_attn_varlen_func(q[0], k[0], v[0], borders, borders, 7, 7, causal=True),
        flash_attn.flash_attn_varlen_qkvpacked_func(torch.stack([q, k, v], 2)[0], borders, 7, causal=True),
        flash_attn.flash_attn_varlen_kvpacked_func(q[0], torch.stack([k, v], 2)[0], borders, borders, 7, 7),
    ]
    return {"digest": _digest(*found), "calls": [name for name, _ in flash_attn_interface.CALLS]}


# --- what check --gpu runs -------------------------------------------------------------------------------------------


def _validated(patch: str) -> Any:
    measured = _registry.module(patch).validate("cpu")
    return {"right": measured.right, "errors": dict(measured.errors), "limits": dict(measured.limits)}


@scenario
def validated_flash_sinks() -> Any:
    return _validated("transformers.flash-sinks")


@scenario
def validated_packed_masks() -> Any:
    return _validated("transformers.packed-masks")


@scenario
def validated_varlen_sinks() -> Any:
    return _validated("flash-attn.varlen-sinks")


if __name__ == "__main__":
    main()
