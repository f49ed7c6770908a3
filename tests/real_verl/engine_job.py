"""verl's own FSDP2 engine on gloo ranks, in a process of its own: prints what it found, as JSON.

    python engine_job.py RANKS CASE [CASE ...] --apply before|after|never|twice

``after``: verl has been imported by then, as with ``external_lib``. ``twice``: without, then ``after``; two results.

Each case is one tiny model, built, cast, wrapped and run by the engine; what comes out is held against the same
checkpoint in plain transformers, in fp64 and eager, every document alone. A new case is a line in `CASES`.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import tempfile
import traceback
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

ENGINE = "verl.workers.engine.fsdp.transformer_impl"
LENGTHS = (37, 150, 1, 68)
VOCABULARY = 128
COMMON: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "num_hidden_layers": 2, "vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "tie_word_embeddings": False, "max_position_embeddings": 4096,
}  # fmt: skip
LAYERS: dict[str, Any] = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8}
# Every expert is used, so that rounding can't turn into another choice of experts.
MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "gpt_oss": {**LAYERS, "num_local_experts": 4, "num_experts_per_tok": 4},
    "mimo_v2_flash": {
        **LAYERS, "head_dim": 24, "v_head_dim": 16, "mlp_layer_types": ["dense", "sparse"], "moe_intermediate_size": 32,
        "n_routed_experts": 4, "num_experts_per_tok": 4, "n_group": 1, "topk_group": 1,
    },
    "ernie4_5_moe": {
        "moe_num_experts": 4, "moe_k": 4, "moe_intermediate_size": 32, "moe_num_shared_experts": 1,
        "moe_layer_start_index": 0, "moe_layer_end_index": 1,
    },
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """How verl is configured.

    Args:
        model: a model of `MODELS`, or ``"deepseek_v4"``.
        attention: what ``override_config.attn_implementation`` says.
        dtype: ``fsdp_config.model_dtype``; with ``"fp32"`` also the ``param_dtype`` of the mixed precision, so that the
            only errors are errors, while ``"bf16"`` leaves that to verl's default.
        ulysses: the sequence-parallel size.
        config: more settings of ``HFModelConfig``.
    """

    model: str
    attention: str = "eager"
    dtype: str = "fp32"
    ulysses: int = 1
    config: Mapping[str, Any] = field(default_factory=dict)


CASES = {
    **{f"{model} packed": Case(model) for model in ("llama", "gpt_oss", "mimo_v2_flash", "deepseek_v4")},
    **{
        f"{model} bf16": Case(model, dtype="bf16")
        for model in ("llama", "gpt_oss", "mimo_v2_flash", "deepseek_v4", "ernie4_5_moe")
    },
    **{
        f"{model} {attention} ulysses {size}": Case(model, attention, ulysses=size)
        for model, attention in (
            ("gpt_oss", "flash_attention_2"), ("mimo_v2_flash", "flash_attention_4"),
            ("llama", "eager"), ("gpt_oss", "eager"), ("mimo_v2_flash", "eager"), ("deepseek_v4", "eager"),
        )
        for size in (2, 4)
    },
}  # fmt: skip


def write(model: str, folder: Path) -> None:
    """A checkpoint in fp32 whose numbers are no bf16 numbers, with sinks of 4, 8, 20 and a random one."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    if model == "deepseek_v4":
        from fsdp_sink_patches.patches.transformers import _deepseek_v4_low_precision

        built: Any = _deepseek_v4_low_precision.saved_in_fp32(
            vocab_size=VOCABULARY, tie_word_embeddings=False, pad_token_id=0
        )
    else:
        config = AutoConfig.for_model(model, **COMMON | MODELS[model])
        built = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32)
        with torch.no_grad():
            for name, value in [*built.named_parameters(), *built.named_buffers()]:
                if name.endswith("sinks"):
                    value.copy_(torch.tensor([4.0, 8.0, 20.0, 2 * float(torch.randn(()))]))
                elif name.endswith(("e_score_correction_bias", "norm.weight")):
                    value.copy_(1 + 0.2 * torch.randn(value.shape))
                elif value.dim() > 1 and "inv_freq" not in name:
                    value.normal_(std=0.2)
    built.config.architectures = [type(built).__name__]
    built.save_pretrained(folder / model)


def plain(folder: Path, model: str, dtype: torch.dtype) -> Any:
    from transformers import AutoModelForCausalLM

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        loaded = AutoModelForCausalLM.from_pretrained(folder / model, torch_dtype=dtype, attn_implementation="eager")
    loaded.config._experts_implementation = "eager"  # torch has no grouped product in fp64
    return loaded


def documents() -> list[Tensor]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randint(3, VOCABULARY, (length,), generator=generator) for length in LENGTHS]


