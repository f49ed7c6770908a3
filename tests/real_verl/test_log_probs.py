"""fp32 log-probs without flash-attn, and fused ones under FSDP2, on the real verl and against upstream."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from packaging.version import Version
from verl_environment import VerlEnv

JOB = Path(__file__).resolve().parent / "log_probs_job.py"
FUSED = "verl.fused-kernels-fsdp2"


@pytest.fixture(scope="module")
def patched(verl_env: VerlEnv, tmp_path_factory: pytest.TempPathFactory) -> Any:
    ids = ["verl.logprobs-fp32"] + ([FUSED] if verl_env.version >= Version("0.7.1") else [])
    return verl_env.measure(JOB, *ids, cwd=tmp_path_factory.mktemp("patched"), FSDP_SINK_PATCHES="none")


@pytest.fixture(scope="module")
def control(verl_env: VerlEnv, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return verl_env.measure(JOB, cwd=tmp_path_factory.mktemp("control"), FSDP_SINK_PATCHES="none")


def test_halves_give_fp32_and_fp32_is_left(patched: Any, control: Any) -> None:
    for dtype in ("torch.bfloat16", "torch.float16"):
        returned, error, rows_alone = patched["through_verl"][dtype]
        assert returned == "torch.float32"
        assert error < 1e-5
        assert rows_alone
        returned, error, _ = control["through_verl"][dtype]
        assert returned == dtype
        assert error > 1e-3
    assert patched["through_verl"]["torch.float32"] == control["through_verl"]["torch.float32"]


def test_its_own_validation_proves_it(patched: Any, control: Any) -> None:
    assert patched["verl.logprobs-fp32"]["right"]
    assert not control["verl.logprobs-fp32"]["right"]


def test_fused_log_probs_run_where_upstream_stops(verl_env: VerlEnv, patched: Any, control: Any) -> None:
    if verl_env.version < Version("0.7.1"):
        assert FUSED not in patched  # lm_head is the root's there
        return
    assert patched[FUSED]["right"], patched[FUSED]
    assert "mixed torch.Tensor and DTensor" in control[FUSED]["raises"]
    assert patched["heads"] == control["heads"]
    assert patched["heads"].count("Linear") == 1
