"""transformers.flash-sinks: sinks are exact under every flash name, against fp64, in real model classes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from measured import (
    RIGHT,
    RIGHT_UNDER_FLASH,
    TRANSFORMERS,
    UNDER_FLASH_ATTN_2,
    Results,
    errors,
    fails,
    proves,
    refusals,
)
from packaging.version import Version

FIRST = {
    "gpt_oss": "4.55",
    "openai_privacy_filter": "5.6",
    "deepseek_v4": "5.8",
    "mimo_v2_flash": "5.13",
    "granite_swa": "5.15",
    "granitemoe_swa": "5.15",
    "hy_v4": "5.17",
    "flint": "5.21",
    "hy_v4_vl": "5.24",
}
"""Every model that passes s_aux, and the release that brought it."""

REFUSED = {"deepseek_v4", "hy_v4", "hy_v4_vl"}


@pytest.mark.parametrize("name", RIGHT_UNDER_FLASH)
def test_right_where_upstream_is_not(
    name: str, patched: Results, control: Results, transformers_version: Version
) -> None:
    assert max(errors(patched[name]).values()) <= RIGHT
    assert fails(control[name], *refusals(transformers_version))


def test_right_where_upstream_drops_a_sink_it_is_given(run: Callable[..., Results]) -> None:
    found, control = (run("sinks_given", apply=ids, stub="fa2")["sinks_given"] for ids in (TRANSFORMERS, ()))
    assert "raises" not in control, control["raises"]
    assert min(control["layer"], control["inner"]) > 0.1  # computed without sinks, without a word
    assert "raises" not in found, found["raises"]
    assert max(found["layer"], found["inner"]) <= RIGHT


@pytest.mark.parametrize("name", ["packed", "packed_fa3", "ulysses"])
def test_right_when_applied_after_the_model_class(name: str, after: Results) -> None:
    assert max(errors(after[name]).values()) <= RIGHT


def test_applies_restores_and_applies_again(after: Results) -> None:
    result = after["restored"]
    assert max(errors(result.pop("then")).values()) <= RIGHT
    assert result == {"not one deep": [], "not restored": [], "not applied again": []}


@pytest.mark.parametrize("stub", ["fa2", "fa3", "fa4"])
def test_right_with_a_flash_package_installed(
    stub: str, run: Callable[..., Results], transformers_version: Version
) -> None:
    name = {"fa2": "packed", "fa3": "packed_fa3", "fa4": "packed_fa4"}[stub]
    names = UNDER_FLASH_ATTN_2 if stub == "fa2" else (name,)
    apply = (*TRANSFORMERS, "flash-attn.varlen-sinks") if stub == "fa2" else TRANSFORMERS
    found, control = run(*names, apply=apply, stub=stub), run(*names, stub=stub)
    if stub == "fa4" and transformers_version < Version("5.4"):
        assert "it came with 5.4" in found[name]["raises"]
        return
    assert max(errors(found[name]).values()) <= RIGHT
    refused = ("ValueError: Expected IntTuple for max_seqlen_q",) if stub == "fa4" else refusals(transformers_version)
    assert fails(control[name], *refused)
    if transformers_version < Version("5") and stub != "fa4":
        assert control[name]["logits"] > 0.1  # computed without sinks, without a word


def test_flash_attention_4_without_the_package(patched: Results, transformers_version: Version) -> None:
    if transformers_version < Version("5.4"):
        assert "it came with 5.4" in patched["packed_fa4"]["raises"]
    else:
        assert max(errors(patched["packed_fa4"]).values()) <= RIGHT


def test_every_model_with_sinks(patched: Results, transformers_version: Version) -> None:
    expected = {m for m, first in FIRST.items() if transformers_version >= Version(first)} - REFUSED
    found = patched["every_model"]
    assert "raises" not in found, found["raises"]
    assert found.keys() == expected
    wrong = {
        (model, batch): result
        for model, batches in found.items()
        for batch, result in batches.items()
        if not max(errors(result).values()) <= RIGHT
    }
    assert not wrong


def test_every_model_that_passes_sinks_is_known(patched: Results, transformers_version: Version) -> None:
    expected = {m: [m not in REFUSED] for m, first in FIRST.items() if transformers_version >= Version(first)}
    assert patched["sink_sources"] == {"models": expected, "sinkless": [False, False]}


def test_checkpointing_still_runs_each_layer_twice(patched: Results) -> None:
    assert patched["checkpointed"]["attention calls"] == 4


def test_verl_wrapper_is_called_by_every_layer(patched: Results, after: Results) -> None:
    assert patched["ulysses"]["calls"] == after["ulysses"]["calls"] == 2


@pytest.mark.parametrize("name", ["compiled", "compiled_borders"])
def test_compiles(name: str, patched: Results, transformers_version: Version) -> None:
    result = patched[name]
    assert result == {"logits": pytest.approx(0, abs=RIGHT), "fullgraph": transformers_version >= Version("5")}


def test_loads_a_checkpoint(patched: Results) -> None:
    assert patched["loaded"] == {"implementation": "flash_attention_2", "logits": pytest.approx(0, abs=RIGHT)}


def test_generation_with_every_cache(patched: Results) -> None:
    result = patched["generated"]
    assert result.pop("distinct tokens") >= 8
    assert result == {"growing": True, "static": True, "static, no padding": True, "alone": True}


def test_lengths_may_be_numpys(patched: Results) -> None:
    assert max(errors(patched["numpy_lengths"]).values()) <= RIGHT


def test_borders_are_never_stale_on_the_cpu_and_derived_once_elsewhere(patched: Results) -> None:
    result = patched["derived_once"]
    assert "raises" not in result, result["raises"]
    assert result["errors"].keys() == {"first", "through .data", "through NumPy"}
    assert max(result["errors"].values()) <= RIGHT
    assert result["calls"] == [1, 1, 2, 3, 4]  # four layers; again; after a write; with a mask; with another mask
    assert result["kept"] == [1, 0]


def test_sinks_keep_their_dtype(patched: Results) -> None:
    assert patched["autocast"]["dsink"] == "torch.float32"
    assert patched["autocast"]["logits"] <= 3e-2
    # bf16 output rounds by 2e-3; a sink of 8.015 rounded to bf16 would be off by 1.5e-2
    assert patched["precise_sinks"] == {"out": pytest.approx(0, abs=4e-3), "dsink dtype": "torch.float32"}


def test_value_keeps_its_head_dim(patched: Results) -> None:
    result = patched["wide_keys"]
    assert result["shape"] == [1, 20, 4, 16]
    assert max(result["out"], result["gradient"]) <= RIGHT


def test_window_counts_the_token_itself(patched: Results) -> None:
    assert patched["window"] == {
        "one document": [min(i + 1, 4) for i in range(12)],
        "packed": [min(i + 1, 4) for n in (5, 7) for i in range(n)],
    }


def test_dropout_is_refused(patched: Results) -> None:
    assert "dropout" in patched["dropout"]["raises"]


def test_nothing_passes_in_silence(patched: Results) -> None:
    for name, message in patched["unusual_arguments"].items():
        assert name in message or "s_aux" in message, (name, message)


def test_names_resolve_without_a_network_and_say_so_once(
    patched: Results, after: Results, control: Results, transformers_version: Version
) -> None:
    known = ["flash_attention_2", "flash_attention_3"]
    known += ["flash_attention_4"] if transformers_version >= Version("5.4") else []
    for result in (patched["resolved"], after["resolved"]):
        assert {name: result["names"][name] for name in known} == {name: name for name in known}
        assert result["connections"] == []
        for name in known:
            lines = [line for line in result["log"] if name in line]
            assert len(lines) == 1
            assert "gpt_oss" in lines[0]
            assert "reference" in lines[0]
    assert all(control["resolved"]["names"][name] != name for name in known)


def test_refusals_are_upstreams(patched: Results, control: Results, transformers_version: Version) -> None:
    """No flash for models without sinks when no package is there, for DSA and compressed attention, no sdpa."""
    assert patched["refused"] == control["refused"]
    assert "FlashAttention2 has been toggled on" in patched["refused"]["llama"]
    for name in {"deepseek_v4", "hy_v4"} & patched["refused"].keys():
        assert "does not support Flash Attention" in patched["refused"][name]
    assert ("hy_v4" in patched["refused"]) == (transformers_version >= Version("5.17"))


def test_sdpa_raises_instead_of_dropping(patched: Results, after: Results, control: Results) -> None:
    assert control["sdpa_forced"]["logits"] > 0.1
    for result in (patched, after):
        assert "sdpa was called with s_aux" in result["sdpa_forced"]["raises"]


def test_a_kernel_without_sinks_raises_instead_of_dropping(patched: Results, control: Results) -> None:
    assert control["foreign_kernels"]["without"] == 0.0
    assert "neither an s_aux nor a learnable_sink" in patched["foreign_kernels"]["without"]
    assert patched["foreign_kernels"]["native"] == control["foreign_kernels"]["native"] == 1.0


def test_models_without_sinks_are_unchanged_bit_for_bit(
    run: Callable[..., Results], transformers_version: Version
) -> None:
    found = run(*UNDER_FLASH_ATTN_2, apply=(*TRANSFORMERS, "flash-attn.varlen-sinks"), stub="fa2")["sinkless"]
    control = run(*UNDER_FLASH_ATTN_2, stub="fa2")["sinkless"]
    assert "raises" not in found, found["raises"]
    if transformers_version == Version("5.6.0"):
        assert "'NoneType' object has no attribute 'to'" in control["raises"]  # huggingface/transformers#45588
    else:
        assert found == control
    assert found.keys() == {"llama", "qwen3", "gemma3_text", "s_aux absent", "s_aux None"}
    assert found["s_aux absent"] == found["s_aux None"]


def test_its_own_validation_proves_it(patched: Results, control: Results, transformers_version: Version) -> None:
    refused = refusals(transformers_version)
    assert proves(patched["validated_flash_sinks"], control["validated_flash_sinks"], *refused)
