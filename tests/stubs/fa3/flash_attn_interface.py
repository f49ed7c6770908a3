"""flash-attn 3's public functions on the fp64 oracle."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fsdp_sink_patches.ops.sink_attention.oracle import oracle_attention

CALLS: list[tuple[str, dict[str, Any]]] = []


def _attend(name: str, q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]) -> Any:
    CALLS.append((name, options))
    out, lse = oracle_attention(
        q, k, v,
        cu_seqlens_q=options.get("cu_seqlens_q"),
        cu_seqlens_k=options.get("cu_seqlens_k"),
        softmax_scale=options["softmax_scale"],
        causal=options["causal"],
        window_size=options["window_size"],
        softcap=options["softcap"],
    )  # fmt: skip
    out = out.to(q.dtype)
    return (out, lse.float()) if options["return_attn_probs"] else out


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Any:
    options = {name: value for name, value in locals().items() if name not in ("q", "k", "v")}
    return _attend("flash_attn_func", q, k, v, options)


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Any:
    options = {name: value for name, value in locals().items() if name not in ("q", "k", "v")}
    return _attend("flash_attn_varlen_func", q, k, v, options)


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    cache_seqlens: Tensor | int | None = None,
    page_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
) -> Any:
    raise NotImplementedError("the stub serves training only")
