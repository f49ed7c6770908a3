"""transformers.rotary-buffers: frequencies survive what a job does to a model, and nothing else changes.

The control runs the same without the patch, in a process of its own, and is wrong wherever a user is.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable

import pytest
from measured import Results, proves
from packaging.version import Version

ID = "transformers.rotary-buffers"
V4 = importlib.util.find_spec("transformers.models.deepseek_v4") is not None
LABELS = importlib.util.find_spec("transformers.core_model_loading") is not None  # 5.0 and newer

WRONG_UPSTREAM = (
    "cast_and_back", "half", "bfloat16_parameters_restored_by_hand", "cast_of_every_module_alone",
    "cast_inside_a_wrapper", "fsdp1_buffer_dtype", "to_empty_and_load", "to_empty_and_assign",
    "meta_cast_and_to_empty_by_module", "to_empty_of_a_real_model", "written_through_data", "written_in_place",
    "replaced", "deepcopy_then_cast", "cast_then_deepcopy", "cast_then_pickle", "cast_and_moved",
)  # fmt: skip
RIGHT_UPSTREAM = ("shared_memory", "built_under_bf16", "from_pretrained_in_bf16")
INITIALIZED = "to_empty_and_initialize_weights"

MODELS = ["gpt_oss", "llama", "qwen3", "gemma3", "qwen2_5_vl", "phi3_longrope", "llama_dynamic"]
MODELS += ["deepseek_v4"] * V4
MODELS += ["mimo_v2_flash"] * (importlib.util.find_spec("transformers.models.mimo_v2_flash") is not None)
ROWS = ["dynamic_rows", "longrope_rows"] + ["labelled_dynamic_rows"] * LABELS
CASES = ["case_a2", "case_a3", "case_a6"] * V4
SAME = ("random_state", "generated", "double", "old_checkpoint", "classes")
FAILING = ("inference_then_training", "shared_module", "handed_out", "on_meta", "unknown_module", "unpickled")
ONCE = (
    "built_of_fakes",
    "changed_by_hand",
    "initialized_again",
    "owners",
    "double_is_steady",
    "threads",
    "checkpointed",
    "compiled",
    "pickled",
    "dynamic_rows_after_a_break",
    "after_unapply",
)
RIGHT = {"frequencies": True, "logits": True}


def in_two_processes(run: Callable[..., Results], others: tuple[str, ...], apply: tuple[str, ...]) -> Results:
    script = "rotary_buffers_scenarios.py"
    return {**run(*MODELS, apply=apply, script=script), **run(*others, apply=apply, script=script)}


@pytest.fixture(scope="module")
def patched(run: Callable[..., Results]) -> Results:
    return in_two_processes(run, (*ROWS, *CASES, *SAME, *FAILING, *ONCE, "validated"), (ID,))


@pytest.fixture(scope="module")
def control(run: Callable[..., Results]) -> Results:
    return in_two_processes(run, (*ROWS, *CASES, *SAME, *FAILING, "validated"), ())


def left_to_upstream(model: str, corruption: str) -> dict[str, bool]:
    """Before 5.0 a vision module built on meta can't be known, and qwen2_5_vl has rotary modules that never run."""
    if model == "qwen2_5_vl" and not LABELS:
        if "to_empty" in corruption and "real" not in corruption:
            return {"frequencies": False, "logits": False}
        if corruption in ("fsdp1_buffer_dtype", "written_in_place", "replaced"):
            return {"frequencies": False, "logits": True}
    return RIGHT


@pytest.mark.parametrize("corruption", [*WRONG_UPSTREAM, *RIGHT_UPSTREAM, INITIALIZED])
@pytest.mark.parametrize("model", MODELS)
def test_survives(model: str, corruption: str, patched: Results, control: Results) -> None:
    assert patched[model][corruption] == left_to_upstream(model, corruption)
    if corruption in WRONG_UPSTREAM:
        # longrope before 5.21 takes the frequencies of every row from original_inv_freq, which a buffer's place spares
        spared = model == "phi3_longrope" and corruption == "replaced" and not LABELS
        assert (control[model][corruption] == RIGHT) is spared
    if corruption in RIGHT_UPSTREAM:
        assert control[model][corruption] == RIGHT
    if corruption == INITIALIZED:
        assert (control[model][corruption] == RIGHT) is LABELS


@pytest.mark.parametrize("model", MODELS)
def test_a_healthy_model_is_upstreams_bit_for_bit(model: str, patched: Results, control: Results) -> None:
    assert patched[model]["names"] == control[model]["names"] != []
    assert patched[model]["fresh"] == control[model]["fresh"]


@pytest.mark.parametrize("name", ROWS)
def test_dynamic_types_follow_the_row(
    name: str, patched: Results, control: Results, transformers_version: Version
) -> None:
    healthy = control[name]["healthy"]
    assert patched[name]["healthy"] == healthy
    assert patched[name]["corrupted"] == healthy
    assert all(a != b for a, b in zip(control[name]["corrupted"], healthy, strict=True))
    # Long, then short: the first row again, as if none had been longer. From 5.0 to 5.12 upstream's dynamic type
    # without labels doesn't shrink back: it looks for the length under another name than it keeps it.
    stays_long = name == "dynamic_rows" and Version("5") <= transformers_version < Version("5.13")
    assert (healthy[5] == healthy[0]) is not stays_long


def test_dynamic_rows_that_grew_while_the_patch_was_off(patched: Results) -> None:
    assert patched["dynamic_rows_after_a_break"] == [True] * 8


