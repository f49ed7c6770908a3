"""transformers.flex-sinks: sinks under flex attention on a CPU, and the kernel's code as far as a CPU runs it."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from measured import RIGHT, Results

ID = "transformers.flex-sinks"
ALL = (ID, "transformers.packed-masks", "transformers.additive-mask-to-block-mask", "transformers.flash-sinks")
BOTH = ("every_model", "packed", "padded", "prepared_mask", "validated", "sinkless", "refused_models")

Run = Callable[..., Results]


@pytest.fixture(scope="module")
def scenarios(run: Run) -> Run:
    return functools.partial(run, script="flex_sinks_scenarios.py")


@pytest.fixture(scope="module")
def with_patch(scenarios: Run) -> Results:
    return scenarios(*BOTH, "flips", "refusals", "compilations", "near_the_limit", "wide_heads", "chunks", apply=ALL)


@pytest.fixture(scope="module")
def upstream(scenarios: Run) -> Results:
    return scenarios(*BOTH)


def test_every_model_with_sinks_trains_right(with_patch: Results, upstream: Results) -> None:
    assert set(with_patch["every_model"]) == set(upstream["every_model"])
    for name, found in with_patch["every_model"].items():
        assert "raises" not in found, f"{name}: {found}"
        assert max(found.values()) <= RIGHT, f"{name}: {found}"
    for name, found in upstream["every_model"].items():
        assert "raises" in found, f"{name}: {found}"


@pytest.mark.parametrize("name", ["packed", "padded", "prepared_mask"])
def test_together_with_its_neighbours(name: str, with_patch: Results, upstream: Results) -> None:
    found = with_patch[name]
    assert max(found[error] for error in ("logits", "dsink", "gradient")) <= RIGHT
    assert found.get("finite", True)
    assert "raises" in upstream[name]


def test_train_eval_generate_train(with_patch: Results) -> None:
    assert with_patch["flips"]["same"]
    assert with_patch["flips"]["again"] <= RIGHT


def test_30_batches_compile_at_most_4_times(with_patch: Results) -> None:
    assert 1 <= with_patch["compilations"]["compilations"] <= 4
    assert with_patch["compilations"]["error"] <= RIGHT


def test_the_warning_before_torchs_limit_names_the_shape(with_patch: Results) -> None:
    said = with_patch["near_the_limit"]
    assert said.startswith("fsdp_sink_patches.ops.flex_attention: compiled 6 times, now for query [6, 8, 140, 64]")
    assert "torch stops at 8" in said


def test_chunks_cut_masks_and_rows_that_see_nothing(with_patch: Results) -> None:
    assert len(with_patch["chunks"]) == 5
    assert max(with_patch["chunks"].values()) <= 1e-12


def test_wide_heads_get_blocks_that_fit(with_patch: Results) -> None:
    found = with_patch["wide_heads"]
    assert found["232448"]["options"] == [64, 32, 2]
    assert all(found[limit]["bytes"] <= int(limit) for limit in ("232448", "101376"))
    assert "head_dim 1024" in found["none"]
    assert "40000 bytes" in found["none"]


def test_what_cannot_be_computed_raises_by_name(with_patch: Results) -> None:
    found = with_patch["refusals"]
    assert all(ID in said for said in found.values()), found
    assert "30 queries and 30 keys; expected at least 40 and 40" in found["short mask"]
    assert "got 3 for 8 heads" in found["sinks"]
    assert "dropout=0.1" in found["dropout"]
    assert "passed indices" in found["indices"]


def test_only_models_proven_equal_are_admitted(with_patch: Results, upstream: Results) -> None:
    assert with_patch["refused_models"]["mimo_v2_flash"] is True
    assert upstream["refused_models"]["mimo_v2_flash"] is not True
    for name in ("hy_v4", "deepseek_v4"):
        assert with_patch["refused_models"][name] == upstream["refused_models"][name] != True  # noqa: E712


def test_models_without_sinks_run_upstreams_code(with_patch: Results, upstream: Results) -> None:
    assert with_patch["sinkless"] == upstream["sinkless"]


def test_its_own_validation_proves_it(with_patch: Results, upstream: Results) -> None:
    assert max(with_patch["validated"].values()) <= RIGHT
    assert set(upstream["validated"].values()) == {"inf"}


def test_a_kernel_that_cannot_be_built_leaves_upstreams(monkeypatch: Any, caplog: Any) -> None:
    """On CUDA: a job that ran before goes on, and the log says what it lost. Bad input and memory still raise."""
    from fsdp_sink_patches.patches.transformers import _flex_sinks

    import fsdp_sink_patches  # noqa: F401

    raised: list[Exception] = [RuntimeError("no such\nkernel"), ValueError("bad"), torch.OutOfMemoryError()]

    def build(*_: Any, **__: Any) -> Any:
        raise raised.pop(0)

    monkeypatch.setattr(_flex_sinks, "flex_attention", build)
    query: Any = types.SimpleNamespace(device=types.SimpleNamespace(type="cuda"))

    def forward() -> Any:
        nothing: Any = None
        return _flex_sinks.layer_forward(
            lambda *a, **k: ("upstream", k["s_aux"]), nothing, query, nothing, nothing, nothing, s_aux=3
        )

    assert forward() == ("upstream", 3)
    assert "transformers.flex-sinks: found that torch could not build" in caplog.text
    assert "RuntimeError: no such)" in caplog.text
    for kind in (ValueError, torch.OutOfMemoryError):
        with pytest.raises(kind):
            forward()
