"""Plain torch attention, chunked over query rows: the backend that runs everywhere.

It computes in fp32 (fp64 for fp64 input) and holds one ``[heads, chunk, keys]`` block of scores at a time, so memory is
O(S * chunk) forward and backward. It is also the naive version that the flash backends are read against.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

SCORE_BYTES = 64 * 2**20
"""How much memory one block of scores may take."""


@dataclass(frozen=True)
class _Chunk:
    """Rows ``q_start:q_stop`` of the flattened queries and the keys ``k_start:k_stop`` that they may see."""

    batch: int
    q_start: int
    q_stop: int
    k_start: int
    k_stop: int
    hidden: Tensor | None
    """True where a query must not see a key, ``[rows, keys]``; None where all is visible."""


def _chunks(
    q: Tensor,
    k: Tensor,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    window: tuple[int, int],
) -> Iterator[_Chunk]:
    """Cut every document's queries into chunks, each with just the keys that its window can reach."""
    left, right = window
    if cu_seqlens_q is None or cu_seqlens_k is None:
        documents = [(b, 0, q.shape[1], 0, k.shape[1]) for b in range(q.shape[0])]
    else:
        qs, ks = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
        documents = [(0, qs[i], qs[i + 1], ks[i], ks[i + 1]) for i in range(len(qs) - 1)]
    for batch, q0, q1, k0, k1 in documents:
        seqlen_q, seqlen_k = q1 - q0, k1 - k0
        shift = seqlen_k - seqlen_q  # queries are aligned to the end of the keys
        reach = seqlen_k if left < 0 or right < 0 else min(seqlen_k, left + right + 1)
        rows = max(16, min(1024, SCORE_BYTES // (4 * q.shape[-2] * max(reach, 1))))
        for a in range(0, seqlen_q, rows):
            b = min(a + rows, seqlen_q)
            lo = 0 if left < 0 else min(max(0, a + shift - left), seqlen_k)
            hi = seqlen_k if right < 0 else max(min(seqlen_k, b + shift + right), lo)
            hidden = None
            if (left >= 0 or right >= 0) and hi > lo:
                position = torch.arange(a + shift, b + shift, device=q.device)[:, None]
                key = torch.arange(lo, hi, device=q.device)[None, :]
                hidden = torch.zeros(b - a, hi - lo, dtype=torch.bool, device=q.device)
                if left >= 0:
                    hidden |= key < position - left
                if right >= 0:
                    hidden |= key > position + right
            yield _Chunk(batch, q0 + a, q0 + b, k0 + lo, k0 + hi, hidden)


def _by_kv_head(x: Tensor, kv_heads: int) -> Tensor:
    """``[rows, heads, d]`` -> ``[kv_heads, group * rows, d]``, so that one bmm serves a group of query heads."""
    rows, heads, d = x.shape
    return x.reshape(rows, kv_heads, heads // kv_heads, d).permute(1, 2, 0, 3).reshape(kv_heads, -1, d)


def _by_row(x: Tensor, rows: int) -> Tensor:
    """The inverse of :func:`_by_kv_head`."""
    kv_heads, _, d = x.shape
    return x.reshape(kv_heads, -1, rows, d).permute(2, 0, 1, 3).reshape(rows, -1, d)


def _scores(qc: Tensor, kc: Tensor, chunk: _Chunk, scale: float, softcap: float) -> Tensor:
    scores = torch.bmm(qc, kc.transpose(1, 2)) * scale
    if softcap > 0:
        scores = softcap * torch.tanh(scores / softcap)
    if chunk.hidden is not None:
        rows, keys = chunk.hidden.shape
        scores.view(scores.shape[0], -1, rows, keys).masked_fill_(chunk.hidden, float("-inf"))
    return scores


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    scale: float,
    window: tuple[int, int],
    softcap: float,
) -> tuple[Tensor, Tensor]:
    """Attention of packed ``[tokens, heads, d]`` or dense ``[batch, seqlen, heads, d]`` tensors, without any sink.

    Returns ``out`` and ``lse`` in the compute dtype (fp32, or fp64 for fp64 input); ``lse`` is ``[heads, tokens]``
    packed and ``[batch, heads, seqlen]`` dense, and ``-inf`` for a row that sees no key (its ``out`` is 0).
    """
    compute = torch.float64 if q.dtype == torch.float64 else torch.float32
    packed = cu_seqlens_q is not None
    out = torch.zeros(*q.shape[:-1], v.shape[-1], dtype=compute, device=q.device)
    lse = torch.full((*q.shape[:-3], q.shape[-2], q.shape[-3]), float("-inf"), dtype=compute, device=q.device)
    out4, lse3 = (out[None], lse[None]) if packed else (out, lse)
    q4, k4, v4 = (q[None], k[None], v[None]) if packed else (q, k, v)
    kv_heads = k.shape[-2]
    for c in _chunks(q, k, cu_seqlens_q, cu_seqlens_k, window):
        if c.k_stop == c.k_start:
            continue
        qc = _by_kv_head(q4[c.batch, c.q_start : c.q_stop].to(compute), kv_heads)
        kc = k4[c.batch, c.k_start : c.k_stop].to(compute).transpose(0, 1)
        vc = v4[c.batch, c.k_start : c.k_stop].to(compute).transpose(0, 1)
        scores = _scores(qc, kc, c, scale, softcap)
        row_lse = torch.logsumexp(scores, dim=-1, keepdim=True)
        # A row that sees nothing has lse = -inf; shifting it by 0 keeps exp(-inf) = 0 instead of NaN.
        probs = torch.exp(scores - torch.where(row_lse == float("-inf"), 0.0, row_lse))
        rows = c.q_stop - c.q_start
        out4[c.batch, c.q_start : c.q_stop] = _by_row(torch.bmm(probs, vc), rows)
        lse3[c.batch, :, c.q_start : c.q_stop] = _by_row(row_lse, rows)[..., 0].T
    return out, lse


def backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    *,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    scale: float,
    window: tuple[int, int],
    softcap: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of one part of a log-sum-exp union, given the **merged** ``out`` and ``lse``.

    With ``P = exp(S - lse)`` and ``delta = rowsum(dout * out)``: ``dV = P^T dout``, ``dS = P * (dout V^T - delta)``,
    ``dQ = scale * dS K``, ``dK = scale * dS^T Q`` (FlashAttention-2, algorithm 2; the merged pair makes it exact for a
    part).

    Returns ``dq, dk, dv`` in the compute dtype.
    """
    compute = torch.float64 if q.dtype == torch.float64 else torch.float32
    packed = cu_seqlens_q is not None
    dq = torch.zeros(q.shape, dtype=compute, device=q.device)
    dk = torch.zeros(k.shape, dtype=compute, device=k.device)
    dv = torch.zeros(v.shape, dtype=compute, device=v.device)
    delta = (dout.to(compute) * out.to(compute)).sum(-1, keepdim=True)
    dq4, dk4, dv4 = (dq[None], dk[None], dv[None]) if packed else (dq, dk, dv)
    q4, k4, v4, do4, delta4 = (t[None] if packed else t for t in (q, k, v, dout, delta))
    lse3 = lse[None] if packed else lse
    kv_heads = k.shape[-2]
    for c in _chunks(q, k, cu_seqlens_q, cu_seqlens_k, window):
        if c.k_stop == c.k_start:
            continue
        q_rows, k_rows = slice(c.q_start, c.q_stop), slice(c.k_start, c.k_stop)
        qc = _by_kv_head(q4[c.batch, q_rows].to(compute), kv_heads)
        kc = k4[c.batch, k_rows].to(compute).transpose(0, 1)
        vc = v4[c.batch, k_rows].to(compute).transpose(0, 1)
        doc = _by_kv_head(do4[c.batch, q_rows].to(compute), kv_heads)
        row_delta = _by_kv_head(delta4[c.batch, q_rows], kv_heads)
        row_lse = _by_kv_head(lse3[c.batch, :, q_rows].to(compute).T[..., None], kv_heads)
        scores = _scores(qc, kc, c, scale, softcap)
        probs = torch.exp(scores - torch.where(row_lse.isinf(), 0.0, row_lse))
        dv4[c.batch, k_rows] += torch.bmm(probs.transpose(1, 2), doc).transpose(0, 1)
        dscores = probs * (torch.bmm(doc, vc.transpose(1, 2)) - row_delta)
        if softcap > 0:
            dscores = dscores * (1 - (scores / softcap).nan_to_num(0.0, neginf=0.0).square())
        dq4[c.batch, q_rows] = _by_row(torch.bmm(dscores, kc), c.q_stop - c.q_start) * scale
        dk4[c.batch, k_rows] += torch.bmm(dscores.transpose(1, 2), qc).transpose(0, 1) * scale
    return dq, dk, dv
