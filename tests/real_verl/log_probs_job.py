"""Measures the log-prob patches in a process with verl; ``log_probs_job.py ID...`` applies those first."""

from __future__ import annotations

import json
import sys
from typing import Any

import torch

import fsdp_sink_patches
from fsdp_sink_patches import _registry

IDS = ("verl.logprobs-fp32", "verl.fused-kernels-fsdp2")


def measured(id: str) -> dict[str, Any]:
    try:
        found: Any = _registry.module(id)
        found = found.validate("cpu")
    except RuntimeError as error:
        return {"raises": str(error)}
    return {"right": found.right, "errors": dict(found.errors), "details": dict(found.details)}


def through_verl() -> dict[str, Any]:
    """What verl's own entry to log-probs returns for halves and for fp32."""
    from verl.utils.torch_functional import logprobs_from_logits

    torch.manual_seed(0)
    logits, labels = 4 * torch.randn(3, 5, 400), torch.randint(0, 400, (3, 5))
    found = {}
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        given = logits.to(dtype)
        exact = given.double().log_softmax(-1).gather(-1, labels[..., None])[..., 0]
        out = logprobs_from_logits(given, labels)
        flat = logprobs_from_logits(given[0], labels[0])
        found[str(dtype)] = [str(out.dtype), float((out.double() - exact).abs().max()), torch.equal(flat, out[0])]
    return found


def heads() -> list[str]:
    """The units that verl shards when no fused forward is in place: as upstream has them."""
    from transformers import LlamaConfig, LlamaForCausalLM
    from verl.utils.fsdp_utils import _select_fsdp2_wrap_targets

    config = LlamaConfig(hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2, vocab_size=9)
    model = LlamaForCausalLM(config)
    return [type(module).__name__ for module in _select_fsdp2_wrap_targets(model, ["LlamaDecoderLayer"])]


def main() -> None:
    if len(sys.argv) > 1:
        fsdp_sink_patches.apply(*sys.argv[1:])
    found: dict[str, Any] = {"through_verl": through_verl()}
    has_units = _registry.get(IDS[1]) is not None and fsdp_sink_patches.status()[IDS[1]].state != "inapplicable"
    if has_units:
        found["heads"] = heads()
    for id in IDS if has_units else IDS[:1]:
        found[id] = measured(id)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