def reference(folder: Path, model: str) -> tuple[Tensor, dict[str, Tensor]]:
    """The log-prob of every next token of every document, alone, and the gradients of minus their mean, by name."""
    exact = plain(folder, model, torch.float64)
    found = []
    for ids in documents():
        logits = exact(input_ids=ids[None], use_cache=False).logits[0, :-1]
        found.append(logits.double().log_softmax(-1).gather(-1, ids[1:, None])[:, 0])
    values = torch.cat(found)
    (-values.mean()).backward()
    return values.detach(), {n: p.grad.detach() for n, p in exact.named_parameters() if p.grad is not None}


def engine_of(folder: Path, case: Case) -> Any:
    if find_spec(ENGINE) is None:
        from legacy_engine import LegacyEngine

        dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[case.dtype]
        return LegacyEngine(str(folder / case.model), case.attention, dtype, dtype, case.ulysses)
    from verl.trainer.config import CheckpointConfig
    from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig
    from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead

    whole = {"param_dtype": "fp32", "reduce_dtype": "fp32", "buffer_dtype": "fp32"}
    model = HFModelConfig(
        path=str(folder / case.model),
        load_tokenizer=False,
        use_remove_padding=True,
        enable_gradient_checkpointing=False,
        override_config={"attn_implementation": case.attention},
        **case.config,
    )
    engine = FSDPEngineWithLMHead(
        model,
        FSDPEngineConfig(
            strategy="fsdp2",
            model_dtype=case.dtype,
            mixed_precision=whole if case.dtype == "fp32" else None,
            ulysses_sequence_parallel_size=case.ulysses,
            use_torch_compile=False,
        ),
        FSDPOptimizerConfig(lr=1e-5, total_training_steps=10),
        CheckpointConfig(),
    )
    engine._build_model_optimizer()
    return engine


def nullcontext_of(*_: Any, **__: Any) -> contextlib.AbstractContextManager[None]:
    return contextlib.nullcontext()


def step(engine: Any, ulysses: int, exact: bool) -> Tensor:
    """verl's own forward and loss on the packed documents, the same on every rank, and the backward; the log-probs."""
    from verl.utils.ulysses import set_ulysses_sequence_parallel_group

    ids = documents()
    nested = torch.nested.as_nested_tensor(ids, layout=torch.jagged)
    positions = torch.nested.as_nested_tensor([torch.arange(len(part)) for part in ids], layout=torch.jagged)
    batch: Any = {"input_ids": nested, "position_ids": positions}
    if find_spec("verl.utils.tensordict_utils") is not None:
        from verl.utils import tensordict_utils
        from verl.utils.dataset.dataset_utils import DatasetPadMode

        settings = {"use_remove_padding": True, "pad_mode": DatasetPadMode.NO_PADDING, "temperature": 1.0}
        batch = tensordict_utils.get_tensordict(batch, settings)
    last = torch.cat([torch.arange(len(part)) < len(part) - 1 for part in ids])

    def loss(model_output: Any, **_: Any) -> tuple[Tensor, dict[str, Any]]:
        return -model_output["log_probs"].values()[last].mean(), {}

    engine.module.train()
    set_ulysses_sequence_parallel_group(engine.ulysses_device_mesh["sp"].get_group() if ulysses > 1 else None)
    # To 0.7.1 verl's autocast is bf16 whatever param_dtype says.
    autocast = mock.patch("torch.autocast", nullcontext_of) if exact else contextlib.nullcontext()
    try:
        with autocast:
            value, output = engine.forward_step(batch, loss, False)
        value.backward()
    finally:
        set_ulysses_sequence_parallel_group(None)
    found: Tensor = output["model_output"]["log_probs"].values()[last].detach()
    return found


def full(value: Any) -> Tensor:
    whole: Tensor = value.full_tensor() if hasattr(value, "full_tensor") else value
    return whole.detach()


def relative(found: Tensor, wanted: Tensor) -> float:
    wanted = wanted.double()
    return float((found.double() - wanted).norm() / wanted.norm())


def watch(module: Any) -> tuple[dict[str, str], dict[str, Tensor]]:
    """Filled by the next forward: the dtype of each parameter where it is read, and the whole vectors of sinks."""
    dtypes: dict[str, str] = {}
    sinks: dict[str, Tensor] = {}

    def note(name: str, child: Any, _: Any) -> None:
        for key, value in child.named_parameters(recurse=False):
            dtypes[f"{name}.{key}"] = str(value.dtype).removeprefix("torch.")
            if key == "sinks":
                sinks[f"{name}.{key}"] = value.detach().clone()

    for name, child in module.named_modules():
        child.register_forward_pre_hook(lambda child, args, name=name: note(name, child, args))
    return dtypes, sinks


