"""flash-attn 2's public functions on the fp64 oracle."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fsdp_sink_patches.ops.sink_attention.oracle import oracle_attention

CALLS: list[tuple[str, dict[str, Any]]] = []


def _attend(name: str, q: Tensor, k: Tensor, v: Tensor, borders: dict[str, Any], options: dict[str, Any]) -> Any:
    CALLS.append((name, {**borders, **options}))
    if options["dropout_p"] or options["alibi_slopes"] is not None or options.get("block_table") is not None:
        raise NotImplementedError("the stub computes neither dropout, alibi nor paged keys")
    out, lse = oracle_attention(
        q, k, v,
        cu_seqlens_q=borders.get("cu_seqlens_q"),
        cu_seqlens_k=borders.get("cu_seqlens_k"),
        softmax_scale=options["softmax_scale"],
        causal=options["causal"],
        window_size=options["window_size"],
        softcap=options["softcap"],
    )  # fmt: skip
    out = out.to(q.dtype)
    return (out, lse.float(), None) if options["return_attn_probs"] else out


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    options = {name: value for name, value in locals().items() if name not in ("q", "k", "v")}
    return _attend("flash_attn_func", q, k, v, {}, options)


def flash_attn_qkvpacked_func(
    qkv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    options = {name: value for name, value in locals().items() if name != "qkv"}
    return _attend("flash_attn_qkvpacked_func", *qkv.unbind(2), {}, options)


def flash_attn_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    options = {name: value for name, value in locals().items() if name not in ("q", "kv")}
    return _attend("flash_attn_kvpacked_func", q, *kv.unbind(2), {}, options)


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
) -> Any:
    options = {name: value for name, value in locals().items() if name not in ("q", "k", "v")}
    return _attend("flash_attn_varlen_func", q, k, v, options, options)


def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    options = {name: value for name, value in locals().items() if name != "qkv"}
    borders = {"cu_seqlens_q": cu_seqlens, "cu_seqlens_k": cu_seqlens}
    return _attend("flash_attn_varlen_qkvpacked_func", *qkv.unbind(1), borders, options)


def flash_attn_varlen_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    options = {name: value for name, value in locals().items() if name not in ("q", "kv")}
    return _attend("flash_attn_varlen_kvpacked_func", q, *kv.unbind(1), options, options)


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    cache_seqlens: Tensor | int | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    block_table: Tensor | None = None,
) -> Any:
    raise NotImplementedError("the stub serves training only")
