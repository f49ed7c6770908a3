"""The one source of rotary frequencies: fp32, on the CPU, outside every module.

A module's buffers are at the mercy of whatever walks over a model: casts, ``to_empty``, FSDP's ``buffer_dtype``,
broadcasts. What is kept here is reached by none of them, and only copies of it are handed out.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Hashable, Mapping
from weakref import WeakValueDictionary

import torch
from torch import Tensor


class Frequencies:
    """Tensors by name (``"inv_freq"``, ``"main_inv_freq"`` ...) that no caller can change.

    Args:
        tensors: plain tensors on a real device, any shape, in fp32 (radians per position). They are copied.

    Raises:
        ValueError: a tensor is on the meta device, fake, or not fp32: there would be no truth to keep.
    """

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        for name, tensor in tensors.items():
            if not is_real(tensor) or tensor.dtype != torch.float32:
                raise ValueError(
                    f"{name}: found a {type(tensor).__name__} of {tensor.dtype} on {tensor.device}; expected a plain "
                    "fp32 tensor with values. Compute the frequencies on the CPU, outside any default dtype."
                )
        self._tensors = {name: copied(tensor, torch.device("cpu")) for name, tensor in tensors.items()}

    def copies(self, device: torch.device | str = "cpu") -> dict[str, Tensor]:
        """Fresh fp32 copies on ``device``, by name. Raises ValueError for the meta device."""
        if torch.device(device).type == "meta":
            raise ValueError("found the meta device; frequencies are copied to a device that holds values.")
        return {name: copied(tensor, torch.device(device)) for name, tensor in self._tensors.items()}


def frequencies(key: Hashable, compute: Callable[[], Mapping[str, Tensor]]) -> Frequencies:
    """The frequencies of ``key``, computed by the first who asks and shared while anyone holds them.

    Args:
        key: everything that ``compute`` depends on.
        compute: returns the tensors of :class:`Frequencies`. It runs for the CPU in fp32, whatever the caller's default
            device and dtype, with the caller's random state left as it was, and must return the same for one key: two
            threads that ask at once may both run it, and one result is kept.
    """
    with _lock:
        found = _known.get(key)
    if found is None:
        computed = Frequencies(_in_fp32_on_cpu(compute))
        with _lock:
            found = _known.setdefault(key, computed)
    return found


def is_real(value: object) -> bool:
    """A plain tensor with values: not on meta, and no fake, distributed or other subclass."""
    return type(value) is Tensor and value.device.type != "meta"


def copied(tensor: Tensor, device: torch.device, dtype: torch.dtype = torch.float32) -> Tensor:
    """A tensor of its own memory, with no history, that may be trained with even if made in inference mode."""
    with torch.inference_mode(False), torch.no_grad():
        return tensor.detach().to(device=device, dtype=dtype, copy=True)


def _in_fp32_on_cpu(compute: Callable[[], Mapping[str, Tensor]]) -> Mapping[str, Tensor]:
    default = torch.get_default_dtype()
    with torch.device("cpu"), torch.inference_mode(False), torch.no_grad(), torch.random.fork_rng(devices=()):
        torch.set_default_dtype(torch.float32)
        try:
            return compute()
        finally:
            torch.set_default_dtype(default)


_known: WeakValueDictionary[Hashable, Frequencies] = WeakValueDictionary()
_lock = threading.Lock()


def _after_fork() -> None:
    # A thread that held the lock does not exist in the child, so it would never be released.
    global _lock
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_after_fork)
