"""verl's FSDP2 engine: every tiny model, two and four gloo ranks; only ``make nightly`` runs this file (cells.toml)."""

from __future__ import annotations

import pytest
from engine import (
    LISTS_IN_FP32,
    Engine,
    Found,
    assert_equal_to_alone,
    assert_fp32_where_listed,
    assert_rounded,
    assert_wrong,
    known,
)
from verl_environment import VerlEnv

MODELS = known(("llama", "gpt_oss", "mimo_v2_flash", "deepseek_v4"))
SEEN_BY_OTHERS = known(("gpt_oss", "deepseek_v4"))
LISTING = known(LISTS_IN_FP32)
LEFT_ALONE = ["llama", "gpt_oss"]
FLASH = {"gpt_oss": "flash_attention_2", "mimo_v2_flash": "flash_attention_4"}
RANKS = (2, 4)
SIZES = [(size, ranks) for ranks in RANKS for size in (2, 4) if size <= ranks]  # four ranks of size 2 are two groups


@pytest.fixture(scope="module")
def engine(verl_env: VerlEnv, tmp_path_factory: pytest.TempPathFactory) -> Engine:
    return Engine(verl_env, tmp_path_factory.mktemp("engine"))


def _cases(ranks: int) -> dict[str, list[str]]:
    """Those of one kind run in one go."""
    sizes = [size for size, of in SIZES if of == ranks]
    return {
        "packed": [f"{model} packed" for model in MODELS],
        "bf16": [f"{model} bf16" for model in [*LEFT_ALONE, *LISTING]],
        "flash": [_flash(model, size) for model in known(tuple(FLASH)) for size in sizes],
        "eager": [f"{model} eager ulysses {size}" for model in MODELS for size in sizes],
    }


def _flash(model: str, size: int) -> str:
    return f"{model} {FLASH[model]} ulysses {size}"


def patched(engine: Engine, ranks: int, kind: str) -> Found:
    return engine.run(ranks, *_cases(ranks)[kind], apply="before")[0]


def control(engine: Engine, ranks: int, kind: str) -> Found:
    return engine.run(ranks, *_cases(ranks)[kind], apply="never")[0]


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("model", MODELS)
def test_packed_is_alone(model: str, ranks: int, engine: Engine) -> None:
    assert_equal_to_alone(patched(engine, ranks, "packed")[f"{model} packed"])


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("model", MODELS)
def test_upstream_packed(model: str, ranks: int, engine: Engine) -> None:
    found = control(engine, ranks, "packed")[f"{model} packed"]
    (assert_wrong if model in SEEN_BY_OTHERS else assert_equal_to_alone)(found)


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("model", [*LEFT_ALONE, *LISTING])
def test_fp32_where_listed(model: str, ranks: int, engine: Engine) -> None:
    assert_fp32_where_listed(patched(engine, ranks, "bf16")[f"{model} bf16"], listed=model in LISTING)


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("model", LISTING)
def test_upstream_rounds_all_of_it(model: str, ranks: int, engine: Engine) -> None:
    assert_rounded(control(engine, ranks, "bf16")[f"{model} bf16"])


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("model", LEFT_ALONE)
def test_upstream_rounds_the_frequencies(model: str, ranks: int, engine: Engine) -> None:
    for rank in control(engine, ranks, "bf16")[f"{model} bf16"]:
        assert "model.rotary_emb.inv_freq" in rank["buffers off"]


@pytest.mark.parametrize(("size", "ranks"), SIZES)
@pytest.mark.parametrize("model", known(tuple(FLASH)))
def test_sequence_parallel_is_one_rank(model: str, size: int, ranks: int, engine: Engine) -> None:
    assert_equal_to_alone(patched(engine, ranks, "flash")[_flash(model, size)])


@pytest.mark.parametrize(("size", "ranks"), SIZES)
@pytest.mark.parametrize("model", MODELS)
def test_attention_inside_a_shard(model: str, size: int, ranks: int, engine: Engine) -> None:
    case = f"{model} eager ulysses {size}"
    for rank in patched(engine, ranks, "eager")[case]:
        assert rank["raises"].startswith("NotImplementedError: verl.ulysses-sinks: ")
    assert_wrong(control(engine, ranks, "eager")[case])


@pytest.mark.parametrize("ranks", RANKS)
def test_each_patch_is_needed(ranks: int, engine: Engine) -> None:
    """All the others on: what is left is what the one that is off repairs."""
    without = engine.run(ranks, _flash("gpt_oss", ranks), apply="before", disable="verl.ulysses-sinks")[0]
    assert all("s_aux must have one logit per query head" in r["raises"] for r in without[_flash("gpt_oss", ranks)])
    case = f"{LISTING[0]} bf16"
    assert_rounded(engine.run(ranks, case, apply="before", disable="verl.fp32-islands")[0][case])
