"""A verl job from its config to a worker, without the training: prints what the worker found, as JSON.

    python -m ray_job MODEL OVERRIDE...

verl's own ``run_ppo`` starts Ray with what the overrides of its own config say, and verl's own worker group starts the
worker. In place of the trainer is a class that asks the worker how things stand there.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import json
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import ray
import verl.trainer.main_ppo as main_ppo
from hydra import compose, initialize_config_module
from verl.single_controller.base import Worker
from verl.single_controller.base.decorator import Dispatch, register

BINDERS = (
    "verl.workers.fsdp_workers",
    "verl.workers.engine.fsdp.transformer_impl",
    "verl.workers.engine.fsdp.engine_impl",
)
"""Modules that bind verl's functions by name when they are imported, in one release or another."""


def binders() -> list[str]:
    found = []
    for name in BINDERS:
        try:
            found += [name] if find_spec(name) else []
        except ModuleNotFoundError:  # a parent package that this release lacks
            continue
    return found


class Probe(Worker):
    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def look(self, config: Any) -> dict[str, Any]:
        import verl.models.transformers.monkey_patch as defining

        modules = [importlib.import_module(name) for name in binders()]
        early = "fsdp_sink_patches" in sys.modules
        self._init_model(config)
        if "fsdp_sink_patches" not in sys.modules:
            return {"early": early, "loaded": False, "packed": packed_against_alone()}
        import fsdp_sink_patches

        packed = packed_against_alone()
        report = fsdp_sink_patches.assert_applied("verl.ulysses-sinks", "transformers.packed-masks")
        return {
            "early": early,
            "loaded": True,
            "packed": packed,
            "stale": [list(status.stale) for status in report.patches if status.stale],
            "bound": {m.__name__: m.apply_monkey_patch is defining.apply_monkey_patch for m in modules},
        }

    def _init_model(self, config: Any) -> None:
        """The lines of verl that import ``external_lib``, before it builds a model."""
        if find_spec("verl.workers.fsdp_workers"):
            from verl.workers.fsdp_workers import ActorRolloutRefWorker

            legacy = object.__new__(ActorRolloutRefWorker)
            legacy.config = config.actor_rollout_ref
            # What it reads next is set by the constructor, which wants a GPU.
            with contextlib.suppress(AttributeError):
                legacy.init_model()
        else:
            from verl.utils.config import omega_conf_to_dataclass

            omega_conf_to_dataclass(config.actor_rollout_ref.model)


def packed_against_alone() -> float:
    """Largest difference of a document's logits, second in a packed row against alone; eager gpt-oss."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 16, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = AutoConfig.for_model(
        "gpt_oss", **sizes, head_dim=8, num_hidden_layers=2, num_local_experts=2, num_experts_per_tok=2, vocab_size=64
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").float()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.3)
        ids = torch.randint(0, 64, (1, 12))
        positions = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 5, 6]])
        packed = model(input_ids=ids, position_ids=positions, use_cache=False).logits[:, 5:]
        alone = model(input_ids=ids[:, 5:], use_cache=False).logits
    return float((packed - alone).abs().max())


def runner(answer: Path) -> Any:
    """What verl starts as its trainer, in a Ray actor of its own."""

    class Runner:
        def run(self, config: Any) -> None:
            from verl.single_controller.ray.base import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup

            pool = RayResourcePool(process_on_nodes=[1], use_gpu=False, max_colocate_count=1)
            group = RayWorkerGroup(pool, RayClassWithInitArgs(ray.remote(Probe)), device_name="cpu", use_gpu=False)
            answer.write_text(json.dumps(group.look(config)[0]))

    return ray.remote(num_cpus=1)(Runner)


def main(model: str, *overrides: str) -> None:
    with initialize_config_module("verl.trainer.config", version_base=None):
        config = compose("ppo_trainer", overrides=[f"actor_rollout_ref.model.path={model}", *overrides])
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "answer.json"
        if "task_runner_class" in inspect.signature(main_ppo.run_ppo).parameters:
            main_ppo.run_ppo(config, runner(answer))
        else:
            main_ppo.TaskRunner = runner(answer)
            main_ppo.run_ppo(config)
        print(answer.read_text())
    ray.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
