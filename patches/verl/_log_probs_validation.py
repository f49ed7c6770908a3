"""What the log-prob patches are measured by."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from fsdp_sink_patches.patches.transformers._validation import _time
from torch import Tensor

from fsdp_sink_patches import Measurement
from fsdp_sink_patches.ops.sink_attention.oracle import relative_error

LLAMA: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 301,
    "tie_word_embeddings": False,
}


def logprobs_fp32(device: str) -> Measurement:
    from verl.utils.torch_functional import logprobs_from_logits_v2

    rows, vocab = (2, 1024), 32768 if device == "cuda" else 2048
    generator = torch.Generator().manual_seed(0)
    logits = (3 * torch.randn(*rows, vocab, generator=generator)).to(device, torch.bfloat16).requires_grad_()
    labels = torch.randint(0, vocab, rows, generator=generator).to(device)
    grad = torch.randn(rows, generator=generator).to(device)
    exact = logits.detach().double().requires_grad_()
    expected = exact.log_softmax(-1).gather(-1, labels[..., None])[..., 0]
    torch.autograd.backward(expected, grad.double())
    found = logprobs_from_logits_v2(logits, labels)
    torch.autograd.backward(found, grad.to(found.dtype))
    errors = {
        "log-probs, largest": float((found.double() - expected).abs().max()),
        "dlogits": relative_error(_grad(logits), _grad(exact)),
    }
    time_ms, peak = _time(lambda: logprobs_from_logits_v2(logits, labels).sum().backward(), device)
    details = {"shape": [*rows, vocab], "returned": str(found.dtype).removeprefix("torch.")}
    return Measurement(errors, {"log-probs, largest": 1e-4, "dlogits": 2.5e-3}, time_ms, peak, details)


def fused_kernels_fsdp2(device: str) -> Measurement:
    """One rank, since the crash needs no second: a sharded weight is a DTensor on one rank too."""
    import copy

    from transformers import LlamaConfig, LlamaForCausalLM
    from verl.models.transformers.monkey_patch import patch_forward_with_backends
    from verl.utils.fsdp_utils import apply_fsdp2

    torch.manual_seed(0)
    with torch.device(device):
        model = LlamaForCausalLM._from_config(LlamaConfig(**LLAMA), attn_implementation="eager", dtype=torch.float32)
    exact = copy.deepcopy(model).double()
    ids = torch.randint(0, LLAMA["vocab_size"], (2, 40), generator=torch.Generator().manual_seed(1)).to(device)
    logits = exact(input_ids=ids, use_cache=False).logits
    labels = ids.roll(-1, 1)
    expected = logits.log_softmax(-1).gather(-1, labels[..., None])[..., 0]
    weights = torch.linspace(-1, 1, expected.numel(), dtype=torch.float64, device=device).view_as(expected)
    torch.autograd.backward(expected, weights)
    mine = not dist.is_initialized()
    with tempfile.TemporaryDirectory() as folder:
        if mine:
            backend = "nccl" if device == "cuda" else "gloo"
            dist.init_process_group(backend, init_method=f"file://{Path(folder) / 'store'}", rank=0, world_size=1)
        try:
            patch_forward_with_backends(model, use_fused_kernels=True, fused_kernels_backend="torch")
            mesh = dist.device_mesh.init_device_mesh(device, (dist.get_world_size(),))
            apply_fsdp2(
                model, {"mesh": mesh}, {"wrap_policy": {"transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]}}
            )

            def step() -> Tensor:
                found: Tensor = model(input_ids=ids, use_cache=False, return_dict=True).log_probs
                torch.autograd.backward(found, weights.to(found.dtype))
                return found

            errors = {"log-probs": relative_error(step(), expected)}
            for name, at in (("lm_head", "lm_head.weight"), ("q_proj", "model.layers.0.self_attn.q_proj.weight")):
                gradient: Any = _grad(model.get_parameter(at))
                errors[f"d{name}"] = relative_error(gradient.full_tensor(), _grad(exact.get_parameter(at)))
            time_ms, peak = _time(step, device)
        finally:
            if mine:
                dist.destroy_process_group()
    details = {"model": "llama, untied", "backend": "torch", "ranks": 1}
    return Measurement(errors, dict.fromkeys(errors, 1e-4), time_ms, peak, details)


def _grad(x: Tensor) -> Tensor:
    assert x.grad is not None
    return x.grad
