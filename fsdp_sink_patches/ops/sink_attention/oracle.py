"""The fp64 oracle: eager attention with one extra sink column in the softmax.

Every numeric claim of this package is measured against it. It materialises the whole score matrix and is differentiable
by plain autograd, so it is for tests and validation, never for training.
"""

from __future__ import annotations

import torch
from torch import Tensor


def visible(
    seqlen_q: int, seqlen_k: int, *, causal: bool, window_size: tuple[int, int] = (-1, -1), device: torch.device
) -> Tensor:
    """Which keys each query of one document sees, bool ``[seqlen_q, seqlen_k]``.

    flash-attn's rule: queries are aligned to the end of the keys, ``window_size=(left, right)`` counts keys on each
    side of the aligned position inclusively, ``-1`` means unbounded, and ``causal`` bounds the right side at 0.
    """
    left, right = window_size
    if causal:
        right = 0
    distance = (
        torch.arange(seqlen_k, device=device)[None, :]
        - torch.arange(seqlen_q, device=device)[:, None]
        - (seqlen_k - seqlen_q)
    )
    mask = torch.ones(seqlen_q, seqlen_k, dtype=torch.bool, device=device)
    if left >= 0:
        mask &= distance >= -left
    if right >= 0:
        mask &= distance <= right
    return mask


def oracle_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    s_aux: Tensor | None = None,
    *,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    sink_kv: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Eager attention in fp64 with a sink logit per head.

    Args:
        q: ``[total_q, heads, head_dim]`` with ``cu_seqlens_q``/``cu_seqlens_k``, else ``[batch, seqlen_q, heads,
            head_dim]``.
        k, v: the same with ``kv_heads``, which divides ``heads``.
        s_aux: ``[heads]``, one logit per query head that joins the softmax and has no value; or None.
        sink_kv: keys and values ``[slots, kv_heads, head_dim]`` that every query of every document sees; or None.

    Returns:
        ``out`` like ``q`` with v's head_dim, and ``lse`` (``[heads, total_q]`` packed, ``[batch, heads, seqlen_q]``
        dense), both fp64; ``lse`` includes slots and sink, and is ``-inf`` for a row that sees nothing at all.
    """
    if cu_seqlens_q is None or cu_seqlens_k is None:
        rows = [
            _one_document(q[b], k[b], v[b], s_aux, softmax_scale, causal, window_size, softcap, sink_kv)
            for b in range(q.shape[0])
        ]
        return torch.stack([out for out, _ in rows]), torch.stack([lse for _, lse in rows])
    starts_q, starts_k = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    outs, lses = [], []
    for i in range(len(starts_q) - 1):
        out, lse = _one_document(
            q[starts_q[i] : starts_q[i + 1]],
            k[starts_k[i] : starts_k[i + 1]],
            v[starts_k[i] : starts_k[i + 1]],
            s_aux, softmax_scale, causal, window_size, softcap, sink_kv,
        )  # fmt: skip
        outs.append(out)
        lses.append(lse)
    return torch.cat(outs), torch.cat(lses, dim=1)


def _one_document(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    s_aux: Tensor | None,
    softmax_scale: float | None,
    causal: bool,
    window_size: tuple[int, int],
    softcap: float,
    sink_kv: tuple[Tensor, Tensor] | None,
) -> tuple[Tensor, Tensor]:
    mask = visible(q.shape[0], k.shape[0], causal=causal, window_size=window_size, device=q.device)
    if sink_kv is not None:
        k = torch.cat([sink_kv[0].to(k.dtype), k])
        v = torch.cat([sink_kv[1].to(v.dtype), v])
        mask = torch.cat([mask.new_ones(q.shape[0], sink_kv[0].shape[0]), mask], dim=1)
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    group = q.shape[1] // k.shape[1]
    q, k, v = q.double(), k.double().repeat_interleave(group, 1), v.double().repeat_interleave(group, 1)
    scores = torch.einsum("qhd,khd->hqk", q, k) * scale
    if softcap > 0:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~mask, float("-inf"))
    if s_aux is not None:
        column = s_aux.double()[:, None, None].expand(-1, q.shape[0], 1)
        logits = torch.cat([scores, column], dim=-1)
    else:
        logits = scores
    lse = torch.logsumexp(logits, dim=-1)
    # A row that sees nothing has lse = -inf; shifting by 0 there keeps exp(-inf) = 0 instead of NaN.
    shift = torch.where(lse.isinf(), torch.zeros_like(lse), lse)
    out = torch.einsum("hqk,khd->qhd", torch.exp(scores - shift[..., None]), v)
    return out, lse


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """``||actual - expected|| / ||expected||`` in fp64; NaN or inf in ``actual`` gives NaN or inf, never a pass."""
    actual, expected = actual.detach().double(), expected.detach().double()
    norm = torch.linalg.vector_norm(expected)
    return float(torch.linalg.vector_norm(actual - expected) / torch.where(norm > 0, norm, torch.ones_like(norm)))
