"""Attention-sink models train right and fast in jobs that already exist.

import fsdp_sink_patches
fsdp_sink_patches.apply()
"""

from __future__ import annotations

import os.path as _path

_root = _path.dirname(_path.dirname(_path.realpath(__file__)))
if _path.isfile(_path.join(_root, "pyproject.toml")) and _path.isfile(_path.join(_root, "patches", "__init__.py")):
    # A bare checkout (Ray ships a working directory to its workers) keeps patches/ and compat_matrix/ beside the
    # package; in an installed wheel they are sub-packages and this does nothing.
    __path__.append(_root)

from fsdp_sink_patches._patch import Measurement, Patch, Target  # noqa: E402, I001 (_patch first: patch modules need it)
from fsdp_sink_patches._engine import applied, apply, assert_applied, status, unapply  # noqa: E402
from fsdp_sink_patches._registry import UnknownPatch  # noqa: E402
from fsdp_sink_patches._state import PatchError, PatchStatus, Report, State, TargetStatus  # noqa: E402

__all__ = [
    "Measurement",
    "Patch",
    "PatchError",
    "PatchStatus",
    "Report",
    "State",
    "Target",
    "TargetStatus",
    "UnknownPatch",
    "applied",
    "apply",
    "assert_applied",
    "status",
    "unapply",
]
