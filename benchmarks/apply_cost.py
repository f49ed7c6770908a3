"""What the patches cost a process before any work is done: medians over fresh interpreters.

    python benchmarks/apply_cost.py [--runs 15] [--json]

- ``apply()``: the call, with neither torch nor any upstream imported. Limit 50 ms.
- ``import``: ``import fsdp_sink_patches``, mostly standard library that torch imports anyway. For information.
- ``apply() late``: the call after the upstream was imported, which is when source is read. For information.
- ``check --static``: the whole command, interpreter start included. Limit 1000 ms.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

COLD = """
import sys, time
a = time.perf_counter()
import fsdp_sink_patches
b = time.perf_counter()
fsdp_sink_patches.apply()
c = time.perf_counter()
loaded = sorted({"torch", "numpy", "transformers", "triton", "flash_attn", "verl", "specforge"} & set(sys.modules))
assert not loaded, f"apply() imported {loaded}"
print(b - a, c - b)
"""
LATE = """
import time
import transformers.models.gpt_oss.modeling_gpt_oss
import fsdp_sink_patches
a = time.perf_counter()
fsdp_sink_patches.apply()
print(time.perf_counter() - a)
"""
LIMITS_MS = {"apply()": 50.0, "check --static": 1000.0}


def environment() -> dict[str, str]:
    env = {name: value for name, value in os.environ.items() if not name.startswith("FSDP_SINK_PATCHES")}
    return env | {"PYTHONPATH": os.pathsep.join([str(ROOT), env.get("PYTHONPATH", "")]).rstrip(os.pathsep)}


def seconds(code: str) -> list[float]:
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, check=True)
    return [float(word) for word in done.stdout.split()]


def wall(*arguments: str) -> float:
    start = time.perf_counter()
    done = subprocess.run([sys.executable, *arguments], env=environment(), capture_output=True, text=True)
    if done.returncode not in (0, 1) or not done.stdout:  # 1: a patch is not in force here, which is an answer too
        raise RuntimeError(done.stderr)
    return time.perf_counter() - start


def measure(runs: int) -> dict[str, float]:
    """Median milliseconds by name. The first run of each is a warm-up that also writes the bytecode."""
    cold = [seconds(COLD) for _ in range(runs + 1)][1:]
    static = [wall("-m", "fsdp_sink_patches.check", "--static") for _ in range(runs + 1)][1:]
    rows = {"import": [row[0] for row in cold], "apply()": [row[1] for row in cold], "check --static": static}
    try:
        rows["apply() late"] = [seconds(LATE)[0] for _ in range(3)]
    except subprocess.CalledProcessError as error:
        if "ModuleNotFoundError" not in error.stderr:
            raise
    return {name: statistics.median(values) * 1e3 for name, values in rows.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--runs", type=int, default=15)
    parser.add_argument("--json", action="store_true", help="one JSON object instead of the table")
    arguments = parser.parse_args()
    found = measure(arguments.runs)
    if arguments.json:
        print(json.dumps({"runs": arguments.runs, "median_ms": found, "limit_ms": LIMITS_MS}))
    else:
        for name, value in found.items():
            print(f"{name:<16} {value:8.1f} ms" + (f"   limit {LIMITS_MS[name]:.0f} ms" if name in LIMITS_MS else ""))
    return int(any(found[name] > limit for name, limit in LIMITS_MS.items()))


if __name__ == "__main__":
    sys.exit(main())
