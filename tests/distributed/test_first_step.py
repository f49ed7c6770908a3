"""What two gloo ranks that load the patches by autoload find out about each other at their first optimizer step."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).resolve().parent


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("planted")
    (folder / "planted-1.0.dist-info").mkdir()
    (folder / "planted-1.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: planted\nVersion: 1.0\n")
    (folder / "planted.py").write_text("def f(x):\n    return x\n")
    env = {name: value for name, value in os.environ.items() if not name.startswith("FSDP_SINK_PATCHES")}
    env |= {"PYTHONPATH": str(HERE.parent.parent), "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    command = [sys.executable, str(HERE / "first_step_ranks.py"), str(folder)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def stopped(rank: Any) -> bool:
    """Whether the exception came before the weights were changed."""
    return rank["outcome"] != "trained" and rank["weight"] == [1.0, 1.0]


def trained(rank: Any) -> bool:
    return (rank["outcome"], rank["weight"]) == ("trained", [-1.0, -1.0])


@pytest.mark.parametrize("case", ["alike", "not imported"])
def test_equal_ranks_train_and_nothing_is_said(found: Any, case: str) -> None:
    """A rank that has not imported the upstream yet computes nothing with it."""
    assert all(trained(rank) and rank["logged"] == [] and rank["seconds"] < 30 for rank in found[case])


@pytest.mark.parametrize("case", ["differ", "unreadable"])
def test_a_rank_that_differs_stops_every_rank_with_both_reports(found: Any, case: str) -> None:
    for rank in found[case]:
        assert stopped(rank)
        assert rank["outcome"].startswith("PatchError fsdp_sink_patches: the patches of rank 1 are not those of rank 0")
        assert (
            "planted.one: found disabled (planted 1.0) on rank 1, in force (planted 1.0) on rank 0." in rank["outcome"]
        )
        assert "The report of rank 1:\n  planted.one: disabled (planted 1.0). named in" in rank["outcome"]
        assert "The report of rank 0:\n  planted.one: applied (planted 1.0)." in rank["outcome"]
    assert [line.split(":")[0] for line in found["unreadable"][0]["logged"]] == ["ERROR fsdp_sink_patches.autoload"]


def test_or_warns(found: Any) -> None:
    for rank in found["differ, warn"]:
        assert trained(rank)
        assert len(rank["logged"]) == 1
        assert rank["logged"][0].startswith("WARNING fsdp_sink_patches: the patches of rank 1 are not those of rank 0")


def test_or_does_not_look(found: Any) -> None:
    assert all(trained(rank) and rank["logged"] == [] for rank in found["differ, off"])


def test_settings_that_differ_stop_too(found: Any) -> None:
    for rank in found["settings"]:
        assert stopped(rank)
        assert (
            "settings: found rope_dtype=activation, pooling_dtype=activation, compressed_attention=eager on rank 1, "
            "rope_dtype=fp32," in rank["outcome"]
        )


def test_a_rank_without_the_package_is_said_and_stops_only_if_strict(found: Any) -> None:
    zero, one = found["silent"]
    assert trained(zero)
    assert trained(one)
    assert one["logged"] == []
    assert [line for line in zero["logged"] if line.startswith("ERROR")] == zero["logged"]
    assert "found no report of rank 1 at the first step of rank 0" in zero["logged"][0]
    zero, one = found["silent, strict"]
    assert stopped(zero)
    assert trained(one)


def test_what_was_replaced_since_is_said_and_stops_only_if_strict(found: Any) -> None:
    for rank in found["shadowed"]:
        assert trained(rank)
        assert any(line.startswith("ERROR") and "planted.one: shadowed" in line for line in rank["logged"])
    for rank in found["shadowed, strict"]:
        assert stopped(rank)
        assert "planted.one: shadowed" in rank["outcome"]
