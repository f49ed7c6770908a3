"""examples/dflash_lora.py on the CPU: the three changes leave the losses as they were, on one rank and on two."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

EXAMPLE = Path(__file__).resolve().parent.parent.parent / "examples" / "dflash_lora.py"
PEFT = ("peft==0.21.2", "accelerate==1.15.0", "psutil==7.1.3")


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """With peft, which only this example needs, in front of everything else."""
    site = tmp_path_factory.mktemp("peft")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
    subprocess.run([*pip, "--target", str(site), *PEFT], check=True)
    paths = [str(site), os.environ.get("PYTHONPATH", "")]
    names = {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "HF_HUB_OFFLINE": "1", "PYTHONWARNINGS": "ignore"}
    return {**os.environ, **names, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}


def run(environment: dict[str, str], *switches: str, ranks: int = 1) -> tuple[Any, str]:
    """The JSON of the last line, and what came before it."""
    command: list[Any] = [sys.executable, EXAMPLE, "--json", "--steps", "2", "--seq-len", "64", *switches]
    if ranks > 1:
        command[1:1] = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    shown, _, last = done.stdout.strip().rpartition("\n")
    return json.loads(last), shown


def test_each_change_leaves_the_losses(environment: dict[str, str]) -> None:
    """Dense mask and all logits, then one change after the other, as a table."""
    rows, shown = run(environment, "--compare", "--lm-head-chunk-size", "10")
    assert [row["name"] for row in rows] == ["as it was", "BlockMask", "and chunked loss", "and FULL_SHARD"]
    assert all(row["name"] in shown for row in rows)
    first = rows[0]["losses"]
    assert first[0] != pytest.approx(first[1], abs=1e-4)
    for row in rows[1:]:
        assert row["losses"] == pytest.approx(first, abs=1e-5)
    other, _ = run(environment, "--draft-block", "32")
    assert other["losses"] != pytest.approx(first, abs=1e-3)  # another mask would be seen


def test_two_ranks_and_both_shardings(environment: dict[str, str]) -> None:
    full, _ = run(environment, ranks=2)
    kept, _ = run(environment, "--sharding", "SHARD_GRAD_OP", ranks=2)
    assert kept["losses"] == pytest.approx(full["losses"], abs=1e-5)
