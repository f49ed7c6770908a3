"""transformers.deepseek-v4-rope: exact tables, shared by who turns by the same positions; one rotation."""

from __future__ import annotations

import math
from collections.abc import Callable
from importlib import metadata

import pytest
from measured import Results
from packaging.version import Version

pytestmark = pytest.mark.skipif(
    Version(metadata.version("transformers")) < Version("5.8.1"), reason="DeepSeek-V4 came with transformers 5.8"
)

ID = "transformers.deepseek-v4-rope"
SCRIPT = "rope_scenarios.py"
SAME_BITS = ("rounded_tables", "dynamic_types", "corrupted_buffers", "as_upstream", "unusual_arguments")
"""Scenarios whose digests are those of upstream."""

ALONE = (
    "other_models", "counts", "counts_with_shared_positions", "checkpointed", "freed", "positions_changed_in_place",
    "hooked", "compiled", "deepcopied_and_pickled",
)  # fmt: skip
BOTH = (*SAME_BITS, "exact_tables", "exact_tables_on_this_release", "logits_error", "validated")
BF16 = 2.0**-9
"""Half an ulp of bf16 below 1, the largest rounding of a cosine."""


@pytest.fixture(scope="session")
def patched_rope(run: Callable[..., Results]) -> Results:
    return run(*BOTH, *ALONE, apply=(ID,), script=SCRIPT)


@pytest.fixture(scope="session")
def upstream_rope(run: Callable[..., Results]) -> Results:
    return run(*BOTH, script=SCRIPT)


@pytest.fixture(scope="session")
def late_rope(run: Callable[..., Results]) -> Results:
    """Applied after the modelling file was imported."""
    return run("exact_tables", "counts_with_shared_positions", "as_upstream", apply=(ID,), after=True, script=SCRIPT)


# --- tables --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("label", ["main", "compress"])
@pytest.mark.parametrize("first", [0, 1000, 70000])
def test_tables_are_exact_in_bf16_where_upstream_rounds_them(label, first, patched_rope, upstream_rope):
    """Cases A4 and A6: an fp32 angle is exact to half an ulp of the largest one; bf16 tables are 2e-3 off anywhere."""
    name = f"{label} {first}"
    ours, theirs = patched_rope["exact_tables"][name], upstream_rope["exact_tables"][name]
    half_an_ulp = 2.0 ** (math.floor(math.log2(first + 63)) - 24)
    assert ours["dtype"] == "torch.float32"
    assert ours["error"] <= half_an_ulp + 1e-7
    assert theirs["dtype"] == "torch.bfloat16"
    assert theirs["error"] > 0.9 * BF16


def test_tables_agree_with_the_papers_numbers(patched_rope):
    """Case A6: theta 10000 plain for ``main``, theta 160000 with yarn for ``compress``, below 65536 and above."""
    for name, row in patched_rope["exact_tables"].items():
        first = int(name.split()[1])
        assert row["error of the formula"] <= 2e-7 + (first + 63) * 2.0**-23, name


def test_labels_never_share_a_table(patched_rope):
    """Case A6: the same tensor of positions, one label after the other; the other label's angles are far off."""
    for row in patched_rope["exact_tables"].values():
        assert row["error of the other label"] > 1


def test_models_share_a_table_only_if_their_frequencies_are_equal(patched_rope):
    assert patched_rope["other_models"]["differ"] > 1
    assert patched_rope["other_models"]["after the buffer"] == 0


@pytest.mark.parametrize("name", SAME_BITS)
def test_upstreams_bits(name, patched_rope, upstream_rope):
    """With ``rope_dtype="activation"``; dynamic rope types and calls that no layer makes in any case."""
    assert "raises" not in upstream_rope[name]
    assert patched_rope[name] == upstream_rope[name]


def test_exact_tables_are_upstreams_before_it_rounds(patched_rope, upstream_rope):
    """On a CPU the matrix product of the releases before 5.19 gives the same bits as the elementwise one."""
    assert patched_rope["exact_tables_on_this_release"] == upstream_rope["exact_tables_on_this_release"]


# --- sharing -------------------------------------------------------------------------------------------------------


def test_alone_it_saves_the_indexers_queries_tables(patched_rope):
    """2 sliding, 2 CSA, 2 HCA layers: upstream computes 2 + 2 + 3 * 2 = 10. Here the model's own two serve the two
    indexers' queries; entries have positions of their own in each compressor and indexer, which a recompute makes
    again."""
    assert patched_rope["counts"]["plain"] == [8, 0]
    assert patched_rope["counts"]["reentrant"] == patched_rope["counts"]["not reentrant"] == [8, 6]


def test_one_computation_for_each_tensor_and_label(patched_rope):
    """Six rotary modules and one of a copied model, asked for both labels of one tensor, again, and of another."""
    assert patched_rope["counts_with_shared_positions"] == [6, 2, 0, 2]


def test_tables_end_with_the_positions(patched_rope):
    assert patched_rope["freed"] == {"left": [0, 1, 0], "alive": [False, False]}


def test_positions_that_move_on_in_place(patched_rope):
    assert patched_rope["positions_changed_in_place"] == 0


# --- the model -----------------------------------------------------------------------------------------------------


def test_checkpointing_changes_no_bit(patched_rope):
    assert set(patched_rope["checkpointed"]) == {
        f"torch.{dtype} {reentrant}" for dtype in ("float32", "bfloat16") for reentrant in (True, False)
    }
    assert all(row == [True, 0] for row in patched_rope["checkpointed"].values())


def test_bf16_logits_are_no_worse(patched_rope, upstream_rope):
    assert 1e-3 < patched_rope["logits_error"] <= 1.05 * upstream_rope["logits_error"]


def test_compiles(patched_rope):
    assert "raises" not in patched_rope["compiled"]
    assert patched_rope["compiled"].pop("left") == 0
    assert max(patched_rope["compiled"].values()) <= 1e-6


def test_hooks_see_what_the_norm_put_out(patched_rope):
    assert patched_rope["hooked"] == [0]


def test_copies_and_state_dicts_hold_nothing_of_it(patched_rope):
    assert patched_rope["deepcopied_and_pickled"] == [True, True]


def test_applied_after_the_model_class(late_rope, patched_rope):
    for name in late_rope:
        assert late_rope[name] == patched_rope[name]


def test_its_own_validation_proves_it(patched_rope, upstream_rope):
    assert patched_rope["validated"]["right"]
    assert not upstream_rope["validated"]["right"]
    assert upstream_rope["validated"]["errors"]["tables"] > 1e-3


def test_with_packing_four_tables_and_none_again(run: Callable[..., Results]) -> None:
    """Compressors share once packing hands all of them the same positions, and recomputation finds them remembered."""
    both = (ID, "transformers.deepseek-v4-packing")
    counts = run("counts", apply=both, script=SCRIPT)["counts"]
    assert counts == {"plain": [4, 0], "reentrant": [4, 0], "not reentrant": [4, 0]}


def test_tables_that_a_wrapper_rounds_are_told_once(run: Callable[..., Results]) -> None:
    found = run("rounded_on_the_way", apply=(ID,), script=SCRIPT)["rounded_on_the_way"]
    assert (found["asked for"], found["exact"]) == (0, 0)
    (said,) = found["said"]
    assert "found cos and sin in bfloat16" in said
    assert "cast_forward_inputs=False" in said
