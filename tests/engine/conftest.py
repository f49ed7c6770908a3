"""Fixtures of the engine's tests."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from fakes import World

from fsdp_sink_patches import _engine


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    for variable in (_engine.SELECT, _engine.DISABLE, _engine.STRICT):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    for name in ("_entries", "_hooked", "_half_imported", "_rehook", "_logged"):
        monkeypatch.setattr(_engine, name, type(getattr(_engine, name))())
    monkeypatch.setattr(_engine, "_called", False)
    world = World(tmp_path, monkeypatch)
    yield world
    for name in [name for name in sys.modules if name.partition(".")[0] == world.name]:
        del sys.modules[name]


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.DEBUG, logger="fsdp_sink_patches")
    return caplog
