"""Scenarios run in child processes, each configuration once a session; tests look at what they measured."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

import pytest
from measured import CONTROL, ENCODER, HAS_ENCODER, RIGHT_UNDER_EAGER, RIGHT_UNDER_FLASH, SINGLE, TRANSFORMERS, Results
from packaging.version import Version

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent


@pytest.fixture(scope="session")
def transformers_version() -> Version:
    """Of the transformers that the children see, first on ``PYTHONPATH`` like here."""
    return Version(metadata.version("transformers"))


@pytest.fixture(scope="session")
def run() -> Callable[..., Results]:
    """``run(*names, apply=(), stub=None, after=False, script="scenarios.py")``: what a process of its own measured."""
    return functools.cache(_run)


def _run(
    *names: str,
    apply: tuple[str, ...] = (),
    stub: str | None = None,
    after: bool = False,
    script: str = "scenarios.py",
) -> Results:
    paths = [str(ROOT)]
    command = [sys.executable, str(HERE / script), "--apply", ",".join(apply)]
    if stub is not None:
        paths.insert(0, str(ROOT / "tests" / "stubs" / stub))
        if stub.startswith("fa"):
            command.append("--flash")
    if after:
        command.append("--after")
    inherited = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith("FSDP_SINK_PATCHES")},
        "PYTHONPATH": os.pathsep.join([*inherited, *paths]),
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_VERBOSITY": "error",
        "PYTHONWARNINGS": "ignore",
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run([*command, *names], env=environment, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    results: Results = json.loads(done.stdout.strip().splitlines()[-1])
    return results


@pytest.fixture(scope="session")
def patched(run: Callable[..., Results]) -> Results:
    """Both transformers patches applied before transformers is imported; no flash package, no CUDA, no network."""
    compiled = ("encoder_compiled",) if HAS_ENCODER else ()
    return run(*RIGHT_UNDER_FLASH, *RIGHT_UNDER_EAGER, *SINGLE, *ENCODER, *compiled, apply=TRANSFORMERS)


@pytest.fixture(scope="session")
def control(run: Callable[..., Results]) -> Results:
    """The same without patches: what a user of upstream meets."""
    return run(*CONTROL, *ENCODER)


@pytest.fixture(scope="session")
def after(run: Callable[..., Results]) -> Results:
    """Applied after the model class, and a module that bound the inner function by name, were imported."""
    return run("packed", "packed_fa3", "ulysses", "eager_packed_by_default", "resolved", "sdpa_forced", "restored",
               apply=TRANSFORMERS, after=True)  # fmt: skip
