"""A CPU as verl's accelerator, through verl's own seam: ``VERL_PLATFORM=cpu VERL_USE_EXTERNAL_MODULES=cpu_platform``.

verl 0.9 takes a machine without an accelerator for one with CUDA; older releases see the CPU by themselves.
"""

from __future__ import annotations

import contextlib
from importlib.util import find_spec
from typing import Any

import torch


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


if not hasattr(torch.cpu, "empty_cache"):
    torch.cpu.empty_cache = lambda: None  # verl calls the device module's own, too
if find_spec("verl.plugin") is not None:
    register()
