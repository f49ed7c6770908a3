"""Fake upstreams in a temporary folder, with their metadata, so that the engine is tested without torch."""

from __future__ import annotations

import importlib
import itertools
import textwrap
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fsdp_sink_patches import Patch, Target, _fingerprint, _registry

_numbers = itertools.count()

DEFAULT_FILES = {
    "__init__.py": "",
    "attention.py": """
        def forward(x, *, scale=1):
            '''Multiply.'''
            return x * scale

        def helper(x):
            return x

        REGISTRY = {"eager": forward}

        class Base:
            def step(self, x):
                return x + 1

            @staticmethod
            def static(x):
                return x + 2

            @classmethod
            def kind(cls, x):
                return cls.__name__, x

        class Model(Base):
            supported = False
            def run(self, x):
                return self.step(x)
    """,
    "user.py": """
        from .attention import forward
        def call(x):
            return forward(x)
    """,
}


def add_one(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Ours: the original plus 1000, so that two layers would show as 2000."""
    return original(*args, **kwargs) + 1000


def add_name(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return (*original(*args, **kwargs), "ours")


def true(original: Any) -> bool:
    return True


def boom(original: Any) -> Any:
    raise RuntimeError("half-way")


class World:
    """One fake upstream and the registry that patches it. Its top-level name is new in every test."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self.name = f"fake_upstream_{next(_numbers)}"
        self.distribution = self.name.replace("_", "-")
        self.patches: dict[str, Patch] = {}
        self.shapes: dict[str, tuple[_fingerprint.Shape, ...]] = {}
        self.monkeypatch = monkeypatch
        monkeypatch.setattr(_registry, "patches", lambda: dict(sorted(self.patches.items())))
        monkeypatch.setattr(_fingerprint, "shapes", lambda patch: self.shapes.get(patch.id, ()))
        monkeypatch.syspath_prepend(str(folder))

    def install(self, version: str | None = "1.0", files: dict[str, str] | None = None) -> None:
        package = self.folder / self.name
        package.mkdir(exist_ok=True)
        for name, text in (DEFAULT_FILES | (files or {})).items():
            (package / name).write_text(textwrap.dedent(text))
        if version is not None:
            info = self.folder / f"{self.name}-1.dist-info"
            info.mkdir(exist_ok=True)
            (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {self.distribution}\nVersion: {version}\n")
        importlib.invalidate_caches()

    def patch(self, *targets: Target, id: str = "up.one", known: bool = True, **fields: Any) -> Patch:
        values: dict[str, Any] = {
            "gives": "one more",
            "distribution": self.distribution,
            "requires": ">=1.0",
            "fixed_in": None,
            "link": "https://example.org/1",
            "remove_when": "never",
        }
        patch = Patch(id=id, targets=targets or (self.target("forward"),), **(values | fields))
        self.patches[id] = patch
        if known:
            digests = {ref: _fingerprint.digest(ref) for ref in _fingerprint.refs(patch)}
            self.shapes[id] = (_fingerprint.Shape(("1.0",), digests),)
        return patch

    def target(self, qualname: str, replacement: Callable[..., Any] = add_one, **fields: Any) -> Target:
        module = fields.pop("module", "attention")
        return Target(f"{self.name}.{module}:{qualname}", replacement, **fields)

    def load(self, module: str = "attention") -> types.ModuleType:
        return importlib.import_module(f"{self.name}.{module}")

    def edit(self, module: str, text: str) -> None:
        (self.folder / self.name / f"{module}.py").write_text(textwrap.dedent(text))
        importlib.invalidate_caches()
