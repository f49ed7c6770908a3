"""SpecForge's own code in a process of its own, with the patches that are named: prints one JSON object."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

import fsdp_sink_patches
from fsdp_sink_patches import _registry

IDS = ("specforge.dflash-block-mask", "specforge.draft-rotary-fp32")


def validated() -> Any:
    found = {}
    for id in IDS:
        measured: Any = _registry.module(id)
        measured = measured.validate("cpu")
        found[id] = {"right": measured.right, "errors": dict(measured.errors)}
    return found


def draft(attention: str) -> tuple[Any, Any]:
    """A DFlash draft of two layers, one of them sliding, and its training wrapper."""
    from specforge.algorithms.common.dflash_family_model import OnlineDFlashModel
    from specforge.modeling.draft.dflash import DFlashDraftModel
    from transformers import Qwen3Config

    torch.manual_seed(0)
    config = Qwen3Config(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        head_dim=16, vocab_size=101, layer_types=["full_attention", "sliding_attention"], sliding_window=12,
        use_sliding_window=True,
    )  # fmt: skip
    config.num_target_layers, config.block_size = 4, 4
    config.dflash_config = {"target_layer_ids": [0, 1], "mask_token_id": 5}
    config._attn_implementation = attention
    model = DFlashDraftModel(config)
    head, embedding = torch.nn.Linear(32, 101, bias=False), torch.nn.Embedding(101, 32)
    wrapper = OnlineDFlashModel(
        model, head.requires_grad_(False), embedding.requires_grad_(False), mask_token_id=5, block_size=4,
        attention_backend=attention, num_anchors=9,
    )  # fmt: skip
    return model, wrapper


def stepped() -> Any:
    """Loss and gradient norm of a training step on eager and sdpa, which the CPU can differentiate."""
    found = {}
    for attention in ("eager", "sdpa"):
        model, wrapper = draft(attention)
        torch.manual_seed(1)
        ids, hidden = torch.randint(6, 101, (2, 40)), torch.randn(2, 40, 64)
        torch.manual_seed(2)  # the anchors are drawn
        loss, *_ = wrapper(ids, hidden, torch.ones(2, 40))
        loss.backward()
        norm = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]).norm()
        found[attention] = [float(loss), float(norm)]
    return found


def built_for_flex() -> Any:
    """The masks that a training step on flex attention hands to the draft model."""
    from fsdp_sink_patches.ops import block_masks

    model, wrapper = draft("flex_attention")
    seen = {}

    class BuiltError(Exception):
        pass

    def catch(*_: Any, attention_mask: Any, **k: Any) -> Any:
        seen.update(attention_mask)
        raise BuiltError

    model.forward = catch
    torch.manual_seed(2)
    with contextlib.suppress(BuiltError):
        wrapper(torch.randint(6, 101, (2, 40)), torch.randn(2, 40, 64), torch.ones(2, 40))
    return {
        name: [list(mask.shape), int(block_masks.dense(mask).sum()), mask.mask_mod.__module__]
        for name, mask in seen.items()
    }


def kept_by_every_draft() -> Any:
    """Relative error of the frequencies after the cast that SpecForge does, and what survives a deep copy."""
    import copy

    from specforge.modeling.draft import llama3_eagle as eagle

    found = {}
    model, _ = draft("eager")
    exact = model.rotary_emb.inv_freq.clone()
    model.to(torch.bfloat16)
    found["dflash"] = float((model.rotary_emb.inv_freq.float() / exact - 1).abs().max())
    x = torch.empty(0)
    for name, module in (
        ("llama", eagle.LlamaRotaryEmbedding(32, 64)),
        ("linear", eagle.LlamaLinearScalingRotaryEmbedding(32, 64, scaling_factor=2.0)),
        ("yarn", eagle.LlamaYarnRotaryEmbedding(32, 64, scaling_factor=4.0, original_max_position_embeddings=64)),
    ):
        exact = module.inv_freq.clone()
        other = copy.deepcopy(module).to(torch.bfloat16)
        with torch.compiler.set_stance("force_eager"):
            other(x, seq_len=20)
        found[name] = float((other.inv_freq.float() / exact - 1).abs().max())
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--apply", default="")
    arguments = parser.parse_args()
    ids = [id for id in arguments.apply.split(",") if id]
    if ids:
        fsdp_sink_patches.apply(*ids)
    scenarios = (validated, stepped, built_for_flex, kept_by_every_draft)
    print(json.dumps({scenario.__name__: scenario() for scenario in scenarios}))


if __name__ == "__main__":
    main()
