"""What bf16 loads of DeepSeek-V4 are measured by: a tiny model saved in fp32, and hyper-connections in fp64."""

from __future__ import annotations

import tempfile
from typing import Any

import torch
from torch import Tensor
from transformers import DeepseekV4ForCausalLM

from fsdp_sink_patches import Measurement
from fsdp_sink_patches.ops.sink_attention.oracle import relative_error

from ._deepseek_v4_models import CSA, HCA, SLIDING, build
from ._validation import _time

LAYERS = (SLIDING, CSA, HCA)

IN_FP32 = ("sinks", "position_bias", "hc_head.", "attn_hc.", "ffn_hc.", "norm.weight", "e_score_correction_bias")
"""Parts of the names of what the released checkpoint or its reference implementation has in fp32."""


def saved_in_fp32(**changes: Any) -> DeepseekV4ForCausalLM:
    """An fp32 model with hyper-connections that mix their streams and norms that are not 1, as in a trained model."""
    model = build(LAYERS, **changes)
    model.config._experts_implementation = "eager"
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            noise = torch.randn(tensor.shape, generator=generator)
            if name.endswith(("norm.weight", "layernorm.weight")):
                tensor.copy_(1 + 0.2 * noise)
            elif name.endswith((".fn", "hc_fn")):
                tensor.copy_(0.05 * noise)
            elif name.endswith((".base", "hc_base", "e_score_correction_bias")):
                tensor.copy_(0.5 * noise)
    return model


def load(model: DeepseekV4ForCausalLM, dtype: torch.dtype = torch.bfloat16) -> DeepseekV4ForCausalLM:
    """``model`` after ``save_pretrained`` and ``from_pretrained(dtype=dtype)``, in training mode."""
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        loaded = DeepseekV4ForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager")
    loaded.config._experts_implementation = "eager"
    return loaded.train()


def rounded(model: DeepseekV4ForCausalLM, loaded: DeepseekV4ForCausalLM) -> dict[str, float]:
    """Relative error of every parameter and buffer of ``loaded`` that :data:`IN_FP32` names."""
    found = dict([*loaded.named_parameters(), *loaded.named_buffers()])
    names = [*model.named_parameters(), *model.named_buffers()]
    return {
        name: relative_error(found[name].cpu(), tensor)
        for name, tensor in names
        if any(part in name for part in IN_FP32)
    }


def exact_hyper_connection(module: Any, streams: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """``post``, ``comb`` and the collapsed streams of a ``DeepseekV4HyperConnection`` in fp64 (arXiv 2606.19348, 2.2).

    ``comb`` is made doubly stochastic by Sinkhorn-Knopp: rows (the last axis) and columns are normalised in turn.
    """
    n, x = module.hc_mult, streams.double()
    weights = _normed(x, module.input_norm.eps) @ module.fn.double().T
    pre, post, comb = (
        part * scale + base
        for part, scale, base in zip(
            weights.split([n, n, n * n], -1),
            module.scale.double(),
            module.base.double().split([n, n, n * n]),
            strict=True,
        )
    )
    comb = comb.unflatten(-1, (n, n)).softmax(-1) + module.hc_eps
    for i in range(module.hc_sinkhorn_iters):
        if i:
            comb = comb / (comb.sum(-1, keepdim=True) + module.hc_eps)
        comb = comb / (comb.sum(-2, keepdim=True) + module.hc_eps)
    return 2 * post.sigmoid(), comb, ((pre.sigmoid() + module.hc_eps)[..., None] * x).sum(-2)


def exact_hyper_head(module: Any, streams: Tensor) -> Tensor:
    """The collapsed streams of a ``DeepseekV4HyperHead`` in fp64."""
    x = streams.double()
    weights = _normed(x, module.input_norm.eps) @ module.hc_fn.double().T
    pre = (weights * module.hc_scale.double() + module.hc_base.double()).sigmoid() + module.eps
    collapsed: Tensor = (pre[..., None] * x).sum(-2)
    return collapsed


def _normed(streams: Tensor, eps: float) -> Tensor:
    flat = streams.flatten(-2)
    return flat * (flat.square().mean(-1, keepdim=True) + eps).rsqrt()


def mixing_errors(loaded: DeepseekV4ForCausalLM) -> dict[str, float]:
    """Relative errors, against fp64, of every hyper-connection's results on random fp32 streams under bf16 autocast."""
    model, device = loaded.model, loaded.device
    streams = torch.randn(
        2, 64, loaded.config.hc_mult, loaded.config.hidden_size, generator=torch.Generator().manual_seed(6)
    )
    streams = streams.to(device)
    errors: dict[str, float] = {}
    with torch.no_grad():
        for site in [site for layer in model.layers for site in (layer.attn_hc, layer.ffn_hc)]:
            with torch.autocast(device.type, torch.bfloat16):
                found = site(streams)
            for name, actual, exact in zip(
                ("post", "comb", "collapsed"), found, exact_hyper_connection(site, streams), strict=True
            ):
                errors[name] = max(errors.get(name, 0.0), relative_error(actual, exact))
        with torch.autocast(device.type, torch.bfloat16):
            found = model.hc_head(streams)
        errors["head"] = relative_error(found, exact_hyper_head(model.hc_head, streams))
    return errors


def measure(device: str) -> Measurement:
    """One bf16 load: what was rounded, its logits with and without autocast, and its hyper-connections."""
    model = saved_in_fp32()
    loaded = load(model).to(device)
    ids = torch.randint(0, model.config.vocab_size, (2, 192), generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        expected = model(input_ids=ids, use_cache=False).logits
    ids = ids.to(device)
    kept = rounded(model, loaded)
    with torch.no_grad():
        plain = loaded(input_ids=ids, use_cache=False).logits.cpu()
        with torch.autocast(device, torch.bfloat16):
            cast = loaded(input_ids=ids, use_cache=False).logits.cpu()
    mixing = mixing_errors(loaded)
    errors = {
        "rounded": max(kept.values()),
        "logits": relative_error(plain, expected),
        "logits, autocast": relative_error(cast, expected),
        "mixing, autocast": max(mixing.values()),
    }
    # 5e-2: what bf16 weights and activations cost this model anyway is 2e-2.
    limits = {"rounded": 0.0, "logits": 5e-2, "logits, autocast": 5e-2, "mixing, autocast": 1e-5}

    def step() -> None:
        loaded.zero_grad(set_to_none=True)
        torch.autograd.backward(loaded(input_ids=ids, labels=ids, use_cache=False).loss)

    time_ms, peak_bytes = _time(step, device)
    details = {"layers": LAYERS, "tokens": list(ids.shape), "kept in fp32": len(kept), "mixing": mixing}
    return Measurement(errors, limits, time_ms, peak_bytes, details)
