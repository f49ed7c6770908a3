"""Run a program with the patches applied, in it and in the Python processes it starts.

    python -m fsdp_sink_patches.run train.py --its --own --arguments
    python -m fsdp_sink_patches.run -m torch.distributed.run --nproc-per-node 8 train.py

The program runs as ``__main__`` in this process with its own ``sys.argv``. A directory with a ``sitecustomize`` is put
first on PYTHONPATH, so children (torchrun's workers, multiprocessing's spawn, local Ray workers) apply too; a
``sitecustomize`` of the user's own still runs. Children started with ``-S``, ``-E`` or ``-I``, and workers on other
nodes, are not reached: use `fsdp_sink_patches.autoload` there.

A child that can't be patched says so and goes on, as with `fsdp_sink_patches.autoload`. Under
``FSDP_SINK_PATCHES_STRICT=1`` it ends at its start with exit code 1 instead of training without the patches.

Which patches: ``FSDP_SINK_PATCHES``, ``FSDP_SINK_PATCHES_DISABLE`` and ``FSDP_SINK_PATCHES_STRICT``. At the first step
of an optimizer every rank is held against rank 0: ``FSDP_SINK_PATCHES_RANKS``.
"""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

USAGE = "usage: python -m fsdp_sink_patches.run [-m] target args..."


def main(argv: Sequence[str]) -> int:
    """Run ``argv`` (without the interpreter and this module). Returns 2 for a usage error, else what remains is 0."""
    arguments = list(argv)
    as_module = arguments[:1] == ["-m"]
    if as_module:
        arguments.pop(0)
    if arguments[:1] in (["-h"], ["--help"]):
        print(f"{USAGE}\n\n{__doc__}")
        return 0
    if not arguments or arguments[0].startswith("-"):
        print(f"{USAGE}\nexpected a script, or -m and a module; found {' '.join(argv) or 'nothing'}.", file=sys.stderr)
        return 2
    target = arguments[0]
    if not as_module and not Path(target).exists():
        print(f"{USAGE}\nno such file: {target!r}. A module needs -m before it.", file=sys.stderr)
        return 2

    prepare_children()
    import fsdp_sink_patches
    from fsdp_sink_patches import distributed

    fsdp_sink_patches.apply()
    distributed.check_at_first_step()
    sys.argv = arguments
    # python -m puts the working directory first on sys.path, python script.py the script's directory, -P neither.
    safe = getattr(sys.flags, "safe_path", False)
    if as_module:
        runpy.run_module(target, run_name="__main__", alter_sys=True)
    else:
        sys.path[: 0 if safe else 1] = [] if safe else [str(Path(target).resolve().parent)]
        runpy.run_path(target, run_name="__main__")
    return 0


def prepare_children() -> None:
    """Put the ``sitecustomize`` directory first on PYTHONPATH, and last where this package lies, if needed.

    Last, because a bare checkout also holds top-level folders (``patches``, ``tests``) that would hide the user's own.
    """
    package = Path(__file__).resolve().parent
    children, root = str(package / "_children"), str(package.parent)
    paths = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry and entry != children]
    site_packages = {
        os.path.realpath(entry) for entry in sys.path if entry.endswith(("site-packages", "dist-packages"))
    }
    if os.path.realpath(root) not in site_packages and root not in paths:
        paths.append(root)  # a bare checkout
    os.environ["PYTHONPATH"] = os.pathsep.join([children, *paths])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
