"""Importing this module applies the patches, for hosts that import by name.

For example verl, inside Ray's ``runtime_env`` (a driver's shell variable does not reach other nodes)::

    VERL_USE_EXTERNAL_MODULES=fsdp_sink_patches.autoload

Which patches: ``FSDP_SINK_PATCHES`` and ``FSDP_SINK_PATCHES_DISABLE``. Such hosts may swallow what a plugin raises at
DEBUG, so a failure is logged at ERROR here, and the job goes on unless ``FSDP_SINK_PATCHES_STRICT=1``. The same holds
for an upstream that is imported later, also when ``FSDP_SINK_PATCHES`` names the patch: a warning, and an exception out
of that import only under strict. The line ``fsdp_sink_patches.assert_applied()`` before step 0, in the worker, is what
makes sure.
"""

from __future__ import annotations

import logging

from fsdp_sink_patches import _engine


def _load() -> None:
    try:
        report = _engine.autoload()
    except Exception as error:
        logging.getLogger("fsdp_sink_patches").error("fsdp_sink_patches.autoload: %s", error)
        if _engine.is_strict():
            raise
        return
    for status in report.failures:
        logging.getLogger("fsdp_sink_patches").error(
            "fsdp_sink_patches.autoload: %s: %s. %s", status.id, status.state, status.reason
        )


_load()
