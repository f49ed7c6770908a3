"""The SpecForge patches on SpecForge itself, from its wheel, against upstream in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch

HERE = Path(__file__).resolve().parent
RELEASE = "0.2.0"
IDS = ("specforge.dflash-block-mask", "specforge.draft-rotary-fp32", "transformers.rotary-buffers")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """``run(*ids)``: what a child measured with these patches. Without SpecForge here its wheel is fetched, alone: what
    is measured needs torch and transformers only."""
    paths = []
    try:
        metadata.version("specforge")
    except metadata.PackageNotFoundError:
        site = tmp_path_factory.mktemp("specforge")
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
        subprocess.run([*pip, "--target", str(site), f"specforge=={RELEASE}"], check=True)
        paths.append(str(site))

    def measure(*ids: str) -> dict[str, Any]:
        inherited = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
        environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("FSDP_SINK_PATCHES")},
            "PYTHONPATH": os.pathsep.join([*inherited, *paths]),
            "HF_HUB_OFFLINE": "1",
            "PYTHONWARNINGS": "ignore",
            "CUDA_VISIBLE_DEVICES": "",
        }
        command = [sys.executable, str(HERE / "specforge_scenarios.py"), "--apply", ",".join(ids)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280, check=False)
        assert done.returncode == 0, done.stderr[-4000:]
        found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
        return found

    return measure


@pytest.fixture(scope="module")
def patched(run: Any) -> dict[str, Any]:
    return run(*IDS)  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def control(run: Any) -> dict[str, Any]:
    return run()  # type: ignore[no-any-return]


@pytest.mark.parametrize("id", IDS[:2])
def test_its_own_validation_proves_it(patched: dict[str, Any], control: dict[str, Any], id: str) -> None:
    assert patched["validated"][id]["right"]
    assert not control["validated"][id]["right"]


def test_the_mask_is_upstreams_element_by_element(patched: dict[str, Any], control: dict[str, Any]) -> None:
    for results in (patched, control):
        assert results["validated"][IDS[0]]["errors"]["elements"] == 0
    ours, theirs = patched["built_for_flex"], control["built_for_flex"]
    assert ours.keys() == theirs.keys() == {"full_attention", "sliding_attention"}
    for name, (shape, visible, _) in theirs.items():
        assert ours[name][:2] == [shape, visible]
        assert ours[name][2].startswith("fsdp_sink_patches.ops.block_masks")
    assert theirs["full_attention"][2].startswith("specforge")


def test_a_training_step_is_the_same(patched: dict[str, Any], control: dict[str, Any]) -> None:
    """In fp32 nothing is rounded, so the loss and the gradients have the same bits."""
    assert patched["stepped"] == control["stepped"]
    assert torch.tensor(list(patched["stepped"].values())).isfinite().all()


def test_every_draft_keeps_its_frequencies(patched: dict[str, Any], control: dict[str, Any]) -> None:
    assert max(patched["kept_by_every_draft"].values()) == 0
    assert min(control["kept_by_every_draft"].values()) > 1e-3
