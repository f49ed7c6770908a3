"""What a patch declares. Data only: nothing here imports an upstream, torch, or runs a replacement."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True)
class Target:
    """One attribute of an upstream module, and what takes its place.

    Args:
        path: ``"package.module:Qualified.name"``; the part before the colon is the module that *defines* the attribute.
        replacement: for ``kind="call"``, a plain function called as ``replacement(original, *args, **kwargs)``;
            for ``kind="value"``, a plain function called once as ``replacement(original)`` that returns the new value
            of a class or module attribute (a flag, a tuple of names).
        kind: how ``replacement`` is used.
        optional: the attribute does not exist in every release of the declared range; a release without it is known by
            the digest ``"absent"``, and there the target is skipped, not drifted. Or not every job imports its module:
            the patch is applied without waiting for it.
    """

    path: str
    replacement: Callable[..., Any]
    kind: Literal["call", "value"] = "call"
    optional: bool = False

    @property
    def module(self) -> str:
        return self.path.partition(":")[0]

    @property
    def qualname(self) -> str:
        return self.path.partition(":")[2]


@dataclass(frozen=True)
class Patch:
    """Why a patch exists, where it applies and when to delete it.

    Intent lives here; evidence (source digests, environments, GPU records) lives in ``compat_matrix/``.

    Args:
        id: ``"<upstream>.<what-it-gives>"`` in kebab-case, never a number.
        gives: what the user gets, in about five words; shown by ``check``.
        distribution: the name on the package index whose metadata carries the version (``"flash-attn-4"``).
        requires: the versions the patch is meant for, e.g. ``">=4.57"``; the fingerprint is the upper bound.
        fixed_in: the first upstream release that makes the patch needless, or None.
        link: the upstream issue or pull request.
        remove_when: the condition under which the patch is deleted.
        targets: what is replaced.
        relies_on: ``"module:qualname"`` of upstream sources that are not replaced but must mean what they meant;
            a trailing ``"?"`` says that a release may lack it.
        refuses: releases that the patch can't make right, and why: a version specifier (``"==5.8.0"``) to the reason
            in one sentence. Nothing is patched there, and whoever imports the first target's module is warned once.
    """

    id: str
    gives: str
    distribution: str
    requires: str
    fixed_in: str | None
    link: str
    remove_when: str
    targets: tuple[Target, ...]
    relies_on: tuple[str, ...] = ()
    refuses: Mapping[str, str] = field(default_factory=dict, hash=False)

    @property
    def versions(self) -> str:
        """What ``requires`` and ``refuses`` leave, as messages say it: ``">=5.8, not ==5.8.0"``."""
        return ", not ".join([self.requires, *self.refuses])


@dataclass(frozen=True)
class Measurement:
    """What one process measured of a patch's effect, patched or not; returned by a patch module's ``validate(device)``.

    Args:
        errors: relative L2 error against the fp64 oracle, by quantity (``"out"``, ``"dsink"``, ``"packed"`` ...).
        limits: the largest error that counts as right, for the same names.
        time_ms: median time of the measured region, in milliseconds.
        peak_bytes: peak device memory of the measured region, in bytes (0 where the device does not count it).
        details: anything else worth keeping, by name (shapes, backend, sink values).
    """

    errors: Mapping[str, float]
    limits: Mapping[str, float]
    time_ms: float
    peak_bytes: int
    details: Mapping[str, Any] = field(default_factory=dict)

    @property
    def right(self) -> bool:
        """Every error is a number within its limit."""
        return all(self.errors[name] <= limit for name, limit in self.limits.items())
