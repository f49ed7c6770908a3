"""What is patched here, what is not, and why.

    python -m fsdp_sink_patches.check                  apply every patch in this process and look
    python -m fsdp_sink_patches.check --static         the same from files alone, in under a second
    python -m fsdp_sink_patches.check --explain ID     one patch: why, where, what drifted, what to do
    python -m fsdp_sink_patches.check --gpu --record   measure each patch on this card and keep the numbers

Exit code 0: as it should be; 1: something is not, as the end of ``--help`` lists; 2: a usage error.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.util
import json
import logging
import os
import platform
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fsdp_sink_patches import _engine, _fingerprint, _gates, _records, _registry, _validate
from fsdp_sink_patches._fingerprint import Match
from fsdp_sink_patches._patch import Patch
from fsdp_sink_patches._report import (
    CheckReport,
    Output,
    Row,
    print_explanation,
    print_report,
    print_verdicts,
)
from fsdp_sink_patches._state import PatchError, PatchStatus, Report, State

VALIDATION_SCHEMA = 1

EPILOG = """
exit code:
  0  as it should be; patches whose upstream is absent, out of range or already fixed are fine too
  1  a patch is drifted, conflict, shadowed or failed; its upstream is installed and can't be imported; a file among its
     GPU records is none; or --gpu: an error out of its limit, a run that raises, a negative control that does not fail,
     or a patch that was named and can't run here
  2  usage, as an unknown id, here or in FSDP_SINK_PATCHES or FSDP_SINK_PATCHES_DISABLE
