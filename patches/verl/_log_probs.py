"""Log-probs of half-precision logits in fp32, without a copy of the logits in fp32."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

LOGITS_AT_ONCE = 2**24
"""Logits widened at a time: 64 MiB in fp32."""


class _LogProbs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor) -> Tensor:
        """``logits`` [rows, vocab], ``labels`` [rows]; fp32 [rows]."""
        found, lse = (torch.empty(labels.shape, dtype=torch.float32, device=logits.device) for _ in range(2))
        for rows in _slices(logits):
            wide = logits[rows].float()
            lse[rows] = wide.logsumexp(-1)
            found[rows] = wide.gather(-1, labels[rows, None])[:, 0] - lse[rows]
        ctx.save_for_backward(logits, labels, lse)
        return found.clamp_(max=0)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        logits, labels, lse = ctx.saved_tensors
        dlogits = torch.empty_like(logits)
        for rows in _slices(logits):
            # d log p_label / d z_j = [j is the label] - p_j
            wide = (logits[rows].float() - lse[rows, None]).exp_().mul_(-grad[rows, None])
            wide.scatter_add_(1, labels[rows, None], grad[rows, None].to(wide.dtype))
            dlogits[rows] = wide.to(logits.dtype)
        return dlogits, None


def _slices(logits: Tensor) -> list[slice]:
    step = max(1, LOGITS_AT_ONCE // logits.shape[-1])
    return [slice(first, first + step) for first in range(0, logits.shape[0], step)]


def log_probs(logits: Tensor, labels: Tensor) -> Tensor:
    """``logits`` [..., vocab] in bf16 or fp16, ``labels`` int64 [...]; fp32 [...]."""
    flat: Tensor = _LogProbs.apply(logits.reshape(-1, logits.shape[-1]), labels.reshape(-1))  # type: ignore[no-untyped-call]
    return flat.view(labels.shape)
