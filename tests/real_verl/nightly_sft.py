"""More of verl's own SFT trainer; only ``make nightly`` runs this file (cells.toml).

What ranks find out about each other is tested in ``tests/distributed/test_first_step.py``; here, that verl's job
gets it without an edit.
"""

from __future__ import annotations

import sft_job
from job import Job, errors

ODD = {"VERL_USE_EXTERNAL_MODULES": "cpu_platform,odd_rank"}


def test_the_job_stops_before_the_first_step(job: Job) -> None:
    code, losses, printed = job.start("odd", **ODD)
    assert code != 0
    assert losses == []
    assert "the patches of rank 1 are not those of rank 0" in printed
    assert "The report of rank 1:\n" in printed
    assert "The report of rank 0:\n" in printed


def test_or_warns_and_goes_on(job: Job) -> None:
    losses, printed = job.losses("warned", **ODD, FSDP_SINK_PATCHES_RANKS="warn")
    assert len(losses) == sft_job.STEPS
    assert printed.count("the patches of rank 1 are not those of rank 0") == sft_job.RANKS


def test_verls_default_attention(job: Job) -> None:
    """flash_attention_2, which keeps the sinks with us and needs neither flash-attn nor a GPU."""
    losses, _ = job.losses("default", attention=None)
    assert max(errors(losses, job.reference)) < 1e-5


def test_verls_default_attention_without_the_plugin(job: Job) -> None:
    code, losses, printed = job.start("default control", attention=None, VERL_USE_EXTERNAL_PLUGINS="none")
    assert code != 0
    assert losses == []
    assert "ImportError" in printed
