"""Tiny models of the real classes, and what each should give: the same model in fp64 with oracle attention.

The oracle copy sees every document alone, so it needs no mask, no padding and no packing, in any release.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import transformers
from packaging.version import Version
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForTokenClassification

from fsdp_sink_patches.ops.sink_attention.oracle import oracle_attention, relative_error

VOCABULARY = 96
SINKS = (4.0, 8.0, 20.0)

_COMMON: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": VOCABULARY,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_LAYERS = {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8}
# All experts are used, so that rounding can't turn into another choice of experts.
_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 4}

SINK_MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt_oss": ("4.55", {**_LAYERS, **_EXPERTS}),
    "openai_privacy_filter": ("5.6", {"num_hidden_layers": 2, "sliding_window": 8, **_EXPERTS}),
    "mimo_v2_flash": (
        "5.13",
        {
            **_LAYERS,
            "head_dim": 24,
            "v_head_dim": 16,
            "mlp_layer_types": ["dense", "dense"],
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_group": 1,
            "topk_group": 1,
        },
    ),
    # Scores are not scaled by default, which makes the sinks' gradients ill-conditioned in fp32, in eager as well.
    "granite_swa": ("5.15", {**_LAYERS, "attention_multiplier": 0.25}),
    "granitemoe_swa": ("5.15", {**_LAYERS, **_EXPERTS, "attention_multiplier": 0.25}),
    "flint": ("5.21", {**_LAYERS, **_EXPERTS, "num_experts": 4, "moe_intermediate_size": 32}),
}
"""Model type -> the release that brought it, and what makes it tiny."""

NOT_FLASH = ("deepseek_v4", "hy_v4", "hy_v4_vl")
"""Models that pass ``s_aux`` but whose attention is not plain attention; they stay refused."""

SINKLESS = ("llama", "qwen3", "gemma3_text")


def here(models: dict[str, tuple[str, dict[str, Any]]]) -> list[str]:
    """The model types that the installed transformers has."""
    return [name for name, (first, _) in models.items() if Version(transformers.__version__) >= Version(first)]


def build(model_type: str, implementation: str, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    """A training-mode model with fixed weights; sinks are 4, 8, 20 and a random one."""
    settings = SINK_MODELS[model_type][1] if model_type in SINK_MODELS else {"num_hidden_layers": 2}
    config = AutoConfig.for_model(model_type, **{**_COMMON, **settings, **changes})
    config._experts_implementation = "eager"  # the one that computes in fp64 as well; unknown before 5.0
    auto = AutoModelForTokenClassification if model_type == "openai_privacy_filter" else AutoModelForCausalLM
    torch.manual_seed(0)
    model = auto.from_config(config, attn_implementation=implementation)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("sinks"):
                parameter.copy_(torch.tensor([*SINKS, float(torch.randn(1, generator=generator))]))
            elif parameter.dim() > 1:
                scale = 0.15 if name.endswith(("q_proj.weight", "k_proj.weight")) else 0.05
                parameter.copy_(scale * torch.randn(parameter.shape, generator=generator))
    return model.to(dtype).train()


def tokens(rows: int, length: int, seed: int = 3) -> Tensor:
    return torch.randint(3, VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(seed))


def restarting(*rows: Sequence[int]) -> Tensor:
    """``position_ids`` of rows packed from documents of these lengths."""
    return torch.stack([torch.cat([torch.arange(n) for n in lengths]) for lengths in rows])


def oracle_of(model: Any) -> Any:
    """An fp64 copy whose attention is :func:`oracle_attention`."""
    register_oracle()
    exact = copy.deepcopy(model).double()
    exact.config._attn_implementation_internal = "oracle"
    for module in exact.modules():
        if hasattr(module, "config"):
            module.config._attn_implementation_internal = "oracle"
    return exact


def register_oracle() -> None:
    transformers.modeling_utils.AttentionInterface.register("oracle", _oracle_forward)


def _oracle_forward(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **k: Any
) -> tuple[Tensor, None]:
    causal, window = k.get("is_causal"), k.get("sliding_window")
    causal = module.is_causal if causal is None else causal
    size = (-1, -1) if window is None else (window - 1, 0 if causal else window - 1)
    q, key, value = (x.transpose(1, 2) for x in (query, key, value))
    out, _ = oracle_attention(
        q, key, value, k.get("s_aux"), softmax_scale=k.get("scaling"), causal=causal, window_size=size
    )
    return out, None


def step(model: Any, documents: Sequence[tuple[int, slice]], ids: Tensor, **batch: Any) -> dict[str, Tensor]:
    """One training step; logits of the documents' tokens and every parameter's gradient.

    Args:
        documents: row and columns of each document. Tokens outside of them are padding and carry no loss.
    """
    model.zero_grad()
    logits = model(input_ids=ids, **batch).logits
    used = torch.cat([logits[row, columns] for row, columns in documents])
    return _finish(model, used)


def step_alone(model: Any, documents: Sequence[tuple[int, slice]], ids: Tensor, offsets: Sequence[int] = ()) -> Any:
    """The same step with every document in a forward of its own; ``offsets`` is each one's first position."""
    model.zero_grad()
    parts = []
    for i, (row, columns) in enumerate(documents):
        part = ids[row : row + 1, columns]
        places = {}
        if offsets:
            places["position_ids"] = torch.arange(part.shape[1])[None] + offsets[i]
        parts.append(model(input_ids=part, **places).logits[0])
    return _finish(model, torch.cat(parts))


def _finish(model: Any, logits: Tensor) -> dict[str, Tensor]:
    weights = torch.linspace(-3, 3, logits.numel(), dtype=logits.dtype).view_as(logits).cos()
    torch.autograd.backward(((logits + weights) ** 2).mean())
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {"logits": logits.detach(), **{name: gradient.clone() for name, gradient in found.items()}}


def worst(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> dict[str, float]:
    """Relative errors: of the logits, of the sinks' gradient, and the largest of any parameter's gradient.

    A gradient that is missing counts as an infinite error.
    """
    errors = {name: relative_error(actual[name], e) if name in actual else math.inf for name, e in expected.items()}
    sinks = [error for name, error in errors.items() if name.endswith("sinks")]
    return {"logits": errors["logits"], "dsink": max(sinks, default=0.0), "gradient": max(errors.values())}


def counted(function: Callable[..., Any], calls: list[int]) -> Callable[..., Any]:
    def wrapper(*a: Any, **k: Any) -> Any:
        calls.append(1)
        return function(*a, **k)

    return wrapper
