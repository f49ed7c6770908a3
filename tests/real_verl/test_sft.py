"""verl's own SFT trainer on packed text, two processes, this package installed and nothing else said."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import pytest
import sft_job
from verl_environment import HERE, VerlEnv, extend

# verl 0.9.1 says transformers<5.11, and its trainer needs that.
TRANSFORMERS = "transformers==5.10.2"
CPU = {
    "PYTHONPATH": str(HERE),
    "VERL_PLATFORM": "cpu",
    "VERL_USE_EXTERNAL_MODULES": "cpu_platform",
    "VERL_ENGINE_DEVICE": "cuda",  # under this name verl keeps the FSDP engine
}


@dataclass(frozen=True)
class Job:
    env: VerlEnv
    folder: Path
    reference: list[float]

    def losses(self, name: str, **environment: str) -> tuple[list[float], str]:
        """What verl logged at each step, and what the job printed."""
        log = self.folder / f"{name}.jsonl"
        done = self.env.start(
            *sft_job.command(self.folder), cwd=self.folder, **CPU, VERL_FILE_LOGGER_PATH=str(log), **environment
        )
        printed = done.stdout + done.stderr
        assert done.returncode == 0, printed[-8000:]
        return [json.loads(line)["data"]["train/loss"] for line in log.read_text().splitlines()], printed


@pytest.fixture(scope="module")
def job(verl_env: VerlEnv, tmp_path_factory: pytest.TempPathFactory) -> Job:
    env = extend(verl_env, tmp_path_factory.mktemp("trainer_env"), TRANSFORMERS)
    folder = tmp_path_factory.mktemp("job")
    done = env.start(HERE / "sft_job.py", folder, cwd=folder)
    assert done.returncode == 0, done.stderr[-4000:]
    return Job(env, folder, json.loads((folder / "reference.json").read_text()))


def errors(losses: list[float], reference: list[float]) -> list[float]:
    assert len(losses) == len(reference) == sft_job.STEPS
    return [abs(found - wanted) for found, wanted in zip(losses, reference, strict=True)]


def test_the_reference_learns(job: Job) -> None:
    """A loss that stands still could be equal for other reasons."""
    assert job.reference[-1] < job.reference[0] - 1


def test_packed_loss_is_the_loss_of_one_plain_process(job: Job) -> None:
    losses, printed = job.losses("patched")
    assert max(errors(losses, job.reference)) < 1e-5
    assert printed.count("transformers.packed-masks: applied") == sft_job.RANKS


def test_without_the_plugin_it_is_another_loss(job: Job) -> None:
    losses, printed = job.losses("control", VERL_USE_EXTERNAL_PLUGINS="none")
    assert "fsdp_sink_patches" not in printed
    assert min(errors(losses, job.reference)) > 1e-2
