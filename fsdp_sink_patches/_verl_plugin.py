"""The ``verl.plugins`` entry point: `fsdp_sink_patches.autoload`, and what it raises is not lost.

verl logs the exception of a plugin at DEBUG and goes on. So it is logged at ERROR here, and under
``FSDP_SINK_PATCHES_STRICT=1`` the process is ended, as it is by the other hooks.
"""

import logging
import os

try:
    import fsdp_sink_patches.autoload  # noqa: F401
except Exception as error:  # autoload raises under strict only; without it the installation is broken
    # Read here, because the package that reads it may be what failed; what can't be read counts as strict.
    if os.environ.get("FSDP_SINK_PATCHES_STRICT", "").strip().lower() not in ("", "0", "false", "no", "off"):
        raise SystemExit(f"fsdp_sink_patches, a plugin of verl, under FSDP_SINK_PATCHES_STRICT: {error}") from error
    logging.getLogger("fsdp_sink_patches").error(
        "fsdp_sink_patches, a plugin of verl: nothing more was patched in this process, which raised %r. "
        "Fix that, or set FSDP_SINK_PATCHES=none.",
        error,
    )
