"""What the transformers patches are measured by: a real gpt-oss of tiny size, packed rows, and the same model in fp64.

The oracle never sees a packed row: each document goes through the fp64 model alone, in eager attention, which has
computed sinks right in every release. So it needs neither a patch nor a mask.
"""

from __future__ import annotations

import copy
import dataclasses
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor
from transformers import GptOssForCausalLM

from fsdp_sink_patches import Measurement
from fsdp_sink_patches.ops.sink_attention.oracle import relative_error

LENGTHS = (200, 1, 57, 254)
"""Documents of the measured row: longer and shorter than the window, and one of a single token."""

STEP_LENGTHS = (2048, 512, 1024, 512)
"""Documents of the row whose training step is timed, at the width of gpt-oss-20b."""

TINY: dict[str, Any] = {
    "num_hidden_layers": 4,
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "sliding_window": 64,
    "num_local_experts": 4,
    "num_experts_per_tok": 4,  # a router that picks would turn rounding into another choice of experts
    "vocab_size": 512,
}
WIDE: dict[str, Any] = {
    **TINY,
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "sliding_window": 128,
    "num_local_experts": 8,
    "vocab_size": 25136,
}


def flash_sinks(device: str) -> Measurement:
    """``flash_attention_2``, in bf16 on a GPU and fp32 on a CPU; where it is refused, what is left to a user: eager."""
    half = device != "cpu"
    dtype = torch.bfloat16 if half else torch.float32
    model, implementation = _flash_or_eager(TINY, dtype, device)
    limit = 2e-2 if half else 1e-5
    return _measure(model, WIDE if half else TINY, implementation, dict.fromkeys(("logits", "dsink", "dq_proj"), limit))


def packed_masks(device: str) -> Measurement:
    """Eager attention in fp32, so that only the mask can be wrong: gpt-oss and, where there is one, the encoder."""
    limits = dict.fromkeys(("logits", "dsink", "dq_proj"), 1e-5)
    measured = _measure(build(TINY, "eager", torch.float32, device), TINY, "eager", limits)
    encoder = getattr(transformers, "OpenAIPrivacyFilterForTokenClassification", None)
    if encoder is None:  # it came with 5.6
        return measured
    config = {**TINY, "num_labels": TINY["vocab_size"], "pad_token_id": None}
    found = _errors(build(config, "eager", torch.float32, device, encoder))
    errors = {f"encoder {name}": error for name, error in found.items()}
    return dataclasses.replace(
        measured, errors={**measured.errors, **errors}, limits={**limits, **dict.fromkeys(errors, 1e-5)}
    )


def build(
    config: dict[str, Any],
    implementation: str,
    dtype: torch.dtype,
    device: str,
    model_class: Any = GptOssForCausalLM,
) -> Any:
    """A model with fixed random weights and sinks of 4, 8, 20 and a random spread, as a training job starts it."""
    torch.manual_seed(0)
    settings = model_class.config_class(**config)
    settings._experts_implementation = "eager"  # the one that computes in fp64 as well; unknown before 5.0
    with torch.device(device):
        model = model_class._from_config(settings, attn_implementation=implementation, dtype=dtype)
    heads = config["num_attention_heads"]
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("sinks"):
                spread = 2 * torch.randn(heads, generator=generator)
                spread[:3] = torch.tensor([4.0, 8.0, 20.0])
                parameter.copy_(spread)
            elif "q_proj.weight" in name or "k_proj.weight" in name:
                parameter.mul_(2)  # scores with a spread, as in a trained model
    return model.train()


def packed_row(lengths: tuple[int, ...], vocabulary: int, device: str) -> tuple[Tensor, Tensor, Tensor]:
    """``input_ids``, ``position_ids`` and ``labels``, each ``[1, tokens]``; positions restart at every document."""
    generator = torch.Generator().manual_seed(2)
    ids, labels = torch.randint(0, vocabulary, (2, 1, sum(lengths)), generator=generator)
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    return ids.to(device), positions.to(device), labels.to(device)


def _flash_or_eager(config: dict[str, Any], dtype: torch.dtype, device: str) -> tuple[Any, str]:
    try:
        return build(config, "flash_attention_2", dtype, device), "flash_attention_2"
    except (ImportError, ValueError, OSError) as error:  # not installed, refused by the class, no hub to download from
        refusal = f"{type(error).__name__}: {error}".split("\n")[0]
        return build(config, "eager", dtype, device), f"eager, since flash_attention_2 raises {refusal}"


def _errors(model: Any) -> dict[str, float]:
    """A step on the packed row against the fp64 model on each document alone, in eager attention."""
    device = model.device.type
    ids, positions, labels = packed_row(LENGTHS, model.config.vocab_size, device)
    oracle = copy.deepcopy(model).double()
    oracle.set_attn_implementation("eager")
    alone, start = [], 0
    for length in LENGTHS:
        part = slice(start, start + length)
        logits = oracle(input_ids=ids[:, part], use_cache=False).logits
        torch.autograd.backward(_loss(logits, labels[:, part], ids.shape[1]))
        alone.append(logits.detach())
        start += length
    logits = model(input_ids=ids, position_ids=positions, use_cache=False).logits
    torch.autograd.backward(_loss(logits, labels, ids.shape[1]))
    return {
        "logits": relative_error(logits, torch.cat(alone, 1)),
        "dsink": relative_error(_gradients(model, "sinks"), _gradients(oracle, "sinks")),
        "dq_proj": relative_error(_gradients(model, "q_proj.weight"), _gradients(oracle, "q_proj.weight")),
    }


def _measure(model: Any, step_config: dict[str, Any], implementation: str, limits: dict[str, float]) -> Measurement:
    device = model.device.type
    errors = _errors(model)
    details = {
        "implementation": implementation,
        "dtype": str(model.dtype).removeprefix("torch."),
        "documents": LENGTHS,
        "sinks": "4, 8, 20, then 2 * randn",
    }
    if step_config is not TINY:
        name = model.config._attn_implementation
        dtype = model.dtype
        del model
        model = build(step_config, name, dtype, device)
    lengths = LENGTHS if step_config is TINY else STEP_LENGTHS
    ids, positions, labels = packed_row(lengths, model.config.vocab_size, device)
    details["timed"] = f"training step of {model.config.num_hidden_layers} layers, hidden {model.config.hidden_size}"
    details["timed documents"] = lengths

    def step() -> None:
        model.zero_grad(set_to_none=True)
        out = model(input_ids=ids, position_ids=positions, use_cache=False).logits
        torch.autograd.backward(_loss(out, labels, ids.shape[1]))

    time_ms, peak_bytes = _time(step, device)
    return Measurement(errors, limits, time_ms, peak_bytes, details)


def _loss(logits: Tensor, labels: Tensor, tokens: int) -> Tensor:
    logits = logits if logits.dtype == torch.float64 else logits.float()
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / tokens


def _gradients(model: Any, ending: str) -> Tensor:
    return torch.cat([p.grad.flatten().double() for n, p in model.named_parameters() if n.endswith(ending)])


def _time(step: Callable[[], None], device: str) -> tuple[float, int]:
    """Median milliseconds of five steps after two, and the device's peak memory of one."""
    cuda = device == "cuda"
    times = []
    for _ in range(7):
        if cuda:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        begin = time.perf_counter()
        step()
        if cuda:
            torch.cuda.synchronize()
        times.append(1000 * (time.perf_counter() - begin))
    return statistics.median(times[2:]), torch.cuda.max_memory_allocated() if cuda else 0
