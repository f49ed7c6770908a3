"""``make nightly``: the behaviour tests on every CPU cell of ``compat_matrix/cells.toml``.

    python tests/cells.py [CELL ...] [-- pytest arguments]

Each cell gets a throwaway environment with its own upstream releases in front of everything this one has. A cell whose
Python is not this one runs on this one, and says so. Exit 1 if any cell failed.
"""

from __future__ import annotations

import platform
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parent.parent


# Run by each environment's own Python; prints the requirements it does not meet.
UNMET = """
import sys
from importlib.metadata import PackageNotFoundError, version
from packaging.requirements import Requirement
for text in sys.argv[1:]:
    wanted = Requirement(text)
    try:
        met = wanted.specifier.contains(version(wanted.name), prereleases=True)
    except PackageNotFoundError:
        met = False
    if not met:
        print(text)
"""


def unmet(python: Path, requirements: list[str]) -> list[str]:
    command = [python, "-c", UNMET, *requirements]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()


def run_cell(name: str, cell: dict[str, Any], pytest_args: list[str]) -> bool:
    """Make the cell's environment, run the tests in it; whether they passed."""
    print(f"\n=== {name}: {', '.join(cell['distributions'])}", flush=True)
    if not platform.python_version().startswith(cell["python"] + "."):
        print(f"    the cell says Python {cell['python']}; this is {platform.python_version()}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        python = Path(folder) / "bin" / "python"
        here = sysconfig.get_path("purelib")
        site = subprocess.run(
            [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
            check=True, capture_output=True, text=True,
        ).stdout.strip()  # fmt: skip
        # Everything else (torch, pytest, this package) comes from the environment that runs this script.
        (Path(site) / "everything_else.pth").write_text(f"import site; site.addsitedir({here!r})\n")
        missing = unmet(python, cell["distributions"])
        # Some pin older releases of what the cell is about (verl: transformers<5.11), so they come without their own.
        alone = [line for line in missing if Requirement(line).name in cell.get("no_deps", [])]
        for lines, options in (([line for line in missing if line not in alone], []), (alone, ["--no-deps"])):
            if lines:
                subprocess.run([python, "-m", "pip", "install", "--quiet", *options, *lines], check=True)
        if missing := unmet(python, cell["distributions"]):
            print(f"    still not there after pip install: {', '.join(missing)}")
            return False
        tests = cell.get("tests", ["tests/behaviour"])
        return subprocess.run([python, "-m", "pytest", *tests, *pytest_args], cwd=ROOT).returncode == 0


def main(arguments: list[str]) -> int:
    split = arguments.index("--") if "--" in arguments else len(arguments)
    asked, pytest_args = arguments[:split], arguments[split + 1 :]
    cells = tomllib.loads((ROOT / "compat_matrix" / "cells.toml").read_text(encoding="utf-8"))["cells"]
    known = [name for name, cell in cells.items() if not cell["gpu"]]
    unknown = sorted(set(asked) - set(known))
    if unknown:
        print(f"no CPU cell is called {', '.join(unknown)}; these are: {', '.join(known)}", file=sys.stderr)
        return 2
    outcome = {name: run_cell(name, cells[name], pytest_args) for name in asked or known}
    print("\n" + "\n".join(f"{name}: {'passed' if passed else 'FAILED'}" for name, passed in outcome.items()))
    return 0 if all(outcome.values()) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
