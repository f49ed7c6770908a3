"""flash-attn's functions, with its argument names and layouts, plus sinks.

``s_aux`` is one learned logit per query head that joins the softmax and has no value (gpt-oss, DeepSeek-V4,
MiMo-V2-Flash ...). ``sink_kv`` are sink *slots*: keys and values that every query of every document sees, whatever the
window.
"""

from __future__ import annotations

import itertools
import weakref

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard

from fsdp_sink_patches.ops.sink_attention._op import sink_attention

Window = tuple[int | None, int | None]


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    s_aux: Tensor | None = None,
    sink_kv: tuple[Tensor, Tensor] | None = None,
    backend: str | None = None,
) -> Tensor | tuple[Tensor, Tensor, None]:
    """Attention with sinks over a dense batch.

    Args:
        q: ``[batch, seqlen_q, heads, head_dim]``, floating point; flash kernels take fp16 and bf16, the reference
            takes all.
        k, v: ``[batch, seqlen_k, kv_heads, head_dim]``; ``kv_heads`` divides ``heads``; v may have another head_dim.
        dropout_p: must be 0: no kernel at hand drops probabilities that a sink took part in.
        softmax_scale: default ``head_dim ** -0.5``; multiplies ``q k^T``, never the sink.
        causal: query i sees keys up to i, aligned to the end of the keys.
        window_size: (left, right), inclusive counts beside the current position; ``-1`` or None is unbounded. A model
            that "sees 128 tokens" has ``(127, 0)``.
        softcap: scores become ``softcap * tanh(scores / softcap)``; 0 is off. The sink is not capped.
        alibi_slopes: must be None.
        deterministic: bitwise equal gradients in every run.
        return_attn_probs: also return the log-sum-exp.
        s_aux: ``[heads]`` in any floating dtype, or a DTensor of it; its gradient has the same dtype and placement. The
            gradient of a DTensor that is not sharded with the heads is taken to be the same on every rank, as DTensor
            does: with other data on each rank pass ``s_aux.full_tensor(grad_placements=[Partial()])`` instead (FSDP2
            hands over plain tensors and reduces by itself).
        sink_kv: ``(k, v)``, each ``[slots, kv_heads, head_dim]``, seen by every query.
        backend: one of :func:`backends`'s names, to force it; None takes the best that serves the request.

    Returns:
        ``out`` ``[batch, seqlen_q, heads, v's head_dim]`` in q's dtype; with ``return_attn_probs`` the tuple
        ``(out, lse, None)``, where ``lse`` ``[batch, heads, seqlen_q]`` in fp32 includes slots and sink. ``lse``
        carries no gradient, as in flash-attn.

    Raises:
        ValueError: an argument does not fit; the message names it, what came and what was expected.
    """
    _refuse(dropout_p, alibi_slopes)
    if q.dim() != 4 or k.dim() != 4 or v.dim() != 4:
        raise ValueError(f"q, k and v must be [batch, seqlen, heads, head_dim]; got {_shapes(q, k, v)}")
    if not q.shape[0] == k.shape[0] == v.shape[0]:
        raise ValueError(f"q, k and v must have one batch size; got {_shapes(q, k, v)}")
    return _attention(
        q, k, v, None, None, q.shape[1], k.shape[1],
        softmax_scale, causal, window_size, softcap, deterministic, return_attn_probs, s_aux, sink_kv, backend,
    )  # fmt: skip


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
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
    *,
    s_aux: Tensor | None = None,
    sink_kv: tuple[Tensor, Tensor] | None = None,
    backend: str | None = None,
) -> Tensor | tuple[Tensor, Tensor, None]:
    """Attention with sinks over packed documents, none of which sees another.

    Args:
        q: ``[total_q, heads, head_dim]``.
        k, v: ``[total_k, kv_heads, head_dim]``.
        cu_seqlens_q, cu_seqlens_k: ``[documents + 1]`` int32 (int64 is converted): where each document starts; from 0,
            never decreasing, ending at ``total_q`` / ``total_k``. Empty documents are fine. On CUDA the values are
            looked at once for each tensor, since that waits for the device.
        max_seqlen_q, max_seqlen_k: the longest document, in tokens; a Python int (a tensor costs a wait for the
            device).
        block_table: must be None: paged keys are for serving.

    The other arguments, the result and the errors are those of :func:`flash_attn_func`; ``lse`` is ``[heads,
    total_q]``.
    """
    _refuse(dropout_p, alibi_slopes)
    if block_table is not None:
        raise ValueError("block_table must be None: attention with sinks over paged keys is not offered")
    if q.dim() != 3 or k.dim() != 3 or v.dim() != 3:
        raise ValueError(f"q, k and v must be [tokens, heads, head_dim]; got {_shapes(q, k, v)}")
    if k.shape[0] != v.shape[0]:
        raise ValueError(f"k and v must have the same number of tokens; got {_shapes(q, k, v)}")
    max_seqlen_q, max_seqlen_k = _as_int(max_seqlen_q), _as_int(max_seqlen_k)
    cu_seqlens_q = _check_cu_seqlens("q", cu_seqlens_q, max_seqlen_q, q.shape[0], q.device)
    cu_seqlens_k = _check_cu_seqlens("k", cu_seqlens_k, max_seqlen_k, k.shape[0], q.device)
    if cu_seqlens_q.shape != cu_seqlens_k.shape:
        raise ValueError(
            f"cu_seqlens_q and cu_seqlens_k must speak of as many documents; got {cu_seqlens_q.shape[0] - 1} and "
            f"{cu_seqlens_k.shape[0] - 1}"
        )
    return _attention(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
        softmax_scale, causal, window_size, softcap, deterministic, return_attn_probs, s_aux, sink_kv, backend,
    )  # fmt: skip


