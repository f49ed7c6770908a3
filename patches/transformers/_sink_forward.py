"""Where transformers' flash path ends in our kernels: documents, padding and windows, for every release from 4.57.

Upstream derives padding and document borders again in every layer, with a device sync each time. Here they are derived
once per tensor of positions or mask, which is once per forward pass.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch
import transformers.integrations.flash_attention as upstream
import transformers.modeling_flash_attention_utils as upstream_utils
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from fsdp_sink_patches.ops import sink_attention

from ._documents import document_starts
from .flash_sinks import SINK_LAYER

T = TypeVar("T")

_NOT_PLAIN_ATTENTION = ("indices", "block_bias", "position_bias", "block_table")
"""Keywords that change which keys a query sees or how it scores them, which no flash kernel here computes."""


def layer_forward(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """transformers' attention interface: [batch, heads, seqlen, head_dim] in, [batch, seqlen, heads, head_dim] out.

    Unlike upstream's it keeps ``s_aux`` in its own dtype (a bf16 copy of a sink of 8 is off by up to 0.03) and
    ``value`` at its own head_dim. The inner function is looked up in the module at every call, because verl puts its
    Ulysses wrapper there after the model is built.
    """
    if any(size == 0 for size in query.shape):
        raise ValueError(
            f"transformers.flash-sinks: query has shape {tuple(query.shape)}, with an empty dimension; expected at "
            "least one row, token, head and head_dim. Skip empty batches before the model is called."
        )
    if hasattr(module, "sinks"):
        kwargs[SINK_LAYER] = True
    out = upstream._flash_attention_forward(
        query.transpose(1, 2),
        key.transpose(1, 2),
        value.transpose(1, 2),
        attention_mask,
        query_length=query.shape[2],
        is_causal=module.is_causal if is_causal is None else is_causal,
        dropout=dropout,
        softmax_scale=scaling,
        sliding_window=sliding_window,
        softcap=softcap,
        use_top_left_mask=upstream._use_top_left_mask,
        target_dtype=_kernel_dtype(module, query),
        attn_implementation=module.config._attn_implementation,
        layer_idx=getattr(module, "layer_idx", None),
        s_aux=s_aux,
        **kwargs,
    )
    return out, None


def flash_forward(
    query_states: Tensor,
    key_states: Tensor,
    value_states: Tensor,
    attention_mask: Tensor | None,
    query_length: int,
    is_causal: bool,
    dropout: float = 0.0,
    position_ids: Tensor | None = None,
    softmax_scale: float | None = None,
    sliding_window: int | None = None,
    use_top_left_mask: bool = False,
    softcap: float | None = None,
    deterministic: bool | None = None,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    max_length_q: int | Tensor | None = None,
    max_length_k: int | Tensor | None = None,
    target_dtype: torch.dtype | None = None,
    *,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> Tensor:
    """``_flash_attention_forward`` with sinks: ``[batch, seqlen, heads, head_dim]`` in and out.

    Args:
        attention_mask: ``[batch, keys]``, 1 for a token and 0 for padding, on either side; or None.
        position_ids: ``[batch or 1, queries]``; they say where documents start, see :func:`document_starts`, where
            queries and keys are the same tokens.
        cu_seq_lens_q, cu_seq_lens_k: borders of the documents in the flattened rows; they win over ``position_ids``.
        max_length_q, max_length_k: the longest document; derived from the borders when missing.
        s_aux: one logit per query head in fp32 or the dtype of q, or None in a layer without sinks.

    Raises:
        NotImplementedError: the layer asks for more than softmax attention with a window and sinks.
        ValueError: masks or positions that don't fit the keys.
    """
    for name in _NOT_PLAIN_ATTENTION:
        if kwargs.get(name) is not None:
            raise NotImplementedError(
                f"transformers.flash-sinks: the attention layer passes {name!r}, which flash kernels with sinks do not "
                'compute. Expected plain attention; use attn_implementation="eager" for this model or call.'
            )
    if target_dtype is not None and query_states.dtype == torch.float32:
        query_states, key_states, value_states = (x.to(target_dtype) for x in (query_states, key_states, value_states))
    window = (-1, -1)
    if sliding_window is not None and key_states.shape[1] > sliding_window:
        # flash-attn's bounds are inclusive; transformers counts the token itself (huggingface/transformers#40163).
        window = (sliding_window - 1, 0 if is_causal else sliding_window - 1)
    if deterministic is None:
        deterministic = os.getenv("FLASH_ATTENTION_DETERMINISTIC", "0") == "1"
    options: dict[str, Any] = {
        "dropout_p": dropout,
        "softmax_scale": softmax_scale,
        "causal": is_causal,
        "window_size": window,
        "softcap": softcap or 0.0,
        "deterministic": deterministic,
        "s_aux": s_aux,
    }  # fmt: skip
    batch, q_length = query_states.shape[:2]
    if attention_mask is not None:
        return _padded(query_states, key_states, value_states, attention_mask, position_ids, options)
    borders = None
    if cu_seq_lens_q is not None:
        borders = _given_borders(cu_seq_lens_q, cu_seq_lens_k, max_length_q, max_length_k)
    elif q_length == key_states.shape[1]:
        if position_ids is not None and q_length > 1:
            borders = _packed_borders(position_ids, batch, q_length)
    elif position_ids is not None:
        key_states, value_states = _used_slots(key_states, value_states, position_ids)
    if borders is None:
        return cast(Tensor, sink_attention.flash_attn_func(query_states, key_states, value_states, **options))
    q, k, v = (x.reshape(-1, *x.shape[2:]) for x in (query_states, key_states, value_states))
    out = cast(Tensor, sink_attention.flash_attn_varlen_func(q, k, v, *borders, **options))
    return out.reshape(batch, q_length, *out.shape[1:])


def require_sink_kernel(name: str) -> None:
    """Raise where a kernel that is not ours would drop the sink; upstream hands it on only if the signature has it."""
    process = upstream_utils.lazy_import_flash_attention(name)[1]
    process = process[0] if isinstance(process, tuple) else process
    supports = getattr(process, "keywords", {}).get("supports_mapping", {})
    if not (supports.get("s_aux") or supports.get("learnable_sink")):
        raise NotImplementedError(
            f"transformers.flash-sinks: {name!r} has neither an s_aux nor a learnable_sink argument, and transformers "
            "would drop the attention sinks. Expected a kernel that takes them; use "
            'attn_implementation="flash_attention_2", which this patch computes exactly.'
        )


def _kernel_dtype(module: Any, query: Tensor) -> torch.dtype | None:
    """What fp32 activations are cast to before a flash kernel (autocast, or layer norms that PEFT keeps in fp32)."""
    if query.dtype != torch.float32:
        return None
    if hasattr(upstream, "get_target_dtype"):
        dtype: torch.dtype | None = upstream.get_target_dtype(query, module)
        return dtype
    # transformers 4.57 has the same rule inside its forward
    if torch.is_autocast_enabled(query.device.type):
        return torch.get_autocast_dtype(query.device.type)
    if hasattr(module.config, "_pre_quantization_dtype"):
        return module.config._pre_quantization_dtype  # type: ignore[no-any-return]
    return next(layer for layer in module.modules() if isinstance(layer, torch.nn.Linear)).weight.dtype


_Borders = tuple[Tensor, Tensor, int, int]
"""``cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k``, the last two plain ints: a kernel given a 0-d CUDA tensor
crashes (FlashAttention 4) or syncs in every layer (FlashAttention 2)."""


def _given_borders(
    cu_q: Tensor, cu_k: Tensor | None, max_q: int | Tensor | None, max_k: int | Tensor | None
) -> _Borders:
    cu_k = cu_q if cu_k is None else cu_k
    return cu_q, cu_k, _longest(max_q, cu_q), _longest(max_k, cu_k)


def _longest(given: int | Tensor | None, cu_seqlens: Tensor) -> int:
    if given is None:
        return _once("longest", lambda: int(cu_seqlens.diff().max()), cu_seqlens)
    if isinstance(given, Tensor):
        return _once("int", lambda: int(given), given)
    return int(given)  # NumPy integers too, which collators give


def _packed_borders(position_ids: Tensor, batch: int, length: int) -> _Borders | None:
    """Borders of the documents in the flattened rows; None when every row is one document."""
    positions = _fitting(position_ids, batch, length)
    if torch.compiler.is_compiling() and batch > 1:
        # transformers looks for packed documents in single rows only, which lets batches compile without a branch on
        # data. Batches of packed rows are refused here, where they would leak into each other.
        torch._assert_async(~document_starts(positions)[:, 1:].any(), "packed rows in a compiled batch of several rows")
        return None
    return _once(("borders", batch), lambda: _find_borders(positions), position_ids)


def _find_borders(position_ids: Tensor) -> _Borders | None:
    starts = document_starts(position_ids)
    if not starts[:, 1:].any():
        return None
    cu_seqlens, longest = _cu_seqlens(starts.flatten())
    return cu_seqlens, cu_seqlens, longest, longest


def _fitting(position_ids: Tensor, batch: int, length: int) -> Tensor:
    """``position_ids`` as ``[batch, length]``."""
    if position_ids.shape in ((batch, length), (1, length), (length,)):
        return position_ids.expand(batch, length)
    raise ValueError(
        f"transformers.flash-sinks: position_ids have shape {tuple(position_ids.shape)} for {batch} rows of {length} "
        f"tokens; expected {(batch, length)}, to see where documents start. Or pass cu_seq_lens_q and cu_seq_lens_k."
    )


def _used_slots(key: Tensor, value: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
    """Cut the empty slots off a static cache that comes without a mask: queries are aligned to the last key.

    Empty slots are zeros behind the last position; real keys are never all zeros.
    """
    if torch.compiler.is_compiling():
        torch._assert_async(key[:, -1].any(), "a static cache with empty slots needs an attention_mask when compiled")
        return key, value
    used = _once("used", lambda: int(position_ids.max()) + 1, position_ids)
    if used < key.shape[1] and not key[:, used:].any():
        return key[:, :used], value[:, :used]
    return key, value


@dataclass(frozen=True)
class _Tokens:
    """The real tokens of a padded batch: their places in the flattened rows, and the borders of their documents."""

    indices: Tensor
    cu_seqlens: Tensor
    max_seqlen: int


def _padded(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, position_ids: Tensor | None, options: dict[str, Any]
) -> Tensor:
    if mask.dim() != 2 or mask.shape[0] != key.shape[0] or mask.shape[1] > key.shape[1]:
        raise ValueError(
            f"transformers.flash-sinks: attention_mask has shape {tuple(mask.shape)} for keys of shape "
            f"{tuple(key.shape)}; expected [batch, keys] with 1 for a token and 0 for padding. Pass the 2-D mask."
        )
    batch, q_length = query.shape[:2]
    length = mask.shape[1]
    # A static cache has more slots than the mask speaks of; they are empty.
    key, value = key[:, :length], value[:, :length]
    if q_length == length:
        places = None if position_ids is None else _fitting(position_ids, batch, length)
        q_tokens = k_tokens = _once("documents", lambda: _documents(mask, places), mask, position_ids)
    else:
        k_tokens = _once("rows", lambda: _rows(mask), mask)
        q_tokens = _once(("last", q_length), lambda: _rows(mask[:, -q_length:]), mask)
    q = query.reshape(-1, *query.shape[2:])[q_tokens.indices]
    k, v = (x.reshape(-1, *x.shape[2:])[k_tokens.indices] for x in (key, value))
    borders = q_tokens.cu_seqlens, k_tokens.cu_seqlens, q_tokens.max_seqlen, k_tokens.max_seqlen
    tokens = cast(Tensor, sink_attention.flash_attn_varlen_func(q, k, v, *borders, **options))
    out = tokens.new_zeros(batch * q_length, *tokens.shape[1:]).index_copy(0, q_tokens.indices, tokens)
    return out.view(batch, q_length, *tokens.shape[1:])


def _documents(mask: Tensor, position_ids: Tensor | None) -> _Tokens:
    """Queries and keys are the same tokens: the documents of every row, without its padding."""
    if position_ids is None:
        return _rows(mask)
    real = mask.bool()
    indices = real.flatten().nonzero().flatten()
    return _Tokens(indices, *_cu_seqlens(document_starts(position_ids, real).flatten()[indices]))


def _rows(mask: Tensor) -> _Tokens:
    """Every row is one document, possibly without a token."""
    lengths = mask.bool().sum(dim=1, dtype=torch.int32)
    cu_seqlens = torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    return _Tokens(mask.flatten().nonzero().flatten(), cu_seqlens, int(lengths.max()))


def _cu_seqlens(starts: Tensor) -> tuple[Tensor, int]:
    """int32 ``[documents + 1]`` and the longest document, from the tokens that begin one, bool ``[tokens]``."""
    begins = starts.nonzero().flatten().to(torch.int32)
    end = begins.new_full((1,), starts.shape[0])
    # No token at all is one document of length zero.
    cu_seqlens = torch.cat([begins, end] if begins.shape[0] > 0 else [end, end])
    return cu_seqlens, int(cu_seqlens.diff().max())


_derived: WeakIdKeyDictionary = WeakIdKeyDictionary()


def _once(name: Hashable, compute: Callable[[], T], tensor: Tensor, other: Tensor | None = None) -> T:
    """``compute()``, remembered for as long as these very tensors live and are not written to.

    All layers of a forward pass get the same position and mask tensors, so what is derived from them costs one device
    sync a forward pass, not one a layer. On the CPU there is no sync to save, and a buffer may be refilled through
    NumPy, so everything is computed every time.

    Limit on a GPU: a write is noticed by autograd's version counter. One that goes past it (``x.data.copy_(...)``,
    another library through DLPack, a CUDA graph's replay) into a tensor that is used again is not seen; write with
    ``x.copy_(...)`` or pass a new tensor.
    """
    inputs = [tensor] if other is None else [tensor, other]
    if torch.compiler.is_compiling() or any(x.device.type == "cpu" or x.is_inference() for x in inputs):
        return compute()
    known: dict[Hashable, Any] = _derived.setdefault(tensor, {})  # type: ignore[no-untyped-call]
    stamp = (tensor._version, None if other is None else other._version)
    if name in known:
        seen, other_ref, value = known[name]
        if seen == stamp and (other_ref() if other_ref is not None else None) is other:
            result: T = value
            return result
    result = compute()
    known[name] = (stamp, None if other is None else weakref.ref(other), result)
    return result
