"""Whether a patch is meant for what is installed here, from distribution metadata alone; nothing is imported.

Not from ``__version__``: ``flash_attn.cute.__version__`` is "0.0.0", and a leftover folder answers "N/A".
"""

from __future__ import annotations

import importlib.metadata
from dataclasses import dataclass

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

from fsdp_sink_patches._patch import Patch
from fsdp_sink_patches._state import State


@dataclass(frozen=True)
class Gate:
    """``state`` is None when the patch may go on to its fingerprint; else why not, with the reason."""

    version: str | None
    state: State | None = None
    reason: str = ""


def look(patch: Patch) -> Gate:
    """The version gate of ``patch``: absent, inapplicable, obsolete, drifted (unreadable version), or open."""
    name = patch.distribution
    try:
        # Typed str, but None when a METADATA file has lost its version (a half-removed install).
        text: str | None = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return Gate(None, State.ABSENT, f"{name} is not installed; install {name}{patch.requires} to use this patch.")
    except Exception as error:  # unreadable metadata must not take the job down; it is reported as drift
        return Gate(None, State.DRIFTED, _unreadable(patch, f"metadata that can't be read ({error!r})"))
    try:
        version = Version(text or "")
    except InvalidVersion:
        return Gate(text, State.DRIFTED, _unreadable(patch, f"version {text!r}"))
    if patch.fixed_in is not None and version >= Version(patch.fixed_in):
        return Gate(
            text,
            State.OBSOLETE,
            f"found {name} {text}, which has the fix since {patch.fixed_in}: nothing to patch. Stop naming it.",
        )
    why = refusal(patch, version)
    if why or not contains(patch.requires, version):
        found = f"found {name} {text}{f' ({why})' if why else ''}"
        return Gate(
            text,
            State.INAPPLICABLE,
            f"{found}, expected {name}{patch.versions}: nothing was patched. Install one of those.",
        )
    return Gate(text)


def contains(specifier: str, version: Version) -> bool:
    """``version`` satisfies ``specifier``, prereleases included."""
    # packaging 25 says 4.58.0.dev0 is not ">=4.56" unless it is asked like this, packaging 26 says that it is.
    return SpecifierSet(specifier).contains(version, prereleases=True)


def refusal(patch: Patch, version: Version) -> str:
    """Why ``patch`` refuses this release, without a full stop; empty where it does not."""
    return next((why.rstrip(".") for releases, why in patch.refuses.items() if contains(releases, version)), "")


def _unreadable(patch: Patch, found: str) -> str:
    return (
        f"found {patch.distribution} with {found}, expected a version in {patch.requires}: nothing was patched. "
        f"Reinstall {patch.distribution}."
    )
