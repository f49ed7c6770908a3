"""What the prose promises is there: links lead somewhere, commands exist, the states are the engine's."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from fsdp_sink_patches._state import State

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")])


@pytest.mark.parametrize("page", PAGES, ids=[str(page.relative_to(ROOT)) for page in PAGES])
def test_relative_links_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text(encoding="utf-8"))
    dead = [link for link in links if "://" not in link and not (page.parent / link).exists()]
    assert not dead


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md"])
def test_make_targets_exist(page: str) -> None:
    targets = set(re.findall(r"\bmake ([a-z]+)(?=[\s`])", (ROOT / page).read_text(encoding="utf-8")))
    assert {"test"} <= targets
    for target in targets:
        done = subprocess.run(["make", "--dry-run", target], cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr


def test_readme_names_every_module_it_runs() -> None:
    modules = set(re.findall(r"fsdp_sink_patches\.([a-z_]+)\b(?!\()", (ROOT / "README.md").read_text(encoding="utf-8")))
    assert {"check", "run", "autoload", "matrix"} <= modules
    missing = [m for m in modules - {"apply"} if not (ROOT / "fsdp_sink_patches" / f"{m}.py").is_file()]
    assert not missing


def test_readme_lists_the_states() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w+)` \| .* \| (yes)? ?\|$", text, re.MULTILINE)
    assert dict(rows) == {state.value: "yes" if state.is_failure else "" for state in State}