def flash_attn_qkvpacked_func(
    qkv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    s_aux: Tensor | None = None,
    sink_kv: tuple[Tensor, Tensor] | None = None,
    backend: str | None = None,
) -> Tensor | tuple[Tensor, Tensor, None]:
    """:func:`flash_attn_func` for ``qkv`` ``[batch, seqlen, 3, heads, head_dim]``."""
    if qkv.dim() != 5 or qkv.shape[2] != 3:
        raise ValueError(f"qkv must be [batch, seqlen, 3, heads, head_dim]; got {list(qkv.shape)}")
    q, k, v = qkv.unbind(2)
    return flash_attn_func(
        q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic,
        return_attn_probs, s_aux=s_aux, sink_kv=sink_kv, backend=backend,
    )  # fmt: skip


def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    s_aux: Tensor | None = None,
    sink_kv: tuple[Tensor, Tensor] | None = None,
    backend: str | None = None,
) -> Tensor | tuple[Tensor, Tensor, None]:
    """:func:`flash_attn_varlen_func` for ``qkv`` ``[total, 3, heads, head_dim]``."""
    if qkv.dim() != 4 or qkv.shape[1] != 3:
        raise ValueError(f"qkv must be [total, 3, heads, head_dim]; got {list(qkv.shape)}")
    q, k, v = qkv.unbind(1)
    return flash_attn_varlen_func(
        q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, dropout_p, softmax_scale, causal, window_size,
        softcap, alibi_slopes, deterministic, return_attn_probs, s_aux=s_aux, sink_kv=sink_kv, backend=backend,
    )  # fmt: skip


