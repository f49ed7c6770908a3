"""Applies the patches at interpreter start; found through PYTHONPATH in what `fsdp_sink_patches.run` starts.

Then hands on to the ``sitecustomize`` that this one hides, as if it had not been here. Nothing here may keep an
interpreter from starting, unless ``FSDP_SINK_PATCHES_STRICT`` asks for that: Python itself prints an exception in a
sitecustomize and goes on, so under strict the process has to be ended.
"""

import os
import sys


def _apply() -> None:
    if os.environ.get("FSDP_SINK_PATCHES", "").strip() == "none":
        return
    try:
        import fsdp_sink_patches.autoload  # noqa: F401
    except Exception as error:
        import logging

        logging.getLogger("fsdp_sink_patches").error(
            "fsdp_sink_patches.run: nothing more was patched in this child process, which raised %r. "
            "Fix that, or set FSDP_SINK_PATCHES=none.",
            error,
        )
        # Read here, because the package that reads it may be what failed; what can't be read counts as strict.
        strict = os.environ.get("FSDP_SINK_PATCHES_STRICT", "").strip().lower()
        if strict not in ("", "0", "false", "no", "off"):
            sys.stderr.write("fsdp_sink_patches.run: FSDP_SINK_PATCHES_STRICT is set, so this process ends here.\n")
            sys.stderr.flush()
            os._exit(1)  # SystemExit here is a fatal error of the interpreter, whose dump would bury the message


def _run_the_hidden_one() -> None:
    import importlib.machinery
    import importlib.util

    here = os.path.realpath(os.path.dirname(__file__))
    path = [entry for entry in sys.path if os.path.realpath(entry or os.curdir) != here]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", path)
    if spec is None or spec.loader is None:
        return
    module = importlib.util.module_from_spec(spec)
    sys.modules["sitecustomize"] = module  # this is the one that programs expect under that name
    spec.loader.exec_module(module)


_apply()
_run_the_hidden_one()
