"""Sequence parallelism through verl's own functions, in a process of its own: prints what was measured, as JSON.

    python ulysses_scenarios.py [--apply ID,ID] NAME...

verl comes from ``PYTHONPATH``: the real one where it is installed, else the stub of the tree.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch

import fsdp_sink_patches


def _on_ranks(size: int) -> dict[str, Any]:
    from fsdp_sink_patches.patches.verl import _validation

    measured = _validation.ulysses_sinks("cpu", size)
    return {"errors": dict(measured.errors), "limits": dict(measured.limits)}


def ranks_2() -> Any:
    return _on_ranks(2)


def ranks_4() -> Any:
    """More ranks than KV heads: verl repeats these."""
    return _on_ranks(4)


def local_attention() -> Any:
    """What becomes of a model in each implementation, by sequence-parallel size."""
    import models
    from transformers import AutoConfig, AutoModelForCausalLM
    from verl.models.transformers.monkey_patch import apply_monkey_patch

    config = AutoConfig.for_model("llama", **models._COMMON, num_hidden_layers=1)
    found = {}
    for implementation in ("eager", "sdpa", "flex_attention"):
        model = AutoModelForCausalLM.from_config(config, attn_implementation=implementation)
        for size in (1, 2):
            found[f"{implementation} {size}"] = _outcome(apply_monkey_patch, model, size)
    gpt_oss = models.build("gpt_oss", "eager")
    gpt_oss.config._attn_implementation_internal = "flash_attention_2"
    found["gpt_oss flash"] = _outcome(apply_monkey_patch, gpt_oss, 2)
    attention = type(model.model.layers[0].self_attn)
    original = attention.forward

    def forward(self: Any, *a: Any, **k: Any) -> Any:
        return original(self, *a, **k)

    forward.__module__ = "verl.models.transformers.some_vlm"
    attention.forward = forward
    found["verl's own attention"] = _outcome(apply_monkey_patch, model, 2)
    return found


def misfits() -> Any:
    """Sinks that don't belong to the heads, and a call without an all-to-all."""
    import verl.models.transformers.monkey_patch as verl_patch
    import verl.utils.ulysses as ulysses

    # One process with the group of two ranks pretended: the call ends before any communication.
    ulysses.get_ulysses_sequence_parallel_world_size = lambda group=None: 2
    ulysses.get_ulysses_sequence_parallel_rank = lambda group=None: 1
    q = torch.randn(1, 6, 4, 8)
    seen = []
    verl_patch._flash_attention_forward = lambda *a, **k: seen.append(k["s_aux"].tolist())
    call = verl_patch._ulysses_flash_attention_forward
    positions = torch.arange(6)[None]
    found = {
        "too few": _outcome(call, q, q, q, None, 6, position_ids=positions, s_aux=torch.zeros(3)),
        "odd": _outcome(call, q[:, :, :3], q, q, None, 6, position_ids=positions, s_aux=torch.zeros(3)),
    }
    verl_patch.get_ulysses_sequence_parallel_world_size = lambda: 2
    found["no positions"] = _outcome(call, q, q, q, None, 6, s_aux=torch.arange(4.0))
    return {**found, "seen": seen}


def _outcome(call: Callable[..., Any], *a: Any, **k: Any) -> str:
    try:
        call(*a, **k)
    except Exception as error:  # the message is the result
        return f"{type(error).__name__}: {error}"
    return ""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--apply", default="")
    parser.add_argument("names", nargs="+")
    arguments = parser.parse_args()
    if arguments.apply:
        ids = arguments.apply.split(",")
        # The stub's sources are not verl's; a real verl has to be one that the patch knows.
        stub = "stubs" in (find_spec("verl").origin or "")
        fsdp_sink_patches.apply(*ids, allow_drift=[id for id in ids if stub and id.startswith("verl.")])
    results = {}
    for name in arguments.names:
        try:
            results[name] = globals()[name]()
        except Exception as error:
            results[name] = {"raises": f"{type(error).__name__}: {error}"}
    print(json.dumps(results))
    sys.stdout.flush()


if __name__ == "__main__":
    main()