def _attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    softmax_scale: float | None,
    causal: bool,
    window_size: Window,
    softcap: float,
    deterministic: bool,
    return_lse: bool,
    s_aux: Tensor | None,
    sink_kv: tuple[Tensor, Tensor] | None,
    backend: str | None,
) -> Tensor | tuple[Tensor, Tensor, None]:
    heads, head_dim = q.shape[-2:]
    kv_heads = k.shape[-2]
    if not q.dtype == k.dtype == v.dtype or not q.dtype.is_floating_point:
        raise ValueError(f"q, k and v must have one floating dtype; got {q.dtype}, {k.dtype}, {v.dtype}")
    if not q.device == k.device == v.device:
        raise ValueError(f"q, k and v must be on one device; got {q.device}, {k.device}, {v.device}")
    if kv_heads == 0 or heads % kv_heads != 0 or v.shape[-2] != kv_heads:
        raise ValueError(f"kv_heads must divide heads and be one for k and v; got {_shapes(q, k, v)}")
    if k.shape[-1] != head_dim:
        raise ValueError(f"q and k must have one head_dim; got {_shapes(q, k, v)}")
    if softcap < 0:
        raise ValueError(f"softcap must be 0 (off) or positive; got {softcap}")
    if not isinstance(window_size, tuple | list) or len(window_size) != 2:
        raise ValueError(f"window_size must be (left, right); got {window_size!r}")
    left, right = (-1 if bound is None or bound < 0 else int(bound) for bound in window_size)
    if causal:
        right = 0
    slot_k, slot_v = _check_slots(sink_kv, q, k, v)
    s_aux = _check_sinks(s_aux, heads, q.device)
    if torch.is_autocast_enabled(q.device.type) and q.dtype == torch.float32:
        half = torch.get_autocast_dtype(q.device.type)
        q, k, v = q.to(half), k.to(half), v.to(half)
    out, lse = sink_attention(
        q, k, v, s_aux, slot_k, slot_v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
        head_dim**-0.5 if softmax_scale is None else float(softmax_scale),
        left, right, float(softcap), deterministic, backend or "",
    )  # fmt: skip
    return (out, lse, None) if return_lse else out


def _shapes(q: Tensor, k: Tensor, v: Tensor) -> str:
    return f"q {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)}"


def _refuse(dropout_p: float, alibi_slopes: Tensor | None) -> None:
    if dropout_p != 0.0:
        raise ValueError(
            f"dropout_p must be 0; got {dropout_p}. Dropout with sinks is not offered: set attention_dropout to 0"
        )
    if alibi_slopes is not None:
        raise ValueError("alibi_slopes must be None: attention with sinks and ALiBi is not offered")


def _as_int(length: int | Tensor) -> int:
    return int(length.item()) if isinstance(length, Tensor) else length


def _check_sinks(s_aux: Tensor | None, heads: int, device: torch.device) -> Tensor | None:
    if s_aux is None:
        return None
    if not isinstance(s_aux, Tensor):
        raise ValueError(f"s_aux must be a tensor [heads]; got {type(s_aux).__name__}")
    if s_aux.dim() != 1 or not s_aux.dtype.is_floating_point:
        raise ValueError(f"s_aux must be [heads], floating point; got {list(s_aux.shape)} {s_aux.dtype}")
    if isinstance(s_aux, DTensor):
        s_aux = _local_sinks(s_aux, heads)
    if s_aux.shape[0] != heads:
        raise ValueError(
            f"s_aux must have one logit per query head; got {s_aux.shape[0]} for {heads} heads. "
            "With sequence or tensor parallel heads, pass this rank's slice"
        )
    if s_aux.device != device:
        raise ValueError(f"s_aux must be on {device} with q; got {s_aux.device}")
    return s_aux


def _local_sinks(s_aux: DTensor, heads: int) -> Tensor:
    """This rank's logits of a DTensor: its shard where the heads are sharded the same way, else the whole vector.

    The whole vector's gradient is taken to be the same on every rank, DTensor's own rule for replicated values.
    """
    if all(isinstance(p, Replicate | Shard) for p in s_aux.placements):
        local = s_aux.to_local()
        if local.shape[0] == heads:
            return local
        if s_aux.shape[0] == heads:
            return s_aux.full_tensor()
    raise ValueError(
        f"s_aux is a DTensor of {s_aux.shape[0]} logits placed {s_aux.placements}; expected its shard or the whole "
        f"of it to match the {heads} heads of q"
    )


