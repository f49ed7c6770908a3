"""Cos and sin tables: exact, and computed once for all who turn by the same positions.

A model asks for the same few tables again and again (DeepSeek-V4-Flash 85 times a forward, for 4 distinct ones). What
is computed from a tensor of positions is remembered *by that tensor*: whoever comes with the same tensor object,
unchanged, and the same frequencies gets the same tables, a recompute under activation checkpointing too. They die
with the tensor, so how long they stay is up to whoever made it: positions made in a forward release them with it,
positions that a data loader holds keep them as long as it does (``8 * half`` bytes a token and label: 8 MiB for 32768
tokens at 32 pairs).

Unchanged means that autograd's counter of in-place changes stands where it stood. It does not see a change made
through ``.data``, through NumPy memory that the tensor shares, by a collective that receives into it, or by a
replayed CUDA graph: positions that are refilled so need ``torch.autograd.graph.increment_version(positions)``, or a
fresh tensor.

Nothing is remembered where that could outlive its meaning: under ``torch.compile``, tracing, fake tensors, dispatch
modes, inference mode (its tensors have no counter) and CUDA graph capture. The tables are computed at each call
there.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Hashable
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

CosSin: TypeAlias = tuple[Tensor, Tensor]


def cos_sin(positions: Tensor, inv_freq: Tensor, *, scaling: float = 1.0, dtype: torch.dtype = torch.float32) -> CosSin:
    """The tables of these positions: ``cos(p * inv_freq) * scaling`` and ``sin`` alike.

    The angle is an elementwise fp32 product, exact to half an ulp of the angle. Written as a matrix product, as
    transformers does before 5.19, TF32 may round it (https://github.com/huggingface/transformers/issues/48428).

    Args:
        positions: ``[batch, tokens]``, integers.
        inv_freq: ``[half]``, radians a position; used in fp32.
        scaling: yarn's attention factor.
        dtype: of the result; the computation is fp32 whatever it is.

    Returns:
        Two tensors ``[batch, tokens, half]`` that carry no gradient.
    """
    with torch.no_grad():
        angles = positions[..., None].float() * inv_freq.to(device=positions.device, dtype=torch.float32)
        return (angles.cos() * scaling).to(dtype), (angles.sin() * scaling).to(dtype)


def remembered(positions: Tensor, key: Hashable, compute: Callable[[], CosSin]) -> CosSin:
    """``compute()``, once for each ``key`` as long as ``positions`` lives unchanged.

    Args:
        positions: the tensor that the tables are computed from.
        key: everything else that they depend on. The current CUDA stream is added to it: another stream would read
            tables that this one may not have written yet.
        compute: called without gradients, while every other thread that asks for tables waits.
    """
    if not _rememberable(positions):
        return computed(compute)
    if positions.is_cuda:
        key = (key, torch.cuda.current_stream(positions.device).cuda_stream)
    with _memory.lock:
        version, tables = _memory.tables.get(positions, (None, None))
        if version != positions._version or tables is None:
            tables = {}
            _memory.tables[positions] = (positions._version, tables)
        if key not in tables:
            tables[key] = computed(compute)
        found: CosSin = tables[key]
        return found


def computed(compute: Callable[[], CosSin]) -> CosSin:
    """``compute()`` without gradients, counted and not remembered."""
    count()
    with torch.no_grad():
        return compute()


def count() -> None:
    """Add one to :func:`computations`; not in a compiled graph, which has no Python to count in."""
    if not torch.compiler.is_compiling():
        with _memory.lock:
            _memory.computations += 1


def fingerprint(inv_freq: Tensor) -> bytes | None:
    """What the frequencies are, to the bit, for the key of :func:`remembered`; None if that can't be known here.

    Modules hold frequencies of their own (63 in DeepSeek-V4-Flash) and share tables only if these are equal. They are
    read once for each tensor and change of it, which costs a wait for the device each time.
    """
    if not _rememberable(inv_freq):
        return None
    with _memory.lock:
        # FSDP1's buffer_dtype puts other memory under the same tensor, unseen by the counter.
        now = (inv_freq._version, inv_freq.data_ptr(), inv_freq.dtype)
        seen, digest = _memory.fingerprints.get(inv_freq, (None, b""))
        if seen != now:
            digest = inv_freq.detach().to(device="cpu", dtype=torch.float32).numpy().tobytes()
            _memory.fingerprints[inv_freq] = (now, digest)
        found: bytes = digest
        return found


def computations() -> int:
    """How many pairs of tables were computed since the process started, or since :func:`reset`; see
    :mod:`fsdp_sink_patches.monitor`."""
    return _memory.computations


def reset() -> None:
    """Count from zero. What is remembered stays."""
    with _memory.lock:
        _memory.computations = 0


class _Memory:
    def __init__(self) -> None:
        # Reentrant: collecting garbage while it is held may end a tensor, and with it an entry.
        self.lock = threading.RLock()
        self.tables: Any = WeakTensorKeyDictionary()
        self.fingerprints: Any = WeakTensorKeyDictionary()
        self.computations = 0


_memory = _Memory()


def _new_lock() -> None:
    _memory.lock = threading.RLock()


if hasattr(os, "register_at_fork"):
    # A thread of the parent may hold it at the fork, and no thread of the child would ever release it.
    os.register_at_fork(after_in_child=_new_lock)


def _rememberable(tensor: Tensor) -> bool:
    return (
        not torch.compiler.is_compiling()
        and type(tensor) is Tensor
        and not torch.is_inference_mode_enabled()
        and not tensor.is_inference()
        and not tensor.is_meta
        and torch._C._len_torch_dispatch_stack() == 0
        and torch._C._get_tracing_state() is None
        and not torch._C._functorch.is_functorch_wrapped_tensor(tensor)
        and not (tensor.is_cuda and torch.cuda.is_current_stream_capturing())
    )
