"""Digests of upstream source, read without importing it, and the shapes of source that each patch was written for.

A digest covers a symbol's own lines, from its first decorator, without docstrings, blank lines and full-line comments,
dedented: the text, not the syntax tree, because ``ast.dump`` and ``ast.unparse`` differ between Python versions.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib
import importlib.machinery
import importlib.util
import io
import sys
import tokenize
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fsdp_sink_patches._patch import Patch

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ABSENT = "absent"

_Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


@dataclass(frozen=True)
class Shape:
    """One form of the upstream source that a patch was checked against: the releases that have it, and its digests."""

    versions: tuple[str, ...]
    digests: dict[str, str]


@dataclass(frozen=True)
class Match:
    """The source found here against the shapes a patch knows.

    Args:
        known: some recorded shape has exactly these digests.
        digests: what was found, by ref.
        shape: the shape that matches; when none does, the one with the fewest differences (the newest of equals), or
            None if no shape is recorded.
        changed: the refs whose digest differs from ``shape`` (all of them if there is none).
    """

    known: bool
    digests: dict[str, str]
    shape: Shape | None
    changed: tuple[str, ...]


def digest(ref: str, root: Path | None = None) -> str:
    """The digest of the source of ``ref``, without importing its module.

    Args:
        ref: ``"package.module:Qualified.name"`` of a function, class, method, class attribute or module constant, or of
            a name that the module imports (then the digest covers where it comes from). All definitions at module or
            class level count, in order, also those inside ``if``/``else``/``try``.
        root: a directory that holds the top-level packages (an unpacked wheel); default: where the running interpreter
            would find the top-level package.

    Returns:
        16 hexadecimal characters, or ``"absent"`` when the module or the name is not there.

    Raises:
        ModuleNotFoundError: the top-level package itself is not there.
        SyntaxError: the file does not parse in this Python.
    """
    path, nodes = _find(ref, root)
    if path is None or not nodes:
        return ABSENT
    lines = _parse(path).lines
    name = ref.rpartition(".")[2].rpartition(":")[2]
    text = "\n".join(_normalised(node, name, lines) for node in nodes)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def locate(ref: str, root: Path | None = None) -> tuple[Path, int]:
    """The file and the first line of ``ref``. Raises LookupError where `digest` says ``"absent"``."""
    path, nodes = _find(ref, root)
    if path is None or not nodes:
        raise LookupError(f"{ref} is not in the source found for {ref.partition(':')[0]!r}")
    return path, _span(nodes[0])[0]


def refs(patch: Patch) -> tuple[str, ...]:
    """Everything a patch is fingerprinted by: its targets, then what it relies on, each once."""
    names = [target.path for target in patch.targets] + [ref.removesuffix("?") for ref in patch.relies_on]
    return tuple(dict.fromkeys(names))


def shapes(patch: Patch) -> tuple[Shape, ...]:
    """The shapes recorded for ``patch`` in ``compat_matrix/<distribution>.toml``; empty when there are none."""
    path = matrix_directory() / f"{patch.distribution.replace('-', '_')}.toml"
    if not path.is_file():
        return ()
    tables = _read_toml(path, _stamp(path)).get(patch.id, [])
    return tuple(Shape(versions=tuple(table["versions"]), digests=dict(table["digests"])) for table in tables)


def match(patch: Patch, root: Path | None = None) -> Match:
    """Compare the source found here with the shapes that ``patch`` knows. Errors as in `digest`."""
    found = {ref: digest(ref, root) for ref in refs(patch)}
    nearest: Shape | None = None
    changed = tuple(found)
    for shape in shapes(patch):
        differing = tuple(ref for ref, value in found.items() if shape.digests.get(ref) != value)
        if nearest is None or len(differing) <= len(changed):
            nearest, changed = shape, differing
    return Match(known=nearest is not None and not changed, digests=found, shape=nearest, changed=changed)


def matrix_directory() -> Path:
    """Where the evidence lies: ``compat_matrix/`` beside the package in a checkout, inside it in a wheel."""
    return Path(next(iter(importlib.import_module("fsdp_sink_patches.compat_matrix").__path__)))


def definitions(ref: str, root: Path | None = None) -> list[ast.stmt]:
    """The statements that define ``ref``, in order; empty where `digest` says ``"absent"``."""
    return _find(ref, root)[1]


def forget() -> None:
    """Drop the parsed files; a training process need not keep upstream's syntax trees."""
    _parse_cached.cache_clear()


# --- files ---------------------------------------------------------------------------------------------------------


def _find(ref: str, root: Path | None) -> tuple[Path | None, list[ast.stmt]]:
    module, colon, qualname = ref.partition(":")
    if not (module and colon and qualname):
        raise ValueError(f"{ref!r} is not a reference: expected 'package.module:Qualified.name'")
    path = _module_file(module, root)
    return (None, []) if path is None else (path, _definitions(_parse(path).tree, qualname))


def _module_file(module: str, root: Path | None) -> Path | None:
    top, *rest = module.split(".")
    file, directories = _top_level(top, root)
    for name in rest:
        for directory in directories:
            if (directory / name / "__init__.py").is_file():
                file, directories = directory / name / "__init__.py", [directory / name]
                break
            if (directory / f"{name}.py").is_file():
                file, directories = directory / f"{name}.py", []
                break
        else:
            # A folder without __init__.py: part of a namespace, no source of its own.
            file, directories = None, [d / name for d in directories if (d / name).is_dir()]
    return file