"""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = _parser()
    options = parser.parse_args(arguments)
    # The report says what these lines would say.
    logging.getLogger("fsdp_sink_patches").addHandler(logging.NullHandler())
    try:
        for id in [*options.allow_drift, *(options.gpu or ()), *([options.explain] if options.explain else ())]:
            _registry.get(id)
        if options.json and options.explain:
            parser.error("--explain is text; --json holds all of it for every patch")
        if not options.record and (options.cell is not None or options.record_dir is not None):
            parser.error("--cell and --record-dir say where a record goes, so they go with --gpu --record")
        if options.record and options.gpu is None:
            parser.error("--record goes with --gpu")
        if options.gpu is not None:
            return _gpu(options, parser)
        report = look(static=options.static, strict=options.strict, allow_drift=options.allow_drift)
    except _registry.UnknownPatch as error:
        parser.error(str(error))
    if options.json:
        print(json.dumps(report.as_json(), indent=2))
        return report.exit_code
    out = Output()
    if options.explain:
        row = next(row for row in report.rows if row.patch.id == options.explain)
        print_explanation(report, row, _registry.module(options.explain).__doc__ or "", out)
        return int(row.fails)
    print_report(report, out)
    return report.exit_code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m fsdp_sink_patches.check",
        description="What is patched in this environment, what is not, and why.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--explain", metavar="ID", help="one patch: why, where, what drifted, what to do")
    what.add_argument(
        "--gpu",
        nargs="*",
        metavar="ID",
        help="measure these patches, or all, on this card, each in a process with it and in one without",
    )
    parser.add_argument(
        "--json",
        action="store_true",
        help="the report as compat_matrix/schema/check.schema.json says; with --gpu, validation.schema.json beside it",
    )
    parser.add_argument(
        "--static",
        action="store_true",
        help="import neither torch nor any upstream: states are what would be",
    )
    parser.add_argument(
        "--strict",
        action="store_true",
        help="exit 1 also for a patch that is inapplicable, obsolete, still armed, applied to allowed drift, or "
        "applied while someone still holds the original; absent and disabled stay fine",
    )
    parser.add_argument(
        "--allow-drift", action="append", default=[], metavar="ID", help="apply it to unknown source too; repeatable"
    )
    gpu = parser.add_argument_group("with --gpu")
    gpu.add_argument("--record", action="store_true", help="write compat_matrix/records/<patch>/<cell>.json")
    gpu.add_argument("--cell", metavar="NAME", help="name of the environment; default from card, torch, transformers")
    gpu.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu only tries the validation itself")
    gpu.add_argument("--record-dir", type=Path, metavar="DIR", help="where to write instead of compat_matrix/records")
    gpu.add_argument("--timeout", type=float, default=300, metavar="S", help="seconds for each process (default 300)")
    return parser


# --- the report ----------------------------------------------------------------------------------------------------


def look(*, static: bool = False, strict: bool = False, allow_drift: Collection[str] = ()) -> CheckReport:
    """The report on this process. Unless ``static``, every patch is really applied in it.

    Raises:
        UnknownPatch: an id in ``allow_drift`` or in the environment variables that no patch has.
    """
    notes: dict[str, list[str]] = {}
    backends = None
    if static:
        environment = _environment_static()
        report = _engine.survey(allow_drift)
    else:
        # An upstream that prints while it is imported must not end up in our JSON.
        with contextlib.redirect_stdout(sys.stderr):
            report, notes = _apply_here(allow_drift)
            environment = _environment()
            if environment["torch"] and not environment["torch_error"]:
                backends = _backends()
    rows = [_row(status, strict, static, notes.get(status.id, [])) for status in report.patches]
    names = dict.fromkeys([*(row.patch.distribution for row in rows), *_validate.COMPANIONS, "triton"])
    return CheckReport(
        package=_validate.package_version(),
        static=static,
        strict=strict,
        environment=environment,
        upstreams={name: _validate.version(name) for name in names},
        backends=backends,
        rows=tuple(rows),
    )


def _apply_here(allow_drift: Collection[str]) -> tuple[Report, dict[str, list[str]]]:
    """Apply, import what the patches wait for, look again: the order of a real job."""
    with contextlib.suppress(PatchError):  # of patches named in the environment; the report shows them
        _engine.apply(allow_drift=allow_drift, strict=False)
    notes: dict[str, list[str]] = {}
    for status in _engine.status().patches:
        if status.state not in (State.ARMED, State.APPLIED):
            continue
        raised: dict[str, list[str]] = {}
        for target in _registry.get(status.id).targets:
            try:
                importlib.import_module(target.module)
            except PatchError:  # raised by our own hook; the report shows it
                pass
            except (Exception, SystemExit) as error:  # what the user wants to read, once for all that it hits
                missing = error.name if isinstance(error, ModuleNotFoundError) else None
                # This release has no such module, or not even the package that it would be in.
                if not (target.optional and missing and f"{target.module}.".startswith(f"{missing}.")):
                    raised.setdefault(f"{type(error).__name__}: {error}", []).append(target.module)
        notes[status.id] = [
            f"importing {', '.join(dict.fromkeys(modules))} here raised {error}; to see where: "
            f"python -c 'import {modules[0]}'."
            for error, modules in raised.items()
        ]
    report = _engine.status()
    # Nothing of these could be imported, so their source has not been read yet.
    unread = {s.id for s in report.patches if s.state is State.ARMED and s.fingerprint is None}
    if unread:
        read = _engine.survey(allow_drift)
        report = Report(tuple(read[s.id] if s.id in unread else s for s in report.patches))
    return report, notes


def _row(status: PatchStatus, strict: bool, static: bool, notes: list[str]) -> Row:
    patch = _registry.get(status.id)
    match, record = None, None
    broken = status.state is State.ARMED and bool(notes)
    if broken:
        notes = [*notes, f"Nothing here can use this patch until that works: repair {patch.distribution} or remove it."]
    if status.version is not None and status.state is not State.ABSENT:
        match = _match(patch)
    try:
        records = _records.load(patch.id)
    except ValueError as error:  # a broken record must not hide the row it belongs to
        record = _records.RecordState("unreadable")
        notes = [*notes, f"GPU record unreadable: {error}"]
    else:
        if match is not None:
            own = _records.sources(patch) if records else {}
            record = _records.judge(records, match.digests, own)
    fails = status.state.is_failure or broken or (strict and _falls_short(status, static))
    fails = fails or (record is not None and record.state == "unreadable")
    return Row(patch, status, fails, match, record, tuple(notes))


def _match(patch: Patch) -> Match | None:
    try:
        return _fingerprint.match(patch)
    except (ModuleNotFoundError, SyntaxError):  # the engine's own row says so
        return None


def _falls_short(status: PatchStatus, static: bool) -> bool:
    return (
        status.state in (State.INAPPLICABLE, State.OBSOLETE)
        or (status.state is State.ARMED and not static)
        or status.fingerprint == "allowed"
        or bool(status.stale)
    )


def _environment_static() -> dict[str, Any]:
    version = _validate.version("torch")
    return {
        "python": platform.python_version(),
        "torch": version,
        "torch_error": None,
        "cuda": None,
        "gpus": None,
    }


def _environment() -> dict[str, Any]:
    here = _environment_static()
    if importlib.util.find_spec("torch") is None:
        return here | {"torch": None, "gpus": []}
    try:
        import torch

        here |= {"torch": str(torch.__version__), "cuda": torch.version.cuda}
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        cards = [torch.cuda.get_device_properties(index) for index in range(count)]
        here["gpus"] = [{"name": card.name, "capability": f"{card.major}.{card.minor}"} for card in cards]
    except Exception as error:  # a broken torch or driver fails in many ways; each is one line of the report
        here["torch_error"] = f"{type(error).__name__}: {error}".split("\n")[0]
    return here


def _backends() -> dict[str, str]:
    try:
        import torch

        from fsdp_sink_patches import settings
        from fsdp_sink_patches.ops import sink_attention
        from fsdp_sink_patches.ops.compressed_attention import _op
    except Exception as error:  # a torch that lacks what the ops need must not hide the patches' rows
        return {"all": f"importing fsdp_sink_patches.ops.sink_attention raised {type(error).__name__}: {error}"}
    compressed = "available"
    if settings.compressed_attention == "eager":
        compressed = "settings.compressed_attention is 'eager': transformers' own attention runs"
    elif not torch.cuda.is_available():
        runs = "plain torch" if settings.compressed_attention == "fused" else "transformers' own attention"
        compressed = f"no CUDA device: {runs} runs"
    elif not _op._have_triton():
        compressed = "no Triton: plain torch runs"
    return {**sink_attention.backends(), "DeepSeek-V4's kernels": compressed}


# --- --gpu ---------------------------------------------------------------------------------------------------------


def _gpu(options: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    if options.static:
        parser.error("--gpu runs the patches, so it can't be --static")
    if options.record and options.device == "cpu":
        why = "a record says that a patch was proved on a card, and a CPU runs none of the kernels"
        parser.error(f"--record needs --device cuda: {why}")
    if options.cell is not None and not _validate.CELL.fullmatch(options.cell):
        parser.error(f"--cell {options.cell!r}: expected small letters, digits, dots and dashes")
    root = options.record_dir or _records.directory()
    if options.record and not _can_write(root):
        parser.error(f"no record can be written to {_shown(root)}; give a --record-dir that can be written")
    with contextlib.redirect_stdout(sys.stderr):  # a torch that prints must not end up in our JSON
        problem = _no_cuda() if options.device == "cuda" else None
        runnable, skipped = _sort_out(options)
    if problem:
        parser.error(f"--gpu needs a CUDA device: {problem}. --device cpu tries the validations without one")
    out = Output()
    if not options.json:
        for each in skipped:
            out.line(f"{each.patch}: {each.text}", "red" if each.fails else "dim")
    machine = _validate.environment() if runnable and options.device == "cuda" else None
    verdicts: list[_validate.Verdict] = []
    written: dict[str, str] = {}
    unwritten: dict[str, str] = {}
    with _progress(2 * len(runnable)) as step:
        for id in runnable:
            drift = id in options.allow_drift
            verdict = _validate.validate(id, options.device, options.timeout, step, drift)
            verdicts.append(verdict)
            if options.record and machine is not None and verdict.proves:  # at once: a run that is stopped keeps it
                content = _validate.record(verdict, machine, options.cell or _validate.cell_name(machine), drift)
                try:
                    written[id] = _shown(_validate.write(content, root))
                except OSError as error:
                    unwritten[id] = f"the record could not be written: {error}. Give another --record-dir."
    fails = any(each.fails for each in skipped) or not all(verdict.proves for verdict in verdicts) or bool(unwritten)
    if options.json:
        rows = [each.as_json() | {"record": None} for each in skipped]
        rows += [verdict.as_json() | {"record": written.get(verdict.patch)} for verdict in verdicts]
        report = {
            "schema": VALIDATION_SCHEMA,
            "package": _validate.package_version(),
            "device": options.device,
            "environment": machine,
            "patches": sorted(rows, key=lambda row: str(row["id"])),
            "exit_code": int(fails),
        }
        print(json.dumps(report, indent=2, allow_nan=False))
        for id, why in unwritten.items():
            print(f"{id}: {why}", file=sys.stderr)
        return int(fails)
    if verdicts:
        print_verdicts(verdicts, out)
    if options.record and verdicts:
        out.line()
        for verdict in verdicts:
            if verdict.patch in written:
                out.line(f"{verdict.patch}: recorded in {written[verdict.patch]}")
            else:
                why = unwritten.get(verdict.patch, f"no record written: {verdict.text}")
                out.line(f"{verdict.patch}: {why}", "red")
    return int(fails)


@dataclass(frozen=True)
class _Skipped:
    """A patch that can't be measured here, and why; ``fails`` when that makes the exit code 1."""

    patch: str
    text: str
    fails: bool

    def as_json(self) -> dict[str, Any]:
        nothing = {"proves": False, "control_fails": False, "patched": None, "unpatched": None}
        return {"id": self.patch, "result": "skipped", "verdict": self.text, **nothing}


