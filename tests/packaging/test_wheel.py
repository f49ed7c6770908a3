"""The wheel built from the sdist is the checkout: same packages, data files and patches, in a clean environment.

Needs a package index (for the three run-time dependencies) and git.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[2]
# Where each top-level folder lives in the installed package.
MAPPED = {
    "fsdp_sink_patches": "fsdp_sink_patches",
    "patches": "fsdp_sink_patches/patches",
    "compat_matrix": "fsdp_sink_patches/compat_matrix",
}


def run(*command: object, cwd: Path, **env: str) -> str:
    """Run a command away from this checkout and this environment's Python settings; its stdout."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "FSDP_SINK_PATCHES", "VIRTUAL_ENV"))}
    done = subprocess.run([str(c) for c in command], cwd=cwd, env=clean | env, capture_output=True, text=True)
    assert done.returncode == 0, f"{command} exited {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def ids(python: object, cwd: Path, **env: str) -> list[str]:
    report = json.loads(run(python, "-m", "fsdp_sink_patches.check", "--static", "--json", cwd=cwd, **env))
    return [patch["id"] for patch in report["patches"]]


def committed(folder: str) -> set[str]:
    """Files of a top-level folder that git tracks or would track, as posix paths relative to the root."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z", "--", folder]
    listing = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    return {name for name in listing.split("\0") if name and (ROOT / name).is_file()}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    source, dist = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("dist")
    for name in committed("."):
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, source / name)
    # With neither --sdist nor --wheel, build makes the sdist and then the wheel from the unpacked sdist.
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", dist, source, cwd=dist)
    assert len(list(dist.glob("*.tar.gz"))) == 1
    (found,) = dist.glob("*.whl")
    return found


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of a clean environment that holds the wheel and its run-time dependencies, nothing else."""
    env = tmp_path_factory.mktemp("env")
    run(sys.executable, "-m", "venv", env, cwd=env)
    python = env / "bin" / "python"
    pip = (python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check")
    run(*pip, "--constraint", ROOT / "constraints.txt", wheel, cwd=env)
    return python


def test_declared_packages_are_the_packages_of_the_tree() -> None:
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]["packages"]
    tree = {
        str(Path(MAPPED[top], *Path(name).parent.parts[1:])).replace(os.sep, ".")
        for top in MAPPED
        for name in committed(top)
        if Path(name).name == "__init__.py"
    }
    assert len(declared) == len(set(declared))
    assert set(declared) == tree, "[tool.setuptools] packages in pyproject.toml must list every package of the tree"


def test_every_file_is_in_the_wheel(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        shipped = {name for name in archive.namelist() if ".dist-info/" not in name}
    wanted = {MAPPED[top] + name.removeprefix(top) for top in MAPPED for name in committed(top)}
    assert "fsdp_sink_patches/py.typed" in wanted
    assert shipped == wanted, "add the missing file to [tool.setuptools.package-data]"


def test_upstreams_are_never_a_dependency(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (metadata,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        lines = archive.read(metadata).decode().splitlines()
    required = [line.removeprefix("Requires-Dist: ") for line in lines if line.startswith("Requires-Dist: ")]
    runtime = {requirement.split(">")[0] for requirement in required if "extra ==" not in requirement}
    assert runtime == {"wrapt", "packaging", "rich", "tomli"}


def test_installed_patches_are_those_of_the_checkout(installed: Path, tmp_path: Path) -> None:
    here = ids(sys.executable, ROOT)
    assert here
    assert ids(installed, tmp_path) == here


def test_bare_checkout_on_the_path(installed: Path, tmp_path: Path) -> None:
    """Ray ships a working directory to its workers and puts it on sys.path: nothing is built or installed there."""
    probe = "import fsdp_sink_patches as p, fsdp_sink_patches.patches as q; print(p.__file__, q.__file__, sep='\\n')"
    files = run(installed, "-c", probe, cwd=tmp_path, PYTHONPATH=str(ROOT)).split()
    assert files == [str(ROOT / "fsdp_sink_patches" / "__init__.py"), str(ROOT / "patches" / "__init__.py")]
    assert ids(installed, tmp_path, PYTHONPATH=str(ROOT)) == ids(sys.executable, ROOT)


def test_verl_finds_the_plugin(installed: Path, tmp_path: Path) -> None:
    """verl 0.9 loads every entry point of this group at the end of `import verl`."""
    probe = (
        "import json; from importlib.metadata import entry_points\n"
        "import sys; found = entry_points(group='verl.plugins'); [e.load() for e in found]\n"
        "print(json.dumps([[e.name, e.value, 'fsdp_sink_patches.autoload' in sys.modules] for e in found]))"
    )
    plugins: list[Any] = json.loads(run(installed, "-c", probe, cwd=tmp_path))
    assert plugins == [["fsdp_sink_patches", "fsdp_sink_patches._verl_plugin", True]]
