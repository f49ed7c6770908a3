"""The environment itself: real verl, this package by its wheel, and a CPU platform."""

from __future__ import annotations

from pathlib import Path

from verl_environment import HERE, ROOT, VerlEnv

PROGRAM = """
import json, verl, fsdp_sink_patches
from verl.utils.device import get_device_name
print(json.dumps([verl.__file__, fsdp_sink_patches.__file__, get_device_name()]))
"""


def test_real_verl_and_our_wheel(verl_env: VerlEnv, tmp_path: Path) -> None:
    cpu = {"PYTHONPATH": str(HERE), "VERL_PLATFORM": "cpu", "VERL_USE_EXTERNAL_MODULES": "cpu_platform"}
    verl, ours, device = verl_env.measure("-c", PROGRAM, cwd=tmp_path, **cpu)
    assert ROOT not in Path(verl).parents
    assert ROOT not in Path(ours).parents
    assert device == "cpu"
