"""`make demo` end to end on a short run, and the parts its numbers rest on."""

from __future__ import annotations

import importlib
import itertools
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

DEMO = Path(__file__).resolve().parents[2] / "demo"


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    out = tmp_path_factory.mktemp("demo_out")
    options = ["--steps", "3", "--measure-every", "3", "--seq-len", "256", "--device", "cpu", "--out", str(out)]
    command = [sys.executable, str(DEMO / "run.py"), "--json", *options]
    done = subprocess.run(command, cwd=out, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    assert found == json.loads((out / "results.json").read_text())
    assert (out / "errors.png").read_bytes().startswith(b"\x89PNG")
    return found


@pytest.fixture
def train(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.syspath_prepend(str(DEMO))
    yield importlib.import_module("train")
    sys.modules.pop("train")


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.syspath_prepend(str(DEMO))
    yield importlib.import_module("run")
    sys.modules.pop("run")


@pytest.mark.timeout(180)
def test_patched_is_right_and_unpatched_is_not(results: dict[str, Any], driver: Any) -> None:
    unpatched, patched = results["runs"]["unpatched"], results["runs"]["patched"]
    assert [e["step"] for e in patched["errors"]] == [e["step"] for e in unpatched["errors"]] == [0, 3]
    assert results["right"]
    assert driver.right(patched)
    assert not driver.right(unpatched)
    # fp32 in both runs: what is left is rounding in one and the leak in the other.
    for wrong, good in zip(unpatched["errors"], patched["errors"], strict=True):
        assert good["logprob_error"] < 1e-5
        assert wrong["logprob_error"] > 100 * good["logprob_error"]
        assert wrong["dsink_error"] > 0.1
        assert good["dsink_error"] < 1e-4
        # The oracle itself: in the unpatched process, documents run alone are right, so the leak is the whole error.
        assert wrong["packed_against_alone"] == pytest.approx(wrong["logprob_error"], rel=1e-3)
    assert unpatched["errors"][0]["logprob_error"] > 0.05
    assert patched["tokens_per_second"] > 0
    assert patched["peak_bytes"] > 0


def test_both_runs_start_from_the_same_weights_and_rows(results: dict[str, Any]) -> None:
    first = {name: run["errors"][0] for name, run in results["runs"].items()}
    assert first["unpatched"]["oracle_loss"] == first["patched"]["oracle_loss"]


def test_the_report_is_part_of_the_results(results: dict[str, Any]) -> None:
    ids = {patch["id"] for patch in results["check"]["patches"]}
    assert {"transformers.flash-sinks", "transformers.packed-masks"} <= ids


def test_a_number_that_is_none_is_not_right(driver: Any) -> None:
    errors = {"logprob_error": 1e-7, "packed_against_alone": 1e-7, "dsink_error": 1e-6}
    assert driver.right({"compute_dtype": "float32", "errors": [errors]})
    assert not driver.right({"compute_dtype": "float32", "errors": [errors, errors | {"dsink_error": float("nan")}]})


def test_rows_are_packed_text(train: Any) -> None:
    documents = train.texts()
    assert len(documents) > 1000
    row = next(train.rows(documents, 512, seed=3))
    slices = row.documents()
    assert len(slices) > 2
    assert [slices[0].start, slices[-1].stop] == [0, 512]
    for piece in slices:
        ids = row.input_ids[0, piece].tolist()
        assert ids[0] == train.BEGIN_OF_DOCUMENT
        assert row.position_ids[0, piece].tolist() == list(range(len(ids)))
        assert any(document.startswith(bytes(ids[1:])) for document in documents)
    again = next(train.rows(documents, 512, seed=3))
    assert torch.equal(row.input_ids, again.input_ids)


def test_nothing_is_predicted_across_a_border(train: Any) -> None:
    row = next(train.rows(train.texts(), 256, seed=4))
    logits = torch.randn(1, 256, train.VOCAB, generator=torch.Generator().manual_seed(0))

    class Model:
        def __call__(self, input_ids: torch.Tensor, position_ids: torch.Tensor) -> Any:
            return type("Output", (), {"logits": logits})

    logp = torch.log_softmax(logits[0], -1)
    expected = [
        logp[at - 1, row.input_ids[0, at]] for piece in row.documents() for at in range(piece.start + 1, piece.stop)
    ]
    assert torch.equal(train.token_logprobs(Model(), row), torch.stack(expected))
    assert not any(b.start - a.stop for a, b in itertools.pairwise(row.documents()))


def test_a_failed_run_says_so(driver: Any, tmp_path: Path) -> None:
    job = driver.Job("broken", "no_such_attention", False, "black")
    args = driver.argparse.Namespace(steps=1, measure_every=1, seq_len=64, device="cpu", dtype="float32", ranks=1)
    with pytest.raises(driver.RunFailedError, match=r"the broken run exited [\s\S]*no_such_attention"):
        list(driver.train(job, args, tmp_path))
