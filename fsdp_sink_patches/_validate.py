"""GPU validation: each patch measured in two processes, with it and without it, and the pair judged.

``python -m fsdp_sink_patches._validate ID --device cuda --patched`` is the child: it applies that one patch (or none),
calls ``validate(device)`` of the patch's module and prints the `Measurement` as the last line of its output, as JSON.
The process without the patch is the negative control: if it is right too, the validation proves nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import math
import os
import platform
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

from fsdp_sink_patches import _fingerprint, _records, _registry
from fsdp_sink_patches._patch import Measurement, Patch

COMPANIONS = ("transformers", "flash-attn", "flash-attn-3", "flash-attn-4")
"""Distributions whose versions a record names, besides torch and triton."""

CELL = re.compile("[a-z0-9][a-z0-9.-]*")
"""Names of cells, which are file names too."""


# --- the child -----------------------------------------------------------------------------------------------------


def measure(patch_id: str, device: str, patched: bool, allow_drift: bool = False) -> dict[str, Any]:
    """Measure in this process; meant for a fresh one. What an unpatched run raises is its result."""
    import fsdp_sink_patches

    validate: Callable[[str], Measurement] = _registry.module(patch_id).validate
    if patched:
        fsdp_sink_patches.apply(patch_id, allow_drift=(patch_id,) if allow_drift else ())
        measured = validate(device)
        fsdp_sink_patches.assert_applied(patch_id)
    else:
        try:
            measured = validate(device)
        except Exception as error:  # whatever upstream does without the patch is the negative control
            return {"raises": without_paths(f"{type(error).__name__}: {error}".strip().split("\n")[0])}
    return as_json(measured)


def as_json(measured: Measurement) -> dict[str, Any]:
    """A measurement as plain data; numbers that are not finite become ``"nan"``, ``"inf"`` or ``"-inf"``."""
    plain: dict[str, Any] = _plain(
        {
            "errors": measured.errors,
            "limits": measured.limits,
            "time_ms": float(measured.time_ms),
            "peak_bytes": int(measured.peak_bytes),
            "details": measured.details,
        }
    )
    return plain


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, str):
        return without_paths(value)
    try:
        number = float(value)  # a Python float, or a tensor or array of one element
    except (TypeError, ValueError):
        return without_paths(str(value))
    return number if math.isfinite(number) else str(number)


def without_paths(text: str) -> str:
    """``text`` with every absolute path cut to its last part: a record names no folders, hosts or users."""
    text = text.replace("file://", "")
    # Not the slashes of a URL: "//" opens no path, and what follows a host follows a letter.
    path = r"(?<![\w./\\])(?!//)(?:[A-Za-z]:)?(?:[\\/][^\s\\/'\":,;()]+){2,}"
    return re.sub(path, lambda found: re.split(r"[\\/]", found[0])[-1], text)


# --- the pair ------------------------------------------------------------------------------------------------------


Result = Literal["proved", "wrong", "failed", "control-right", "control-failed"]


@dataclass(frozen=True)
class Verdict:
    """Both measurements of one patch, as plain data, and what they prove."""

    patch: str
    patched: dict[str, Any]
    unpatched: dict[str, Any]

    @property
    def control_fails(self) -> bool:
        """Whether the unpatched process raised, or has some quantity out of the limits of the patched one."""
        limits, errors = self.patched.get("limits", {}), self.unpatched.get("errors", {})
        return "raises" in self.unpatched or any(
            name in errors and not _within(errors[name], limit) for name, limit in limits.items()
        )

    @property
    def result(self) -> Result:
        """``proved``; ``wrong``: out of limits with the patch; ``failed``: no measurement with it; ``control-right``:
        right without the patch too; ``control-failed``: no measurement without it."""
        if "crashed" in self.patched:
            return "failed"
        if faults(self.patched):
            return "wrong"
        if "crashed" in self.unpatched:
            return "control-failed"
        return "proved" if self.control_fails else "control-right"

    @property
    def proves(self) -> bool:
        return self.result == "proved"

    @property
    def text(self) -> str:
        match self.result:
            case "failed":
                return f"failed: {self.patched['crashed']}"
            case "wrong":
                return "out of limits: " + ", ".join(faults(self.patched))
            case "control-failed":
                return f"no negative control: the unpatched process did not finish: {self.unpatched['crashed']}"
            case "control-right":
                return "proves nothing: the unpatched run is within the limits too"
            case _:
                return "right, and wrong without the patch"

    def as_json(self) -> dict[str, Any]:
        """A row of ``compat_matrix/schema/validation.schema.json``, but for its ``record``."""
        return {
            "id": self.patch,
            "result": self.result,
            "verdict": self.text,
            "proves": self.proves,
            "control_fails": self.control_fails,
            "patched": self.patched,
            "unpatched": self.unpatched,
        }


def is_right(measured: Mapping[str, Any]) -> bool:
    """Every quantity a number within its limit, and at least one quantity."""
    return not faults(measured)


def faults(measured: Mapping[str, Any]) -> list[str]:
    """Why a measurement is not right, a text for each quantity. A quantity that is not judged is a fault too."""
    errors, limits = measured.get("errors", {}), measured.get("limits", {})
    if not limits:
        return ["the measurement states no limits"]
    found = [f"{name} has no limit" for name in errors if name not in limits]
    for name, limit in limits.items():
        if not math.isfinite(float(limit)):
            found.append(f"{name} has a limit of {limit}, which is none")
        elif name not in errors:
            found.append(f"{name} was not measured")
        elif not _within(errors[name], limit):
            found.append(f"{name} {errors[name]} > {limit}")
    return found


def _within(error: Any, limit: Any) -> bool:
    return float(error) <= float(limit)  # false for a NaN


def run_child(patch_id: str, device: str, patched: bool, timeout: float, allow_drift: bool = False) -> dict[str, Any]:
    """Measure in a child process; ``{"crashed": why}`` if it prints no measurement."""
    command = [sys.executable, "-m", "fsdp_sink_patches._validate", patch_id, "--device", device]
    command.append("--patched" if patched else "--unpatched")
    if allow_drift:
        command.append("--allow-drift")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("FSDP_SINK_PATCHES")}
    # The child applies by name; a sitecustomize of `fsdp_sink_patches.run` or a plugin must not apply anything before.
    environment["FSDP_SINK_PATCHES"] = "none"
    # What is measured is on this machine: without it the unpatched path may wait for a hub.
    environment["HF_HUB_OFFLINE"] = "1"
    here = str(Path(__file__).resolve().parent.parent)
    environment["PYTHONPATH"] = os.pathsep.join([here, *filter(None, [environment.get("PYTHONPATH")])])
    # A session of its own: a kernel compiler's workers would outlive a killed child and hold its pipes open.
    child = subprocess.Popen(
        command,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        out, errors = child.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        _kill(child)
        return {"crashed": f"no result after {timeout:g} s", "stderr": child.communicate()[1]}
    except BaseException:  # Ctrl-C reaches us only
        _kill(child)
        raise
    if child.returncode == 0:
        result = next(filter(None, map(_result, reversed(out.splitlines()))), None)
        return result or {"crashed": "it ended without a measurement", "stderr": errors}
    last = (errors.strip().splitlines() or ["no message"])[-1]
    how = f"signal {-child.returncode}" if child.returncode < 0 else f"exit {child.returncode}"
    return {"crashed": f"{how}: {without_paths(last)}", "stderr": errors}


def _kill(child: subprocess.Popen[str]) -> None:
    with contextlib.suppress(ProcessLookupError):  # it has just ended
        os.killpg(child.pid, signal.SIGKILL)


def _result(line: str) -> dict[str, Any] | None:
    """What `main` prints, or None for any other line: an upstream may print at exit too."""
    try:
        found = json.loads(line)
    except ValueError:
        return None
    if isinstance(found, dict) and (set(found) == {"raises"} or set(found) == {f.name for f in fields(Measurement)}):
        return found
    return None


def validate(
    patch_id: str, device: str, timeout: float, step: Callable[[str], None], allow_drift: bool = False
) -> Verdict:
    """Both processes, one after the other; ``step`` is told before each what is running."""
    step(f"{patch_id}, without the patch")
    unpatched = run_child(patch_id, device, False, timeout)
    step(f"{patch_id}, with the patch")
    return Verdict(patch_id, run_child(patch_id, device, True, timeout, allow_drift), unpatched)


# --- the record ----------------------------------------------------------------------------------------------------


def environment() -> dict[str, Any]:
    """What a record says of the machine: versions and the card, no names or folders. Imports torch; needs CUDA."""
    import torch

    major, minor = torch.cuda.get_device_capability()
    return {
        "gpu": torch.cuda.get_device_name(),
        "capability": f"{major}.{minor}",
        "driver": driver(),
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "triton": version("triton"),
        **{name: version(name) for name in COMPANIONS},
    }


def driver() -> str | None:
    """The NVIDIA driver's version, or None where ``nvidia-smi`` can't say."""
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):  # no tool, no driver, or a container without it: not known
        return None
    return done.stdout.strip().splitlines()[0].strip() or None


def version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def cell_name(machine: Mapping[str, Any]) -> str:
    """``"h200-torch2.11-transformers5.17"``: card, torch and transformers, to the minor version."""
    card = re.sub(r"[^a-z0-9]+", "-", str(machine["gpu"]).lower().removeprefix("nvidia ")).strip("-")
    short = {name: ".".join(str(machine[name]).split("+")[0].split(".")[:2]) for name in ("torch", "transformers")}
    parts = [card, f"torch{short['torch']}"]
    if machine["transformers"]:
        parts.append(f"transformers{short['transformers']}")
    return "-".join(parts)


def record(verdict: Verdict, machine: Mapping[str, Any], cell: str, allow_drift: bool = False) -> dict[str, Any]:
    """The content of a record file. Only for a verdict that proves something; ``allow_drift`` as it was measured."""
    if not verdict.proves:
        raise ValueError(f"{verdict.patch}: nothing to record: {verdict.text}")
    patch = _registry.get(verdict.patch)
    drift = f" --allow-drift {patch.id}" if allow_drift else ""
    return {
        "schema": _records.SCHEMA,
        "patch": patch.id,
        "cell": cell,
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "package": package_version(),
        "command": f"python -m fsdp_sink_patches.check --gpu {patch.id} --record --cell {cell}{drift}",
        "upstream": {
            "distribution": patch.distribution,
            "version": version(patch.distribution),
            "digests": {ref: _fingerprint.digest(ref) for ref in _fingerprint.refs(patch)},
        },
        "sources": _records.sources(patch),
        "environment": dict(machine),
        "patched": verdict.patched,
        "unpatched": verdict.unpatched,
    }


def package_version() -> str:
    """Our version; a bare checkout has no metadata, so there it is read from ``pyproject.toml``."""
    found = version("fsdp-sink-patches")
    if found is not None:
        return found
    project = Path(__file__).resolve().parent.parent / "pyproject.toml"
    match = (
        re.search(r'^version = "(.+)"$', project.read_text(encoding="utf-8"), re.MULTILINE)
        if project.is_file()
        else None
    )
    return match[1] if match else "unknown"


def write(content: Mapping[str, Any], root: Path) -> Path:
    """Write a record below ``root``; returns the file. OSError where that can't be written."""
    path = root / str(content["patch"]) / f"{content['cell']}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    return path


def validatable(patch: Patch) -> bool:
    return callable(getattr(_registry.module(patch.id), "validate", None))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m fsdp_sink_patches._validate")
    parser.add_argument("id")
    parser.add_argument("--device", default="cuda")
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--patched", action="store_true")
    which.add_argument("--unpatched", action="store_true")
    parser.add_argument("--allow-drift", action="store_true")
    options = parser.parse_args(arguments)
    found = measure(options.id, options.device, options.patched, options.allow_drift)
    print(json.dumps(found, allow_nan=False), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
