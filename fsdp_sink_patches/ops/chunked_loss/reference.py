"""The same results from all logits at once, by autograd: slow, memory hungry, and easy to believe.

In fp64 it is the oracle of the tests; in bf16 it is the unchunked path that the benchmarks and the error bounds compare
with. Nothing in the package calls it.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def full_logits(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    softcap: float | None = None,
    temperature: float | Tensor = 1.0,
) -> Tensor:
    """``[..., vocab]`` in at least fp32: a linear layer in the dtype of its inputs, then the cap, then the
    temperature."""
    logits = F.linear(hidden, weight, bias)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    if isinstance(temperature, Tensor):
        return logits / temperature.unsqueeze(-1).to(logits.dtype)
    return logits if temperature == 1 else logits / temperature


def cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    bias: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    softcap: float | None = None,
    temperature: float | Tensor = 1.0,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    token_weights: Tensor | None = None,
) -> Tensor:
    """:func:`linear_cross_entropy`'s formula on all logits."""
    logits = full_logits(hidden, weight, bias, softcap, temperature).flatten(0, -2)
    counted = labels.flatten() != ignore_index
    losses = F.cross_entropy(
        logits, labels.flatten(), ignore_index=ignore_index, reduction="none", label_smoothing=label_smoothing
    )
    if z_loss:
        losses = losses + z_loss * torch.where(counted, logits.logsumexp(-1).square(), 0.0)
    weights = counted.to(losses.dtype)
    if token_weights is not None:
        weights = torch.where(counted, token_weights.flatten().to(losses.dtype), 0.0)
        losses = losses * weights
    if reduction == "none":
        return losses.view(labels.shape)
    if reduction == "sum":
        return losses.sum()
    return losses.sum() / weights.sum() if bool(weights.count_nonzero()) else losses.sum()


def log_probs(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    bias: Tensor | None = None,
    ignore_index: int = -100,
    softcap: float | None = None,
    temperature: float | Tensor = 1.0,
) -> tuple[Tensor, Tensor]:
    """:func:`linear_log_probs`'s log-probabilities and entropies from all logits."""
    every = full_logits(hidden, weight, bias, softcap, temperature).log_softmax(-1)
    counted = labels != ignore_index
    picked = every.gather(-1, torch.where(counted, labels, 0).unsqueeze(-1)).squeeze(-1)
    return torch.where(counted, picked, 0.0), -(every.exp() * every).sum(-1)
