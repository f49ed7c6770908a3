"""verl.ulysses-sinks: sinks under sequence parallelism, with the real verl where it is installed, else with a stub."""

from __future__ import annotations

from collections.abc import Callable
from importlib import metadata

import pytest
from measured import Results

IDS = ("verl.ulysses-sinks", "transformers.flash-sinks")
LOCAL = ("eager 2", "sdpa 2", "flex_attention 2")


def _stub() -> str | None:
    try:
        metadata.version("verl")
    except metadata.PackageNotFoundError:
        return "verl"
    return None


@pytest.fixture(scope="module")
def patched(run: Callable[..., Results]) -> Results:
    names = ("ranks_2", "ranks_4", "local_attention", "misfits")
    return run(*names, apply=IDS, stub=_stub(), script="ulysses_scenarios.py")


@pytest.fixture(scope="module")
def control(run: Callable[..., Results]) -> Results:
    """Without verl's patch; transformers.flash-sinks computes the attention in both."""
    return run("ranks_2", "local_attention", apply=IDS[1:], stub=_stub(), script="ulysses_scenarios.py")


@pytest.mark.parametrize("ranks", ["ranks_2", "ranks_4"])
def test_equal_to_one_rank_and_fp64(ranks: str, patched: Results) -> None:
    assert "raises" not in patched[ranks], patched[ranks]
    errors, limits = patched[ranks]["errors"], patched[ranks]["limits"]
    assert set(errors) == {"logits", "dsink", "dq_proj"}
    assert {name: error for name, error in errors.items() if not error <= limits[name]} == {}


def test_upstream_hands_every_sink_to_every_rank(control: Results) -> None:
    assert "s_aux must have one logit per query head; got 8 for 4 heads" in control["ranks_2"]["raises"]


def test_attention_inside_the_shard_is_refused(patched: Results, control: Results) -> None:
    found = patched["local_attention"]
    for name in LOCAL:
        assert found[name].startswith("NotImplementedError: verl.ulysses-sinks: LlamaForCausalLM runs ")
        assert "attn_implementation=flash_attention_2" in found[name]
    assert {name for name, outcome in found.items() if not outcome} == set(found) - set(LOCAL)
    assert set(control["local_attention"].values()) == {""}


def test_sinks_that_do_not_fit_the_heads(patched: Results) -> None:
    found = patched["misfits"]
    for name in ("too few", "odd"):
        assert found[name].startswith("ValueError: verl.ulysses-sinks: found s_aux of shape (3,)")
    # Without positions verl does no all-to-all, so the sinks stay whole.
    assert (found["no positions"], found["seen"]) == ("", [[0.0, 1.0, 2.0, 3.0]])
