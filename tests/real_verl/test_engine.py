"""verl's FSDP2 engine with tiny models on two gloo ranks; nightly_engine.py has the rest."""

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

PACKED = known(("gpt_oss", "deepseek_v4"))
LISTING = known(LISTS_IN_FP32)[:1]
ULYSSES = "gpt_oss flash_attention_2 ulysses 2"
LOCAL = "gpt_oss eager ulysses 2"
CASES = (*[f"{model} packed" for model in PACKED], *[f"{model} bf16" for model in LISTING], LOCAL, ULYSSES)


@pytest.fixture(scope="session")
def engine(verl_env: VerlEnv, tmp_path_factory: pytest.TempPathFactory) -> Engine:
    return Engine(verl_env, tmp_path_factory.mktemp("engine"))


@pytest.fixture(scope="session")
def both(engine: Engine) -> list[Found]:
    return engine.run(2, *CASES, apply="twice")


@pytest.fixture(scope="session")
def control(both: list[Found]) -> Found:
    return both[0]


@pytest.fixture(scope="session")
def patched(both: list[Found]) -> Found:
    return both[1]


@pytest.mark.parametrize("model", PACKED)
def test_packed_is_alone(model: str, patched: Found) -> None:
    assert_equal_to_alone(patched[f"{model} packed"])


@pytest.mark.parametrize("model", PACKED)
def test_upstream_lets_documents_see_each_other(model: str, control: Found) -> None:
    assert_wrong(control[f"{model} packed"])


@pytest.mark.parametrize("model", LISTING)
def test_fp32_stays_where_the_model_lists_it(model: str, patched: Found) -> None:
    assert_fp32_where_listed(patched[f"{model} bf16"], listed=True)


@pytest.mark.parametrize("model", LISTING)
def test_upstream_rounds_all_of_it(model: str, control: Found) -> None:
    assert_rounded(control[f"{model} bf16"])


def test_sequence_parallel_is_one_rank(patched: Found) -> None:
    assert_equal_to_alone(patched[ULYSSES])


def test_attention_inside_a_shard_is_refused(patched: Found, control: Found) -> None:
    assert all(
        rank["raises"].startswith("NotImplementedError: verl.ulysses-sinks: GptOssForCausalLM runs eager attention")
        for rank in patched[LOCAL]
    )
    assert_wrong(control[LOCAL])
