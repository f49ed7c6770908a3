"""transformers.deepseek-v4-attention: upstream's numbers without its score matrix, per document."""

from __future__ import annotations

from collections.abc import Callable
from importlib import metadata
from typing import Any

import pytest
from measured import RIGHT, Results
from packaging.version import Version

if Version(metadata.version("transformers")) < Version("5.8.1"):
    pytest.skip("DeepSeek-V4 comes with transformers 5.8, causal with 5.8.1", allow_module_level=True)

ID = "transformers.deepseek-v4-attention"
PACKING = "transformers.deepseek-v4-packing"
OTHERS = ("transformers.deepseek-v4-rope", "transformers.deepseek-v4-low-precision", "transformers.rotary-buffers")
SCRIPT = "v4_attention_scenarios.py"
EXACT = 1e-12
"""Relative L2 between two fp64 runs that differ in the order of their sums."""
ROTATED = 1e-6
"""The same where rotations, which are fp32 upstream, are of other positions in the row."""
WRONG = 0.1
KINDS = 5


@pytest.fixture(scope="module")
def patched(run: Callable[..., Results]) -> Results:
    first = ("plain", "sinks_matter", "packed", "padded", "leaks", "continued", "generated", "decided")
    second = ("given_masks", "checkpointed", "compiled", "half_precision", "memory", "untouched", "validated", "held")
    return {**run(*first, apply=(ID, PACKING), script=SCRIPT), **run(*second, apply=(ID, PACKING), script=SCRIPT)}


@pytest.fixture(scope="module")
def alone(run: Callable[..., Results]) -> Results:
    """Without the packing patch."""
    return run("plain", "alone", "generated", "given_masks", "validated", apply=(ID,), script=SCRIPT)


@pytest.fixture(scope="module")
def control(run: Callable[..., Results]) -> Results:
    return run("packed", "memory", "untouched", "validated", script=SCRIPT)


def _right(result: dict[str, Any], calls: int = 3) -> None:
    for name, each in result.items():
        assert len(each["calls"]) == calls, name
        assert max(each["logits"], each["gradient"]) <= (EXACT if "fp64" in name else RIGHT), name


def test_plain_rows_have_upstreams_logits_and_gradients(patched: Results, alone: Results) -> None:
    for found in (patched["plain"], alone["plain"]):
        assert len(found) == (KINDS + 1) * 2
        _right(found)


def test_dropped_sinks_would_show(patched: Results) -> None:
    assert patched["sinks_matter"] > WRONG


def test_packed_documents_are_as_if_alone(patched: Results, control: Results) -> None:
    assert len(patched["packed"]) == KINDS
    for kind, errors in patched["packed"].items():
        assert errors.pop("calls") == [256] * 9
        assert errors.pop("gradient against eager") <= EXACT
        assert errors["gradient"] <= ROTATED
        assert max(errors.values()) <= RIGHT
        upstream = control["packed"][kind]
        assert upstream["use_cache=True"] > WRONG
        if kind != "sliding":
            assert min(upstream["use_cache=False"], upstream["gradient"]) > WRONG


def test_padding_and_gaps(patched: Results) -> None:
    assert len(patched["padded"]) == 4 * 9
    for name, error in patched["padded"].items():
        assert error <= (ROTATED if "gaps" in name else RIGHT), name


def test_nothing_leaks(patched: Results) -> None:
    assert len(patched["leaks"]) == KINDS
    assert all(moved == [0, 0] for moved in patched["leaks"].values())


def test_a_fused_prefill_goes_on_with_upstreams_steps(patched: Results) -> None:
    assert len(patched["continued"]) == 8
    for each in patched["continued"].values():
        assert each["rel"] <= RIGHT
        assert each["fused calls"] == [3, 3]


def test_generates_upstreams_tokens(patched: Results, alone: Results) -> None:
    for found in (patched["generated"], alone["generated"]):
        assert found == {"equal": True, "calls": [100] * 3}


