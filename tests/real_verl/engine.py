"""`engine_job` in a `VerlEnv`, and what its findings must be: one function a claim, for every case that makes it."""

from __future__ import annotations

import functools
from importlib import metadata
from pathlib import Path
from typing import Any

from packaging.version import Version
from verl_environment import HERE, VerlEnv

CPU = {
    "PYTHONPATH": str(HERE),
    "VERL_PLATFORM": "cpu",
    "VERL_USE_EXTERNAL_MODULES": "cpu_platform",
    "VERL_USE_EXTERNAL_PLUGINS": "none",  # the job itself applies the patches, or does not
}
TRANSFORMERS = Version(metadata.version("transformers"))  # the environment's, too
SINCE = {"deepseek_v4": "5.8.1", "mimo_v2_flash": "5.13"}
LISTS_IN_FP32 = {"deepseek_v4": "5.8.1", "mimo_v2_flash": "5.24", "ernie4_5_moe": "4.57"}
"""The first release whose model has parameters on its list."""

Found = dict[str, list[dict[str, Any]]]


def known(models: dict[str, str] | tuple[str, ...]) -> list[str]:
    """Those of ``models`` that this transformers has; of a dict, those from the given release on."""
    since = models if isinstance(models, dict) else {model: SINCE.get(model, "0") for model in models}
    return [model for model, first in since.items() if Version(first) <= TRANSFORMERS]


class Engine:
    """Runs sets of cases, each set once a session: ``found[case][rank]``."""

    def __init__(self, env: VerlEnv, folder: Path) -> None:
        self._env, self._folder = env, folder

    @functools.lru_cache  # noqa: B019 (one for the session)
    def run(self, ranks: int, *cases: str, apply: str, disable: str = "") -> list[Found]:
        """What `engine_job` found: one result, or with ``apply="twice"`` that of upstream and the patched one."""
        command = (HERE / "engine_job.py", ranks, *cases, "--apply", apply)
        settings = CPU | {"FSDP_SINK_PATCHES_DISABLE": disable}
        found: list[Found] = self._env.measure(*command, cwd=self._folder, **settings)
        return found


def assert_equal_to_alone(found: list[dict[str, Any]]) -> None:
    """fp32 throughout: what is off here is wrong, not rounded."""
    for rank in found:
        assert "raises" not in rank, rank["raises"]
        assert rank["mean"] < 1e-5
        assert rank["max"] < 1e-4
        assert rank["gradients"] < 1e-4
        assert rank["dsinks"] < 1e-4
        assert rank["without gradient"] == []
        assert rank["buffers off"] == {}
        assert rank["names"]


def assert_wrong(found: list[dict[str, Any]]) -> None:
    for rank in found:
        assert "raises" not in rank, rank["raises"]
        assert rank["mean"] > 0.1
        assert rank["gradients"] > 0.5


def assert_fp32_where_listed(found: list[dict[str, Any]], *, listed: bool) -> None:
    """``model_dtype=bf16``: what the list names is fp32 where it is read and where it is stored; nothing else."""
    for rank in found:
        assert "raises" not in rank, rank["raises"]
        assert bool(rank["listed"]) == listed
        assert rank["fp32 in the forward"] == rank["stored"] == rank["listed"]
        assert set(rank["listed"]) <= set(rank["as in the checkpoint"])
        assert rank["buffers off"] == {}
        assert rank["buffers"] > 0
        assert rank["mean"] < 0.06  # what bf16 weights cost these models
        assert rank["names"]
        assert rank["clipped"]["norm"] < 1e-2
        assert rank["clipped"]["still"] == 0


def assert_rounded(found: list[dict[str, Any]]) -> None:
    """Upstream: nothing is fp32, and what was fp32 in the checkpoint holds other values."""
    for rank in found:
        if "raises" in rank:  # transformers 4.57: a router that multiplies fp32 by its own weight
            assert "expected m1 and m2 to have the same dtype" in rank["raises"]
            continue
        assert rank["listed"]
        assert rank["fp32 in the forward"] == rank["stored"] == []
        assert not set(rank["listed"]) <= set(rank["as in the checkpoint"])
