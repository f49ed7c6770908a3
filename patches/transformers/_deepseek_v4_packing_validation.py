"""What ``transformers.deepseek-v4-packing`` is measured by: a packed row against its documents alone in fp64."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fsdp_sink_patches import Measurement, settings
from fsdp_sink_patches.ops.sink_attention.oracle import relative_error

from ._deepseek_v4_models import CSA, HCA, SLIDING, build
from ._validation import _time

LAYERS = (SLIDING, CSA, HCA)
LENGTHS = (37, 150, 69)
WIDE_LENGTHS = (2048, 512, 1024, 512)
WIDE: dict[str, Any] = {
    "hidden_size": 1024,
    "moe_intermediate_size": 512,
    "num_attention_heads": 16,
    "head_dim": 512,
    "qk_rope_head_dim": 64,
    "q_lora_rank": 256,
    "o_lora_rank": 256,
    "index_head_dim": 128,  # at least the rotary channels
    "sliding_window": 128,
    "compress_rates": {CSA: 4, HCA: 128},
    "initializer_range": 0.02,
}
LIMITS = {"logits": 1e-5, "dsinks": 1e-4, "dkv_proj": 1e-4}


def validate(device: str) -> Measurement:
    """fp32 logits and gradients of a packed row; upstream's are off by 0.5 and more."""
    model = build(LAYERS, device=device)
    ids, positions = packed(LENGTHS, model.config.vocab_size, device)
    exact = copy.deepcopy(model).double()
    exact.set_experts_implementation("eager")  # the one that multiplies fp64 matrices
    with settings.using(pooling_dtype="activation"):
        alone = [exact(input_ids=document, use_cache=False).logits for document in _documents(ids)]
    expected = torch.cat(alone, 1)
    torch.autograd.backward(_loss(expected))
    found = model(input_ids=ids, position_ids=positions, use_cache=False).logits
    torch.autograd.backward(_loss(found))
    errors = {
        "logits": relative_error(found, expected),
        "dsinks": relative_error(_gradients(model, "sinks"), _gradients(exact, "sinks")),
        "dkv_proj": relative_error(_gradients(model, "compressor.kv_proj.weight"),
                                   _gradients(exact, "compressor.kv_proj.weight")),
    }  # fmt: skip
    cuda = device == "cuda"
    lengths = WIDE_LENGTHS if cuda else LENGTHS
    if cuda:
        del exact, alone, expected, found
        model = build(LAYERS, device=device, **WIDE)
        ids, positions = packed(lengths, model.config.vocab_size, device)

    def step() -> None:
        model.zero_grad(set_to_none=True)
        with torch.autocast(device, dtype=torch.bfloat16, enabled=cuda):
            logits = model(input_ids=ids, position_ids=positions, use_cache=False).logits
        torch.autograd.backward(_loss(logits.float()))

    time_ms, peak_bytes = _time(step, device)
    details = {
        "documents": LENGTHS,
        "timed": f"training step of {len(LAYERS)} layers, hidden {model.config.hidden_size}",
        "timed documents": lengths,
    }
    return Measurement(errors, LIMITS, time_ms, peak_bytes, details)


def packed(lengths: tuple[int, ...], vocabulary: int, device: str) -> tuple[Tensor, Tensor]:
    """Token ids and positions that restart, int64 ``[1, tokens]``."""
    generator = torch.Generator().manual_seed(2)
    ids = torch.randint(0, vocabulary, (1, sum(lengths)), generator=generator)
    return ids.to(device), torch.cat([torch.arange(n) for n in lengths])[None].to(device)


def _documents(ids: Tensor) -> list[Tensor]:
    return [ids[:, sum(LENGTHS[:i]) : sum(LENGTHS[: i + 1])] for i in range(len(LENGTHS))]


def _loss(logits: Tensor) -> Tensor:
    weights = torch.linspace(-3, 3, logits.numel(), dtype=logits.dtype, device=logits.device).view_as(logits).cos()
    return F.mse_loss(logits, weights)


def _gradients(model: Any, ending: str) -> Tensor:
    return torch.cat(
        [p.grad.flatten().double() for n, p in model.named_parameters() if n.endswith(ending) and p.grad is not None]
    )
