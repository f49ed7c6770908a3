"""transformers.deepseek-v4-packing: what each document gives alone, in rows that pack, pad or cut documents."""

from __future__ import annotations

from collections.abc import Callable
from importlib import metadata
from typing import Any

import pytest
from measured import RIGHT, Results
from packaging.version import Version

if Version(metadata.version("transformers")) < Version("5.8.1"):
    pytest.skip("DeepSeek-V4 comes with transformers 5.8, causal with 5.8.1", allow_module_level=True)

ID = "transformers.deepseek-v4-packing"
EXACT = 1e-6
"""Relative L2 between two runs of one dtype, packed and alone: fp32 logits, or gradients in fp64."""
WRONG = 0.1

BOTH = (
    "table", "cached_by_default", "gradients", "six_and_ten", "hash_routers", "padded", "padded_and_packed",
    "masked_inside", "padding_trains", "plain", "unpadded_cache", "generated", "unregistered", "prepared_masks",
    "mask_dtype", "validated", "timed",
)  # fmt: skip
PATCHED = (
    *BOTH, "bias_zeroed", "forms", "cut_rows", "continued", "reused_cache", "refused", "checkpointed",
    "pooled_in_fp32", "held",
)  # fmt: skip
TRACED = ("compiled", "compiled_model", "no_copy_to_the_host")


@pytest.fixture(scope="module")
def patched(run: Callable[..., Results]) -> Results:
    return run(*PATCHED, apply=(ID,), script="packing_scenarios.py")


@pytest.fixture(scope="module")
def traced(run: Callable[..., Results]) -> Results:
    return run(*TRACED, apply=(ID,), script="packing_scenarios.py")


@pytest.fixture(scope="module")
def control(run: Callable[..., Results]) -> Results:
    return run(*BOTH, script="packing_scenarios.py")


def _worst(result: Any) -> float:
    """The largest number in it."""
    values = result.values() if isinstance(result, dict) else result if isinstance(result, list) else [result]
    return max(_worst(value) if isinstance(value, (dict, list)) else value for value in values)


def test_every_document_as_if_alone(patched: Results) -> None:
    assert len(patched["table"]) == 10
    for row in patched["table"].values():
        assert len(row["rel"]) == 3
        assert max(row["rel"]) <= EXACT
        assert row["leak"] == [0, 0]


def test_upstream_mixes_documents(control: Results, transformers_version: Version) -> None:
    for name, row in control["table"].items():
        first, *others = row["rel"]
        assert first <= EXACT
        if not name.startswith("sliding"):
            assert min(others) > (0.2 if name.startswith("mixed") else 0.5)
            assert min(row["leak"]) > 1
        elif transformers_version >= Version("5.14"):
            assert max(others) <= EXACT
        else:  # a cache is always built, and with one packed rows are not found
            assert min(others) > WRONG


def test_a_cache_or_a_mask_of_ones_changes_nothing(patched: Results, control: Results) -> None:
    assert _worst(patched["cached_by_default"]) <= RIGHT
    assert len(control["cached_by_default"]) == 6
    assert min(control["cached_by_default"].values()) > WRONG


def test_a_packed_step_has_the_gradient_of_its_documents(patched: Results, control: Results) -> None:
    assert _worst(patched["gradients"]) <= EXACT
    assert min(result["all"] for result in control["gradients"].values()) > WRONG


def test_documents_shorter_than_two_windows(patched: Results, control: Results) -> None:
    assert _worst(patched["six_and_ten"]) <= RIGHT
    assert min(control["six_and_ten"].values()) > WRONG


def test_without_the_bias_it_would_be_wrong(patched: Results) -> None:
    assert len(patched["bias_zeroed"]) == 3
    assert min(patched["bias_zeroed"].values()) > WRONG


def test_rows_said_in_other_ways(patched: Results) -> None:
    assert len(patched["forms"]) == 10
    assert _worst(patched["forms"]) <= RIGHT


def test_hash_routers_get_their_tokens(patched: Results, control: Results) -> None:
    assert patched["hash_routers"] <= RIGHT
    assert control["hash_routers"] > WRONG


