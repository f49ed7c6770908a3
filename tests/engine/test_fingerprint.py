"""Digests: the same for the same code, different for different code, and never an import."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fsdp_sink_patches import Patch, Target, _fingerprint
from fsdp_sink_patches._fingerprint import digest, locate, match, refs, shapes

SOURCE = '''
"""Module docstring."""
from __future__ import annotations
from .other import (
    neighbour,
    moved as renamed,
)
import os

raise RuntimeError("imported")

LIMIT = 3
NAMES: tuple[str, ...] = (
    "a",
    "b",
)

if os.name == "posix":
    def branchy(x):
        return x
else:
    def branchy(x):
        return -x

try:
    import something as maybe
except ImportError:
    maybe = None


@decorator(
    1
)
def plain(x):
    """Doc."""
    # a comment
    y = x + 1

    return y


class Base:
    """Class doc."""
    flag = True

    def method(self, x):
        """Doc
        of two lines."""
        return x

    class Inner:
        def deep(self): return 1
'''


@pytest.fixture
def root(tmp_path: Path) -> Path:
    package = tmp_path / "upstream_x"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('imported')\n")
    (package / "code.py").write_text(SOURCE)
    return tmp_path


def one(tmp_path: Path, source: str, name: str = "f") -> str:
    (tmp_path / "single.py").write_text(source)
    return digest(f"single:{name}", tmp_path)


@pytest.mark.parametrize(
    "name",
    [
        "plain", "branchy", "LIMIT", "NAMES", "Base", "Base.flag", "Base.method", "Base.Inner.deep", "maybe", "renamed",
        "neighbour",
    ],
)  # fmt: skip
def test_every_kind_of_symbol_has_a_digest(root: Path, name: str) -> None:
    value = digest(f"upstream_x.code:{name}", root)
    assert len(value) == 16
    assert int(value, 16) >= 0
    assert "upstream_x" not in sys.modules


@pytest.mark.parametrize(
    "ref", ["upstream_x.code:gone", "upstream_x.code:Base.gone", "upstream_x.gone:f", "upstream_x.code.sub:f"]
)
def test_absent(root: Path, ref: str) -> None:
    assert digest(ref, root) == "absent"
    with pytest.raises(LookupError, match="upstream_x"):
        locate(ref, root)


def test_missing_top_level_package(root: Path) -> None:
    with pytest.raises(ModuleNotFoundError, match="no_such_upstream"):
        digest("no_such_upstream.code:f", root)
    with pytest.raises(ModuleNotFoundError, match="no_such_upstream"):
        digest("no_such_upstream.code:f")


def test_malformed_ref(root: Path) -> None:
    with pytest.raises(ValueError, match=r"package\.module:Qualified\.name"):
        digest("upstream_x.code.plain", root)


def test_locate_starts_at_the_first_decorator(root: Path) -> None:
    path, line = locate("upstream_x.code:plain", root)
    assert path == root / "upstream_x" / "code.py"
    assert SOURCE.split("\n")[line - 1].startswith("@decorator(")


def test_default_root_finds_without_importing_the_submodule() -> None:
    code = (
        "import sys; from fsdp_sink_patches._fingerprint import digest;"
        "print(digest('xml.dom.minidom:Node'), digest('wsgiref.headers:Headers.items'));"
        "print([m for m in ('xml.dom', 'wsgiref.headers') if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split("\n")
    assert len(out[0].split()[1]) == 16
    assert out[1] == "[]"


def test_namespace_packages(tmp_path: Path) -> None:
    (tmp_path / "ns" / "cute").mkdir(parents=True)
    (tmp_path / "ns" / "cute" / "interface.py").write_text("def f(): return 1\n")
    assert len(digest("ns.cute.interface:f", tmp_path)) == 16
    assert digest("ns:f", tmp_path) == "absent"
    assert digest("ns.cute:f", tmp_path) == "absent"


def test_all_definitions_count_in_order(tmp_path: Path) -> None:
    first = "def f(x): return 1\n"
    second = "def f(x): return 2\n"
    values = {one(tmp_path, text) for text in (first, second, first + second, second + first)}
    assert len(values) == 4
    guarded = "if A:\n    def f(x): return 1\nelse:\n    def f(x): return 2\n"
    assert one(tmp_path, guarded) == one(tmp_path, first + second)


def test_a_neighbour_in_the_same_import_changes_nothing(tmp_path: Path) -> None:
    alone = one(tmp_path, "from .masks import f\n")
    assert alone == one(tmp_path, "from .masks import a, f, z\n")
    assert alone != one(tmp_path, "from .other import f\n")
    assert alone != one(tmp_path, "from ..masks import f\n")
    assert alone != one(tmp_path, "from .masks import g as f\n")


def test_text_inside_strings_is_not_a_comment_or_a_blank_line(tmp_path: Path) -> None:
    def body(inner: str) -> str:
        return f'def f():\n    x = """{inner}"""\n    return x\n'

    values = {one(tmp_path, body(inner)) for inner in ("a\n# b\nc", "a\nc", "a\n\nc", "a\n  # b\nc")}
    assert len(values) == 4
    # Moving code into a class moves the code, not the text of its strings.
    moved = 'class C:\n    def f():\n        x = """a\n# b\nc"""\n        return x\n'
    assert one(tmp_path, moved, "C.f") == one(tmp_path, body("a\n# b\nc"))


