"""A bare checkout whose patches are planted ones, their upstream beside it, and a torch that is what a test says.

Everything runs as a user runs it: ``python -m fsdp_sink_patches.check`` in a process of its own.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import jsonschema

import fsdp_sink_patches
from fsdp_sink_patches._fingerprint import digest

ROOT = Path(fsdp_sink_patches.__file__).resolve().parent.parent
SCHEMAS = ROOT / "compat_matrix" / "schema"

PATCH = """
'''What breaks: planted.f is a thousand short.'''
from fsdp_sink_patches import Measurement, Patch, Target
def replacement(original, *args, **kwargs):
    return original(*args, **kwargs) + 1000
PATCH = Patch(
    id="planted.{slug}", gives="a thousand more", distribution="planted", requires=">=1,<3", fixed_in=None,
    link="https://example.org/1", remove_when="planted.f adds it", relies_on=("planted:helper", "planted:later?"),
    targets=(Target("planted:{name}", replacement),),
)
def validate(device):
    from . import _helper
    return Measurement(**_helper.measure(device))
"""
HELPER = """
def measure(device):
    import planted
    out = abs(planted.f(1) - 1001) / 1001
    return dict(errors={"out": out}, limits={"out": 1e-6}, time_ms=1.5, peak_bytes=2**21, details={"on": device})
"""
UPSTREAM = "def f(x):\n    return x\ndef g(x):\n    return x\ndef helper(x):\n    return x\n"
BROKEN_TORCH = "raise ImportError('libplanted.so: cannot open')"
CUDA_TORCH = """
    __version__ = "2.11.0+cu130"
    class version:
        cuda = "13.0"
    class cuda:
        is_available = staticmethod(lambda: True)
        device_count = staticmethod(lambda: 1)
        get_device_name = staticmethod(lambda: "NVIDIA H200")
        get_device_capability = staticmethod(lambda: (9, 0))
        class get_device_properties:
            name, major, minor = "NVIDIA H200", 9, 0
            def __init__(self, index): pass
"""


class Checkout:
    def __init__(self, root: Path) -> None:
        self.root = root
        self.upstream = root / "upstream"
        shutil.copytree(
            ROOT / "fsdp_sink_patches", root / "fsdp_sink_patches", ignore=shutil.ignore_patterns("__pycache__")
        )
        shutil.copy(ROOT / "pyproject.toml", root)
        for folder in ("patches", "patches/planted", "compat_matrix", "upstream"):
            (root / folder).mkdir()
            (root / folder / "__init__.py").touch()
        shutil.copy(ROOT / "patches" / "__init__.py", root / "patches")
        self.write("patches/planted/_helper.py", HELPER)
        self.install("1.5")
        self.plant()
        self.write("upstream/torch.py", BROKEN_TORCH)

    def write(self, name: str, text: str) -> None:
        (self.root / name).write_text(textwrap.dedent(text))

    def install(self, version: str, source: str = UPSTREAM) -> None:
        info = self.upstream / "planted-1.dist-info"
        info.mkdir(exist_ok=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: planted\nVersion: {version}\n")
        self.write("upstream/planted.py", source)

    def plant(self, slug: str = "thing", name: str = "f", text: str = PATCH) -> None:
        """A patch, with the source that is installed now among the known ones."""
        self.write(f"patches/planted/{slug}.py", text.format(slug=slug, name=name))
        with (self.root / "compat_matrix" / "planted.toml").open("a") as file:
            refs = (f"planted:{name}", "planted:helper", "planted:later")
            pairs = ", ".join(f'"{ref}" = "{digest(ref, self.upstream)}"' for ref in refs)
            file.write(f'[["planted.{slug}"]]\nversions = ["1.4", "1.5"]\ndigests = {{ {pairs} }}\n')

    def check(self, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        return self.python("-m", "fsdp_sink_patches.check", *arguments, **environment)

    def python(self, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, *arguments],
            cwd=self.root,
            env=self.environment() | environment,
            capture_output=True,
            text=True,
            timeout=60,
        )

    def environment(self) -> dict[str, str]:
        env = {name: value for name, value in os.environ.items() if not name.startswith(("FSDP_SINK", "PYTHONPATH"))}
        # -B: two edits of a file within a second leave the first one's bytecode valid.
        return env | {"PYTHONPATH": f"{self.root}{os.pathsep}{self.upstream}", "PYTHONDONTWRITEBYTECODE": "1"}

    def report(self, *arguments: str, code: int = 0, **environment: str) -> dict[str, Any]:
        done = self.check("--json", *arguments, **environment)
        assert done.returncode == code, done.stdout + done.stderr
        found: dict[str, Any] = json.loads(done.stdout)
        assert found["exit_code"] == code
        return found

    def row(self, *arguments: str, code: int = 0, id: str = "planted.thing", **environment: str) -> dict[str, Any]:
        (row,) = (row for row in self.report(*arguments, code=code, **environment)["patches"] if row["id"] == id)
        found: dict[str, Any] = row
        return found

    def validation(self, *arguments: str, code: int = 0, **environment: str) -> dict[str, Any]:
        done = self.check("--json", "--gpu", *arguments, **environment)
        assert done.returncode == code, done.stdout + done.stderr
        found: dict[str, Any] = json.loads(done.stdout)
        jsonschema.validate(found, schema("validation"))
        assert found["exit_code"] == code
        return found

    def verdict(self, *arguments: str, code: int = 0) -> dict[str, Any]:
        (row,) = self.validation("--device", "cpu", *arguments, code=code)["patches"]
        found: dict[str, Any] = row
        return found


def schema(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((SCHEMAS / f"{name}.schema.json").read_text(encoding="utf-8"))
    return found