def clipped_and_stepped(module: Any) -> dict[str, float]:
    """verl's gradient clipping and an AdamW step: the relative error of the norm, and what did not move or is NaN."""
    from verl.utils.fsdp_utils import fsdp2_clip_grad_norm_

    trained = {name: value for name, value in module.named_parameters() if value.grad is not None}
    before = {name: full(value).clone() for name, value in trained.items()}
    exact = torch.stack([full(value.grad).double().norm() for value in trained.values()]).norm()
    norm = full(fsdp2_clip_grad_norm_(list(trained.values()), max_norm=float(exact) / 2))
    torch.optim.AdamW(module.parameters(), lr=1e-2).step()
    still = [n for n, v in trained.items() if torch.equal(full(v), before[n]) or not full(v).isfinite().all()]
    return {"norm": abs(float(norm) / float(exact) - 1), "still": len(still)}


def run(folder: Path, case: Case, expected: tuple[Tensor, dict[str, Tensor]]) -> dict[str, Any]:
    engine = engine_of(folder, case)
    dtypes, sinks = watch(engine.module)
    found = step(engine, case.ulysses, exact=case.dtype == "fp32")
    values, gradients = expected
    away = (found.double() - values).abs()
    known = dict(engine.module.named_parameters())
    missing = [name for name in gradients if known[name].grad is None]
    errors = {n: relative(full(known[n].grad), g) for n, g in gradients.items() if n not in missing and g.norm() > 0}
    checkpoint = plain(folder, case.model, torch.float32)
    exact = {n: torch.equal(full(known[n]).float(), value) for n, value in checkpoint.named_parameters()}
    buffers = dict(engine.module.named_buffers())
    off = {
        name: f"{buffers[name].dtype}, {relative(buffers[name], value):.1e}"
        for name, value in checkpoint.named_buffers()
        if buffers[name].dtype != value.dtype or not torch.equal(buffers[name], value)
    }
    listed = sorted(n for n, v in plain(folder, case.model, torch.bfloat16).named_parameters() if v.dtype.itemsize == 4)
    return {
        "listed": listed,
        "mean": float(away.mean()),
        "max": float(away.max()),
        "finite": bool(found.isfinite().all()),
        "gradients": max(errors.values()),
        "dsinks": max([error for name, error in errors.items() if name.endswith("sinks")], default=0.0),
        "without gradient": missing,
        "fp32 in the forward": sorted(name for name, dtype in dtypes.items() if dtype == "float32"),
        "as in the checkpoint": sorted(name for name, same in exact.items() if same),
        "stored": sorted(name for name, value in known.items() if value.dtype == torch.float32),
        "sinks": max((relative(v, checkpoint.get_parameter(n)) for n, v in sinks.items()), default=0.0),
        "buffers": len(buffers),
        "buffers off": off,
        "attention": engine.module.config._attn_implementation,
        "names": list(engine.module.state_dict()) == list(checkpoint.state_dict()),
        "clipped": clipped_and_stepped(engine.module),
    }


def _outcome(work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    try:
        return work()
    except Exception as error:  # what verl or the patch says is what the test looks at
        traceback.print_exc()
        return {"raises": f"{type(error).__name__}: {error}"}


def _references(_: int, folder: str, names: list[str]) -> None:
    for model in {CASES[name].model for name in names}:
        write(model, Path(folder))
        torch.save(reference(Path(folder), model), f"{folder}/{model}.pt")


def _rank(rank: int, size: int, folder: str, names: list[str]) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size))
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=size)
    torch.manual_seed(0)
    expected = {model: torch.load(f"{folder}/{model}.pt") for model in {CASES[name].model for name in names}}
    for name in names:
        case = CASES[name]
        found = _outcome(lambda case=case: run(Path(folder), case, expected[case.model]))
        everyone: list[Any] = [None] * size
        dist.all_gather_object(everyone, found)
        if rank == 0:
            Path(folder, f"{name}.json").write_text(json.dumps(everyone), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("ranks", type=int)
    parser.add_argument("cases", nargs="+", choices=CASES)
    parser.add_argument("--apply", choices=("before", "after", "never", "twice"), required=True)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        # Forked, so that everything is imported once; in a child, as autograd can't be used on both sides of a fork,
        # and as nothing of verl or ours may be in the process of the reference.
        mp.start_processes(_references, args=(folder, given.cases), nprocs=1, start_method="fork")
        import fsdp_sink_patches

        if given.apply == "before":
            fsdp_sink_patches.apply()
        import cpu_platform  # noqa: F401

        if find_spec(ENGINE) is not None:
            importlib.import_module(ENGINE)
        results = []
        if given.apply in ("never", "twice"):
            results.append(_on_ranks(given.ranks, folder, given.cases))
        if given.apply != "never":
            fsdp_sink_patches.apply()
            results.append(_on_ranks(given.ranks, folder, given.cases))
        print(json.dumps(results))


def _on_ranks(ranks: int, folder: str, names: list[str]) -> dict[str, Any]:
    Path(folder, "store").unlink(missing_ok=True)
    mp.start_processes(_rank, args=(ranks, folder, names), nprocs=ranks, start_method="fork")
    return {name: json.loads(Path(folder, f"{name}.json").read_text(encoding="utf-8")) for name in names}


if __name__ == "__main__":
    main()