def _shown(path: Path) -> str:
    """Relative to the working directory where it lies below it: what a user can paste into ``git add``."""
    path, here = path.resolve(), Path.cwd().resolve()
    return str(path.relative_to(here)) if path.is_relative_to(here) else str(path)


def _can_write(folder: Path) -> bool:
    """Whether ``folder`` is, or could be made, a folder to write to; makes nothing."""
    folder = folder.resolve()
    there = next(path for path in (folder, *folder.parents) if path.exists())
    return there.is_dir() and os.access(there, os.W_OK)


def _no_cuda() -> str | None:
    """Why there is no card to measure on. Makes no CUDA context: an exclusive card would refuse the children."""
    try:
        import torch

        if torch.cuda.is_available():
            return None
    except Exception as error:  # as in _environment
        return f"{type(error).__name__}: {error}".split("\n")[0]
    return "torch sees none" if torch.version.cuda else "this torch is built without CUDA"


def _sort_out(options: argparse.Namespace) -> tuple[list[str], list[_Skipped]]:
    """The ids that can be measured here, and those that can't."""
    # Each child applies the one patch it measures, whatever the environment chooses for a job.
    survey = _engine.survey(options.allow_drift, environment=False)
    runnable, skipped = [], []
    for id in dict.fromkeys(options.gpu or _registry.patches()):
        gate, status = _gates.look(_registry.get(id)), survey[id]
        if gate.state in (State.ABSENT, State.INAPPLICABLE, State.OBSOLETE):
            skipped.append(_Skipped(id, f"skipped, {gate.state}. {gate.reason}", id in options.gpu))
        elif status.state.is_failure:
            skipped.append(_Skipped(id, f"not measured, {status.state}. {status.reason}", True))
        elif not _validate.validatable(_registry.get(id)):
            skipped.append(_Skipped(id, "its module has no validate(device), so nothing can be measured", True))
        else:
            runnable.append(id)
    return runnable, skipped


@contextlib.contextmanager
def _progress(total: int) -> Iterator[Callable[[str], None]]:
    """A bar on stderr for a terminal, a line a step for anything else."""
    if not sys.stderr.isatty():
        yield lambda text: print(f"measuring {text}", file=sys.stderr, flush=True)
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task("", total=total)
        begun = 0

        def step(text: str) -> None:
            nonlocal begun
            progress.update(task, description=text, completed=begun)
            begun += 1

        yield step
        progress.update(task, description="done", completed=total)


if __name__ == "__main__":
    sys.exit(main())
