"""flash-attn.varlen-sinks: s_aux and sink_kv for callers of the package itself."""

from __future__ import annotations

from collections.abc import Callable

from measured import RIGHT, TRANSFORMERS, UNDER_FLASH_ATTN_2, Results, proves

APPLY = (*TRANSFORMERS, "flash-attn.varlen-sinks")
FUNCTIONS = {
    f"flash_attn_{kind}func"
    for kind in ("", "qkvpacked_", "kvpacked_", "varlen_", "varlen_qkvpacked_", "varlen_kvpacked_")
}


def test_sinks_and_slots_are_exact(run: Callable[..., Results]) -> None:
    found = run(*UNDER_FLASH_ATTN_2, apply=APPLY, stub="fa2")["direct"]
    assert "raises" not in found, found["raises"]
    assert found.pop("re-exported") is True
    assert found.keys() == {*FUNCTIONS, "slots", "slots and sinks"}
    assert max(found.values()) <= RIGHT


def test_upstream_has_no_such_argument(run: Callable[..., Results]) -> None:
    assert "unexpected keyword argument 's_aux'" in run(*UNDER_FLASH_ATTN_2, stub="fa2")["direct"]["raises"]


def test_without_sinks_the_packages_own_function_runs(run: Callable[..., Results]) -> None:
    found = run(*UNDER_FLASH_ATTN_2, apply=APPLY, stub="fa2")["direct_without_sinks"]
    assert found == run(*UNDER_FLASH_ATTN_2, stub="fa2")["direct_without_sinks"]
    assert sorted(found["calls"]) == sorted(FUNCTIONS)


def test_its_own_validation_proves_it(run: Callable[..., Results]) -> None:
    found, control = run(*UNDER_FLASH_ATTN_2, apply=APPLY, stub="fa2"), run(*UNDER_FLASH_ATTN_2, stub="fa2")
    refused = "TypeError: flash_attn_varlen_func() got an unexpected keyword argument 's_aux'"
    assert proves(found["validated_varlen_sinks"], control["validated_varlen_sinks"], refused)
