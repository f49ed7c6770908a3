"""What can be said about a patch in this process: ten states, one report, one exception."""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal


class State(str, enum.Enum):
    """One meaning each; ``is_failure`` says whether a job should stop for it."""

    DISABLED = "disabled"  # the user said no, or nobody asked
    ABSENT = "absent"  # the upstream is not installed
    INAPPLICABLE = "inapplicable"  # version outside the declared range, or refused
    OBSOLETE = "obsolete"  # fixed_in reached: delete the patch
    ARMED = "armed"  # waiting for a module's import
    APPLIED = "applied"  # every attribute is ours, looked at now
    DRIFTED = "drifted"  # in range, but not a source we know
    CONFLICT = "conflict"  # someone else already holds an attribute
    SHADOWED = "shadowed"  # was applied; replaced or reloaded since
    FAILED = "failed"  # raised; the traceback is kept

    __str__ = str.__str__

    @property
    def is_failure(self) -> bool:
        return self in (State.DRIFTED, State.CONFLICT, State.SHADOWED, State.FAILED)


TargetState = Literal["waiting", "skipped", "ours", "wrapped", "original", "foreign"]


@dataclass(frozen=True)
class TargetStatus:
    """One attribute, looked at now.

    Args:
        path: ``"module:qualname"``.
        state: ``waiting`` for the module's import; ``skipped``, an optional target that this release lacks; ``ours``;
            ``wrapped``, held by a wrapper that reaches ours through ``__wrapped__``; ``original``, upstream's own;
            ``foreign``, held by someone else.
        owner: who holds the attribute, for ``wrapped`` and ``foreign``; else empty.
    """

    path: str
    state: TargetState
    owner: str = ""


@dataclass(frozen=True)
class PatchStatus:
    """One patch in this process.

    Args:
        version: of the installed distribution, or None.
        fingerprint: ``known``, ``unknown``, ``allowed`` (unknown, and the user allowed it), or None when the source has
            not been read (nothing of the upstream is imported yet, or a gate before it said no).
        reason: what was found, what was expected, what to do; empty when there is nothing to say.
        traceback: of the exception behind ``failed``.
        stale: who still holds the original and could not be rebound.
    """

    id: str
    gives: str
    distribution: str
    version: str | None
    fingerprint: Literal["known", "unknown", "allowed"] | None
    state: State
    reason: str
    traceback: str | None
    stale: tuple[str, ...]
    targets: tuple[TargetStatus, ...]


@dataclass(frozen=True)
class Report:
    """Every registered patch, sorted by id."""

    patches: tuple[PatchStatus, ...]

    def __getitem__(self, id: str) -> PatchStatus:
        for status in self.patches:
            if status.id == id:
                return status
        raise KeyError(id)

    @property
    def failures(self) -> tuple[PatchStatus, ...]:
        return tuple(status for status in self.patches if status.state.is_failure)

    def digest(self) -> str:
        """16 hex characters over what must agree between processes: ids, versions, fingerprints, states, owners.

        Not file paths: nodes may have their environments in different places.
        """
        import hashlib
        import json

        facts = [
            [
                s.id,
                s.version,
                s.fingerprint,
                s.state,
                [[t.path, t.state, t.owner.partition(" (")[0]] for t in s.targets],
            ]
            for s in self.patches
        ]
        return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]


class PatchError(RuntimeError):
    """Patches that should be in force are not; ``statuses`` holds them."""

    def __init__(self, statuses: Iterable[PatchStatus], headline: str = "") -> None:
        self.statuses = tuple(statuses)
        self.headline = headline
        lines = [headline] if headline else []
        lines += [f"{status.id}: {status.state}. {status.reason}" for status in self.statuses]
        lines += [status.traceback.rstrip() for status in self.statuses if status.traceback]
        super().__init__("\n".join(lines))

    def __reduce__(self) -> tuple[type[PatchError], tuple[tuple[PatchStatus, ...], str]]:
        return type(self), (self.statuses, self.headline)  # Ray and multiprocessing pickle exceptions
