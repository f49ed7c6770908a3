"""Every registered patch keeps the contract, and planted defects prove that the contract can fail."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import importlib.metadata
import itertools
import textwrap
from pathlib import Path
from typing import Any

import contract
import pytest
from packaging.version import Version

from fsdp_sink_patches import Patch, Target, _fingerprint, _registry

IDS = sorted(_registry.patches())
STUBS = contract.ROOT / "tests" / "stubs" / "fa2"
STEPS = ("import", "apply", "apply", "unapply")
ORDERS = sorted(set(itertools.permutations(STEPS)))


def test_there_are_patches() -> None:
    assert IDS


@pytest.mark.parametrize("id", IDS)
def test_declaration(id: str) -> None:
    assert contract.declaration(_registry.get(id), _registry.module(id)) == []


@pytest.mark.parametrize("id", IDS)
def test_replacements(id: str) -> None:
    assert contract.replacements(_registry.get(id), _registry.module(id)) == []


@pytest.mark.parametrize("id", IDS)
def test_evidence(id: str) -> None:
    assert contract.evidence(_registry.get(id)) == []


def test_no_two_patches_share_a_target() -> None:
    assert contract.shared_targets(_registry.patches().values()) == []


def test_the_registry_needs_neither_torch_nor_any_upstream() -> None:
    upstreams = {ref.partition(".")[0] for patch in _registry.patches().values() for ref in _fingerprint.refs(patch)}
    assert contract.imports_alone(upstreams) == []


def test_every_folder_of_patches_is_packaged() -> None:
    folders = {p.name for p in (contract.ROOT / "patches").iterdir() if p.is_dir() and not p.name.startswith("_")}
    listed = (contract.ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert {name for name in folders if f'"fsdp_sink_patches.patches.{name}"' not in listed} == set()


# --- orders --------------------------------------------------------------------------------------------------------


def installed_here(id: str) -> bool:
    """By metadata, in a release that still needs the patch; or as the stub of the tree, which has the real
    signatures."""
    patch = _registry.get(id)
    if patch.distribution == "flash-attn":
        return True
    try:
        found = importlib.metadata.version(patch.distribution)
    except importlib.metadata.PackageNotFoundError:
        return False
    return patch.fixed_in is None or Version(found) < Version(patch.fixed_in)


@functools.cache
def results(steps: tuple[str, ...]) -> dict[str, Any]:
    """One process for all patches: importing the upstreams is what takes the time."""
    return contract.after(steps, IDS, None, STUBS)


def test_no_order_is_missing() -> None:
    assert len(ORDERS) == 12
    assert all(sorted(order) == sorted(STEPS) for order in ORDERS)


@pytest.mark.parametrize("steps", ORDERS, ids="-".join)
def test_every_order_of_import_apply_apply_unapply(steps: tuple[str, ...]) -> None:
    here = [id for id in IDS if installed_here(id)]
    assert here
    wrong = {id: contract.order(steps, results(steps)[id]) for id in here}
    assert {id: lines for id, lines in wrong.items() if lines} == {}


@pytest.mark.parametrize(
    ("steps", "state"),
    [(("import", "someone-else", "apply"), "conflict"), (("import", "other-source"), "drifted")],
    ids=["conflict", "drift"],
)
def test_refused_whole(steps: tuple[str, ...], state: str) -> None:
    here = [id for id in IDS if installed_here(id)]
    wrong = {id: contract.refused(results(steps)[id], state) for id in here}
    assert {id: lines for id, lines in wrong.items() if lines} == {}


# --- planted defects -----------------------------------------------------------------------------------------------

GOOD = '''
"""What breaks for the user."""
from fsdp_sink_patches import Patch, Target
def replacement(original, x):
    return original(x)
def validate(device):
    raise RuntimeError(device)
PATCH = Patch(
    id="planted.some-thing", gives="some thing", distribution="planted-upstream", requires=">=1", fixed_in=None,
    link="https://example.org/1", remove_when="upstream does it itself",
    targets=(Target("planted_upstream:f", replacement),),
)
'''


def plant(tmp_path: Path, source: str) -> Path:
    folder = tmp_path / "patches"
    (folder / "planted").mkdir(parents=True)
    (folder / "planted" / "__init__.py").touch()
    (folder / "planted" / "some_thing.py").write_text(source)
    info = tmp_path / "site" / "planted_upstream-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: planted-upstream\nVersion: 1.0\n")
    (tmp_path / "site" / "planted_upstream.py").write_text("def f(x):\n    return x\n")
    return folder


def test_a_good_planted_patch_passes(tmp_path: Path) -> None:
    folder = plant(tmp_path, GOOD)
    assert contract.imports_alone(["planted_upstream"], folder) == []
    for steps in (("apply", "import", "apply"), ("import", "apply", "unapply")):
        result = contract.after(steps, ["planted.some-thing"], folder, tmp_path / "site")
        assert contract.order(steps, result["planted.some-thing"]) == []


@pytest.mark.parametrize("line", ["import torch", "import planted_upstream", "from transformers import nothing"])
def test_a_heavy_import_is_caught(tmp_path: Path, line: str) -> None:
    (wrong,) = contract.imports_alone(["planted_upstream"], plant(tmp_path, GOOD + line))
    assert "blocked" in wrong


def test_a_patch_that_does_not_hold_is_caught(tmp_path: Path) -> None:
    folder = plant(tmp_path, GOOD)
    steps = ("apply", "import", "apply")
    result = contract.after(steps, ["planted.some-thing"], folder, tmp_path / "site")
    state, reason, targets, _ = result["planted.some-thing"]
    for broken in ({"planted_upstream:f": 2}, {"planted_upstream:f": 0}):
        assert contract.order(steps, [state, reason, targets, broken]) != []
    assert contract.order(steps, ["shadowed", "r", targets, {}]) != []
    assert contract.refused(["conflict", "r", targets, {"planted_upstream:f": 0}], "conflict") == []
    assert contract.refused(["conflict", "r", targets, {"planted_upstream:f": 1}], "conflict") != []
    assert contract.refused(["applied", "r", targets, {}], "conflict") != []
    assert contract.order(("import", "apply", "unapply"), ["applied", "r", targets, {}]) != []


def good() -> tuple[Patch, Any]:
    module = type(contract)("fsdp_sink_patches.patches.planted.some_thing")
    exec(textwrap.dedent(GOOD), vars(module))
    return module.PATCH, module


@pytest.mark.parametrize(
    "change",
    [
        {"id": "planted.Some_Thing"}, {"id": "planted.7"}, {"id": "planted"}, {"id": "planted.other-thing"},
        {"gives": "one two three four five six seven"}, {"gives": ""}, {"link": ""}, {"link": "see the tracker"},
        {"remove_when": ""}, {"requires": ""}, {"requires": "about 4"}, {"fixed_in": "soon"}, {"targets": ()},
        {"relies_on": ("no colon",)}, {"refuses": {"1.3": "it is not causal in this release"}},
        {"refuses": {"==1.3": "broken"}}, {"refuses": {"": "it is not causal in this release"}},
    ],
    ids=str,
)  # fmt: skip
def test_a_bad_declaration_is_caught(change: dict[str, Any]) -> None:
    patch, module = good()
    assert contract.declaration(patch, module) == []
    assert contract.declaration(dataclasses.replace(patch, **change), module) != []


def test_a_missing_docstring_is_caught() -> None:
    patch, module = good()
    module.__doc__ = None
    assert contract.declaration(patch, module) != []


def takes_original_first(original: Any, x: Any) -> Any:
    return original(x)


def takes_x_first(x: Any, original: Any) -> Any:
    return original(x)


@pytest.mark.parametrize(
    "function", [lambda original: original, functools.partial(takes_original_first), takes_x_first]
)
def test_a_bad_replacement_is_caught(function: Any) -> None:
    patch, module = good()

    def changed(replacement: Any) -> Patch:
        return dataclasses.replace(patch, targets=(Target("planted_upstream:f", replacement),))

    assert contract.replacements(changed(takes_original_first), module) == []
    assert contract.replacements(changed(function), module) != []


def test_a_missing_validate_is_caught() -> None:
    patch, module = good()
    patch = dataclasses.replace(patch, targets=(Target("planted_upstream:f", takes_original_first),))
    del module.validate
    assert contract.replacements(patch, module) == ["no validate(device)"]


@pytest.mark.parametrize(
    "shapes",
    [
        (),
        (_fingerprint.Shape(("1.0",), {}),),
        (_fingerprint.Shape((), {"planted_upstream:f": "0" * 16}),),
        (_fingerprint.Shape(("0.1",), {"planted_upstream:f": "0" * 16}),),
        (_fingerprint.Shape(("1.0",), {"planted_upstream:f": "absent"}),),
        (_fingerprint.Shape(("1.0",), {"planted_upstream:f": "0" * 16, "planted_upstream:g": "0" * 16}),),
    ],
)
def test_missing_or_wrong_evidence_is_caught(shapes: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    patch, _ = good()
    right = (_fingerprint.Shape(("1.0",), {"planted_upstream:f": "0" * 16}),)
    monkeypatch.setattr(_fingerprint, "shapes", lambda patch: right)
    assert contract.evidence(patch) == []
    monkeypatch.setattr(_fingerprint, "shapes", lambda patch: shapes)
    assert contract.evidence(patch) != []


def test_evidence_of_a_refused_release_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    patch, _ = good()
    right = (_fingerprint.Shape(("1.0",), {"planted_upstream:f": "0" * 16}),)
    monkeypatch.setattr(_fingerprint, "shapes", lambda patch: right)
    assert contract.evidence(dataclasses.replace(patch, refuses={"==1.1": "not causal"})) == []
    assert contract.evidence(dataclasses.replace(patch, refuses={"==1.0": "not causal"})) != []


def test_a_shared_target_is_caught() -> None:
    patch, _ = good()
    assert contract.shared_targets([patch]) == []
    assert contract.shared_targets([patch, dataclasses.replace(patch, id="planted.other")]) != []


def test_the_template_keeps_the_contract() -> None:
    module = importlib.import_module("fsdp_sink_patches.patches._template")
    wrong = contract.declaration(module.PATCH, module) + contract.replacements(module.PATCH, module)
    assert [line for line in wrong if "where the file is" not in line] == []
