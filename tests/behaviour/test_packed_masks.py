"""transformers.packed-masks: packed documents don't see each other in eager and flex attention."""

from __future__ import annotations

import pytest
from measured import ENCODER_PACKED, HAS_ENCODER, RIGHT, RIGHT_UNDER_EAGER, Results, errors, fails, proves
from packaging.version import Version


@pytest.mark.parametrize("name", [*RIGHT_UNDER_EAGER, *ENCODER_PACKED])
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


if HAS_ENCODER:  # openai_privacy_filter came with 5.6; ENCODER_PACKED is empty before

    def test_a_bidirectional_document_moves_no_other(patched: Results, control: Results) -> None:
        assert patched["encoder_leak"]["own"] > 1e-3
        assert patched["encoder_leak"]["others"] == 0
        assert control["encoder_leak"]["others"] > 1e-3

    def test_the_encoders_embeddings_and_positional_arguments(patched: Results, control: Results) -> None:
        assert set(patched["encoder_embeddings"]) == {"named", "placed", "all placed"}
        assert max(patched["encoder_embeddings"].values()) <= RIGHT
        assert min(control["encoder_embeddings"].values()) > 1e-2

    def test_the_encoder_compiles(patched: Results) -> None:
        assert patched["encoder_compiled"] == {"logits": pytest.approx(0, abs=RIGHT)}

    def test_what_is_not_packed_runs_the_encoders_own_code(patched: Results, control: Results) -> None:
        assert len(patched["encoder_untouched"]) == 4
        assert patched["encoder_untouched"] == control["encoder_untouched"]

    def test_the_encoders_block_mask_stays_bidirectional(patched: Results, control: Results) -> None:
        assert patched["encoder_flex_masks"] == {"packed": 0, "all ones": 0, "padded": 0, "both ways": 2}
        assert min(control["encoder_flex_masks"][name] for name in ("packed", "all ones", "padded")) > 0


def test_its_own_validation_proves_it(patched: Results, control: Results) -> None:
    assert proves(patched["validated_packed_masks"], control["validated_packed_masks"])
