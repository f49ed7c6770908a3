"""``matrix refresh`` on hand-made releases of a made-up upstream, and ``matrix table`` on the evidence of the tree."""

from __future__ import annotations

import dataclasses
import io
import json
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import pytest

from fsdp_sink_patches import Patch, Target, _fingerprint, _records, _registry, matrix

F = "up.mod:f"
HELPER = "up.mod:helper"
SOURCE = "def f(x):\n    return x\n\n\ndef helper():\n    return {}\n"


def replacement(original: Any, x: Any) -> Any:
    return original(x)


PATCH = Patch(
    id="up.one", gives="one thing", distribution="up-stream", requires=">=1", fixed_in="4", link="https://example.org/1",
    remove_when="upstream does it itself", targets=(Target(F, replacement),), relies_on=(HELPER,),
)  # fmt: skip


class Bench:
    """A folder of releases and a ``compat_matrix`` of its own."""

    def __init__(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.releases, self.evidence = folder / "releases", folder / "compat_matrix"
        self.releases.mkdir()
        self.evidence.mkdir()
        self.toml = self.evidence / "up_stream.toml"
        self._capsys = capsys

    def wheel(self, version: str, source: str) -> None:
        with zipfile.ZipFile(self.releases / f"up_stream-{version}-py3-none-any.whl", "w") as file:
            file.writestr("up/__init__.py", "raise RuntimeError('a release is never imported')\n")
            file.writestr("up/mod.py", source)

    def sdist(self, version: str, source: str, inside: str = "") -> None:
        stem = f"up_stream-{version}"
        files = {
            "setup.py": "raise RuntimeError('never run')\n",
            f"{inside}up/__init__.py": "",
            f"{inside}up/mod.py": source,
        }
        with tarfile.open(self.releases / f"{stem}.tar.gz", "w:gz") as file:
            for name, text in files.items():
                member = tarfile.TarInfo(f"{stem}/{name}")
                member.size = len(text.encode())
                file.addfile(member, io.BytesIO(text.encode()))

    def refresh(self, *arguments: str, offline: bool = True) -> tuple[int, str]:
        code = matrix.main(["refresh", *arguments, *(["--from", str(self.releases)] if offline else [])])
        out, err = self._capsys.readouterr()
        return code, out + err

    def known(self) -> list[tuple[str, ...]]:
        return [shape.versions for shape in _fingerprint.shapes(PATCH)]


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Bench:
    bench = Bench(tmp_path, capsys)
    monkeypatch.setattr(_registry, "patches", lambda: {PATCH.id: PATCH})
    monkeypatch.setattr(_fingerprint, "matrix_directory", lambda: bench.evidence)
    return bench


def test_a_new_source_is_written_only_when_accepted(bench: Bench) -> None:
    bench.wheel("1.0", SOURCE.format(1))
    code, text = bench.refresh("up-stream==1.0")
    assert code == 1
    assert "NEW SOURCE" in text
    assert "--accept" in text
    assert not bench.toml.exists()
    assert bench.refresh("up-stream==1.0", "--accept")[0] == 0
    assert bench.known() == [("1.0",)]
    (shape,) = _fingerprint.shapes(PATCH)
    assert list(shape.digests) == [F, HELPER]
    assert bench.refresh("up-stream==1.0")[0] == 0


def test_known_source_extends_the_list_in_version_order(bench: Bench) -> None:
    for version in ("1.9", "1.10", "1.2"):
        bench.wheel(version, SOURCE.format(1))
    bench.sdist("1.3", SOURCE.format(1).replace("return x", '"""Prose."""\n    # A note.\n    return x'))
    bench.sdist("1.4", SOURCE.format(1), inside="src/")
    assert bench.refresh("up-stream==1.9", "--accept")[0] == 0
    code, text = bench.refresh("up-stream")
    assert code == 0, text
    assert bench.known() == [("1.2", "1.3", "1.4", "1.9", "1.10")]


def test_what_changed_is_named_and_shown_against_the_nearest_release(bench: Bench) -> None:
    for version, number in (("1.0", 1), ("2.0", 2), ("3.0", 5)):
        bench.wheel(version, SOURCE.format(number))
    assert bench.refresh("up-stream<3", "--accept")[0] == 0
    before = bench.toml.read_bytes()
    code, text = bench.refresh("up-stream==3.0")
    assert code == 1
    assert "against 2.0" in text
    assert HELPER in text
    assert F + " " not in text
    assert "-    return 2" in text
    assert "+    return 5" in text
    assert bench.toml.read_bytes() == before
    assert bench.refresh("up-stream==3.0", "--accept")[0] == 0
    assert bench.known() == [("1.0",), ("2.0",), ("3.0",)]


def test_a_release_that_changed_under_its_version_moves(bench: Bench) -> None:
    bench.wheel("1.0", SOURCE.format(1))
    bench.wheel("1.1", SOURCE.format(1))
    assert bench.refresh("up-stream", "--accept")[0] == 0
    bench.wheel("1.1", SOURCE.format(3))
    assert bench.refresh("up-stream==1.1")[0] == 1
    assert bench.refresh("up-stream==1.1", "--accept")[0] == 0
    assert bench.known() == [("1.0",), ("1.1",)]


def test_what_is_absent_is_recorded_so(bench: Bench) -> None:
    bench.wheel("1.0", "def f(x):\n    return x\n")
    assert bench.refresh("up-stream", "--accept")[0] == 0
    (shape,) = _fingerprint.shapes(PATCH)
    assert shape.digests[HELPER] == "absent"


def test_json(bench: Bench) -> None:
    for version, number in (("0.9", 1), ("1.0", 1), ("1.1", 1), ("1.2", 2), ("4.0", 1)):
        bench.wheel(version, SOURCE.format(number))
    assert bench.refresh("up-stream==1.0", "--accept")[0] == 0
    code, text = bench.refresh("up-stream", "--json")
    result = json.loads(text)
    assert code == result["exit_code"] == 1
    found = {finding["version"]: finding["result"] for finding in result["findings"]}
    assert found == {"0.9": "outside", "1.0": "known", "1.1": "extended", "1.2": "new", "4.0": "outside"}
    (change,) = next(finding for finding in result["findings"] if finding["version"] == "1.2")["changed"]
    assert change["ref"] == HELPER
    assert change["found"] != change["known"]
    assert bench.known() == [("1.0", "1.1")]


def test_a_refused_release_is_outside_and_the_table_says_why(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    refusing = dataclasses.replace(PATCH, refuses={"==1.1": "up-stream 1.1 returns its argument twice."})
    monkeypatch.setattr(_registry, "patches", lambda: {PATCH.id: refusing})
    for version in ("1.0", "1.1", "1.2"):
        bench.wheel(version, SOURCE.format(1))
    assert bench.refresh("up-stream", "--accept")[0] == 0
    assert bench.known() == [("1.0", "1.2")]
    assert "Refuses `==1.1`: up-stream 1.1 returns its argument twice.\n" in matrix.matrix_text()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["up-stream==7.0"], "found for up-stream: 1.0"),
        (["down-stream==1.0"], "is not the upstream of any patch; these are: up-stream"),
        (["up-stream=1.0"], "is not a requirement such as"),
    ],
)
def test_usage(bench: Bench, arguments: list[str], said: str) -> None:
    bench.wheel("1.0", SOURCE.format(1))
    code, text = bench.refresh(*arguments)
    assert code == 2
    assert said in text


