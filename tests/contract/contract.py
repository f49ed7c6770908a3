"""What every patch must satisfy. Each function returns what is wrong, so that a planted defect can prove it bites."""

from __future__ import annotations

import inspect
import json
import os
import pickle
import re
import subprocess
import sys
import types
from collections.abc import Iterable
from dataclasses import fields
from pathlib import Path
from typing import Any

from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.version import InvalidVersion, Version

import fsdp_sink_patches
from fsdp_sink_patches import Patch, _fingerprint

ROOT = Path(fsdp_sink_patches.__file__).resolve().parent.parent
PREFIX = "fsdp_sink_patches.patches."
ID = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*\.[a-z][a-z0-9]*(-[a-z0-9]+)*")


def declaration(patch: Patch, module: types.ModuleType) -> list[str]:
    """Intent: an id that is its path, five words, a link, a removal condition, ranges that parse."""
    wrong = []
    if len(fields(patch)) > 10:
        wrong.append("more than ten fields")
    if not ID.fullmatch(patch.id):
        wrong.append(f"id {patch.id!r} is not <upstream>.<what-it-gives> in kebab-case")
    if module.__name__ != PREFIX + patch.id.replace("-", "_"):
        wrong.append(f"id {patch.id!r} does not say where the file is: {module.__name__}")
    if not 1 <= len(patch.gives.split()) <= 6:
        wrong.append(f"gives has {len(patch.gives.split())} words")
    if not re.fullmatch(r"https://\S+/\S+", patch.link):
        wrong.append(f"link {patch.link!r}")
    if len(patch.remove_when.split()) < 3:
        wrong.append(f"remove_when {patch.remove_when!r}")
    if not (module.__doc__ or "").strip():
        wrong.append("no docstring that says what breaks for the user")
    try:
        if not str(SpecifierSet(patch.requires)):
            wrong.append("requires is empty")
        if patch.fixed_in is not None:
            Version(patch.fixed_in)
        for releases, why in patch.refuses.items():
            if not str(SpecifierSet(releases)) or len(why.split()) < 5:
                wrong.append(f"refuses {releases!r}: {why!r} names no releases or no reason")
    except (InvalidSpecifier, InvalidVersion) as error:
        wrong.append(str(error))
    if not patch.targets:
        wrong.append("no targets")
    wrong += [f"reference {ref!r}" for ref in _fingerprint.refs(patch) if not re.fullmatch(r"[\w.]+:[\w.]+", ref)]
    return wrong


def replacements(patch: Patch, module: types.ModuleType) -> list[str]:
    """Plain functions of the patch's module that take ``original`` first, and a ``validate(device)``."""
    wrong = []
    for target in patch.targets:
        function: Any = target.replacement
        if type(function) is not types.FunctionType:
            wrong.append(f"the replacement of {target.path} is a {type(function).__name__}, not a plain function")
            continue
        if next(iter(inspect.signature(function).parameters), None) != "original":
            wrong.append(f"{function.__name__} does not take original first")
        try:
            same = pickle.loads(pickle.dumps(function)) is function
        except (pickle.PicklingError, AttributeError, ImportError) as error:
            wrong.append(f"{function.__name__} does not pickle by reference: {error}")
        else:
            wrong += [] if same else [f"{function.__name__} pickles to something else"]
    if list(inspect.signature(getattr(module, "validate", lambda: None)).parameters) != ["device"]:
        wrong.append("no validate(device)")
    return wrong


def evidence(patch: Patch) -> list[str]:
    """Recorded shapes, each with every reference and a version in range."""
    shapes = _fingerprint.shapes(patch)
    wrong = [] if shapes else [f"no shapes of {patch.id} in compat_matrix/"]
    for shape in shapes:
        missing = set(_fingerprint.refs(patch)) ^ set(shape.digests)
        wrong += [f"the shape of {shape.versions} and the patch differ at {ref}" for ref in sorted(missing)]
        if not shape.versions:
            wrong.append("a shape without versions")
        wrong += [
            f"{version} is recorded but not in {patch.requires}"
            for version in shape.versions
            if not SpecifierSet(patch.requires).contains(version, prereleases=True)
        ]
        wrong += [
            f"{version} is recorded but refused by {releases}"
            for version in shape.versions
            for releases in patch.refuses
            if SpecifierSet(releases).contains(version, prereleases=True)
        ]
        needed = {target.path for target in patch.targets if not target.optional}
        wrong += [f"{ref} is absent in {shape.versions}" for ref in needed if shape.digests.get(ref) == "absent"]
    return wrong


def shared_targets(patches: Iterable[Patch]) -> list[str]:
    """Two patches on one attribute would conflict with each other."""
    owner: dict[str, str] = {}
    wrong = []
    for patch in patches:
        for target in patch.targets:
            if target.path in owner:
                wrong.append(f"{patch.id} and {owner[target.path]} both target {target.path}")
            owner[target.path] = patch.id
    return wrong


# --- in a process of its own ---------------------------------------------------------------------------------------

PRELUDE = """
import json, sys
import fsdp_sink_patches as fsp
from fsdp_sink_patches import _engine, _fingerprint, _registry
planted = {planted!r}
if planted:
    import fsdp_sink_patches.patches as package
    package.__path__[:] = [planted]
"""

