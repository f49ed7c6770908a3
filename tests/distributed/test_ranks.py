"""assert_same_everywhere over a real gloo group: equal ranks pass, different ones are named on every rank."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import fsdp_sink_patches

ROOT = Path(fsdp_sink_patches.__file__).resolve().parent.parent

RANK = """
import sys
import fsdp_sink_patches as fsp
from fsdp_sink_patches import Patch, Target, _registry, _fingerprint
from fsdp_sink_patches.distributed import assert_same_everywhere
def replacement(original, *a): return original(*a)
patch = Patch("planted.one", "one", "planted", ">=1", None, "l", "r", (Target("planted:f", replacement),))
_registry.patches = lambda: {{"planted.one": patch}}
rank, size, store = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
import planted
{body}
import torch.distributed as dist
dist.init_process_group("gloo", init_method="file://" + store, rank=rank, world_size=size)
try:
    print("same", assert_same_everywhere()["planted.one"].state)
except fsp.PatchError as error:
    print("differ", error)
dist.barrier()
dist.destroy_process_group()
"""


def ranks(tmp_path: Path, body: str, size: int) -> list[str]:
    (tmp_path / "planted-1.0.dist-info").mkdir()
    (tmp_path / "planted-1.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: planted\nVersion: 1.0\n")
    (tmp_path / "planted.py").write_text("def f(x):\n    return x\n")
    env = {name: value for name, value in os.environ.items() if not name.startswith("FSDP_SINK_PATCHES")}
    env |= {"PYTHONPATH": os.pathsep.join([str(ROOT), str(tmp_path)]), "OMP_NUM_THREADS": "1"}
    code, store = RANK.format(body=body), str(tmp_path / "store")
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(rank), str(size), store],
            env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(size)
    ]  # fmt: skip
    try:
        done = [process.communicate(timeout=120) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert all(out for out, _ in done), done
    return [out for out, _ in done]


def test_equal_ranks_pass(tmp_path: Path) -> None:
    out = ranks(tmp_path, "fsp.apply(allow_drift=('planted.one',))", 2)
    assert out == ["same applied\n", "same applied\n"]


@pytest.mark.parametrize(
    ("body", "found"),
    [
        ("if rank != 1: fsp.apply(allow_drift=('planted.one',))", "found disabled"),
        ("fsp.apply(allow_drift=('planted.one',))\nif rank == 1: planted.f = print", "found shadowed"),
    ],
)
def test_the_rank_that_differs_is_named_on_every_rank(tmp_path: Path, body: str, found: str) -> None:
    for out in ranks(tmp_path, body, 3):
        assert out.startswith("differ")
        assert f"rank 1: planted.one: {found}" in out
        assert "2 of 3 agree with rank 0" in out
        assert "rank 2:" not in out


def test_without_a_process_group_there_is_nothing_to_compare() -> None:
    from fsdp_sink_patches.distributed import assert_same_everywhere

    assert {status.id for status in assert_same_everywhere().patches} == {
        s.id for s in fsdp_sink_patches.status().patches
    }


def test_importing_it_does_not_import_torch() -> None:
    code = "import sys, fsdp_sink_patches.distributed; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
