"""Importing this module applies the patches, for hosts that import by name.

For example verl, inside Ray's ``runtime_env`` (a driver's shell variable does not reach other nodes)::

    VERL_USE_EXTERNAL_MODULES=fsdp_sink_patches.autoload

or any Ray job, for hosts that want something to call::

    runtime_env={"worker_process_setup_hook": "fsdp_sink_patches.autoload.load"}

Which patches: ``FSDP_SINK_PATCHES`` and ``FSDP_SINK_PATCHES_DISABLE``. Such hosts may swallow what a plugin raises at
DEBUG, so a failure is logged at ERROR here, and the job goes on unless ``FSDP_SINK_PATCHES_STRICT=1``. The same holds
for an upstream that is imported later, also when ``FSDP_SINK_PATCHES`` names the patch: a warning, and an exception out
of that import only under strict. At the first step of an optimizer all of it is looked at once more, and each rank is
held against rank 0: see `fsdp_sink_patches.distributed.check_at_first_step`. A job that needs single patches says so
with ``fsdp_sink_patches.assert_applied(...)`` before step 0, in the worker.
"""

from __future__ import annotations

import logging

from fsdp_sink_patches import _engine, distributed


def load() -> None:
    """Nothing more than importing this module has done."""


def _load() -> None:
    try:
        report = _engine.autoload()
        distributed.check_at_first_step()
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
