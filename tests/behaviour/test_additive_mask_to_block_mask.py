"""transformers.additive-mask-to-block-mask: a 4-D mask on flex attention masks, whatever its form."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
from measured import Results

ID = "transformers.additive-mask-to-block-mask"
RIGHT = 1e-5
WRONG_UPSTREAM = ("boolean", "boolean_per_head", "additive_per_head", "expanded_over_the_batch", "hybrid",
                  "wider_than_the_keys", "with_a_cache")  # fmt: skip
RIGHT_UPSTREAM = ("additive", "infinite", "bias", "integers_that_are_added", "heads_of_another_number")
BOTH = (*WRONG_UPSTREAM, *RIGHT_UPSTREAM, "integers", "one_mask_for_the_batch", "rows_that_see_nothing",
        "what_the_layers_get", "validated", "doge")  # fmt: skip

Run = Callable[..., Results]


@pytest.fixture(scope="module")
def scenarios(run: Run) -> Run:
    return functools.partial(run, script="additive_mask_scenarios.py")


@pytest.fixture(scope="module")
def with_patch(scenarios: Run) -> Results:
    return scenarios(*BOTH, "compiled", "bound_by_name", apply=(ID,))


@pytest.fixture(scope="module")
def upstream(scenarios: Run) -> Results:
    return scenarios(*BOTH)


@pytest.mark.parametrize("name", WRONG_UPSTREAM)
def test_right_where_upstream_is_wrong(name: str, with_patch: Results, upstream: Results) -> None:
    assert with_patch[name] <= RIGHT
    assert upstream[name] > 1e-2


@pytest.mark.parametrize("name", RIGHT_UPSTREAM)
def test_right_where_upstream_is_right(name: str, with_patch: Results, upstream: Results) -> None:
    assert with_patch[name] <= RIGHT
    assert upstream[name] <= RIGHT


def test_one_mask_serves_the_batch(with_patch: Results, upstream: Results) -> None:
    assert with_patch["one_mask_for_the_batch"] <= RIGHT
    found = upstream["one_mask_for_the_batch"]
    assert "raises" in found if isinstance(found, dict) else found > 1e-2


def test_integers_are_refused(with_patch: Results, upstream: Results) -> None:
    assert "pass mask.bool() if 1 means visible" in with_patch["integers"]["raises"]
    assert upstream["integers"] > 1e-2


def test_models_that_add_up_their_masks_keep_them(with_patch: Results, upstream: Results) -> None:
    assert with_patch["doge"]["earlier"] == 0
    assert with_patch["doge"]["last"] > 1e-2
    assert with_patch["doge"] == upstream["doge"]


def test_a_row_that_sees_nothing_gives_zero(with_patch: Results, upstream: Results) -> None:
    assert with_patch["rows_that_see_nothing"] == {"row": 0.0, "finite": True}
    assert upstream["rows_that_see_nothing"]["row"] > 1e-2


def test_boolean_masks_inside_of_torch_compile(with_patch: Results) -> None:
    assert with_patch["compiled"]["same"] <= 1e-3
    assert with_patch["compiled"]["other"] > 1


def test_what_becomes_a_block_mask(with_patch: Results, upstream: Results) -> None:
    flex = {
        "boolean": "BlockMask 1", "additive": "BlockMask 1", "infinite": "BlockMask 1", "half": "BlockMask 1",
        "bias": "same", "two dimensions": "BlockMask", "short": "same", "block mask": "same",
    }  # fmt: skip
    untouched = {f"{name}, {kind}": "same" for name in ("sdpa", "eager")
                 for kind in ("boolean", "additive", "infinite", "half", "bias", "short")}  # fmt: skip
    expected = {f"flex_attention, {kind}": got for kind, got in flex.items()} | untouched
    assert with_patch["what_the_layers_get"] == expected
    before = {name: "BlockMask" if "two" in name else "same" for name in expected}
    assert upstream["what_the_layers_get"] == before


def test_modules_that_bind_the_function_by_name(with_patch: Results, scenarios: Run) -> None:
    assert with_patch["bound_by_name"]["same"]
    after = scenarios("boolean", "additive_per_head", "bound_by_name", apply=(ID,), after=True)
    assert after["bound_by_name"]["same"]
    assert max(after["boolean"], after["additive_per_head"]) <= RIGHT


def test_its_own_validation_proves_it(with_patch: Results, upstream: Results) -> None:
    assert with_patch["validated"]["right"]
    assert not upstream["validated"]["right"]
    errors = upstream["validated"]["errors"]
    assert errors["additive"] <= RIGHT
    assert min(errors["boolean"], errors["per head"]) > 1e-2