def _check_slots(
    sink_kv: tuple[Tensor, Tensor] | None, q: Tensor, k: Tensor, v: Tensor
) -> tuple[Tensor | None, Tensor | None]:
    if sink_kv is None:
        return None, None
    slot_k, slot_v = sink_kv
    for name, slot, like in (("k", slot_k, k), ("v", slot_v, v)):
        if slot.dim() != 3 or slot.shape[1:] != like.shape[-2:] or slot.shape[0] == 0:
            raise ValueError(
                f"sink_kv's {name} must be [slots, {like.shape[-2]}, {like.shape[-1]}] with at least one slot; got "
                f"{list(slot.shape)}"
            )
        if slot.device != q.device or not slot.dtype.is_floating_point:
            raise ValueError(
                f"sink_kv's {name} must be floating point on {q.device}; got {slot.dtype} on {slot.device}"
            )
    if slot_k.shape[0] != slot_v.shape[0]:
        raise ValueError(f"sink_kv's k and v must have as many slots; got {slot_k.shape[0]} and {slot_v.shape[0]}")
    return slot_k, slot_v


_checked: dict[int, tuple[weakref.ref[Tensor], tuple[int, int], int]] = {}
"""Document starts that were looked at: id -> (the tensor, its version and the tokens, the longest document)."""


def _check_cu_seqlens(which: str, cu_seqlens: Tensor, max_seqlen: int, total: int, device: torch.device) -> Tensor:
    name = f"cu_seqlens_{which}"
    if not isinstance(cu_seqlens, Tensor):
        raise ValueError(f"{name} must be an int32 tensor; got {type(cu_seqlens).__name__}")
    if cu_seqlens.dim() != 1 or cu_seqlens.shape[0] < 2 or cu_seqlens.dtype not in (torch.int32, torch.int64):
        raise ValueError(
            f"{name} must be int32 [documents + 1] with at least one document; "
            f"got {cu_seqlens.dtype} {list(cu_seqlens.shape)}"
        )
    if cu_seqlens.device != device:
        raise ValueError(f"{name} must be on {device} with q; got {cu_seqlens.device}")
    if not torch.compiler.is_compiling():
        longest = _longest_document(name, cu_seqlens, total)
        if longest is not None and max_seqlen < longest:
            raise ValueError(
                f"max_seqlen_{which} must be at least the longest document of {name}, {longest}; got {max_seqlen}. "
                "Kernels do not write the rows beyond it"
            )
    return cu_seqlens if cu_seqlens.dtype == torch.int32 else cu_seqlens.to(torch.int32)


def _longest_document(name: str, cu_seqlens: Tensor, total: int) -> int | None:
    """Look at the values, on CUDA once for each tensor: that waits for the device, and every layer gets the same one.

    A CUDA tensor whose memory is refilled behind its back (``.data.copy_``) is not looked at again. None: no values to
    look at now.
    """
    if type(cu_seqlens) is not Tensor or (cu_seqlens.is_cuda and torch.cuda.is_current_stream_capturing()):
        return None  # a fake or functional tensor has no values, and a graph capture must not wait
    remember = cu_seqlens.is_cuda and not cu_seqlens.is_inference()  # an inference tensor has no version
    key = id(cu_seqlens)
    stamp = (cu_seqlens._version, total) if remember else (0, total)
    seen = _checked.get(key) if remember else None
    if seen is not None and seen[0]() is cu_seqlens and seen[1] == stamp:
        return seen[2]
    starts = cu_seqlens.tolist()
    fault = None
    if starts[0] != 0:
        fault = f"start at 0; it starts at {starts[0]}: the tokens before it would never be attended"
    elif starts != sorted(starts):
        i = next(i for i in range(1, len(starts)) if starts[i] < starts[i - 1])
        fault = f"never decrease; got {starts[i - 1]} then {starts[i]} at index {i}"
    elif starts[-1] != total:
        fault = f"end at the number of tokens, {total}; it ends at {starts[-1]}"
    if fault is not None:
        raise ValueError(f"{name} must {fault}")
    longest: int = max(b - a for a, b in itertools.pairwise(starts))
    if remember:
        _checked[key] = (weakref.ref(cu_seqlens, lambda _: _checked.pop(key, None)), stamp, longest)
    return longest
