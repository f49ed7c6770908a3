"""Runs ``interpreted_loss_kernels.py`` in a process of its own: Triton reads TRITON_INTERPRET when it is first
imported."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path


def test_kernels_through_the_interpreter():
    tests = Path(__file__).with_name("interpreted_loss_kernels.py")
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tests)],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        cwd=tests.parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stdout[-6000:] + run.stderr[-2000:]
    assert int(re.search(r"(\d+) passed", run.stdout).group(1)) >= 22, run.stdout[-500:]
