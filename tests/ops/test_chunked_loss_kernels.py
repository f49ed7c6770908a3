"""Runs ``interpreted_loss_kernels.py`` in a process of its own: Triton reads TRITON_INTERPRET when it is first
imported."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from fsdp_sink_patches.ops.chunked_loss import _kernels


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
    assert int(re.search(r"(\d+) passed", run.stdout).group(1)) >= 18, run.stdout[-500:]


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("name", ["_update_kernel", "_differentiate_kernel"])
def test_kernels_compile_for_a_card(monkeypatch, tmp_path, capability, name):
    """What the interpreter lets pass, types above all, the compiler does not; it needs no card."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    kernel = getattr(_kernels, name)
    types = {"out_ptr": "*bf16", "labels_ptr": "*i64", "softcap": "fp32", "inverse_cap": "fp32"}
    constants = {"BEGIN": False, "COOLED": True, "CAPPED": True, "BLOCK": 2048}
    constants = {key: value for key, value in constants.items() if key in kernel.arg_names}
    signature = {
        key: "constexpr" if key in constants else types.get(key, "*fp32" if key.endswith("_ptr") else "i32")
        for key in kernel.arg_names
    }
    source = ASTSource(kernel, signature, constexprs=constants)
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": 8})
    assert compiled.asm["cubin"]
