"""A tiny DeepSeek-V4 with everything that the real one has, for what the DeepSeek-V4 patches are measured by."""

from __future__ import annotations

from typing import Any

import torch
from transformers import DeepseekV4Config, DeepseekV4ForCausalLM

SLIDING, CSA, HCA = "sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"

YARN = {
    "rope_type": "yarn",
    "factor": 16,
    "original_max_position_embeddings": 65536,
    "beta_fast": 32,
    "beta_slow": 1,
}
"""What the released V4-Flash has on its compressed layers; its sliding-only layers have no yarn."""

TINY: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 128,
    "moe_intermediate_size": 64,
    "num_attention_heads": 4,
    "head_dim": 64,
    "qk_rope_head_dim": 16,
    "q_lora_rank": 64,
    "n_routed_experts": 2,
    "num_experts_per_tok": 2,  # a router that picks would turn rounding into another choice of experts
    "o_groups": 2,
    "o_lora_rank": 32,
    "index_n_heads": 32,  # with few heads every ReLU can be 0, and picks among equal scores are arbitrary
    "index_head_dim": 32,
    "index_topk": 512,  # every entry; smaller to make the indexer choose
    "sliding_window": 16,
    "compress_rates": {CSA: 4, HCA: 16},
    "initializer_range": 0.08,
    "rope_parameters": YARN,
}


def build(
    layer_types: tuple[str, ...], dtype: torch.dtype = torch.float32, device: str = "cpu", **changes: Any
) -> DeepseekV4ForCausalLM:
    """A model of these layers with fixed random weights, sinks of 4, 8, 20 and a random spread, in training mode.

    Args:
        layer_types: one of :data:`SLIDING`, :data:`CSA` and :data:`HCA` a layer.
        dtype: of every parameter; the frequencies stay fp32, as after ``from_pretrained``.
        device: where it is built.
        **changes: of :data:`TINY`, or any other setting of ``DeepseekV4Config``.
    """
    settings = {**TINY, "num_hidden_layers": len(layer_types), "layer_types": list(layer_types)}
    settings["mlp_layer_types"] = ["moe"] * len(layer_types)
    settings["rope_parameters"] = dict(settings["rope_parameters"])  # the config writes into it
    torch.manual_seed(0)
    with torch.device(device):
        model = DeepseekV4ForCausalLM._from_config(
            DeepseekV4Config(**{**settings, **changes}), attn_implementation="eager", dtype=torch.float32
        )
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("sinks"):
                spread = 2 * torch.randn(parameter.shape, generator=generator)
                spread[:3] = torch.tensor([4.0, 8.0, 20.0])
                parameter.copy_(spread)
            elif name.endswith("position_bias"):  # zero in a fresh model: it would hide a wrong window
                parameter.copy_(0.5 * torch.randn(parameter.shape, generator=generator))
            parameter.data = parameter.data.to(dtype)
    return model.train()