def test_rows_that_start_in_the_middle_of_a_document(patched: Results) -> None:
    cut = patched["cut_rows"]
    assert cut["leak"] == [0, 0]
    assert max(cut["at a window's border"], cut["document after"]) <= RIGHT
    for kind in ("CSA, all entries", "HCA"):
        assert cut[kind]["entries"] <= EXACT
        assert cut[kind]["seen"]
        assert cut[kind]["left over"]


def test_padding_on_either_side(patched: Results, control: Results) -> None:
    assert len(patched["padded"]) == len(control["padded"]) == 36
    assert _worst(patched["padded"]) <= RIGHT
    for name, error in control["padded"].items():
        # A window with padding on the right is seen by padding alone.
        assert error <= RIGHT if " 0 left" in name else error > WRONG, name


def test_padding_among_packed_documents(patched: Results, control: Results) -> None:
    assert _worst(patched["padded_and_packed"]) <= RIGHT
    assert min(control["padded_and_packed"].values()) > WRONG


def test_a_document_goes_on_over_masked_tokens(patched: Results, control: Results) -> None:
    assert len(patched["masked_inside"]) == 5
    for kind, errors in patched["masked_inside"].items():
        assert len(errors) == (7 if kind in ("sliding", "mixed") else 6)
        assert max(errors.values()) <= RIGHT, kind
        assert min(control["masked_inside"][kind].values()) > WRONG, kind


def test_padding_has_no_part_in_gradients(patched: Results, control: Results) -> None:
    assert patched["padding_trains"] <= EXACT
    assert control["padding_trains"] > WRONG


def test_a_plain_document_gives_upstreams_bits(patched: Results, control: Results) -> None:
    assert len(patched["plain"]) == 5 * 4 + 4 * 4 + 1
    assert patched["plain"] == control["plain"]


def test_caches_of_unpadded_prompts_are_upstreams(patched: Results, control: Results) -> None:
    assert len(patched["unpadded_cache"]) == 8
    assert patched["unpadded_cache"] == control["unpadded_cache"]


def test_left_padded_prompts_go_on_token_by_token(patched: Results) -> None:
    assert len(patched["continued"]) == 5
    assert _worst(patched["continued"]) <= RIGHT


def test_left_padded_prompts_generate_what_each_generates_alone(
    patched: Results, control: Results, transformers_version: Version
) -> None:
    found = patched["generated"]
    assert found["together"] == found["alone"] == control["generated"]["alone"]
    assert control["generated"]["together"] != control["generated"]["alone"]
    assert found["copied"] == 0
    assert found["beams"] == (True if transformers_version >= Version("5.23") else "upstream")


def test_a_reset_cache_remembers_nothing(patched: Results) -> None:
    assert patched["reused_cache"] == {"padded": True, "plain": True, "packed": True, "padded again": True}


@pytest.mark.parametrize(
    ("name", "error", "words"),
    [
        ("packed", "NotImplementedError", "found a cache of 40 tokens that packed, cut, right-padded or gapped rows"),
        ("right padded", "NotImplementedError", "found a cache of 40 tokens"),
        ("cut", "NotImplementedError", "found a cache of 40 tokens"),
        ("gapped", "NotImplementedError", "found a cache of 40 tokens"),
        ("split", "ValueError", "found 20 tokens and position_ids of shape (1, 40)"),
        ("left padded, no mask", "ValueError", "found a cache of left-padded rows"),
        ("turn padded right", "NotImplementedError", "found a cache of 40 tokens of left-padded rows, and 12 tokens"),
        ("turn padded left", "NotImplementedError", "12 tokens that do not go on with its rows"),
        ("turn with a gap", "NotImplementedError", "12 tokens that do not go on with its rows"),
        ("turn restarts", "NotImplementedError", "12 tokens that do not go on with its rows"),
        ("turn restarts, no mask", "NotImplementedError", "12 tokens that do not go on with its rows"),
        ("turn jumps, no mask", "NotImplementedError", "12 tokens that do not go on with its rows"),
        ("upstream's turn padded left", "NotImplementedError", "found a cache of 40 tokens of unpadded rows, and an"),
        ("upstream's turn with a gap", "NotImplementedError", "an attention_mask with padding before more tokens"),
        ("cache stayed empty", "ValueError", "call model.eval() or model.gradient_checkpointing_disable() before"),
        ("flex", "NotImplementedError", "found attn_implementation='flex_attention'"),
        ("flash", "NotImplementedError", "found attn_implementation='flash_attention_2'"),
        ("block mask", "NotImplementedError", "a mask of type object"),
        ("positions", "ValueError", "found position_ids of shape (3, 40)"),
        ("mask", "ValueError", "found an attention_mask of shape (2, 39)"),
    ],
)
def test_refused_with_a_reason(name: str, error: str, words: str, patched: Results) -> None:
    said = patched["refused"][name]
    assert said.startswith(f"{error}: {ID}: ")
    assert words in said
    assert "expected" in said


