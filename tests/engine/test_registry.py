"""Discovery: in one order, each id once, unknown ids with a suggestion."""

from __future__ import annotations

import importlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from fsdp_sink_patches import _registry

CARD = """
from fsdp_sink_patches import Patch
PATCH = Patch({id!r}, gives="g", distribution="d", requires=">1", fixed_in=None, link="l", remove_when="r", targets=())
"""


@pytest.fixture
def planted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    package = importlib.import_module("fsdp_sink_patches.patches")
    monkeypatch.setattr(package, "__path__", [str(tmp_path)])
    (tmp_path / "up").mkdir()
    (tmp_path / "up" / "__init__.py").touch()
    saved = {name: module for name, module in sys.modules.items() if name.startswith("fsdp_sink_patches.patches.")}
    for name in saved:
        del sys.modules[name]
    _registry._modules.cache_clear()
    importlib.invalidate_caches()
    yield tmp_path / "up"
    for name in [name for name in sys.modules if name.startswith("fsdp_sink_patches.patches.")]:
        del sys.modules[name]
    sys.modules.update(saved)
    _registry._modules.cache_clear()


def test_sorted_by_id_and_helpers_are_skipped(planted: Path) -> None:
    (planted / "a.py").write_text(CARD.format(id="up.zeta"))
    (planted / "b.py").write_text(CARD.format(id="up.alpha"))
    (planted / "_helper.py").write_text("raise RuntimeError('a helper is no patch')")
    assert list(_registry.patches()) == ["up.alpha", "up.zeta"]
    assert _registry.get("up.zeta").id == "up.zeta"
    assert _registry.module("up.zeta").__name__ == "fsdp_sink_patches.patches.up.a"


def test_duplicate_ids_raise_and_name_both_modules(planted: Path) -> None:
    (planted / "a.py").write_text(CARD.format(id="up.same"))
    (planted / "b.py").write_text(CARD.format(id="up.same"))
    with pytest.raises(ValueError, match=r"up\.same.*patches\.up\.a.*patches\.up\.b"):
        _registry.patches()


def test_a_module_without_a_patch_raises(planted: Path) -> None:
    (planted / "a.py").write_text("PATCHES = 1\n")
    with pytest.raises(TypeError, match=r"patches\.up\.a holds no PATCH"):
        _registry.patches()


def test_unknown_ids_suggest(planted: Path) -> None:
    (planted / "a.py").write_text(CARD.format(id="up.flash-sinks"))
    with pytest.raises(_registry.UnknownPatch, match=r"did you mean 'up\.flash-sinks'") as caught:
        _registry.get("up.flash-sink")
    assert caught.value.id == "up.flash-sink"
    with pytest.raises(_registry.UnknownPatch, match=r"registered ids are: up\.flash-sinks"):
        _registry.module("qqqq")


def test_patches_refuses_any_other_name() -> None:
    root = Path(_registry.__file__).resolve().parent.parent
    done = subprocess.run([sys.executable, "-c", "import patches"], cwd=root, capture_output=True, text=True)
    assert done.returncode != 0
    assert "only known as fsdp_sink_patches.patches" in done.stderr
