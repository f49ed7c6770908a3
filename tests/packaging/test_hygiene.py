"""What is committed names no machine: no absolute path of somebody's disk, no registry host, no merge debris."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# Written so that this file does not match itself.
FORBIDDEN = {
    "an absolute path of one machine": re.compile(r"(?<![\w.~})*-])/(?:work|root|opt|home|Users)/\w"),
    "a package registry's host": re.compile(r"(?:pypi|pythonhosted|download\.pytorch)\.org"),
    "a merge conflict marker": re.compile(r"^(?:<{7} |>{7} |={7}$)", re.MULTILINE),
}


def tracked() -> list[Path]:
    listing = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    return [ROOT / name for name in listing.split("\0") if name and (ROOT / name).is_file()]


@pytest.mark.parametrize("what", FORBIDDEN)
def test_no_tracked_file_names(what: str) -> None:
    pattern, found = FORBIDDEN[what], []
    for path in tracked():
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:  # an image
            continue
        for match in pattern.finditer(text):
            line = text.count("\n", 0, match.start()) + 1
            found.append(f"{path.relative_to(ROOT)}:{line}: {match.group()}")
    assert not found, f"{what} is committed:\n" + "\n".join(found)


def test_patterns_find_what_they_are_for() -> None:
    slash = "/"
    samples = {
        "an absolute path of one machine": f"see {slash}work{slash}main",
        "a package registry's host": "https://" + "pypi" + ".org/simple",
        "a merge conflict marker": "<" * 7 + " ours",
    }
    for what, sample in samples.items():
        assert FORBIDDEN[what].search(sample), what
    assert not FORBIDDEN["an absolute path of one machine"].search("docs/work/plan.md and .../home/page")