def _top_level(top: str, root: Path | None) -> tuple[Path | None, list[Path]]:
    if root is not None:
        if (root / top).is_dir():
            init = root / top / "__init__.py"
            return (init if init.is_file() else None), [root / top]
        if (root / f"{top}.py").is_file():
            return root / f"{top}.py", []
        raise ModuleNotFoundError(f"no package {top!r} in {root}", name=top)
    try:
        spec = importlib.util.find_spec(top)
    except ValueError:  # in sys.modules without a __spec__ (a script run as __main__, a stub made by hand)
        spec = importlib.machinery.PathFinder.find_spec(top)
    if spec is None:
        raise ModuleNotFoundError(f"no package {top!r} here", name=top)
    origin = Path(spec.origin) if spec.origin and spec.origin.endswith(".py") else None
    return origin, [Path(location) for location in spec.submodule_search_locations or ()]


@dataclass(frozen=True)
class _Source:
    lines: list[str]
    tree: ast.Module


def _stamp(path: Path) -> tuple[int, int]:
    stat = path.stat()
    return stat.st_mtime_ns, stat.st_size


def _parse(path: Path) -> _Source:
    return _parse_cached(path, _stamp(path))


@functools.lru_cache(maxsize=32)
def _parse_cached(path: Path, stamp: tuple[int, int]) -> _Source:
    with tokenize.open(path) as file:  # honours the coding line, and makes every line ending "\n"
        text = file.read()
    return _Source(lines=text.split("\n"), tree=ast.parse(text, filename=str(path)))


@functools.lru_cache(maxsize=32)
def _read_toml(path: Path, stamp: tuple[int, int]) -> Mapping[str, Any]:
    return tomllib.loads(path.read_text(encoding="utf-8"))


# --- symbols -------------------------------------------------------------------------------------------------------


def _definitions(tree: ast.Module, qualname: str) -> list[ast.stmt]:
    scopes: list[list[ast.stmt]] = [tree.body]
    *outer, last = qualname.split(".")
    for name in outer:
        scopes = [
            node.body
            for scope in scopes
            for node in _statements(scope)
            if isinstance(node, ast.ClassDef) and node.name == name
        ]
    return [node for scope in scopes for node in _statements(scope) if last in _bound_names(node)]


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Every statement that runs in this scope, in order, through if/else/try/with/for."""
    for node in body:
        yield node
        if isinstance(node, _Definition):
            continue
        for name in ("body", "handlers", "orelse", "finalbody", "cases"):
            for child in getattr(node, name, ()):
                yield from _statements([child] if isinstance(child, ast.stmt) else child.body)


def _bound_names(node: ast.stmt) -> Iterator[str]:
    if isinstance(node, _Definition):
        yield node.name
    elif isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign):
        for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
            for part in target.elts if isinstance(target, ast.Tuple | ast.List) else [target]:
                if isinstance(part, ast.Name):
                    yield part.id
    elif isinstance(node, ast.Import | ast.ImportFrom):
        for alias in node.names:
            yield alias.asname or alias.name


def _span(node: ast.stmt) -> tuple[int, int]:
    """First and last line, counted from one, decorators included."""
    decorators = node.decorator_list if isinstance(node, _Definition) else []
    return min([node.lineno, *(decorator.lineno for decorator in decorators)]), node.end_lineno or node.lineno


def _normalised(node: ast.stmt, name: str, lines: list[str]) -> str:
    if isinstance(node, ast.Import | ast.ImportFrom):
        # Only where this name comes from: a neighbour added to the same statement changes nothing.
        alias = next(alias for alias in node.names if (alias.asname or alias.name) == name)
        source = "." * node.level + (node.module or "") if isinstance(node, ast.ImportFrom) else ""
        return f"from {source} import {alias.name} as {name}"
    first, last = _span(node)
    cut = lines[first - 1 : last]
    for docstring in _docstrings(node):
        _blank(cut, docstring, first)
    inside = _inside_strings(cut)
    indent = len(cut[0]) - len(cut[0].lstrip())
    kept = []
    for number, line in enumerate(cut):
        if number in inside:
            kept.append(line)
        elif (text := line.strip()) and not text.startswith("#"):
            kept.append((line.lstrip() if line[:indent].strip() else line[indent:]).rstrip())
    return "\n".join(kept)


def _docstrings(node: ast.stmt) -> Iterator[ast.expr]:
    for inner in ast.walk(node):
        if isinstance(inner, _Definition) and inner.body:
            head = inner.body[0]
            if (
                isinstance(head, ast.Expr)
                and isinstance(head.value, ast.Constant)
                and isinstance(head.value.value, str)
            ):
                yield head.value


def _blank(cut: list[str], node: ast.expr, first: int) -> None:
    """Take the text of ``node`` out of the lines, in place, leaving what stands before and after it on its lines."""
    start, end = node.lineno - first, (node.end_lineno or node.lineno) - first
    # Columns of the syntax tree count UTF-8 bytes.
    before = cut[start].encode()[: node.col_offset].decode()
    after = cut[end].encode()[node.end_col_offset :].decode()
    cut[start : end + 1] = [before + after] + [""] * (end - start)


def _inside_strings(cut: list[str]) -> set[int]:
    """Lines (from zero) that begin inside a string: there a blank line or a ``#`` is part of a value, so they stay."""
    text = "\n".join(cut) + "\n"
    if '"""' not in text and "'''" not in text and "\\\n" not in text:
        return set()
    inside: set[int] = set()
    starts: list[int] = []
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        kind = tokenize.tok_name[token.type]
        if kind == "STRING":
            inside.update(range(token.start[0], token.end[0]))
        elif kind in ("FSTRING_START", "TSTRING_START"):  # one STRING token before Python 3.12
            starts.append(token.start[0])
        elif kind in ("FSTRING_END", "TSTRING_END"):
            inside.update(range(starts.pop(), token.end[0]))
    return inside