def test_one_place_decides(patched: Results) -> None:
    found = dict(patched["decided"])
    assert found["auto"] == found["eager"] == found["like_eager"] == found["dropout, eager"] == 0
    assert found["fused"] == found["dropout, eval"] == 3
    assert found["output_attentions"][:2] == [0, 3]
    assert found["output_attentions"][2][:3] == [1, 4, 96]
    assert found["attentions"] == 0
    assert found["dropout"].startswith(
        f"NotImplementedError: {ID}: found attention_dropout=0.1 in training; expected 0"
    )
    assert 'settings.use(compressed_attention="eager")' in found["dropout"]
    log = "\n".join(found["log"])
    for words in ("tensors are on cpu, not CUDA", "output_attentions asks for probabilities", "is 'like_eager'"):
        assert log.count(words) == 1


def test_given_masks_are_read_or_left_to_upstream(patched: Results, alone: Results) -> None:
    for found in (patched["given_masks"], alone["given_masks"]):
        assert {name: each["calls"] for name, each in found.items()} == {
            "window": 3, "infinite": 3, "holed": 0, "soft": 0, "written to": 3,
        }  # fmt: skip
        assert max(each["rel"] for each in found.values()) <= RIGHT


def test_without_packing_padding_is_left_to_upstream(alone: Results) -> None:
    assert len(alone["alone"]) == 6
    for name, each in alone["alone"].items():
        assert each["calls"] == (0 if name.startswith("padded") else 3), name
        assert max(each["logits"], each["gradient"]) <= RIGHT


def test_activation_checkpointing_goes_on(patched: Results) -> None:
    assert list(patched["checkpointed"]) == ["reentrant=False", "reentrant=True"]
    assert all(each == {"calls": 6, "equal": True} for each in patched["checkpointed"].values())


def test_compiles_in_one_graph(patched: Results) -> None:
    assert len(patched["compiled"]) == 2
    assert max(patched["compiled"].values()) <= 1e-6


def test_half_precision_costs_no_more_than_under_eager(patched: Results) -> None:
    found = patched["half_precision"]
    assert len(found) == 3 * 2 * 2 * 2
    for name in (name for name in found if name.endswith("fused")):
        eager = found[name.replace("fused", "eager")]
        assert all(ours <= 1.1 * theirs for ours, theirs in zip(found[name], eager, strict=True)), name
        assert found[f"{name}, dtype"] == found[f"{name.replace('fused', 'eager')}, dtype"]


def test_no_tensor_grows_with_the_square_of_the_row(patched: Results, control: Results) -> None:
    for kind in ("sliding", "CSA, all entries", "CSA, top-k", "HCA", "mixed"):
        assert patched["memory"][f"{kind}, 1024"] <= 2.1 * patched["memory"][f"{kind}, 512"]
        assert control["memory"][f"{kind}, 1024"] >= 3.9 * control["memory"][f"{kind}, 512"]


def test_on_the_cpu_upstreams_bits_by_default(patched: Results, control: Results) -> None:
    assert patched["untouched"] == control["untouched"]


def test_its_own_validation_proves_it(patched: Results, alone: Results, control: Results) -> None:
    assert patched["validated"]["right"]
    assert alone["validated"]["right"]
    assert not control["validated"]["right"]
    assert control["validated"]["errors"]["scores"] > 1


def test_it_goes_without_a_trace(patched: Results) -> None:
    found = patched["held"]
    assert found["gone"]
    assert found["rel"] <= RIGHT
    assert found["calls"] == [0, 3]


@pytest.mark.parametrize("order", [(ID, PACKING, *OTHERS), (*OTHERS, PACKING, ID)], ids=["first", "last"])
def test_with_the_other_patches_in_any_order(order: tuple[str, ...], run: Callable[..., Results]) -> None:
    found = run("packed_briefly", "checkpointed", apply=order, after=order[0] == ID, script=SCRIPT)
    assert found["packed_briefly"]["rel"] <= RIGHT
    assert found["packed_briefly"]["calls"] == [96] * 3
    assert all(each == {"calls": 6, "equal": True} for each in found["checkpointed"].values())
