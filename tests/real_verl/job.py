"""verl's SFT trainer by torchrun in a `VerlEnv`, on the CPU."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import sft_job
from verl_environment import HERE, VerlEnv

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

    def start(self, name: str, attention: str | None = "eager", **environment: str) -> tuple[int, list[float], str]:
        """Run it; the exit code, the losses that verl logged, and what was printed."""
        log = self.folder / f"{name}.jsonl"
        settings = CPU | {"VERL_FILE_LOGGER_PATH": str(log)} | environment
        done = self.env.start(*sft_job.command(self.folder, attention), cwd=self.folder, **settings)
        lines = log.read_text(encoding="utf-8").splitlines() if log.exists() else []
        losses = [json.loads(line)["data"]["train/loss"] for line in lines]
        return done.returncode, losses, done.stdout + done.stderr

    def losses(self, name: str, attention: str | None = "eager", **environment: str) -> tuple[list[float], str]:
        """`start`, of a job that ends well."""
        code, losses, printed = self.start(name, attention, **environment)
        assert code == 0, printed[-8000:]
        return losses, printed


def prepare(env: VerlEnv, folder: Path) -> Job:
    """Write what the job reads into the empty ``folder``, and compute the loss that it should report."""
    done = env.start(HERE / "sft_job.py", folder, cwd=folder)
    assert done.returncode == 0, done.stderr[-4000:]
    return Job(env, folder, json.loads((folder / "reference.json").read_text()))


def errors(losses: list[float], reference: list[float]) -> list[float]:
    assert len(losses) == len(reference) == sft_job.STEPS
    return [abs(found - wanted) for found, wanted in zip(losses, reference, strict=True)]
