"""What ``transformers.deepseek-v4-attention`` is measured by: upstream's attention in fp64, and what a step writes."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fsdp_sink_patches import Measurement, settings
from fsdp_sink_patches.ops.sink_attention.oracle import relative_error

from ._deepseek_v4_models import CSA, HCA, SLIDING, build
from ._deepseek_v4_packing_validation import WIDE, _gradients, _loss
from ._validation import _time

LAYERS = (SLIDING, CSA, HCA)
TOKENS, LONG, TIMED = 200, 1024, 4096


class _Largest(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The most elements that an operation's result has room for."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for each in out if isinstance(out, tuple | list) else (out,):
            if isinstance(each, Tensor):
                self.elements = max(self.elements, each.untyped_storage().nbytes() // each.element_size())
        return out


def validate(device: str) -> Measurement:
    """fp32 logits and gradients of a plain row (bf16 on CUDA), and the largest tensor over upstream's scores.

    Upstream's attention is right, so what it fails is ``"scores"``: the largest tensor of a step of a sliding and a
    heavily compressed layer, as a share of one score for each head, token and token.
    """
    cuda = device == "cuda"
    with settings.using(compressed_attention="fused"):
        errors = _errors(device, torch.bfloat16 if cuda else torch.float32)
        errors["scores"] = _scores(device)
        model = build(LAYERS, torch.bfloat16 if cuda else torch.float32, device, **(WIDE if cuda else {}))
        ids = _ids(TIMED if cuda else TOKENS, model, device)

        def step() -> None:
            model.zero_grad(set_to_none=True)
            torch.autograd.backward(_loss(model(input_ids=ids, use_cache=False).logits.float()))

        with torch.autocast(device, dtype=torch.bfloat16, enabled=cuda):
            time_ms, peak_bytes = _time(step, device)
    # bf16: what eager costs this model in bf16 anyway is 2e-2 in its logits.
    limits = {"logits": 5e-2, "dsinks": 0.1, "dkv_proj": 0.1} if cuda else dict.fromkeys(errors, 1e-4)
    details = {"tokens": TOKENS, "timed": f"training step of {len(LAYERS)} layers, {ids.shape[1]} tokens"}
    return Measurement(errors, {**limits, "scores": 0.5}, time_ms, peak_bytes, details)


def _errors(device: str, dtype: torch.dtype) -> dict[str, float]:
    model = build(LAYERS, device=device)
    ids = _ids(TOKENS, model, device)
    exact = copy.deepcopy(model).double()
    exact.set_experts_implementation("eager")  # the one that multiplies fp64 matrices
    with settings.using(compressed_attention="eager", pooling_dtype="activation"):
        expected = exact(input_ids=ids, use_cache=False).logits
        torch.autograd.backward(_loss(expected))
    with torch.autocast(device, dtype=torch.bfloat16, enabled=dtype != torch.float32):
        found = model(input_ids=ids, use_cache=False).logits
        torch.autograd.backward(_loss(found.float()))
    return {
        "logits": relative_error(found, expected),
        **{
            name: relative_error(_gradients(model, ending), _gradients(exact, ending))
            for name, ending in (("dsinks", "sinks"), ("dkv_proj", "self_attn.kv_proj.weight"))
        },
    }


def _scores(device: str) -> float:
    """Upstream's is at least 1; tensors of ``[tokens, tokens]``, without heads, are 1 / 4."""
    model = build((SLIDING, HCA), device=device, vocab_size=64)
    for layer in model.model.layers:
        layer.mlp.forward = lambda x, input_ids=None: x
    with _Largest() as largest:  # type: ignore[no-untyped-call]
        logits = model(input_ids=_ids(LONG, model, device), use_cache=False).logits
        torch.autograd.backward(logits.square().sum())
    return float(largest.elements / (model.config.num_attention_heads * LONG * LONG))


def _ids(tokens: int, model: Any, device: str) -> Tensor:
    generator = torch.Generator().manual_seed(2)
    return torch.randint(0, model.config.vocab_size, (1, tokens), generator=generator).to(device)
