"""A CPU as verl's accelerator, through verl's own seam: ``VERL_PLATFORM=cpu VERL_USE_EXTERNAL_MODULES=cpu_platform``.

verl 0.9 takes a machine without an accelerator for one with CUDA; older releases see the CPU by themselves.
"""

from __future__ import annotations

import contextlib
import functools
from importlib.util import find_spec
from typing import Any

import torch
import torch.distributed


def register() -> None:
    from verl.plugin.platform.platform_base import PlatformBase
    from verl.plugin.platform.platform_manager import PlatformRegistry

    class CPU(PlatformBase):
        device_name = vendor_name = "cpu"
        device_module = torch.cpu

        def is_available(self) -> bool:
            return True

        def is_platform_available(self, use_smi_check: bool = False) -> bool:
            return True

        def current_device(self) -> Any:
            return "cpu"

        def device_count(self) -> int:
            return 1

        def set_device(self, device_index: int) -> None:
            pass

        def synchronize(self, device_index: int | None = None) -> None:
            pass

        def manual_seed(self, seed: int) -> None:
            torch.manual_seed(seed)

        def manual_seed_all(self, seed: int) -> None:
            torch.manual_seed(seed)

        def set_allocator_settings(self, settings: str) -> None:
            pass

        def empty_cache(self) -> None:
            pass

        def get_device_capability(self, device_index: int = 0) -> tuple[int | None, int | None]:
            return None, None

        def communication_backend_name(self) -> str:
            return "gloo"

        def visible_devices_envvar(self) -> str:
            return "CPU_VISIBLE_DEVICES"

        def nvtx_range(self, msg: str) -> Any:
            return contextlib.nullcontext()

        def profiler_start(self) -> None:
            pass

        def profiler_stop(self) -> None:
            pass

        def ray_resource_name(self) -> str:
            return "CPU"

        def ray_noset_envvars(self) -> list[str]:
            return []

        def is_ipc_supported(self) -> bool:
            return False

        def cudart(self) -> Any:
            return None

    PlatformRegistry.register(platform="cpu")(CPU)


def one_backend() -> None:
    """verl asks for ``cpu:gloo,{device}:{backend}``, which names the CPU twice here."""
    original = torch.distributed.init_process_group

    @functools.wraps(original)
    def init_process_group(backend: str | None = None, *a: Any, **k: Any) -> Any:
        return original("gloo" if backend == "cpu:gloo,cpu:gloo" else backend, *a, **k)

    torch.distributed.init_process_group = init_process_group


one_backend()
# What verl asks the device module for and torch.cpu lacks: a CPU keeps no cache and no count of its own.
for _name in ("memory_allocated", "memory_reserved", "max_memory_allocated", "max_memory_reserved"):
    setattr(torch.cpu, _name, lambda *a, **k: 0)
for _name in ("empty_cache", "reset_peak_memory_stats", "ipc_collect"):
    setattr(torch.cpu, _name, lambda *a, **k: None)
if find_spec("verl.plugin") is not None:
    register()
