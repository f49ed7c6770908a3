"""verl's own SFT trainer on packed text, two processes, this package installed and nothing else said."""

from __future__ import annotations

import sft_job
from job import Job, errors


def test_the_reference_learns(job: Job) -> None:
    """A loss that stands still could be equal for other reasons."""
    assert job.reference[-1] < job.reference[0] - 1


def test_packed_loss_is_the_loss_of_one_plain_process(job: Job) -> None:
    losses, printed = job.losses("patched")
    assert max(errors(losses, job.reference)) < 1e-5
    assert printed.count("transformers.packed-masks: applied") == sft_job.RANKS
    assert "at the first step" not in printed, "something that was applied was replaced, or a rank was silent"


def test_without_the_plugin_it_is_another_loss(job: Job) -> None:
    losses, printed = job.losses("control", VERL_USE_EXTERNAL_PLUGINS="none")
    assert "fsdp_sink_patches" not in printed
    assert min(errors(losses, job.reference)) > 1e-2
