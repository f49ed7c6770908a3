"""``flash_attn.flash_attn_*_func(..., s_aux=...)``: attention sinks for code that calls the package directly.

What breaks for the user: flash-attn 2 has no sink argument, so a trainer that calls ``flash_attn_varlen_func`` itself
gets a TypeError, or drops the sink to get on. Rescaling the output by hand gives wrong gradients without a word,
because flash-attn's backward ignores the gradient of its log-sum-exp.

With the patch the six training functions take two more keywords, ``s_aux`` (one logit per query head) and ``sink_kv``
(sink slots), and run :mod:`fsdp_sink_patches.ops.sink_attention` when either is given. Without them the original runs
untouched. Only flash-attn 2 is meant: flash-attn-4 installs ``flash_attn.cute`` under the same top-level name, has its
own ``learnable_sink``, and is another distribution.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fsdp_sink_patches import Measurement, Patch, Target

if TYPE_CHECKING:
    from collections.abc import Callable


def _run(ours: str, original: Callable[..., Any], a: tuple[Any, ...], k: dict[str, Any]) -> Any:
    s_aux, sink_kv = k.pop("s_aux", None), k.pop("sink_kv", None)
    if s_aux is None and sink_kv is None:
        return original(*a, **k)
    from fsdp_sink_patches.ops import sink_attention

    return getattr(sink_attention, ours)(*a, **k, s_aux=s_aux, sink_kv=sink_kv)


def flash_attn_func(original: Callable[..., Any], *a: Any, **k: Any) -> Any:
    """``q, k, v``: [batch, seqlen, heads or kv_heads, head_dim]."""
    return _run("flash_attn_func", original, a, k)


def flash_attn_varlen_func(original: Callable[..., Any], *a: Any, **k: Any) -> Any:
    """``q, k, v``: [total, heads or kv_heads, head_dim] with ``cu_seqlens``."""
    return _run("flash_attn_varlen_func", original, a, k)


def flash_attn_qkvpacked_func(original: Callable[..., Any], *a: Any, **k: Any) -> Any:
    """``qkv``: [batch, seqlen, 3, heads, head_dim]."""
    return _run("flash_attn_qkvpacked_func", original, a, k)


def flash_attn_varlen_qkvpacked_func(original: Callable[..., Any], *a: Any, **k: Any) -> Any:
    """``qkv``: [total, 3, heads, head_dim] with ``cu_seqlens``."""
    return _run("flash_attn_varlen_qkvpacked_func", original, a, k)


def flash_attn_kvpacked_func(original: Callable[..., Any], q: Any, kv: Any, *a: Any, **k: Any) -> Any:
    """``kv``: [batch, seqlen, 2, kv_heads, head_dim]."""
    if k.get("s_aux") is None and k.get("sink_kv") is None:
        return _run("", original, (q, kv, *a), k)
    return _run("flash_attn_func", original, (q, *kv.unbind(2), *a), k)


def flash_attn_varlen_kvpacked_func(original: Callable[..., Any], q: Any, kv: Any, *a: Any, **k: Any) -> Any:
    """``kv``: [total, 2, kv_heads, head_dim] with ``cu_seqlens``."""
    if k.get("s_aux") is None and k.get("sink_kv") is None:
        return _run("", original, (q, kv, *a), k)
    return _run("flash_attn_varlen_func", original, (q, *kv.unbind(1), *a), k)


PATCH = Patch(
    id="flash-attn.varlen-sinks",
    gives="s_aux= in flash-attn 2 functions",
    distribution="flash-attn",
    requires=">=2.7.4.post1,<3",
    fixed_in=None,
    link="https://github.com/Dao-AILab/flash-attention/pull/1819",
    remove_when="flash-attn 2 takes s_aux in its forward and returns its gradient",
    targets=(
        Target("flash_attn.flash_attn_interface:flash_attn_func", flash_attn_func),
        Target("flash_attn.flash_attn_interface:flash_attn_varlen_func", flash_attn_varlen_func),
        Target("flash_attn.flash_attn_interface:flash_attn_qkvpacked_func", flash_attn_qkvpacked_func),
        Target("flash_attn.flash_attn_interface:flash_attn_varlen_qkvpacked_func", flash_attn_varlen_qkvpacked_func),
        Target("flash_attn.flash_attn_interface:flash_attn_kvpacked_func", flash_attn_kvpacked_func),
        Target("flash_attn.flash_attn_interface:flash_attn_varlen_kvpacked_func", flash_attn_varlen_kvpacked_func),
    ),
    relies_on=(
        "flash_attn.flash_attn_interface:_flash_attn_forward",
        "flash_attn.flash_attn_interface:_flash_attn_backward",
        "flash_attn.flash_attn_interface:_flash_attn_varlen_forward",
        "flash_attn.flash_attn_interface:_flash_attn_varlen_backward",
    ),
)


def validate(device: str) -> Measurement:
    """flash-attn's own functions with a sink against the fp64 oracle; needs flash-attn 2 and a CUDA device."""
    from . import _validation

    return _validation.varlen_sinks(device)
