"""The same patches on every rank, or an error that names the ranks that differ.

One rank with a pristine attribute trains on other mathematics than its neighbours, and no loss curve says so.
`assert_same_everywhere` is for a script's own line; `check_at_first_step` is what jobs get that load the patches by a
hook (`fsdp_sink_patches.autoload`).
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections import Counter
from typing import Any

from fsdp_sink_patches import _engine
from fsdp_sink_patches._engine import status
from fsdp_sink_patches._state import PatchError, PatchStatus, Report, State

RANKS = "FSDP_SINK_PATCHES_RANKS"
POLICIES = ("stop", "warn", "off")
WAIT_SECONDS = 300.0
"""How long a rank waits for another's report. Ranks that train together reach their first step within moments; one that
still compiles or tunes kernels may take minutes, and collectives wait for 10 minutes by default."""

_log = logging.getLogger("fsdp_sink_patches")
_armed = _stepped = False


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


# --- at the first step of an optimizer -----------------------------------------------------------------------------


def check_at_first_step() -> None:
    """Have every rank held against rank 0 when this process first steps an optimizer; once a process.

    The reports travel through the store of the default process group, not through a collective: ranks that never step
    an optimizer, or that lack this package, can't hang the others. Rank 0 reads every report, each other rank that of
    rank 0. Nothing is compared without a process group, and in processes that never step an optimizer (a reference
    model in workers of its own, an inference server).

    ``FSDP_SINK_PATCHES_RANKS``: ``stop`` (the default) raises `PatchError` with both reports out of the step, ``warn``
    logs them, ``off`` compares nothing. A rank that says nothing within `WAIT_SECONDS` is logged at ERROR, and an error
    under ``FSDP_SINK_PATCHES_STRICT=1``: it has no report, and may have no optimizer. So is a patch that should be in
    force on this rank and is not: trainers put their own functions in place after the patches were loaded.

    With ``FSDP_SINK_PATCHES=none`` nothing is looked at.

    Raises:
        ValueError: ``FSDP_SINK_PATCHES_RANKS`` can't be read; the ranks are compared as under ``stop`` all the same.
    """
    global _armed
    if _armed or os.environ.get(_engine.SELECT, "").strip() == "none":
        return
    _armed = True
    from wrapt import register_post_import_hook

    register_post_import_hook(_arm, "torch.optim.optimizer")
    _policy(checked=True)


def _arm(optimizer_module: Any) -> None:
    # Stays registered: torch walks its table of hooks while they run, so one that removes itself breaks the step.
    optimizer_module.register_optimizer_step_pre_hook(_before_a_step)


def _before_a_step(*_: Any) -> None:
    global _stepped
    if not _stepped:
        _stepped = True
        _first_step()


def _first_step() -> None:
    report = status()
    policy = _policy()
    if policy != "off":
        _compare(report, policy)
    if report.failures and _engine.is_strict():
        raise PatchError(report.failures)
    for failure in report.failures:
        _log.error("fsdp_sink_patches, at the first step: %s: %s. %s", failure.id, failure.state, failure.reason)


def _policy(checked: bool = False) -> str:
    value = os.environ.get(RANKS, "").strip().lower() or POLICIES[0]
    if value in POLICIES:
        return value
    if checked:
        raise ValueError(f"{RANKS}={value!r}: expected one of {', '.join(POLICIES)}. Taken as {POLICIES[0]}.")
    return POLICIES[0]


def _compare(report: Report, policy: str) -> None:
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return
    rank, size = dist.get_rank(), dist.get_world_size()
    others = range(1, size) if rank == 0 else range(1)
    mine = [_comparable(report), [_line(patch) for patch in report.patches]]
    try:
        theirs = _exchange(dist.distributed_c10d, rank, others, mine)
    except Exception as error:  # a backend without a store of this kind, or a store that is gone
        _log.warning("fsdp_sink_patches: the ranks could not be held against each other: %r", error)
        return
    if differing := [other for other, found in theirs.items() if found[0] != mine[0]]:
        zero, other = (mine, theirs[differing[0]]) if rank == 0 else (theirs[0], mine)
        text = _difference(differing if rank == 0 else [rank], zero, other)
        if policy == "stop":
            raise PatchError((), text)
        _log.warning("%s", text)
    if silent := [other for other in others if other not in theirs]:
        text = (
            f"fsdp_sink_patches: found no report of rank {_some(silent)} at the first step of rank {rank}, after "
            f"{WAIT_SECONDS:.0f} s; expected one from every rank. Either the package is not loaded there (a driver's "
            "environment variable does not reach other nodes: use Ray's runtime_env), or those ranks step no "
            f"optimizer: then set {RANKS}=off."
        )
        if _engine.is_strict():
            raise PatchError((), text)
        _log.error("%s", text)


def _exchange(c10d: Any, rank: int, others: range, mine: Any) -> dict[int, Any]:
    """Publish this rank's report; those of ``others`` that came in time."""
    store = c10d.PrefixStore("fsdp_sink_patches", c10d._get_default_store())
    store.set(str(rank), json.dumps(mine))
    end = time.monotonic() + WAIT_SECONDS
    return {other: found for other in others if (found := _read(store, str(other), end)) is not None}


def _read(store: Any, key: str, end: float) -> Any:
    """What another rank wrote, or None. Asking again and again leaves the store free for the others in between."""
    while not store.check([key]):
        if time.monotonic() > end:
            return None
        time.sleep(0.05)
    return json.loads(store.get(key))


def _comparable(report: Report) -> dict[str, str]:
    """What must agree. A patch that waits for an import is as good as one in force: a rank that has not imported the
    module does not compute with it."""
    from fsdp_sink_patches import settings

    chosen = {name: getattr(settings, name) for name in ("rope_dtype", "pooling_dtype", "compressed_attention")}
    facts = {"settings": ", ".join(f"{name}={value}" for name, value in chosen.items())}
    for patch in report.patches:
        state = "in force" if patch.state in (State.APPLIED, State.ARMED) else str(patch.state)
        facts[patch.id] = f"{state} ({patch.distribution} {patch.version})"
    return facts


def _line(patch: PatchStatus) -> str:
    return f"{patch.id}: {patch.state} ({patch.distribution} {patch.version}). {patch.reason}".rstrip()


def _difference(differing: list[int], zero: Any, other: Any) -> str:
    (facts_0, report_0), (facts, report) = zero, other
    ids = [id for id in sorted({*facts_0, *facts}) if facts_0.get(id) != facts.get(id)]
    headline = f"fsdp_sink_patches: the patches of rank {_some(differing)} are not those of rank 0, and would train on "
    advice = (
        "Install the same packages on every node and load the patches by the same hook with the same settings; "
        f"{RANKS}=warn goes on all the same, {RANKS}=off does not compare."
    )
    lines = [
        headline + "other mathematics.",
        *(f"{id}: found {facts.get(id)} on rank {differing[0]}, {facts_0.get(id)} on rank 0." for id in ids),
        f"The report of rank {differing[0]}:",
        *(f"  {line}" for line in report),
        "The report of rank 0:",
        *(f"  {line}" for line in report_0),
        advice,
    ]
    return "\n".join(lines)


def _some(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
