"""The check's report: what is known of each patch here, as data (``--json``) and as text for a pipe or a terminal."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from fsdp_sink_patches import _fingerprint, _records
from fsdp_sink_patches._fingerprint import Match
from fsdp_sink_patches._patch import Patch

SCHEMA = 1

STYLES = {
    "applied": "green",
    "armed": "green",
    "known": "green",
    "validated": "green",
    "disabled": "dim",
    "absent": "dim",
    "inapplicable": "yellow",
    "obsolete": "yellow",
    "allowed": "yellow",
    "stale": "yellow",
    "drifted": "bold red",
    "conflict": "bold red",
    "shadowed": "bold red",
    "failed": "bold red",
    "unknown": "bold red",
}


@dataclass(frozen=True)
class Row:
    """One patch here.

    Args:
        state: one of the ten states; under ``--static`` a prediction, and ``armed`` means "would apply".
        fails: this row makes the exit code 1.
        match: the source found against the shapes known; None where the upstream is not installed.
        stale: references to the original that were found elsewhere, as the engine names them.
    """

    patch: Patch
    state: str
    version: str | None
    fingerprint: str | None
    reason: str
    fails: bool
    match: Match | None = None
    record: _records.RecordState | None = None
    stale: tuple[str, ...] = ()
    traceback: str | None = None


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
    patch = row.patch
    return {
        "id": patch.id,
        "gives": patch.gives,
        "link": patch.link,
        "remove_when": patch.remove_when,
        "requires": patch.requires,
        "fixed_in": patch.fixed_in,
        "distribution": patch.distribution,
        "version": row.version,
        "fingerprint": row.fingerprint,
        "state": row.state,
        "fails": row.fails,
        "reason": row.reason,
        "known_releases": [version for shape in _fingerprint.shapes(patch) for version in shape.versions],
        "targets": [_symbol(t.path, t.optional, row.match) for t in patch.targets],
        "relies_on": [_symbol(ref.removesuffix("?"), ref.endswith("?"), row.match) for ref in patch.relies_on],
        "drift": drift(row),
        "stale_references": list(row.stale),
        "traceback": row.traceback,
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
    """Each symbol that differs from the nearest known shape: what was found, what was expected, and where each is known."""
    match = row.match
    if match is None or match.known:
        return []
    shapes = _fingerprint.shapes(row.patch)
    found = []
    for ref in match.changed:
        expected = None if match.shape is None else match.shape.digests.get(ref)
        found.append(
            {
                "ref": ref,
                "found": match.digests[ref],
                "found_in": [v for s in shapes if s.digests.get(ref) == match.digests[ref] for v in s.versions],
                "expected": expected,
                "expected_in": [] if match.shape is None else list(match.shape.versions),
            }
        )
    return found


# --- text ----------------------------------------------------------------------------------------------------------


class Output:
    """A terminal gets colour and wrapping; a pipe gets plain text, one row a line, whatever its length."""

    def __init__(self) -> None:
        self._terminal = sys.stdout.isatty()
        self._buffer = io.StringIO()
        if self._terminal:
            self.console = Console(highlight=False)
        else:
            self.console = Console(file=self._buffer, width=10_000, color_system=None, force_terminal=False, highlight=False)

    def line(self, text: str = "", style: str | None = None) -> None:
        self.console.print(Text(text, style=style or ""), soft_wrap=True)
        self._flush()

    def table(self, header: Sequence[str], rows: Iterable[Sequence[str]], indent: int = 0) -> None:
        table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
        for name in header:
            table.add_column(name, overflow="fold", no_wrap=not self._terminal)
        for row in rows:
            table.add_row(*(Text(cell, style=STYLES.get(cell.split(" ")[0], "")) for cell in row))
        from rich.padding import Padding

        self.console.print(Padding(table, (0, 0, 0, indent)))
        self._flush()

    def _flush(self) -> None:
        if not self._terminal:
            for line in self._buffer.getvalue().splitlines():
                print(line.rstrip())
            self._buffer.seek(0)
            self._buffer.truncate()


def print_report(report: CheckReport, out: Output) -> None:
    out.line(environment_line(report))
    out.line("upstreams: " + ", ".join(f"{name} {found or 'not installed'}" for name, found in report.upstreams.items()))
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
                f"{row.patch.distribution} {row.version or '-'}",
                row.fingerprint or "-",
                "armed (would apply)" if report.static and row.state == "armed" else row.state,
                str(row.record) if row.record is not None else "-",
            )
            for row in report.rows
        ],
    )
    notes = [(row, row.reason) for row in report.rows if row.reason and (row.fails or row.state not in ("applied", "armed"))]
    notes += [(row, f"still held elsewhere: {', '.join(row.stale)}") for row in report.rows if row.stale]
    if notes:
        out.line()
    for row, text in notes:
        out.line(f"{row.patch.id}: {text}", "red" if row.fails else None)
    failing = [row.patch.id for row in report.rows if row.fails]
    if failing:
        out.line()
        out.line(f"not as it should be: {', '.join(failing)}. For each: python -m fsdp_sink_patches.check --explain ID")


def environment_line(report: CheckReport) -> str:
    here = report.environment
    parts = [f"fsdp-sink-patches {report.package}", f"python {here['python']}"]
    if here["torch_error"]:
        parts.append(f"torch {here['torch']} (can't be imported: {here['torch_error']})")
    elif here["torch"] is None:
        parts.append("torch not installed")
    else:
        parts += [f"torch {here['torch']}", f"CUDA {here['cuda']}" if here["cuda"] else "built without CUDA"]
    if here["gpus"] is None:
        parts.append("GPU not looked at (--static)")
    else:
        cards = [f"{gpu['name']} (capability {gpu['capability']})" for gpu in here["gpus"]]
        parts += [f"{cards.count(card)} x {card}" for card in dict.fromkeys(cards)] or ["no GPU"]
    return ", ".join(parts)


def print_explanation(row: Row, why: str, static: bool, out: Output) -> None:
    patch = row.patch
    out.line(f"{patch.id}: {patch.gives}", "bold")
    out.line()
    for line in why.strip().splitlines():
        out.line(f"  {line}" if line else "")
    out.line()
    out.line(f"upstream     {patch.distribution} {row.version or '(not installed)'}; the patch is for {patch.requires}")
    out.line(f"link         {patch.link}")
    out.line(f"remove when  {patch.remove_when}" + (f" (fixed in {patch.fixed_in})" if patch.fixed_in else ""))
    state = "armed (would apply)" if static and row.state == "armed" else row.state
    out.line(f"state        {state}" + (f": {row.reason}" if row.reason else ""), STYLES.get(row.state))
    out.line(f"source       {row.fingerprint or 'not looked at'}")
    out.line(f"GPU record   {row.record if row.record is not None else '-'}")
    for title, refs in (
        ("replaces", [(t.path, t.optional) for t in patch.targets]),
        ("relies on", [(ref.removesuffix("?"), ref.endswith("?")) for ref in patch.relies_on]),
    ):
        if refs:
            out.line()
            out.line(title, "bold")
            out.table(("symbol", "where"), [(ref, _where(ref, optional, row.match)) for ref, optional in refs], indent=2)
    changes = drift(row)
    if changes:
        out.line()
        nearest = row.match.shape.versions if row.match is not None and row.match.shape is not None else ()
        out.line(f"differs from the nearest source we know ({_span(nearest)})" if nearest else "no source is known", "bold")
        out.table(
            ("symbol", "found", "which is known from", "expected"),
            [(c["ref"], c["found"], _span(c["found_in"]) or "nowhere", c["expected"] or "-") for c in changes],
            indent=2,
        )
    for line in advice(row):
        out.line()
        out.line(line)
    if row.stale:
        out.line()
        out.line("the original is still held by", "bold")
        for name in row.stale:
            out.line(f"  {name}")
    if row.traceback:
        out.line()
        out.line(row.traceback.rstrip())


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
    patch, name = row.patch, f"{row.patch.distribution}=={row.version}"
    match row.state:
        case "drifted":
            known = [version for shape in _fingerprint.shapes(patch) for version in shape.versions]
            if row.version in known:
                return [
                    f"{name} as released is known, so the installed files were changed after installing. To be rid of that: "
                    f"pip install --force-reinstall --no-deps {name}"
                ]
            lines = [
                f"To see what changed in the source: python -m fsdp_sink_patches.matrix refresh {name}. If the patch is still "
                "right for it, the same command with --accept adds it.",
                f"To apply it all the same, at your own risk: apply(allow_drift=({patch.id!r},)), or check --allow-drift {patch.id}.",
            ]
            return lines
        case "conflict" | "shadowed":
            return [
                "Someone else assigns the same attribute. Apply ours after theirs, or switch one of the two off: "
                f"FSDP_SINK_PATCHES_DISABLE={patch.id}."
            ]
        case "obsolete":
            return [f"{patch.distribution} {patch.fixed_in} and newer need no patch: delete it."]
        case "inapplicable":
            return [f"Install a release that satisfies {patch.requires} to have it."]
        case "failed":
            return ["The traceback below is ours to fix: please report it with the output of check --json."]
    return []