def test_pip_fetches_without_installing_or_building(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(bench.releases))
    monkeypatch.setenv("PIP_DISABLE_PIP_VERSION_CHECK", "1")
    bench.wheel("1.0", SOURCE.format(1))
    bench.sdist("1.1", SOURCE.format(1))
    code, text = bench.refresh("up-stream>=1", "--accept", offline=False)
    assert code == 0, text
    assert bench.known() == [("1.0", "1.1")]
    code, text = bench.refresh("up-stream==1.2", offline=False)
    assert code == 2
    assert "the newest up-stream is 1.1" in text
    assert bench.refresh("up-stream", offline=False)[0] == 2
    monkeypatch.setenv("PIP_FIND_LINKS", str(bench.evidence))
    code, text = bench.refresh("up-stream==1.0", offline=False)
    assert code == 2
    assert "pip found no up-stream at all" in text


# --- tables --------------------------------------------------------------------------------------------------------


def test_the_tables_say_what_the_evidence_says() -> None:
    folder = _fingerprint.matrix_directory()
    assert (folder / "MATRIX.md").read_text(encoding="utf-8") == matrix.matrix_text()
    readme = (folder.parent / "README.md").read_text(encoding="utf-8")
    assert readme == matrix.readme_text(readme)
    assert all(f"`{id}`" in readme for id in _registry.patches())


def test_check_finds_tables_that_lag_behind(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    readme = bench.evidence.parent / "README.md"
    readme.write_text(f"# Ours\n\n{matrix.BEGIN}\n{matrix.END}\n\nMore.\n")
    bench.wheel("1.0", SOURCE.format(1))
    bench.wheel("1.1", SOURCE.format(1))
    bench.refresh("up-stream==1.0", "--accept")
    assert matrix.main(["table", "--check"]) == 1
    assert matrix.main(["table"]) == 0
    assert matrix.main(["table", "--check"]) == 0
    assert "| `up.one` | one thing | up-stream 1.0 | never |" in readme.read_text()
    assert readme.read_text().endswith("\n\nMore.\n")
    bench.refresh("up-stream==1.1")
    capsys.readouterr()
    assert matrix.main(["table", "--check"]) == 1
    assert "+| 1.0, 1.1 | - |" in capsys.readouterr().out
    readme.write_text("# Ours, without markers\n")
    assert matrix.main(["table"]) == 2


def test_a_gpu_record_counts_for_its_source_only(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    own = {"fsdp_sink_patches.patches.up.one": "0" * 16}
    monkeypatch.setattr(_records, "sources", lambda patch: own)
    for version, number in (("1.0", 1), ("1.1", 1), ("2.0", 2)):
        bench.wheel(version, SOURCE.format(number))
    bench.refresh("up-stream", "--accept")
    record = {
        "schema": 1, "patch": PATCH.id, "cell": "card", "date": "2026-01-02T03:04:05Z", "sources": own,
        "upstream": {"digests": _fingerprint.shapes(PATCH)[0].digests}, "environment": {"gpu": "NVIDIA X1"},
    }  # fmt: skip
    folder = bench.evidence / "records" / PATCH.id
    folder.mkdir(parents=True)
    (folder / "card.json").write_text(json.dumps(record))
    assert "| up.one | card | X1 | up-stream 1.0, 1.1 | 2026-01-02 |" in matrix.matrix_text()
    assert "| validated: X1, 2026-01-02, up-stream 1.0 to 1.1 (2 releases) |" in matrix.matrix_text()
    monkeypatch.setattr(_records, "sources", lambda patch: dict.fromkeys(own, "1" * 16))
    assert "| up.one | card | X1 | nothing: stale | 2026-01-02 |" in matrix.matrix_text()
    assert "(3 releases) | stale |" in matrix.matrix_text()
