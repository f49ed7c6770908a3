"""What the flash-attn patch is measured by: the package's own functions on packed documents against the fp64 oracle."""

from __future__ import annotations

import statistics
import time

import flash_attn
import torch
from torch import Tensor

from fsdp_sink_patches import Measurement
from fsdp_sink_patches.ops.sink_attention.oracle import oracle_attention, relative_error

LENGTHS = (200, 1, 57, 254)
TIMED_LENGTHS = (2048, 4096, 1, 2047)
HEADS, KV_HEADS, HEAD_DIM, WINDOW = 8, 2, 64, 127


def varlen_sinks(device: str) -> Measurement:
    """``flash_attn.flash_attn_varlen_func(..., s_aux=...)`` in bf16, forward and backward, windowed and grouped."""
    q, k, v, dout, sinks, cu_seqlens = _inputs(LENGTHS, device)
    exact = [x.detach().double().requires_grad_() for x in (q, k, v, sinks)]
    expected, _ = oracle_attention(
        *exact, cu_seqlens_q=cu_seqlens, cu_seqlens_k=cu_seqlens, causal=True, window_size=(WINDOW, 0)
    )
    torch.autograd.backward(expected, dout.double())
    out = _call(q, k, v, sinks, cu_seqlens, max(LENGTHS))
    torch.autograd.backward(out, dout)
    errors = {"out": relative_error(out, expected)}
    for name, actual, wanted in zip(("dq", "dk", "dv", "dsink"), (q, k, v, sinks), exact, strict=True):
        assert actual.grad is not None
        assert wanted.grad is not None
        errors[name] = relative_error(actual.grad, wanted.grad)
    lengths = LENGTHS if device == "cpu" else TIMED_LENGTHS
    q, k, v, dout, sinks, cu_seqlens = _inputs(lengths, device)
    cuda = device == "cuda"
    times = []
    for _ in range(12):
        if cuda:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        begin = time.perf_counter()
        torch.autograd.backward(_call(q, k, v, sinks, cu_seqlens, max(lengths)), dout)
        if cuda:
            torch.cuda.synchronize()
        times.append(1000 * (time.perf_counter() - begin))
    details = {"documents": LENGTHS, "timed documents": lengths, "heads": (HEADS, KV_HEADS), "window": WINDOW}
    peak = torch.cuda.max_memory_allocated() if cuda else 0
    return Measurement(errors, dict.fromkeys(errors, 5e-3), statistics.median(times[2:]), peak, details)


def _inputs(lengths: tuple[int, ...], device: str) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    q, dout = torch.randn(2, sum(lengths), HEADS, HEAD_DIM, generator=generator).to(device, torch.bfloat16)
    k, v = torch.randn(2, sum(lengths), KV_HEADS, HEAD_DIM, generator=generator).to(device, torch.bfloat16)
    sinks = 2 * torch.randn(HEADS, generator=generator)
    sinks[:3] = torch.tensor([4.0, 8.0, 20.0])
    borders = torch.tensor([0, *lengths]).cumsum(0).to(device, torch.int32)
    q, k, v, sinks = (x.clone().requires_grad_() for x in (q, k, v, sinks.to(device)))
    return q, k, v, dout, sinks, borders


def _call(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, cu_seqlens: Tensor, longest: int) -> Tensor:
    out: Tensor = flash_attn.flash_attn_varlen_func(
        q, k, v, cu_seqlens, cu_seqlens, longest, longest, causal=True, window_size=(WINDOW, 0), s_aux=sinks
    )
    return out
