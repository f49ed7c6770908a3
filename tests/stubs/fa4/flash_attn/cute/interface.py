"""flash-attn 4's public functions on the fp64 oracle."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fsdp_sink_patches.ops.sink_attention.oracle import oracle_attention

CALLS: list[tuple[str, dict[str, Any]]] = []


def _attend(name: str, q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]) -> tuple[Tensor, Tensor | None]:
    CALLS.append((name, options))
    for longest in ("max_seqlen_q", "max_seqlen_k"):
        if isinstance(options.get(longest), Tensor):
            raise ValueError(f"Expected IntTuple for {longest}, got {options[longest]}")
    sink = options["learnable_sink"]
    if sink is not None and sink.shape != (q.shape[-2],):
        raise AssertionError(f"learnable_sink has shape {tuple(sink.shape)}")
    left, right = options["window_size"]
    out, lse = oracle_attention(
        q, k, v, sink,
        cu_seqlens_q=options.get("cu_seqlens_q"),
        cu_seqlens_k=options.get("cu_seqlens_k"),
        softmax_scale=options["softmax_scale"],
        causal=options["causal"],
        window_size=(-1 if left is None else left, -1 if right is None else right),
        softcap=options["softcap"],
    )  # fmt: skip
    needs_lse = options["return_lse"] or (torch.is_grad_enabled() and q.requires_grad)
    return out.to(q.dtype), lse.float() if needs_lse else None


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    qv: Tensor | None = None,
    gather_kv_indices: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int | None, int | None] = (None, None),
    learnable_sink: Tensor | None = None,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    return_lse: bool = False,
) -> Any:
    options = {name: value for name, value in locals().items() if name not in ("q", "k", "v")}
    return _attend("flash_attn_func", q, k, v, options)


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    qv: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    min_seqlen_k: int | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    gather_kv_indices: Tensor | None = None,
    page_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int | None, int | None] = (None, None),
    learnable_sink: Tensor | None = None,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    return_lse: bool = False,
) -> Any:
    options = {name: value for name, value in locals().items() if name not in ("q", "k", "v")}
    return _attend("flash_attn_varlen_func", q, k, v, options)


def _flash_attn_fwd(q: Tensor, k: Tensor, v: Tensor, *, learnable_sink: Tensor | None = None) -> Any:
    raise NotImplementedError("the stub has no CUDA kernel")


def _flash_attn_bwd(q: Tensor, k: Tensor, v: Tensor, *, learnable_sink: Tensor | None = None) -> Any:
    raise NotImplementedError("the stub has no CUDA kernel")
