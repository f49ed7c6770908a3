"""Attention-sink models train right and fast in jobs that already exist.

import fsdp_sink_patches
fsdp_sink_patches.apply()
"""

from __future__ import annotations

from pathlib import Path as _Path

_root = _Path(__file__).resolve().parent.parent
if (_root / "pyproject.toml").is_file() and (_root / "patches" / "__init__.py").is_file():
    # A bare checkout (Ray ships a working directory to its workers) keeps patches/ and compat_matrix/ beside the
    # package; in an installed wheel they are sub-packages and this does nothing.
    __path__.append(str(_root))

from fsdp_sink_patches._patch import Measurement, Patch, Target  # noqa: E402

__all__ = ["Measurement", "Patch", "Target"]