def test_only_docstrings_go_not_other_strings(tmp_path: Path) -> None:
    assert one(tmp_path, 'def f():\n    "doc"\n    return 1\n') == one(tmp_path, "def f():\n    return 1\n")
    assert one(tmp_path, 'def f():\n    """Zürich\n    doc."""  # noqa\n    return 1\n') == one(
        tmp_path, "def f():\n    return 1\n"
    )
    assert one(tmp_path, 'def f():\n    return "a"\n') != one(tmp_path, 'def f():\n    return "b"\n')
    assert one(tmp_path, 'def f():\n    x = 1\n    "not a doc"\n    return 1\n') != one(
        tmp_path, "def f():\n    x = 1\n    return 1\n"
    )
    assert one(tmp_path, 'def f(): "ü"; return 1\n') == one(tmp_path, 'def f(): "other"; return 1\n')


def test_decorators_signature_and_annotations_count(tmp_path: Path) -> None:
    base = one(tmp_path, "def f(x):\n    return x\n")
    for changed in (
        "@d\ndef f(x):\n    return x\n",
        "def f(y):\n    return x\n",
        "def f(x: int):\n    return x\n",
        "async def f(x):\n    return x\n",
    ):
        assert one(tmp_path, changed) != base


def test_windows_line_ends_and_form_feeds(tmp_path: Path) -> None:
    plain = one(tmp_path, "A = 1\ndef f(x):\n    return x\n")
    (tmp_path / "single.py").write_bytes(b"A = 1\r\n\x0c\r\ndef f(x):\r\n    return x\r\n")
    assert digest("single:f", tmp_path) == plain


# --- properties ----------------------------------------------------------------------------------------------------

STATEMENTS = [
    "x = 1",
    "y = x + 2",
    "if x:\n    y = 3",
    "for i in x:\n    y += i\n    continue",
    "z = (1,\n     2)",
    "return x",
]
NOISE = ["", "   ", "# comment", "    # indented comment", "\t# tab", '# """ quotes']
bodies = st.lists(st.sampled_from(STATEMENTS), min_size=1, max_size=6)


def render(statements: list[str], doc: str | None = None, noise: list[str] | None = None, depth: int = 0) -> str:
    lines = ["def f(x):"]
    if doc is not None:
        lines += textwrap.indent(f'"""{doc}"""', "    ").split("\n")
    for line in "\n".join(statements).split("\n"):
        lines.append("    " + line)
        lines.extend(noise or ())
    text = "\n".join(lines) + "\n"
    for level in range(depth):
        text = f"class C{level}:\n" + textwrap.indent(text, "    ", lambda line: True)
    return text


def path_of(depth: int) -> str:
    return ".".join([f"C{level}" for level in reversed(range(depth))] + ["f"])


@settings(max_examples=60, deadline=None)
@given(
    statements=bodies,
    doc=st.none() | st.text(alphabet="ab é#\n'", max_size=20),
    noise=st.lists(st.sampled_from(NOISE), max_size=3),
    depth=st.integers(0, 2),
)
def test_comments_docstrings_blank_lines_and_indentation_change_nothing(
    tmp_path_factory: pytest.TempPathFactory, statements: list[str], doc: str | None, noise: list[str], depth: int
) -> None:
    tmp = tmp_path_factory.mktemp("p")
    plain = one(tmp, render(statements))
    assert one(tmp, render(statements, doc, noise, depth), path_of(depth)) == plain


