"""The same patches on every rank, or an error that names the ranks that differ.

One rank with a pristine attribute trains on other mathematics than its neighbours, and no loss curve says so.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from fsdp_sink_patches._engine import status
from fsdp_sink_patches._state import PatchError, Report


def assert_same_everywhere(group: Any = None) -> Report:
    """Compare this rank's report with every other's; call it on all ranks, after the model is built.

    Compared are ids, upstream versions, fingerprints, states, and who holds each attribute. Without an initialised
    process group there is one process, and nothing to compare.

    Args:
        group: the process group to compare over; None is the default group. With NCCL the current CUDA device must be
            set, as for any collective.

    Returns:
        This rank's report.

    Raises:
        PatchError: on every rank, naming the ranks that differ from the most common report, and how.
    """
    report = status()
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized()):
        return report
    rows: list[Any] = [None] * dist.get_world_size(group)
    # The digest decides; the states come along so that the message can say what differs.
    dist.all_gather_object(rows, (dist.get_rank(), report.digest(), _facts(report)), group=group)
    counts = Counter(row[1] for row in rows)
    if len(counts) == 1:
        return report
    usual = max(counts, key=lambda digest: (counts[digest], -min(row[0] for row in rows if row[1] == digest)))
    reference = next(row for row in rows if row[1] == usual)
    lines = []
    for rank, digest, facts in rows:
        if digest == usual:
            continue
        ids = sorted(facts.keys() | reference[2].keys())
        differing = [id for id in ids if facts.get(id) != reference[2].get(id)]
        lines += [
            f"rank {rank}: {id}: found {facts.get(id)}, rank {reference[0]} has {reference[2].get(id)}"
            for id in differing
        ]
    raise PatchError(
        report.failures,
        f"the patches differ between ranks ({counts[usual]} of {len(rows)} agree with rank {reference[0]}):\n"
        + "\n".join(lines)
        + "\nCall fsdp_sink_patches.apply() at the same place on every rank, with the same packages installed.",
    )


def _facts(report: Report) -> dict[str, str]:
    facts = {}
    for patch in report.patches:
        targets = ", ".join(f"{target.path} {target.state} {target.owner}".strip() for target in patch.targets)
        facts[patch.id] = f"{patch.state} ({patch.distribution} {patch.version}, {patch.fingerprint}; {targets})"
    return facts
