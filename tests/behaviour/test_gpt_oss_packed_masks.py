"""transformers.gpt-oss-packed-masks: packed documents don't see each other in eager and flex attention."""

from __future__ import annotations

import pytest
from measured import RIGHT, RIGHT_UNDER_EAGER, Results, errors, fails, proves
from packaging.version import Version


@pytest.mark.parametrize("name", RIGHT_UNDER_EAGER)
def test_right_where_upstream_leaks(name: str, patched: Results, control: Results) -> None:
    assert max(errors(patched[name]).values()) <= RIGHT
    assert "raises" not in control[name]
    assert fails(control[name])


def test_right_when_applied_after_the_model_class(after: Results) -> None:
    assert max(errors(after["eager_packed_by_default"]).values()) <= RIGHT


def test_embeddings_and_positional_arguments(patched: Results, control: Results) -> None:
    assert set(patched["eager_embeddings"]) == {"named", "placed", "all placed"}
    assert max(patched["eager_embeddings"].values()) <= RIGHT
    assert min(control["eager_embeddings"].values()) > 1e-2


def test_compiles(patched: Results, transformers_version: Version) -> None:
    fullgraph = transformers_version >= Version("5")
    assert patched["eager_compiled"] == {"logits": pytest.approx(0, abs=RIGHT), "fullgraph": fullgraph}


def test_rows_that_are_not_packed_run_upstreams_code(patched: Results, control: Results) -> None:
    assert len(patched["eager_untouched"]) == 4
    assert patched["eager_untouched"] == control["eager_untouched"]


def test_flex_block_masks(patched: Results, control: Results) -> None:
    assert patched["flex_masks"] == {"full": 0, "sliding": 0}
    assert min(control["flex_masks"].values()) > 0


def test_its_own_validation_proves_it(patched: Results, control: Results) -> None:
    assert proves(patched["validated_packed_masks"], control["validated_packed_masks"])
