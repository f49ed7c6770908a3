"""What ``transformers.deepseek-v4-rope`` is measured by: a tiny DeepSeek-V4, and its tables and rotations in fp64."""

from __future__ import annotations

import copy
import functools
from typing import Any

import torch
import transformers.models.deepseek_v4.modeling_deepseek_v4 as modelling
from torch import Tensor

from fsdp_sink_patches import Measurement
from fsdp_sink_patches.ops.sink_attention.oracle import relative_error

from ._deepseek_v4_models import CSA, HCA, SLIDING, build
from ._validation import _time

CosSin = tuple[Tensor, Tensor]

LAYERS = (SLIDING, CSA, HCA, CSA)
TOKENS = 256
LIMITS = {
    "tables": 1e-5,
    "tables at 70000": 6e-4,
    "rotated q": 1.9e-3,
    "turned back": 1.9e-3,
    "logits": 3e-2,
}
"""The tables' limits are the rounding of the angle itself (half an ulp of 1024 and of 70000 radians, spread over the
channels); bf16 costs 1.6e-3 at any position. The rotations' are bf16's own rounding of their results, 1.65e-3, where
rounded tables add as much again. The logits' is what bf16 weights and activations cost: it shows that nothing broke."""


def exact_tables(positions: Tensor, inv_freq: Tensor) -> CosSin:
    """fp64 tables of fp32 frequencies, ``[batch, tokens, half]``."""
    angles = positions[..., None].double() * inv_freq.float().double()
    return angles.cos(), angles.sin()


def exact_rotation(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The trailing channels of ``x`` ``[batch, heads, tokens, dim]`` as complex numbers, turned in fp64."""
    part = x[..., -2 * cos.shape[-1] :].double()
    turned = torch.complex(part[..., 0::2], part[..., 1::2]) * torch.complex(cos, sin)[:, None]
    return torch.view_as_real(turned).flatten(-2)


def exact_model(model: Any) -> Any:
    """The same weights in fp64, with fp64 tables of the same frequencies."""
    exact = copy.deepcopy(model).double()
    exact.set_experts_implementation("eager")  # the one that multiplies fp64 matrices

    def forward(self: Any, x: Tensor, position_ids: Tensor, layer_type: str) -> CosSin:
        return exact_tables(position_ids, getattr(self, f"{layer_type}_inv_freq"))

    for module in exact.modules():
        if isinstance(module, modelling.DeepseekV4RotaryEmbedding):
            module.forward = functools.partial(forward, module)
    return exact


def validate(device: str) -> Measurement:
    model = build(LAYERS, torch.bfloat16, device)
    rotary = model.model.rotary_emb
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(1, 4, 1024, model.config.head_dim, generator=generator).to(device, torch.bfloat16)
    errors = dict.fromkeys(LIMITS, 0.0)
    for name, first in (("tables", 0), ("tables at 70000", 70000 - 512)):
        positions = torch.arange(first, first + 1024, device=device)[None]
        for label in ("main", "compress"):
            exact = exact_tables(positions, getattr(rotary, f"{label}_inv_freq"))
            cos, sin = rotary(x, position_ids=positions, layer_type=label)
            _keep_worst(errors, name, torch.cat((cos, sin)), torch.cat(exact))
            half = cos.shape[-1]
            # The rotation is measured at small positions alone, where its tables' own error is far below its rounding.
            if first == 0:
                turned = modelling.apply_rotary_pos_emb(x, cos, sin)
                _keep_worst(errors, "rotated q", turned[..., -2 * half :], exact_rotation(x, *exact))
                back = modelling.apply_rotary_pos_emb(turned, cos, -sin)
                _keep_worst(errors, "turned back", back[..., -2 * half :], exact_rotation(turned, exact[0], -exact[1]))
    ids = torch.randint(0, model.config.vocab_size, (1, TOKENS), generator=generator).to(device)
    with torch.no_grad():
        logits = model(input_ids=ids, use_cache=False).logits
        errors["logits"] = relative_error(logits, exact_model(model)(input_ids=ids, use_cache=False).logits)

    # V4-Flash's queries on a GPU: 64 heads of 512 channels, 64 of them rotary, as q_b_proj leaves them in memory.
    heads, tokens, dim, half = (64, 4096, 512, 32) if device == "cuda" else (8, 128, 64, 8)
    q = torch.randn(1, tokens, heads, dim, device=device, dtype=torch.bfloat16).transpose(1, 2)
    timed_positions = torch.arange(tokens, device=device)[None]
    frequencies = 10000.0 ** -torch.arange(half, device=device).div(half)
    cos, sin = (t.to(cos.dtype) for t in exact_tables(timed_positions, frequencies))
    with torch.no_grad():
        time_ms, peak_bytes = _time(lambda: modelling.apply_rotary_pos_emb(q, cos, sin), device)
    details = {
        "rope_dtype": str(cos.dtype).removeprefix("torch."),
        "positions": "0 to 1023 and 69488 to 70511",
        "timed": f"apply_rotary_pos_emb on q of {heads} heads, {tokens} tokens, {dim} channels, {2 * half} rotary",
    }
    return Measurement(errors, LIMITS, time_ms, peak_bytes, details)


def _keep_worst(errors: dict[str, float], name: str, found: Tensor, expected: Tensor) -> None:
    error = relative_error(found, expected)
    errors[name] = error if error != error else max(errors[name], error)