BLOCKED = (
    """
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {blocked!r}:
            raise ImportError("blocked: " + name)
sys.meta_path.insert(0, Blocker())
"""
    + PRELUDE.replace("import json, sys\n", "")
    + """
ids = sorted(_registry.patches())
fsp.apply()
fsp.status()
print(json.dumps([ids, sorted(set({blocked!r}) & set(sys.modules))]))
"""
)

HEAVY = (
    "torch",
    "numpy",
    "transformers",
    "accelerate",
    "triton",
    "flash_attn",
    "flash_attn_interface",
    "verl",
    "specforge",
)


def imports_alone(blocked: Iterable[str], planted: Path | None = None) -> list[str]:
    """The registry loads, and ``apply()`` runs, with torch and every upstream blocked by a finder that raises."""
    names = tuple(sorted({*HEAVY, *blocked}))
    code = "import json, sys\n" + BLOCKED.format(blocked=names, planted=str(planted) if planted else "")
    done = run(code)
    if done.returncode:
        return [done.stderr.strip().rpartition("\n")[2]]
    ids, loaded = json.loads(done.stdout)
    return [f"{name} was imported" for name in loaded] + ([] if ids else ["no patches were found"])


ORDER = (
    PRELUDE
    + """
import importlib
steps = {steps!r}
ids = {ids!r}
registered = {{id: patch for id, patch in _registry.patches().items() if id in ids}}
modules = sorted({{t.module for p in registered.values() for t in p.targets}})
def load():
    for name in modules:
        try:
            importlib.import_module(name)
        except ModuleNotFoundError as error:
            if not name.startswith(error.name or "?"):
                raise
for step in steps:
    if step == "import":
        load()
    elif step == "someone-else":
        from fsdp_sink_patches import _ownership
        for patch in registered.values():
            target = min(patch.targets, key=lambda t: t.optional)
            if target.module in sys.modules:
                at = _ownership.place(sys.modules[target.module], target.qualname)
                setattr(at.holder, at.name, lambda *args, **kwargs: None)
    elif step == "other-source":
        _fingerprint.shapes = lambda patch: ()
        fsp.apply(disable=[id for id in _registry.patches() if id not in ids])
    elif step == "apply":
        fsp.apply(disable=[id for id in _registry.patches() if id not in ids], allow_drift=ids)
    else:
        fsp.unapply()
def layers(value):
    count, value = 0, getattr(value, "__func__", value)
    while value is not None:
        code = getattr(value, "__code__", None)
        count += code is not None and code.co_filename == _engine.__file__
        value = getattr(value, "__wrapped__", None)
        value = getattr(value, "__func__", value)
    return count
from fsdp_sink_patches import _ownership
result = {{}}
report = fsp.status()
for id, patch in registered.items():
    depth = {{}}
    for target in patch.targets:
        try:
            at = _ownership.place(sys.modules[target.module], target.qualname)
            depth[target.path] = layers(at.raw) if target.kind == "call" else None
        except (KeyError, _ownership.Missing):
            depth[target.path] = "absent"
    status = report[id]
    result[id] = [status.state, status.reason, {{t.path: t.state for t in status.targets}}, depth]
print("RESULT" + json.dumps(result))
"""
)


def after(steps: Iterable[str], ids: Iterable[str], planted: Path | None = None, *paths: Path) -> dict[str, Any]:
    """State, reason, target states and wrapper depths by id after ``steps`` in a fresh process."""
    code = ORDER.format(steps=tuple(steps), ids=tuple(ids), planted=str(planted) if planted else "")
    done = run(code, *paths)
    line = next((line for line in done.stdout.split("\n") if line.startswith("RESULT")), None)
    assert line is not None, done.stderr
    result: dict[str, Any] = json.loads(line.removeprefix("RESULT"))
    return result


def order(steps: Iterable[str], result: list[Any]) -> list[str]:
    """What is wrong with one patch's result: in force iff the last of apply/unapply was apply, and one wrapper deep."""
    steps = tuple(steps)
    state, reason, targets, depth = result
    on = [step for step in steps if step != "import"][-1] == "apply"
    wrong = [] if state == ("applied" if on else "disabled") else [f"{steps}: {state}: {reason}"]
    for path, count in depth.items():
        if count in (None, "absent"):
            continue
        wanted = int(on and targets[path] == "ours")
        if count != wanted:
            wrong.append(f"{steps}: {path} is {count} wrappers deep, expected {wanted}")
    return wrong


def refused(result: list[Any], expected: str) -> list[str]:
    """What is wrong with one patch's result when it should have been refused: its state, or a target it still holds."""
    state, reason, _, depth = result
    wrong = [] if state == expected else [f"{state}, expected {expected}: {reason}"]
    return wrong + [
        f"{path} was patched all the same" for path, count in depth.items() if isinstance(count, int) and count
    ]


def run(code: str, *paths: Path) -> subprocess.CompletedProcess[str]:
    env = {name: value for name, value in os.environ.items() if not name.startswith("FSDP_SINK_PATCHES")}
    env["PYTHONPATH"] = os.pathsep.join([str(ROOT), *map(str, paths)])
    env["OMP_NUM_THREADS"] = "1"
    return subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=250)
