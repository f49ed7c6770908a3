"""GPU validation records: what was measured, on what, and whether that still speaks for the code that is here now.

A record holds the digests of the upstream source and of our own code. ``validated`` means that both are what they were;
nothing else in this package may use that word.
"""

from __future__ import annotations

import ast
import hashlib
import json
import tokenize
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from fsdp_sink_patches import _fingerprint, _registry
from fsdp_sink_patches._patch import Patch

PACKAGE = "fsdp_sink_patches"
SCHEMA = 1

State = Literal["validated", "stale", "never", "unreadable"]


@dataclass(frozen=True)
class RecordState:
    """What the records say of a patch here.

    Args:
        state: ``validated`` when some record was made of exactly this source, ``stale`` when there are records but each
            was made of other source, ``never`` when there are none, ``unreadable`` when a file is no record.
        record: the record that decides: the newest that matches, else the newest.
        changed: for ``stale``, what differs: upstream refs and our own modules.
    """

    state: State
    record: Mapping[str, Any] | None = None
    changed: tuple[str, ...] = ()

    def __str__(self) -> str:
        if self.record is None:
            return self.state
        place = f"{gpu_name(self.record)}, {self.record['date'][:10]}"
        if self.state == "validated":
            return f"validated ({place})"
        more = f" and {len(self.changed) - 1} more" if len(self.changed) > 1 else ""
        return f"stale ({place}; changed since: {self.changed[0]}{more})"


def gpu_name(record: Mapping[str, Any]) -> str:
    """``"H200"`` of ``"NVIDIA H200"``."""
    return str(record["environment"]["gpu"]).removeprefix("NVIDIA ")


def directory() -> Path:
    return _fingerprint.matrix_directory() / "records"


def load(patch_id: str, root: Path | None = None) -> tuple[Mapping[str, Any], ...]:
    """The records of one patch, oldest first. A file that is no record raises ValueError naming it."""
    found: list[Mapping[str, Any]] = []
    folder = (root or directory()) / patch_id
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        if path.name.startswith("."):  # of a file manager or an editor
            continue
        try:
            if path.suffix != ".json":
                raise ValueError("the name of a record ends in .json")
            record = json.loads(path.read_text(encoding="utf-8"))
            _require(record, patch_id)
        except (ValueError, OSError) as error:
            raise ValueError(
                f"found compat_matrix/records/{patch_id}/{path.name}, expected a GPU record of {patch_id} in schema "
                f"{SCHEMA}: {error}. Restore the file as it was committed, or delete it and measure again: "
                f"python -m {PACKAGE}.check --gpu {patch_id} --record"
            ) from error
        found.append(record)
    return tuple(sorted(found, key=lambda record: record["date"]))


def _require(record: Any, patch_id: str) -> None:
    """ValueError unless everything that this package reads of a record is there."""
    if not isinstance(record, dict):
        raise ValueError(f"it holds a {type(record).__name__}")
    for name, wanted in (("schema", SCHEMA), ("patch", patch_id)):
        if record.get(name) != wanted:
            raise ValueError(f"its {name} is {record.get(name)!r}" if name in record else f"it has no {name!r}")
    for where, kind in (
        ("date", str),
        ("cell", str),
        ("sources", dict),
        ("upstream.digests", dict),
        ("environment.gpu", str),
    ):
        value: Any = record
        for name in where.split("."):
            value = value.get(name) if isinstance(value, dict) else None
        if not isinstance(value, kind) or not value:
            raise ValueError(f"it has no {where!r} that can be read")


def judge(
    records: Iterable[Mapping[str, Any]], upstream_digests: Mapping[str, str], own_sources: Mapping[str, str]
) -> RecordState:
    """`RecordState` of ``records`` (oldest first) for this upstream source and these sources of ours.

    The upstream's version plays no part: another release with equal digests is the same code.
    """
    state = RecordState("never")
    for record in records:
        changed = (
            *_differing(record["upstream"]["digests"], upstream_digests),
            *_differing(record["sources"], own_sources),
        )
        if not changed:
            state = RecordState("validated", record)
        elif state.state != "validated":
            state = RecordState("stale", record, changed)
    return state


def _differing(recorded: Mapping[str, str], now: Mapping[str, str]) -> tuple[str, ...]:
    return tuple(name for name in sorted({*recorded, *now}) if recorded.get(name) != now.get(name))


# --- our own sources -----------------------------------------------------------------------------------------------


def sources(patch: Patch) -> dict[str, str]:
    """Digests of everything of ours that the patch's numbers depend on, by module name.

    That is the patch's file, the helpers beside it that it imports, and every module of each package under ``ops`` that
    any of these import. Read statically: nothing is imported but the patch itself.
    """
    found: dict[str, str] = {}
    waiting = [str(_registry.module(patch.id).__name__)]
    while waiting:
        name = waiting.pop()
        path = _file(name)
        if name in found or path is None:
            continue
        found[name] = code_digest(path)
        for imported in _imports(name, path):
            waiting.extend(_ours(imported))
    return dict(sorted(found.items()))


def code_digest(path: Path) -> str:
    """16 hexadecimal characters over a file's lines without docstrings, comment lines and blank lines.

    Lines, not syntax: the text of ``ast.unparse`` differs between Python versions, and a record outlives them.
    """
    with tokenize.open(path) as file:
        text = file.read()
    prose: set[int] = set()
    for node in ast.walk(ast.parse(text, filename=path.name)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and node.body:
            head = node.body[0]
            if (
                isinstance(head, ast.Expr)
                and isinstance(head.value, ast.Constant)
                and isinstance(head.value.value, str)
            ):
                prose.update(range(head.lineno, (head.end_lineno or head.lineno) + 1))
    kept = [
        line.rstrip()
        for number, line in enumerate(text.split("\n"), start=1)
        if number not in prose and line.strip() and not line.lstrip().startswith("#")
    ]
    return hashlib.sha256("\n".join(kept).encode()).hexdigest()[:16]


def _imports(name: str, path: Path) -> Iterator[str]:
    """Absolute names that a module of ours imports, anywhere in it; ``from x import y`` gives ``x`` and ``x.y``."""
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    with tokenize.open(path) as file:
        tree = ast.parse(file.read(), filename=path.name)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            source = ".".join([*base, *([node.module] if node.module else [])])
            yield source
            yield from (f"{source}.{alias.name}" for alias in node.names)


def _ours(name: str) -> Iterator[str]:
    """The modules whose code a record must hold because ``name`` is imported."""
    parts = name.split(".")
    if parts[:2] == [PACKAGE, "patches"]:
        yield name
    elif parts[:2] == [PACKAGE, "ops"] and len(parts) > 2:
        unit = ".".join(parts[:3])
        path = _file(unit)
        if path is not None and path.name == "__init__.py":
            for inner in path.parent.rglob("*.py"):
                steps = inner.relative_to(path.parent).with_suffix("").parts
                yield ".".join([unit, *(step for step in steps if step != "__init__")])
        elif path is not None:
            yield unit


def _file(name: str) -> Path | None:
    """The file of a module of ours, without importing its parents (``ops`` packages import torch)."""
    parts = name.split(".")
    if parts[:2] == [PACKAGE, "patches"]:
        import fsdp_sink_patches.patches as patches

        base = Path(next(iter(patches.__path__))).joinpath(*parts[2:])
    else:
        base = Path(__file__).resolve().parent.joinpath(*parts[1:])
    for path in (base / "__init__.py", base.with_name(base.name + ".py")):
        if path.is_file():
            return path
    return None
