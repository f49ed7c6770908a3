"""transformers.deepseek-v4-low-precision: DeepSeek-V4 saved in fp32, loaded in bf16, trained and sampled.

What upstream gets wrong differs by release, so the negative control does too: to 5.9 a bf16 load is rounded, to 5.19 it
crashes, and in every release to 5.24 autocast reaches the hyper-connections. Where upstream is right, its bits stay.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import metadata

import pytest
from measured import Results
from packaging.version import Version

installed = Version(metadata.version("transformers"))
ID = "transformers.deepseek-v4-low-precision"
SCRIPT = "low_precision_scenarios.py"
SCENARIOS = (
    "kept", "step", "step_under_autocast", "fp32_model_under_autocast", "checkpointed", "generated", "untouched",
    "bf16_load_bits", "mixing", "norm", "planted", "on_meta", "compiled", "made_from_config", "validated",
)  # fmt: skip
CONTROL = tuple(name for name in SCENARIOS if name not in ("checkpointed", "on_meta", "compiled", "made_from_config"))

CASTS_NORMS = installed >= Version("5.20")
KEEPS_SINKS = installed >= Version("5.10.1")

LOGITS = 4e-2
"""bf16 weights and activations alone cost these logits 2e-2, with or without the patch."""

GRADIENTS = 1e-1
"""The same for gradients, which pass every rounding twice: up to 6e-2."""

pytestmark = pytest.mark.skipif(installed < Version("5.8.1"), reason="no DeepSeek-V4 that is causal before 5.8.1")


@pytest.fixture(scope="module")
def patched(run: Callable[..., Results]) -> Results:
    return run(*SCENARIOS, apply=(ID,), script=SCRIPT)


@pytest.fixture(scope="module")
def control(run: Callable[..., Results]) -> Results:
    return run(*CONTROL, script=SCRIPT)


def crashes(result: Results) -> bool:
    return "raises" in result and "same dtype" in result["raises"]


def test_what_the_checkpoint_has_in_fp32_stays(patched: Results, control: Results) -> None:
    kept = patched["kept"]
    assert len(kept["errors"]) >= 3 * (1 + 6 + 2 + 2)
    assert max(kept["errors"].values()) == 0
    assert kept["types"] == ["torch.float32"]
    assert kept["others"] == ["torch.bfloat16"]
    assert kept["of"] > 30
    lost = {name for name, error in control["kept"]["errors"].items() if error > 1e-6}
    if KEEPS_SINKS:
        assert lost == set()
    else:
        assert all(any(part in name for name in lost) for part in ("sinks", "position_bias", "hc_head"))
        assert all(any(part in name for part in ("sinks", "position_bias", "hc_head")) for name in lost)


@pytest.mark.parametrize("name", ["step", "step_under_autocast", "fp32_model_under_autocast"])
def test_a_training_step_is_as_right_as_bf16_can_be(name: str, patched: Results, control: Results) -> None:
    found = patched[name]
    assert "raises" not in found, found
    assert found["missing"] == []
    assert found["dtype"] == "torch.bfloat16"
    assert found["logits"] <= LOGITS
    assert max(found["of"].values()) <= GRADIENTS
    if name == "step" and not CASTS_NORMS:
        assert crashes(control[name])
    else:
        assert found["logits"] <= 1.02 * control[name]["logits"]


def test_generation_with_a_cache(patched: Results, control: Results) -> None:
    assert patched["generated"]["tokens"] == 12
    assert patched["generated"]["logits"] <= LOGITS
    assert crashes(control["generated"]) != CASTS_NORMS


def test_activation_checkpointing_recomputes_the_same_bits(patched: Results) -> None:
    assert patched["checkpointed"] == {"autocast False": True, "autocast True": True}


def test_hyper_connections_are_fp32_under_autocast(patched: Results, control: Results) -> None:
    assert set(patched["mixing"]["errors"]) == {"post", "comb", "collapsed", "head"}
    assert max(patched["mixing"]["errors"].values()) <= 1e-6
    assert patched["mixing"]["same"] == [True, True, True]
    assert patched["mixing"]["autocast afterwards"]
    assert min(control["mixing"]["errors"].values()) >= 5e-4
    assert control["mixing"]["same"] == [False, False, False]


def test_where_upstream_is_right_its_bits_stay(patched: Results, control: Results) -> None:
    assert len(patched["untouched"]) == 3
    assert patched["untouched"] == control["untouched"]
    if CASTS_NORMS:
        assert patched["bf16_load_bits"] == control["bf16_load_bits"]
    else:
        assert crashes(control["bf16_load_bits"])


def test_a_norm_answers_in_the_activations_dtype(patched: Results, control: Results) -> None:
    error, dtype = patched["norm"]["torch.bfloat16"]
    assert (error <= 2**-9, dtype) == (True, "torch.bfloat16")
    assert patched["norm"]["torch.float32"] == control["norm"]["torch.float32"]
    assert control["norm"]["torch.bfloat16"][1] == ("torch.bfloat16" if CASTS_NORMS else "torch.float32")


def test_the_defects_of_older_releases_planted_in_this_one(patched: Results) -> None:
    planted = patched["planted"]
    assert crashes(planted["older"])
    assert planted["patched"] == patched["step"]
    assert planted["names"] == planted["names here"], "the names that 5.10.1 added, and no others"


def test_compiles(patched: Results) -> None:
    assert patched["compiled"] == {"autocast False": True, "autocast True": True}


def test_on_the_meta_device(patched: Results) -> None:
    assert patched["on_meta"] == [[1, 8, 4], [1, 8, 4, 4], "torch.bfloat16"]


def test_a_model_that_was_never_loaded(patched: Results) -> None:
    assert patched["made_from_config"] == {"finite": True}


def test_its_own_validation_proves_it(patched: Results, control: Results) -> None:
    assert patched["validated"]["right"]
    if CASTS_NORMS:
        wrong = {n for n, e in control["validated"]["errors"].items() if e > control["validated"]["limits"][n]}
        assert wrong == {"mixing, autocast"}
    else:
        assert crashes(control["validated"])
