"""Real verl from its wheel, in an environment that the tests make.

Inside the gate that is the release of `GATE`; inside a cell of ``compat_matrix/cells.toml`` the one that the cell
brings. This package is in it as a user has it: from its wheel, with its entry point. Needs a package index and git.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.version import Version

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
GATE = "cpu-verl0.9.1-transformers5.24"
LAYERS = "import site; site.addsitedir({0!r})\n"


@dataclass(frozen=True)
class VerlEnv:
    """An interpreter with verl, torch, transformers and this package; nothing of the checkout is on its path."""

    python: Path
    version: Version

    def start(self, *command: object, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
        """``python *command`` on the CPU, without a network, and with no settings but those in ``environment``."""
        ours = ("FSDP_SINK_PATCHES", "PYTHON", "VERL_", "RAY_", "VIRTUAL_ENV")
        env = {
            **{name: value for name, value in os.environ.items() if not name.startswith(ours)},
            "HF_HUB_OFFLINE": "1",
            "TRANSFORMERS_VERBOSITY": "error",
            "PYTHONWARNINGS": "ignore",
            "CUDA_VISIBLE_DEVICES": "",
            "OMP_NUM_THREADS": "1",
            "RAY_USAGE_STATS_ENABLED": "0",
            **environment,
        }
        line = [str(self.python), *map(str, command)]
        return subprocess.run(line, cwd=cwd, env=env, capture_output=True, text=True, timeout=280, check=False)

    def measure(self, *command: object, cwd: Path, **environment: str) -> Any:
        """`start`; the JSON of the last line that it printed. Fails with the end of stderr if it did not exit 0."""
        done = self.start(*command, cwd=cwd, **environment)
        assert done.returncode == 0, f"{command} exited {done.returncode}\n{done.stdout[-2000:]}\n{done.stderr[-6000:]}"
        return json.loads(done.stdout.strip().splitlines()[-1])


def make(folder: Path, source: Path) -> VerlEnv:
    """An environment in the empty ``folder``: the running interpreter's packages, and in front of them what the cell
    has and these have not, and this package's wheel, built in the empty folder ``source``.
    """
    _run(sys.executable, "-m", "venv", "--without-pip", folder, cwd=folder)
    python = folder / "bin" / "python"
    scheme = sysconfig.get_preferred_scheme("prefix")
    site = Path(sysconfig.get_path("purelib", scheme, {"base": str(folder), "platbase": str(folder)}))
    (site / "everything_else.pth").write_text(LAYERS.format(sysconfig.get_path("purelib")), encoding="utf-8")
    install = (python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-compile")
    if _version("verl") is None:
        cells = tomllib.loads((ROOT / "compat_matrix" / "cells.toml").read_text(encoding="utf-8"))["cells"]
        wanted = [Requirement(line) for line in cells[GATE]["distributions"]]
        missing = [line for line in wanted if not _met(line)]
        alone = [line for line in missing if line.name in cells[GATE]["no_deps"]]
        _run(*install, *[line for line in missing if line not in alone], cwd=folder)
        _run(*install, "--no-deps", *alone, cwd=folder)
    _run(*install, "--no-deps", "--no-build-isolation", _copy(source), cwd=folder)
    found = _run(python, "-c", "from importlib.metadata import version; print(version('verl'))", cwd=folder)
    return VerlEnv(python, Version(found.strip()))


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _met(line: Requirement) -> bool:
    version = _version(line.name)
    return version is not None and line.specifier.contains(version, prereleases=True)


def _copy(source: Path) -> Path:
    """A copy of what git has of this tree: building in the tree itself leaves files there."""
    command = ("git", "ls-files", "--cached", "--others", "--exclude-standard", "-z")
    for name in _run(*command, cwd=ROOT).split("\0"):
        if name and (ROOT / name).is_file():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, source / name)
    return source


def _run(*command: object, cwd: Path) -> str:
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}
    done = subprocess.run([str(c) for c in command], cwd=cwd, env=clean, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{command} exited {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout
