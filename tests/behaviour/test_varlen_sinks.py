"""flash-attn.varlen-sinks: s_aux and sink_kv for callers of the package itself."""

from __future__ import annotations

from collections.abc import Callable

from measured import RIGHT, TRANSFORMERS, Results

NAMES = ("packed", "sinkless", "direct_without_sinks", "direct")
FUNCTIONS = {
    f"flash_attn_{kind}func"
    for kind in ("", "qkvpacked_", "kvpacked_", "varlen_", "varlen_qkvpacked_", "varlen_kvpacked_")
}


def test_sinks_and_slots_are_exact(run: Callable[..., Results]) -> None:
    found = run(*NAMES, apply=(*TRANSFORMERS, "flash-attn.varlen-sinks"), stub="fa2")["direct"]
    assert "raises" not in found, found["raises"]
    assert found.pop("re-exported") is True
    assert found.keys() == {*FUNCTIONS, "slots", "slots and sinks"}
    assert max(found.values()) <= RIGHT


def test_upstream_has_no_such_argument(run: Callable[..., Results]) -> None:
    assert "unexpected keyword argument 's_aux'" in run(*NAMES, stub="fa2")["direct"]["raises"]


def test_without_sinks_the_packages_own_function_runs(run: Callable[..., Results]) -> None:
    found = run(*NAMES, apply=(*TRANSFORMERS, "flash-attn.varlen-sinks"), stub="fa2")["direct_without_sinks"]
    assert found == run(*NAMES, stub="fa2")["direct_without_sinks"]
    assert sorted(found["calls"]) == sorted(FUNCTIONS)
