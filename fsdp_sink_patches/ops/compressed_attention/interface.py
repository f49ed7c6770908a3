"""The public call."""

from __future__ import annotations

import math
from typing import Literal, overload

import torch
from torch import Tensor

from fsdp_sink_patches.ops.compressed_attention import _op

_INTEGERS = (torch.int32, torch.int64)
_SMALLEST_SCALE = 2.0**-15
"""Of fp16: a gradient of keys adds ``P / softmax_scale``, which must stay below fp16's largest number, 65504."""


@overload
def compressed_attention(
    q: Tensor, kv: Tensor, compressed_kv: Tensor, sinks: Tensor, *, window_starts: Tensor,
    entry_ranges: Tensor | None = None, topk_indices: Tensor | None = None, softmax_scale: float | None = None,
    deterministic: bool = False, return_lse: Literal[False] = False,
) -> Tensor: ...  # fmt: skip
@overload
def compressed_attention(
    q: Tensor, kv: Tensor, compressed_kv: Tensor, sinks: Tensor, *, window_starts: Tensor,
    entry_ranges: Tensor | None = None, topk_indices: Tensor | None = None, softmax_scale: float | None = None,
    deterministic: bool = False, return_lse: Literal[True],
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
def compressed_attention(
    q: Tensor,
    kv: Tensor,
    compressed_kv: Tensor,
    sinks: Tensor,
    *,
    window_starts: Tensor,
    entry_ranges: Tensor | None = None,
    topk_indices: Tensor | None = None,
    softmax_scale: float | None = None,
    deterministic: bool = False,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """DeepSeek-V4's attention (arXiv 2606.19348, 2.3): a sliding window, compressed entries and a sink per head.

    Token ``t`` sees the keys ``window_starts[t] ... t``, then either the entries ``entry_ranges[t, 0] ...
    entry_ranges[t, 1] - 1`` (HCA) or the entries ``topk_indices[t]`` (CSA), all in one softmax with one more logit, the
    head's sink. Keys are values: one tensor, one head, shared by all query heads. Rows of a batch and packed documents
    lie one behind the other along ``tokens``; :func:`fsdp_sink_patches.ops.compressed_layout.window_starts` and
    ``compressed_layout`` say who sees what.

    On CUDA in bf16 and fp16 Triton kernels run, forward and backward, with memory ``O(tokens)``; elsewhere plain torch
    in chunks of tokens. Sums are fp32 (fp64 for fp64).

    Args:
        q: ``[tokens, heads, head_dim]``, floating point; the kernels take a head_dim of up to 512.
        kv: ``[tokens, head_dim]``, q's dtype.
        compressed_kv: ``[entries, head_dim]``, q's dtype; may be empty.
        sinks: ``[heads]``, floating point.
        window_starts: int32 or int64 ``[tokens]``, the first key of each token's window, at most the token itself.
        entry_ranges: int32 or int64 ``[tokens, 2]``, or None.
        topk_indices: int32 or int64 ``[tokens, k]``, -1 for none, no entry twice in a row; or None.
        softmax_scale: factor of the scores, above 0, for fp16 at least 2 ** -15; ``head_dim ** -0.5`` if None.
        deterministic: the gradients have the same bits in every run. Only those of picked entries need it: by default
            they are added atomically in fp32, and so they are where ``torch.use_deterministic_algorithms`` is off.
        return_lse: also return the log-sum-exp, sink included, ``[heads, tokens]`` in fp32 (fp64 for fp64), without a
            gradient.

    Returns:
        ``[tokens, heads, head_dim]`` in q's dtype, contiguous. Gradients flow to ``q``, ``kv``, ``compressed_kv`` and
        ``sinks``.

    Raises:
        ValueError: a shape, dtype, device or ``softmax_scale`` does not fit, or both ``entry_ranges`` and
            ``topk_indices`` are given. The numbers in them are not looked at, which would wait for the device: an index
            outside is undefined.
    """
    _check(q, kv, compressed_kv, sinks, window_starts, entry_ranges, topk_indices)
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else float(softmax_scale)
    smallest = _SMALLEST_SCALE if q.dtype == torch.float16 else 0.0
    if not smallest <= scale < math.inf or scale == 0:
        raise ValueError(
            f"compressed_attention: found softmax_scale {scale} for {q.dtype}; expected a finite one above 0, for "
            "fp16 at least 2 ** -15. Scale q instead."
        )
    out, lse = _op.compressed_attention(
        q, kv, compressed_kv, sinks, window_starts, entry_ranges, topk_indices, scale, deterministic
    )
    return (out, lse.t()) if return_lse else out


def _check(
    q: Tensor,
    kv: Tensor,
    compressed_kv: Tensor,
    sinks: Tensor,
    window_starts: Tensor,
    entry_ranges: Tensor | None,
    topk_indices: Tensor | None,
) -> None:
    def refuse(name: str, x: Tensor, expected: str) -> None:
        raise ValueError(
            f"compressed_attention: found {name} of shape {tuple(x.shape)}, {x.dtype} on {x.device}; "
            f"expected {expected}."
        )

    if q.dim() != 3 or not q.is_floating_point():
        refuse("q", q, "floating point [tokens, heads, head_dim]; flatten rows of a batch into tokens")
    tokens, heads, dim = q.shape
    if kv.shape != (tokens, dim) or kv.dtype != q.dtype:
        refuse("kv", kv, f"{q.dtype} [{tokens}, {dim}], as q has")
    if compressed_kv.dim() != 2 or compressed_kv.shape[1] != dim or compressed_kv.dtype != q.dtype:
        refuse("compressed_kv", compressed_kv, f"{q.dtype} [entries, {dim}], as q has; 0 entries for none")
    if sinks.shape != (heads,) or not sinks.is_floating_point():
        refuse("sinks", sinks, f"floating point [{heads}], one for each head of q")
    if window_starts.shape != (tokens,) or window_starts.dtype not in _INTEGERS:
        refuse("window_starts", window_starts, f"int32 or int64 [{tokens}], the first key of each token's window")
    if entry_ranges is not None and topk_indices is not None:
        raise ValueError(
            "compressed_attention: found entry_ranges and topk_indices; expected one of them. Give entry_ranges for "
            "heavily compressed attention, topk_indices for sparse."
        )
    if entry_ranges is not None and (entry_ranges.shape != (tokens, 2) or entry_ranges.dtype not in _INTEGERS):
        refuse("entry_ranges", entry_ranges, f"int32 or int64 [{tokens}, 2], first and one past the last entry")
    if topk_indices is not None and (
        topk_indices.dim() != 2 or topk_indices.shape[0] != tokens or topk_indices.dtype not in _INTEGERS
    ):
        refuse("topk_indices", topk_indices, f"int32 or int64 [{tokens}, k], -1 for none")
    for name, x in (
        ("kv", kv), ("compressed_kv", compressed_kv), ("sinks", sinks), ("window_starts", window_starts),
        ("entry_ranges", entry_ranges), ("topk_indices", topk_indices),
    ):  # fmt: skip
        if x is not None and x.device != q.device:
            refuse(name, x, f"a tensor on {q.device}, where q is")