@settings(max_examples=60, deadline=None)
@given(statements=bodies, other=bodies)
def test_other_statements_change_the_digest(
    tmp_path_factory: pytest.TempPathFactory, statements: list[str], other: list[str]
) -> None:
    tmp = tmp_path_factory.mktemp("p")
    same = render(statements) == render(other)
    assert (one(tmp, render(statements)) == one(tmp, render(other))) == same


# --- the same on every Python --------------------------------------------------------------------------------------


def test_pinned_digests(root: Path) -> None:
    """Literal values: if this fails on one interpreter only, digests in compat_matrix/ would not travel."""
    found = {name: digest(f"upstream_x.code:{name}", root) for name in ("plain", "NAMES", "Base", "branchy", "renamed")}
    assert found == PINNED


PINNED = {
    "plain": "16ae63a518c775e7",
    "NAMES": "6341469fc3b46d70",
    "Base": "a5f9c1fc2e645cd8",
    "branchy": "59c0680b8e480b4e",
    "renamed": "f259ddaf081b4932",
}


# --- shapes --------------------------------------------------------------------------------------------------------


def replacement(original: object) -> object:
    return original


PATCH = Patch(
    id="upstream-x.thing",
    gives="a thing",
    distribution="upstream-x",
    requires=">=1",
    fixed_in=None,
    link="https://example.org",
    remove_when="never",
    targets=(Target("upstream_x.code:plain", replacement), Target("upstream_x.code:gone", replacement, optional=True)),
    relies_on=("upstream_x.code:LIMIT", "upstream_x.code:nowhere?", "upstream_x.code:plain"),
)


def write_matrix(directory: Path, *tables: tuple[list[str], dict[str, str]]) -> None:
    text = ""
    for versions, digests in tables:
        text += f'[["{PATCH.id}"]]\nversions = {versions!r}\n[{PATCH.id!r}.digests]\n'
        text += "".join(f'"{ref}" = "{value}"\n' for ref, value in digests.items())
    (directory / "upstream_x.toml").write_text(text)


@pytest.fixture
def matrix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    directory = tmp_path / "matrix"
    directory.mkdir()
    monkeypatch.setattr(_fingerprint, "matrix_directory", lambda: directory)
    return directory


def test_refs_are_targets_then_relies_on_each_once() -> None:
    names = [ref.partition(":")[2] for ref in refs(PATCH)]
    assert names == ["plain", "gone", "LIMIT", "nowhere"]


def test_match_knows_a_recorded_shape(root: Path, matrix: Path) -> None:
    assert shapes(PATCH) == ()
    nothing = match(PATCH, root)
    assert (nothing.known, nothing.shape, nothing.changed) == (False, None, refs(PATCH))
    digests = {ref: digest(ref, root) for ref in refs(PATCH)}
    assert digests["upstream_x.code:gone"] == "absent"
    write_matrix(matrix, (["1.0"], dict.fromkeys(digests, "0" * 16)), (["1.1", "1.2"], digests))
    found = match(PATCH, root)
    assert found.known
    assert found.shape is not None
    assert found.shape.versions == ("1.1", "1.2")
    assert found.changed == ()


def test_match_names_what_changed_against_the_nearest_shape(root: Path, matrix: Path) -> None:
    digests = {ref: digest(ref, root) for ref in refs(PATCH)}
    write_matrix(
        matrix, (["1.0"], digests | {"upstream_x.code:LIMIT": "f" * 16}), (["0.9"], dict.fromkeys(digests, "0" * 16))
    )
    found = match(PATCH, root)
    assert not found.known
    assert found.changed == ("upstream_x.code:LIMIT",)
    assert found.shape is not None
    assert found.shape.versions == ("1.0",)


def test_a_shape_that_lacks_a_ref_is_not_a_match(root: Path, matrix: Path) -> None:
    digests = {ref: digest(ref, root) for ref in refs(PATCH)}
    del digests["upstream_x.code:LIMIT"]
    write_matrix(matrix, (["1.0"], digests))
    assert match(PATCH, root).changed == ("upstream_x.code:LIMIT",)


def test_a_changed_file_is_read_again(root: Path) -> None:
    before = digest("upstream_x.code:LIMIT", root)
    (root / "upstream_x" / "code.py").write_text(SOURCE.replace("LIMIT = 3", "LIMIT = 30"))
    assert digest("upstream_x.code:LIMIT", root) != before
