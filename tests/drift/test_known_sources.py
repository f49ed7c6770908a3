"""The upstream installed here is one the patches know, one changed token makes it unknown, and prose does not."""

from __future__ import annotations

import ast
import importlib.metadata
import io
import json
import keyword
import shutil
import sys
import tokenize
from pathlib import Path

import jsonschema
import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from fsdp_sink_patches import Patch, _fingerprint, _gates, _records, _registry, _validate

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

INSTALLED = Version(importlib.metadata.version("transformers"))


def needed(patch: Patch, version: Version) -> bool:
    """In range, and upstream has not fixed it yet."""
    fixed = patch.fixed_in is not None and version >= Version(patch.fixed_in)
    return _gates.contains(patch.requires, version) and not fixed


PATCHES = {
    id: patch
    for id, patch in _registry.patches().items()
    if patch.distribution == "transformers" and needed(patch, INSTALLED)
}
PRESENT = [
    (id, ref) for id, patch in PATCHES.items() for ref in _fingerprint.refs(patch) if _fingerprint.definitions(ref)
]


def modules(patch: Patch) -> set[Path]:
    return {_fingerprint.locate(ref)[0] for id, ref in PRESENT if id == patch.id}


@pytest.fixture
def root(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A folder with a copy of the modules that the patch named first among the test's parameters looks at."""
    package = Path(_fingerprint.locate("transformers:__version__")[0]).parent
    for source in {package / "__init__.py"} | modules(PATCHES[request.getfixturevalue("id")]):
        target = tmp_path / source.relative_to(package.parent)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(source, target)
    return tmp_path


@pytest.mark.parametrize("id", PATCHES)
def test_the_installed_release_is_known(id: str) -> None:
    match = _fingerprint.match(PATCHES[id])
    assert match.changed == ()
    assert match.known
    assert match.shape is not None
    assert importlib.metadata.version("transformers") in match.shape.versions


@pytest.mark.parametrize("id", _registry.patches())
def test_every_release_we_test_is_known(id: str) -> None:
    """Of the cells' releases, those that the patch is meant for."""
    patch = _registry.get(id)
    text = (_fingerprint.matrix_directory() / "cells.toml").read_text(encoding="utf-8")
    named = [Requirement(line) for cell in tomllib.loads(text)["cells"].values() for line in cell["distributions"]]
    tested = {Version(str(need.specifier).removeprefix("==")) for need in named if need.name == patch.distribution}
    meant = {str(v) for v in tested if needed(patch, v) and not _gates.refusal(patch, v)}
    known = {version for shape in _fingerprint.shapes(patch) for version in shape.versions}
    assert meant
    assert meant - known == set()


def test_the_tables_hold_the_registered_patches_and_no_others() -> None:
    """A renamed patch must not leave its table behind, and a table must be named after its distribution."""
    folder = _fingerprint.matrix_directory()
    found = {
        (path.stem, id)
        for path in folder.glob("*.toml")
        if path.name != "cells.toml"
        for id in tomllib.loads(path.read_text(encoding="utf-8"))
    }
    assert found == {(p.distribution.replace("-", "_"), id) for id, p in _registry.patches().items()}


@pytest.mark.parametrize("id", _registry.patches())
def test_each_shape_is_of_the_patch_as_it_is_now(id: str) -> None:
    """A symbol added to a patch must be looked up in every release again, and only what may lack may be absent."""
    patch = _registry.get(id)
    may_lack = {t.path for t in patch.targets if t.optional} | {r[:-1] for r in patch.relies_on if r.endswith("?")}
    for shape in _fingerprint.shapes(patch):
        assert set(shape.digests) == set(_fingerprint.refs(patch))
        assert {ref for ref, digest in shape.digests.items() if digest == _fingerprint.ABSENT} <= may_lack
        outside = [v for v in shape.versions if not SpecifierSet(patch.requires).contains(v, prereleases=True)]
        assert outside == []


def test_each_committed_record_is_one() -> None:
    root = _fingerprint.matrix_directory()
    rules = json.loads((root / "schema" / "record.schema.json").read_text(encoding="utf-8"))
    files = [path for path in (root / "records").rglob("*") if path.is_file()]
    assert files
    for path in files:
        text = path.read_text(encoding="utf-8")
        record = json.loads(text)
        jsonschema.validate(record, rules)
        assert path.relative_to(root / "records").parts == (record["patch"], f"{record['cell']}.json")
        assert record in _records.load(record["patch"])
        assert _registry.get(record["patch"]).distribution == record["upstream"]["distribution"]
        both = _validate.Verdict(record["patch"], record["patched"], record["unpatched"])
        assert both.proves, both.text
        assert _validate.without_paths(text) == text
    assert {path.parent.name for path in files} <= set(_registry.patches())


@pytest.mark.parametrize("id", _registry.patches())
def test_no_release_has_two_shapes_and_no_shape_is_twice(id: str) -> None:
    shapes = _fingerprint.shapes(_registry.get(id))
    versions = [version for shape in shapes for version in shape.versions]
    assert shapes
    assert len(versions) == len(set(versions))
    assert len({tuple(shape.digests.items()) for shape in shapes}) == len(shapes)


@pytest.mark.parametrize(("id", "ref"), PRESENT, ids=[f"{id}-{ref.rpartition(':')[2]}" for id, ref in PRESENT])
def test_one_changed_token_is_drift_and_named(id: str, ref: str, root: Path) -> None:
    patch = PATCHES[id]
    assert _fingerprint.match(patch, root).known
    path = _fingerprint.locate(ref, root)[0]
    rename_last_name(path, _fingerprint.definitions(ref, root)[-1])
    match = _fingerprint.match(patch, root)
    assert not match.known
    assert match.changed == (ref,)


@pytest.mark.parametrize("id", PATCHES)
def test_comments_docstrings_and_blank_lines_are_not_drift(id: str, root: Path) -> None:
    patch = PATCHES[id]
    before = {path: path.read_text(encoding="utf-8") for path in root.rglob("*.py")}
    for ref in _fingerprint.refs(patch):
        for number in range(len(_fingerprint.definitions(ref, root))):
            reword(_fingerprint.locate(ref, root)[0], _fingerprint.definitions(ref, root)[number])
    reworded = [path for path, text in before.items() if path.read_text(encoding="utf-8") != text]
    assert {path.name for path in reworded} == {path.name for path in modules(patch)}
    match = _fingerprint.match(patch, root)
    assert match.changed == ()
    assert match.known


def rename_last_name(path: Path, node: ast.stmt) -> None:
    """Append a letter to the last identifier within the statement."""
    lines = path.read_text(encoding="utf-8").split("\n")
    text = "\n".join(lines[node.lineno - 1 : node.end_lineno]) + "\n"
    # Indented as it may be, it needs a line above to be tokenized.
    tokens = tokenize.generate_tokens(io.StringIO("if 1:\n" + text).readline)
    names = [t for t in tokens if t.type == tokenize.NAME and not keyword.iskeyword(t.string)]
    row, column = names[-1].end
    line = node.lineno - 1 + row - 2  # from zero; the added line is row one
    lines[line] = lines[line][:column] + "x" + lines[line][column:]
    path.write_text("\n".join(lines), encoding="utf-8")


def reword(path: Path, node: ast.stmt) -> None:
    """Give a function or class another docstring, a comment and blank lines; other statements a comment before them."""
    lines = path.read_text(encoding="utf-8").split("\n")
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        head = node.body[0]
        first = head.lineno - 1
        if getattr(head, "decorator_list", None):
            first = min(decorator.lineno for decorator in head.decorator_list) - 1  # type: ignore[attr-defined]
        indent = " " * head.col_offset
        if ast.get_docstring(node) is not None:
            del lines[first : head.end_lineno]
        lines[first:first] = [
            f'{indent}"""Other words.',
            "",
            f'{indent}In two paragraphs."""',
            "",
            f"{indent}# A note.",
        ]
    else:
        lines.insert(node.lineno - 1, " " * node.col_offset + "# A note.")
    path.write_text("\n".join(lines), encoding="utf-8")
