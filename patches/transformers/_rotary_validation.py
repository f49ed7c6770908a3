"""What transformers.rotary-buffers is measured by: the angles of rotary tables against the same angles in fp64."""

from __future__ import annotations

import importlib.util
import math
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fsdp_sink_patches import Measurement

from . import _validation

POSITIONS = (0, 511, 4095, 65535)
LIMIT = 1e-2
"""Radians. The fp32 product of frequency and position is off by up to 4e-3 at the last position."""


def rotary_buffers(device: str) -> Measurement:
    """The largest phase error at :data:`POSITIONS`, in radians, by model, label and what was done to the model.

    The fp64 frequencies are computed here from the config's numbers alone, by the formula of YaRN (arXiv:2309.00071).
    """
    errors: dict[str, float] = {}
    details: dict[str, Any] = {"positions": POSITIONS}
    times = []
    for name, build in _models().items():
        for what, model in (("cast", build(device).to(torch.bfloat16)), ("to_empty", _emptied(build, device))):
            positions = torch.tensor([POSITIONS], device=device)
            for label, parameters in _ropes(model.config).items():
                begin = time.perf_counter()
                arguments = {} if label is None else {"layer_type": label}
                cos, sin = model.model.rotary_emb(torch.zeros(1, device=device), positions, **arguments)
                cos, sin = cos.cpu().double()[0], sin.cpu().double()[0]
                times.append(1000 * (time.perf_counter() - begin))
                angle = torch.tensor(POSITIONS).double()[:, None] * _frequencies(parameters, cos.shape[-1])
                off = (torch.atan2(sin, cos) - angle + math.pi).remainder(2 * math.pi) - math.pi
                key = " ".join(filter(None, (name, label, what)))
                errors[key] = float(off.abs().max())
                details[key] = off.abs().amax(1).tolist()
    return Measurement(errors, dict.fromkeys(errors, LIMIT), statistics.median(times), 0, details)


def _models() -> dict[str, Callable[[str], Any]]:
    models = {"gpt_oss": lambda device: _validation.build(_validation.TINY, "eager", torch.float32, device)}
    if importlib.util.find_spec("transformers.models.deepseek_v4") is not None:
        from . import _deepseek_v4_models as v4

        models["deepseek_v4"] = lambda device: v4.build((v4.SLIDING, v4.CSA), device=device)
    return models


def _emptied(build: Callable[[str], Any], device: str) -> Any:
    """Materialised from meta, with buffers as they may be then: luck could make them right."""
    model = build("meta").to_empty(device=device)
    for name, buffer in model.named_buffers():
        if name.endswith("inv_freq"):
            buffer.data.fill_(1e30)
    return model


def _ropes(config: Any) -> dict[str | None, dict[str, Any]]:
    """The rope parameters by label; a model without labels has the label None."""
    parameters = getattr(config, "rope_parameters", None)
    if parameters is None:  # before 5.0
        return {None: {**config.rope_scaling, "rope_theta": config.rope_theta}}
    # DeepSeek-V4's may keep settings of the flat form beside its labels.
    return {label: inner for label, inner in parameters.items() if isinstance(inner, dict)} or {None: parameters}


def _frequencies(parameters: dict[str, Any], count: int) -> Tensor:
    """``[count]`` radians per position in fp64: plain, or YaRN."""
    base, dim = parameters["rope_theta"], 2 * count
    index = torch.arange(count, dtype=torch.float64)
    plain = torch.pow(torch.tensor(base, dtype=torch.float64), -2 * index / dim)
    if parameters.get("rope_type", "default") == "default":
        return plain

    def pair_that_turns(times: float) -> float:
        length = parameters["original_max_position_embeddings"]
        return float(dim * math.log(length / (times * 2 * math.pi)) / (2 * math.log(base)))

    low, high = pair_that_turns(parameters["beta_fast"]), pair_that_turns(parameters["beta_slow"])
    if parameters.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    ramp = ((index - low) / (high - low)).clamp(0, 1)
    scaled: Tensor = plain * (ramp / parameters["factor"] + 1 - ramp)
    return scaled
