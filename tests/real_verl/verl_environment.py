"""Real verl from its wheel, in an environment that the tests make.

Inside the gate that is the release of `GATE`; inside a cell of ``compat_matrix/cells.toml`` the one that the cell
brings. This package is in it as a user has it: from its wheel, with its entry point. Needs a package index and git.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
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
        # A session of its own, so that what a hanging job has started ends with it.
        with subprocess.Popen(
            line, cwd=cwd, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
        ) as process:
            try:
                out, errors = process.communicate(timeout=280)
            except BaseException:
                os.killpg(process.pid, signal.SIGKILL)
                raise
        return subprocess.CompletedProcess(line, process.returncode, out, errors)

    def measure(self, *command: object, cwd: Path, **environment: str) -> Any:
        """`start`; the JSON of the last line that it printed. Fails with the end of stderr if it did not exit 0."""
        done = self.start(*command, cwd=cwd, **environment)
        assert done.returncode == 0, f"{command} exited {done.returncode}\n{done.stdout[-2000:]}\n{done.stderr[-6000:]}"
        return json.loads(done.stdout.strip().splitlines()[-1])


def make(folder: Path, source: Path) -> VerlEnv:
    """An environment in the empty ``folder``: the running interpreter's packages, and in front of them what the cell
    has and these have not, and this package's wheel, built in the empty folder ``source``.
    """
    python = _layer(folder, Path(sys.executable))
    if _version(Path(sys.executable), "verl") is None:
        cell = tomllib.loads((ROOT / "compat_matrix" / "cells.toml").read_text(encoding="utf-8"))["cells"][GATE]
        missing = [line for line in map(Requirement, cell["distributions"]) if not _met(line)]
        alone = [line for line in missing if line.name in cell["no_deps"]]
        _install(python, *[line for line in missing if line not in alone])
        _install(python, "--no-deps", *alone)
    _install(python, "--no-deps", "--no-build-isolation", _copy(source))
    return VerlEnv(python, Version(_version(python, "verl") or ""))


def extend(env: VerlEnv, folder: Path, *requirements: str) -> VerlEnv:
    """``env`` with other releases in front of its own, in the empty ``folder``."""
    python = _layer(folder, env.python)
    _install(python, *requirements)
    return VerlEnv(python, Version(_version(python, "verl") or ""))


def _layer(folder: Path, below: Path) -> Path:
    """The Python of a new environment that sees the packages of ``below`` behind its own."""
    _run(sys.executable, "-m", "venv", "--without-pip", folder, cwd=folder)
    python = folder / "bin" / "python"
    where = "import sysconfig; print(sysconfig.get_path('purelib'))"
    site, packages = (_run(each, "-c", where, cwd=folder).strip() for each in (python, below))
    (Path(site) / "everything_else.pth").write_text(f"import site; site.addsitedir({packages!r})\n", encoding="utf-8")
    return python


def _install(python: Path, *arguments: object) -> None:
    command = (python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-compile")
    _run(*command, *arguments, cwd=python.parent)


def _version(python: Path, name: str) -> str | None:
    program = "import sys\nfrom importlib.metadata import distributions\n"
    program += "print(next((d.version for d in distributions(name=sys.argv[1])), ''))"
    return _run(python, "-c", program, name, cwd=python.parent).strip() or None


def _met(line: Requirement) -> bool:
    try:
        return line.specifier.contains(metadata.version(line.name), prereleases=True)
    except metadata.PackageNotFoundError:
        return False


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