@pytest.mark.skipif(not V4, reason="this release has no DeepSeek-V4")
class TestDeepseekV4:
    def test_case_a2_to_empty(self, patched: Results, control: Results) -> None:
        assert len(patched["case_a2"]) == 16  # main and compress, and the original of each, in four rotary modules
        assert all(patched["case_a2"].values())
        assert not any(control["case_a2"].values())

    def test_case_a3_phase_error_after_a_cast(self, patched: Results, control: Results) -> None:
        at_4095 = {label: errors[2] for label, errors in patched["case_a3"].items()}
        assert at_4095.keys() == {"main", "compress"}
        assert max(at_4095.values()) < 1e-2
        assert max(error for errors in patched["case_a3"].values() for error in errors) < 1e-2
        upstream = {label: errors[2] for label, errors in control["case_a3"].items()}
        assert upstream["main"] == pytest.approx(1.8, abs=0.05)
        assert upstream["compress"] == pytest.approx(2 * 3.14159 - 3.9, abs=0.05)  # 3.9 rad, the short way round

    def test_case_a6_labels_keep_their_own_rope(self, patched: Results, control: Results) -> None:
        for found in (patched["case_a6"], control["case_a6"]):
            assert (found["main theta"], found["main type"]) == (10000.0, "default")
            assert (found["compress theta"], found["compress type"]) == (160000.0, "yarn")
            for label in ("main", "compress"):
                (wanted,) = found[f"{label} reference"]  # one table, in all four modules
                assert (found[f"{label} model"] == [wanted]) is (found is patched["case_a6"])
        assert patched["case_a6"]["main model"] != patched["case_a6"]["compress model"]


@pytest.mark.parametrize("name", SAME)
def test_changes_nothing_else(name: str, patched: Results, control: Results) -> None:
    assert patched[name] == control[name]


def test_an_old_checkpoint_is_refused_or_passed_over_as_upstream_does(patched: Results) -> None:
    assert patched["old_checkpoint"] == [["model.rotary_emb.inv_freq"], True, True]


def test_a_double_model_has_the_same_values(patched: Results) -> None:
    assert patched["double"]["same"]
    assert patched["double"]["dtypes"] == ["torch.float64"]


def test_a_model_of_fake_tensors_is_upstreams(patched: Results) -> None:
    *right, log = patched["built_of_fakes"]
    assert right == [True, True, True]
    assert not any("without fp32 values" in line for line in log)


def test_what_is_changed_by_hand_is_undone_aloud(patched: Results) -> None:
    """Only what a module is built from again holds."""
    found = patched["changed_by_hand"]
    assert found["eighth"] == {"assigned": False, "in place": False, "registered": False, "built again": True}
    (said,) = found["said"]
    assert "found other values in inv_freq of a Qwen3RotaryEmbedding" in said
    assert "disable this patch" in said


def test_weights_that_are_initialized_again_follow_the_config_alone(patched: Results) -> None:
    assert patched["initialized_again"] == {"unkept": 8.0, "follows": True}


def test_a_module_with_parameters_is_never_built_again(patched: Results) -> None:
    assert patched["owners"] == {"built": {"model": 1, "attention": 1}, "held": True, "said": []}


def test_a_double_model_is_copied_once(patched: Results) -> None:
    assert patched["double_is_steady"]


def test_inference_mode_then_training(patched: Results, control: Results) -> None:
    assert patched["inference_then_training"]
    assert not control["inference_then_training"]


def test_threads(patched: Results) -> None:
    assert patched["threads"] == {"wrong": 0, "frequencies": True}


def test_one_module_in_two_models(patched: Results, control: Results) -> None:
    assert all(patched["shared_module"])
    assert not any(control["shared_module"])


def test_what_is_handed_out_is_a_copy(patched: Results, control: Results) -> None:
    assert patched["handed_out"] == [True, True]
    assert control["handed_out"] == [False, False]


def test_meta_buffers_are_fp32(patched: Results, control: Results) -> None:
    assert patched["on_meta"] == ["meta torch.float32"]
    assert control["on_meta"] == ["meta torch.bfloat16"]


def test_a_module_of_unknown_arguments(patched: Results, control: Results) -> None:
    """Held if it was built with values. On meta it is left alone, and named once however many there are."""
    assert patched["unknown_module"]["held"]
    assert not control["unknown_module"]["held"]
    (line,) = patched["unknown_module"]["said"]
    assert all(part in line for part in (ID, "odd", "found", "expected", "build the model on a real device"))


def test_compiles_once(patched: Results, transformers_version: Version) -> None:
    assert patched["compiled"] == {"same": [True] * 4, "graphs": 1, "more": 0}


def test_activation_checkpointing(patched: Results) -> None:
    plain, checkpointed = patched["checkpointed"]
    assert plain == checkpointed


def test_a_pickle_loads_without_this_package(patched: Results) -> None:
    assert len(patched["pickled"]["found"]) == 3
    assert set(patched["pickled"]["found"]) == {patched["pickled"]["wanted"]}


def test_what_is_unpickled_is_taken_on_by_initialize_weights(patched: Results, control: Results) -> None:
    assert patched["unpickled"] == [False, True]
    assert control["unpickled"] == [False, False]


def test_after_unapply_every_model_is_upstreams(patched: Results) -> None:
    assert patched["after_unapply"] == {
        "model": [True, True], "copy": [True, True], "copied now": [True, True], "forward": True, "again": True,
    }  # fmt: skip


def test_its_own_validation_proves_it(patched: Results, control: Results) -> None:
    assert proves(patched["validated"], control["validated"])
    assert len(patched["validated"]["errors"]) == (6 if V4 else 2)
