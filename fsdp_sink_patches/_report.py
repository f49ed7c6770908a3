"""The check's report: what is known of each patch here, as data (``--json``) and as text for a pipe or a terminal."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from fsdp_sink_patches import _fingerprint, _records
from fsdp_sink_patches._fingerprint import Match
from fsdp_sink_patches._patch import Patch
from fsdp_sink_patches._state import PatchStatus, State

if TYPE_CHECKING:
    from fsdp_sink_patches._validate import Verdict

SCHEMA = 1

STYLES = {
    "applied": "green",
    "armed": "green",
    "known": "green",
    "validated": "green",
    "right": "green",
    "disabled": "dim",
    "absent": "dim",
    "skipped": "dim",
    "inapplicable": "yellow",
    "obsolete": "yellow",
    "allowed": "yellow",
    "stale": "yellow",
    "drifted": "bold red",
    "conflict": "bold red",
    "shadowed": "bold red",
    "failed": "bold red",
    "unknown": "bold red",
    "unreadable": "bold red",
    "out": "bold red",
    "no": "bold red",
    "proves": "bold red",
}
"""Styles of a table cell by its first word."""


@dataclass(frozen=True)
class Row:
    """One patch here.

    Args:
        status: the engine's word; under ``--static`` a prediction, and ``armed`` means "would apply".
        fails: this row makes the exit code 1.
        match: the source found against the shapes known; None where the upstream is not installed or can't be read.
        record: what the GPU records say; None where there is no ``match`` to compare them with and each can be read.
        notes: what the check itself has to add to the engine's reason.
    """

    patch: Patch
    status: PatchStatus
    fails: bool
    match: Match | None = None
    record: _records.RecordState | None = None
    notes: tuple[str, ...] = ()

    @property
    def reason(self) -> str:
        return " ".join(filter(None, [self.status.reason, *self.notes]))


@dataclass(frozen=True)
class CheckReport:
    package: str
    static: bool
    strict: bool
    environment: Mapping[str, Any]
    upstreams: Mapping[str, str | None]
    backends: Mapping[str, str] | None
    rows: tuple[Row, ...]

    @property
    def exit_code(self) -> int:
        return int(any(row.fails for row in self.rows))

    def state(self, row: Row) -> str:
        return "armed (would apply)" if self.static and row.status.state is State.ARMED else str(row.status.state)

    def as_json(self) -> dict[str, Any]:
        """``compat_matrix/schema/check.schema.json``."""
        return {
            "schema": SCHEMA,
            "package": self.package,
            "static": self.static,
            "strict": self.strict,
            "environment": dict(self.environment),
            "upstreams": dict(self.upstreams),
            "backends": None if self.backends is None else dict(self.backends),
            "patches": [_row_json(row) for row in self.rows],
            "exit_code": self.exit_code,
        }


def _row_json(row: Row) -> dict[str, Any]:
    patch, status = row.patch, row.status
    return {
        "id": patch.id,
        "gives": patch.gives,
        "link": patch.link,
        "remove_when": patch.remove_when,
        "requires": patch.requires,
        "fixed_in": patch.fixed_in,
        "distribution": patch.distribution,
        "version": status.version,
        "fingerprint": status.fingerprint,
        "state": str(status.state),
        "fails": row.fails,
        "reason": row.reason,
        "known_releases": [version for shape in _fingerprint.shapes(patch) for version in shape.versions],
        "targets": [_symbol(t.path, t.optional, row.match) for t in patch.targets],
        "relies_on": [_symbol(ref.removesuffix("?"), ref.endswith("?"), row.match) for ref in patch.relies_on],
        "drift": drift(row),
        "stale_references": list(status.stale),
        "traceback": status.traceback,
        "gpu_record": None if row.record is None else _record_json(row.record),
    }


def _symbol(ref: str, optional: bool, match: Match | None) -> dict[str, Any]:
    where: dict[str, Any] = {"ref": ref, "optional": optional, "file": None, "line": None, "digest": None}
    if match is not None:
        where["digest"] = match.digests[ref]
        if where["digest"] != _fingerprint.ABSENT:
            path, line = _fingerprint.locate(ref)
            where.update(file=str(path), line=line)
    return where


def _record_json(state: _records.RecordState) -> dict[str, Any]:
    record = state.record
    return {
        "state": state.state,
        "cell": None if record is None else record["cell"],
        "gpu": None if record is None else record["environment"]["gpu"],
        "date": None if record is None else record["date"],
        "changed": list(state.changed),
    }


def drift(row: Row) -> list[dict[str, Any]]:
    """Each symbol that differs from the nearest known shape: what was found and what was expected, and where each is
    known from. Empty where the source is known or was not asked about."""
    match = row.match
    if match is None or row.status.fingerprint not in ("unknown", "allowed"):
        return []
    shapes = _fingerprint.shapes(row.patch)
    return [
        {
            "ref": ref,
            "found": match.digests[ref],
            "found_in": [v for s in shapes if s.digests.get(ref) == match.digests[ref] for v in s.versions],
            "expected": None if match.shape is None else match.shape.digests.get(ref),
            "expected_in": [] if match.shape is None else list(match.shape.versions),
        }
        for ref in match.changed
    ]


# --- text ----------------------------------------------------------------------------------------------------------


class Output:
    """A terminal gets colour and wrapping; a pipe gets plain text, one row a line, whatever its length."""

    def __init__(self) -> None:
        self._terminal = sys.stdout.isatty()
        self._buffer = io.StringIO()
        self._console = (
            Console(highlight=False)
            if self._terminal
            else Console(file=self._buffer, width=10_000, color_system=None, force_terminal=False, highlight=False)
        )

    def line(self, text: str = "", style: str | None = None) -> None:
        self._console.print(Text(text, style=style or ""), soft_wrap=True)
        self._flush()

    def table(self, header: Sequence[str], rows: Iterable[Sequence[str]], indent: int = 0) -> None:
        table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
        for name in header:
            table.add_column(name, overflow="fold", no_wrap=not self._terminal)
        for row in rows:
            table.add_row(*(Text(cell, style=STYLES.get(cell.split(" ")[0].rstrip(":,"), "")) for cell in row))
        self._console.print(Padding(table, (0, 0, 0, indent)))
        self._flush()

    def _flush(self) -> None:
        if not self._terminal:
            for line in self._buffer.getvalue().splitlines():
                print(line.rstrip())
            self._buffer.seek(0)
            self._buffer.truncate()


def print_report(report: CheckReport, out: Output) -> None:
    out.line(environment_line(report))
    found = (f"{name} {version or 'not installed'}" for name, version in report.upstreams.items())
    out.line("upstreams: " + ", ".join(found))
    if report.backends is not None:
        out.line("attention backends, best first:")
        for name, why in report.backends.items():
            out.line(f"  {name}: {why}", None if why == "available" else "dim")
    out.line()
    out.table(
        ("patch", "gives", "upstream", "fingerprint", "would be" if report.static else "state", "GPU record"),
        [
            (
                row.patch.id,
                row.patch.gives,
                f"{row.patch.distribution} {row.status.version or '-'}",
                row.status.fingerprint or "-",
                report.state(row),
                str(row.record) if row.record is not None else "-",
            )
            for row in report.rows
        ],
    )
    # Under --static the reason of every armed row is the same; the table's heading says it.
    armed = {row.patch.id for row in report.rows if report.static and row.status.state is State.ARMED}
    told = [(row, " ".join(row.notes) if row.patch.id in armed else row.reason) for row in report.rows]
    if any(text for _, text in told):
        out.line()
    for row, text in told:
        if text:
            out.line(f"{row.patch.id}: {text}", "red" if row.fails else None)
    failing = [row.patch.id for row in report.rows if row.fails]
    if failing:
        out.line()
        out.line(f"not as it should be: {', '.join(failing)}. For each: python -m fsdp_sink_patches.check --explain ID")


def environment_line(report: CheckReport) -> str:
    here = report.environment
    parts = [f"fsdp-sink-patches {report.package}", f"python {here['python']}"]
    if here["torch_error"]:
        parts.append(f"torch {here['torch']} (does not work here: {here['torch_error']})")
    elif here["torch"] is None:
        parts.append("torch not installed")
    else:
        parts.append(f"torch {here['torch']}")
        if not report.static:
            parts.append(f"CUDA {here['cuda']}" if here["cuda"] else "built without CUDA")
    if here["gpus"] is None:
        parts.append("GPU not looked at")
    else:
        cards = [f"{gpu['name']} (capability {gpu['capability']})" for gpu in here["gpus"]]
        parts += [f"{cards.count(card)} x {card}" for card in dict.fromkeys(cards)] or ["no GPU"]
    return ", ".join(parts)


def print_explanation(report: CheckReport, row: Row, why: str, out: Output) -> None:
    patch, status = row.patch, row.status
    out.line(f"{patch.id}: {patch.gives}", "bold")
    out.line()
    for line in why.strip().splitlines():
        out.line(f"  {line}" if line else "")
    out.line()
    out.line(
        f"upstream     {patch.distribution} {status.version or '(not installed)'}; the patch is for {patch.versions}"
    )
    out.line(f"link         {patch.link}")
    out.line(f"remove when  {patch.remove_when}" + (f" (fixed in {patch.fixed_in})" if patch.fixed_in else ""))
    out.line(
        f"state        {report.state(row)}" + (f": {row.reason}" if row.reason else ""), STYLES[status.state.value]
    )
    known = _span(row.match.shape.versions) if row.match is not None and row.match.known and row.match.shape else ""
    out.line(f"fingerprint  {status.fingerprint or '-'}" + (f", the source of {known}" if known else ""))
    out.line(f"GPU record   {row.record if row.record is not None else '-'}")
    for title, refs in (
        ("replaces", [(t.path, t.optional) for t in patch.targets]),
        ("relies on", [(ref.removesuffix("?"), ref.endswith("?")) for ref in patch.relies_on]),
    ):
        if refs:
            out.line()
            out.line(title, "bold")
            rows = [(ref, _where(ref, optional, row.match)) for ref, optional in refs]
            out.table(("symbol", "where"), rows, indent=2)
    changes = drift(row)
    if changes:
        nearest = _span(changes[0]["expected_in"])
        out.line()
        out.line(
            f"differs from the nearest source we know, that of {nearest}" if nearest else "no source is known", "bold"
        )
        for change in changes:
            out.line(f"  {change['ref']}")
            out.line(f"  - expected {change['expected'] or 'nothing recorded'}  {nearest}".rstrip(), "red")
            out.line(f"  + found    {change['found']}  {_span(change['found_in']) or 'in no release we know'}", "green")
    for line in advice(row):
        out.line()
        out.line(line)
    if status.stale:
        out.line()
        out.line("the original is still held by", "bold")
        for name in status.stale:
            out.line(f"  {name}")
    if status.traceback:
        out.line()
        out.line(status.traceback.rstrip())


def _where(ref: str, optional: bool, match: Match | None) -> str:
    symbol = _symbol(ref, optional, match)
    if symbol["file"] is not None:
        return f"{symbol['file']}:{symbol['line']}"
    if match is None:
        return "-"
    return "not in this release" + (" (it may lack it)" if optional else "")


def _span(versions: Sequence[str]) -> str:
    if not versions:
        return ""
    return versions[0] if len(versions) == 1 else f"{versions[0]} to {versions[-1]}, {len(versions)} releases"


def advice(row: Row) -> list[str]:
    """What the user can do about this row; empty when there is nothing to do."""
    patch, name = row.patch, f"{row.patch.distribution}=={row.status.version}"
    match row.status.state:
        case State.DRIFTED if row.status.version in {v for s in _fingerprint.shapes(patch) for v in s.versions}:
            why = f"{name} as released is known, so the installed files were changed after installing. To undo that: "
            return [why + f"pip install --force-reinstall --no-deps {name}"]
        case State.DRIFTED:
            see = f"To see what changed in the source: python -m fsdp_sink_patches.matrix refresh {name}. If the patch "
            anyway = (
                f"To apply it all the same, at your own risk: apply(allow_drift=({patch.id!r},)); to try that here: "
            )
            return [
                see + "is still right for it, the same command with --accept adds it.",
                anyway + f"python -m fsdp_sink_patches.check --allow-drift {patch.id}",
            ]
        case State.CONFLICT | State.SHADOWED:
            first = (
                "Someone else assigns the same attribute. Apply ours at another time, or switch one of the two off: "
            )
            return [first + f"FSDP_SINK_PATCHES_DISABLE={patch.id}."]
        case State.OBSOLETE:
            return [f"{patch.distribution} {patch.fixed_in} and newer need no patch: delete it."]
        case State.INAPPLICABLE:
            return [f"Install a release that satisfies {patch.versions} to have it."]
        case State.FAILED:
            return ["The traceback below is ours to fix: please report it with the output of check --json."]
        case _:
            return []


# --- the GPU validation --------------------------------------------------------------------------------------------


def print_verdicts(verdicts: Sequence[Verdict], out: Output) -> None:
    """One row a quantity: the error with the patch, its limit, the error without; then what both cost."""
    rows = []
    for verdict in verdicts:
        names = list({**verdict.patched.get("limits", {}), **verdict.patched.get("errors", {})}) or ["-"]
        for index, name in enumerate(names):
            rows.append(
                (
                    verdict.patch if index == 0 else "",
                    name,
                    _error(verdict.patched, name),
                    _number(verdict.patched.get("limits", {}).get(name)),
                    _error(verdict.unpatched, name),
                    verdict.text if index == 0 else "",
                )
            )
    out.table(("patch", "quantity", "error", "limit", "without the patch", "verdict"), rows)
    out.line()
    out.table(
        ("patch", "time", "without it", "ratio", "peak memory", "without it", "ratio", "timed"),
        [
            (
                verdict.patch,
                _time(verdict.patched),
                _time(verdict.unpatched),
                _ratio(verdict, "time_ms"),
                _peak(verdict.patched),
                _peak(verdict.unpatched),
                _ratio(verdict, "peak_bytes"),
                str(verdict.patched.get("details", {}).get("timed", "-")),
            )
            for verdict in verdicts
        ],
    )
    for verdict in verdicts:
        for which, measured in (("without the patch", verdict.unpatched), ("with the patch", verdict.patched)):
            if "raises" in measured:
                out.line()
                out.line(f"{verdict.patch}, {which}, raises: {measured['raises']}")
            if measured.get("stderr"):
                out.line()
                out.line(f"{verdict.patch}, {which}, the last lines on stderr of its process:")
                for line in measured["stderr"].strip().splitlines()[-40:]:
                    out.line(f"  {line}")


def _error(measured: Mapping[str, Any], name: str) -> str:
    if "raises" in measured:
        return "raises " + str(measured["raises"]).partition(":")[0]
    if "crashed" in measured:
        return "no result"
    return _number(measured["errors"].get(name))


def _number(value: Any) -> str:
    return "-" if value is None else f"{float(value):.2e}"


def _time(measured: Mapping[str, Any]) -> str:
    return f"{float(measured['time_ms']):.1f} ms" if "time_ms" in measured else "-"


def _peak(measured: Mapping[str, Any]) -> str:
    return f"{measured['peak_bytes'] / 2**20:.0f} MiB" if measured.get("peak_bytes") else "-"


def _ratio(verdict: Verdict, name: str) -> str:
    with_it, without = verdict.patched.get(name), verdict.unpatched.get(name)
    return f"{float(with_it) / float(without):.2f}" if with_it and without else "-"