@pytest.mark.parametrize("name", ["turn", "turn, no mask", "upstream's turn"])
def test_whole_turns_go_on(name: str, patched: Results) -> None:
    assert patched["refused"][name] == "nothing"


def test_upstream_refuses_what_makes_no_sense(patched: Results) -> None:
    assert patched["refused"]["nothing"].startswith("ValueError: You must specify exactly one of")


def test_no_attention_function_is_left_without_a_mask(patched: Results, control: Results) -> None:
    assert _worst(patched["unregistered"]) <= RIGHT
    assert min(control["unregistered"].values()) > WRONG


def test_masks_that_the_caller_prepared(patched: Results, control: Results) -> None:
    assert _worst(patched["prepared_masks"]) <= RIGHT
    assert min(control["prepared_masks"].values()) > WRONG


def test_the_mask_has_the_dtype_of_the_activations(patched: Results, control: Results) -> None:
    assert patched["mask_dtype"] == control["mask_dtype"] == ["torch.float64"]


def test_activation_checkpointing_goes_on(patched: Results) -> None:
    expected = {"attention calls": 6, "layouts": [4, 16], "equal": True}
    assert patched["checkpointed"] == {
        "reentrant=False": expected,
        "reentrant=True": expected,
        "remembered after": 0,
        "written to": {"entries": [24, 12, 6, 15], "remembered": 2},  # both rates, of the last positions alone
    }


def test_compiles(traced: Results) -> None:
    assert set(traced["compiled"]) == {"CSA, top-k", "HCA"}
    assert _worst(traced["compiled"]) <= EXACT
    model = dict(traced["compiled_model"])
    assert model.pop("continued").startswith(f"NotImplementedError: {ID}: ")
    assert len(model) == 2
    assert _worst(model) <= EXACT


def test_nothing_is_copied_to_the_host(traced: Results) -> None:
    assert traced["no_copy_to_the_host"] == "none"


def test_pooling_in_fp32(patched: Results) -> None:
    found = patched["pooled_in_fp32"]
    for kind in ("CSA, all entries", "HCA"):
        assert found[kind]["fp32"] < 0.8 * found[kind]["activation"]
        assert found[kind]["activation"] < 1e-2
        assert found[kind]["fp32 dtype"] == found[kind]["activation dtype"]
    assert max(found["padded logits"], found["cached logits"]) <= RIGHT
    assert found["adapter"].startswith(f"NotImplementedError: {ID}: found settings.pooling_dtype='fp32'")
    assert found["autocast"] == "torch.bfloat16"


def test_its_own_validation_proves_it(patched: Results, control: Results) -> None:
    assert patched["validated"]["right"]
    assert not control["validated"]["right"]
    assert min(control["validated"]["errors"].values()) > WRONG
    assert patched["timed"] == control["timed"] == [1, 200, 512]


def test_it_goes_without_a_trace(patched: Results) -> None:
    assert patched["held"]


def test_applied_after_the_model_class(run: Callable[..., Results]) -> None:
    found = run("cached_by_default", "six_and_ten", apply=(ID,), after=True, script="packing_scenarios.py")
    assert max(_worst(found["cached_by_default"]), _worst(found["six_and_ten"])) <= RIGHT
