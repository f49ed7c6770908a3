"""Each of the ten states, what it says, and who gets an exception."""

from __future__ import annotations

import importlib
import logging
import pickle
import sys
import types

import pytest
from fakes import World, boom, true

import fsdp_sink_patches as fsp
from fsdp_sink_patches import PatchError, State, UnknownPatch, _engine


def test_failures_are_the_four_that_stop_a_job() -> None:
    assert {s.value for s in State if s.is_failure} == {"drifted", "conflict", "shadowed", "failed"}
    assert len(State) == 10
    assert f"{State.APPLIED}" == str(State.APPLIED) == "applied"


def test_disabled(world: World) -> None:
    world.install()
    world.patch()
    assert fsp.status()["up.one"].state is State.DISABLED
    assert "call fsdp_sink_patches.apply()" in fsp.status()["up.one"].reason
    report = fsp.apply(disable=("up.one",))
    assert report["up.one"].state is State.DISABLED
    assert "disable=" in report["up.one"].reason
    assert world.load().forward(1) == 1


def test_absent(world: World) -> None:
    world.install(version=None)
    world.patch()
    status = fsp.apply()["up.one"]
    assert (status.state, status.version) == (State.ABSENT, None)
    assert world.distribution in status.reason
    with pytest.raises(PatchError, match=r"up\.one: absent.*is not installed"):
        fsp.apply("up.one")


@pytest.mark.parametrize("version", ["0.9", "1.0rc1.dev0"])
def test_inapplicable(world: World, version: str, log: pytest.LogCaptureFixture) -> None:
    world.install(version)
    world.patch()
    status = fsp.apply()["up.one"]
    assert (status.state, status.version) == (State.INAPPLICABLE, version)
    assert ">=1.0" in status.reason
    assert version in status.reason
    assert levels(log) == [logging.INFO], "who never imports the module misses nothing"
    assert world.load().forward(1) == 1
    assert levels(log) == [logging.INFO, logging.WARNING]


def levels(log: pytest.LogCaptureFixture) -> list[int]:
    return [r.levelno for r in log.records if "inapplicable" in r.message]


WHY = "up 1.3 is not causal: every query sees the future"


@pytest.mark.parametrize("version", ["1.3", "1.3.0", "1.3+cu128"])
@pytest.mark.parametrize("imported", ["before", "after"])
def test_refused(world: World, version: str, imported: str, log: pytest.LogCaptureFixture) -> None:
    world.install(version)
    world.patch(world.target("forward"), world.target("call", module="user"), refuses={"==1.2": "no", "==1.3": WHY})
    if imported == "before":
        world.load()
    status = fsp.apply()["up.one"]
    assert (status.state, status.version) == (State.INAPPLICABLE, version)
    assert status.reason == (
        f"found {world.distribution} {version} ({WHY}), expected {world.distribution}>=1.0, not ==1.2, not ==1.3: "
        "nothing was patched. Install one of those."
    )
    assert levels(log) == [logging.WARNING if imported == "before" else logging.INFO]
    assert world.load().forward(1) == 1
    world.load("user")
    fsp.apply()
    fsp.status()
    assert levels(log).count(logging.WARNING) == 1
    assert WHY in log.records[-1].message
    with pytest.raises(PatchError, match=r"up\.one: inapplicable.*every query sees the future"):
        fsp.apply("up.one")
    with pytest.raises(PatchError, match="every query sees the future"):
        fsp.assert_applied("up.one")


def test_refused_and_switched_off_says_nothing(world: World, log: pytest.LogCaptureFixture) -> None:
    world.install("1.3")
    world.patch(refuses={"==1.3": WHY})
    fsp.apply()
    fsp.unapply("up.one")
    world.load()
    assert levels(log) == [logging.INFO]


@pytest.mark.parametrize("version", ["1.2", "1.3.1", "1.3.post1", "1.4"])
def test_only_what_is_refused_is_refused(world: World, version: str) -> None:
    world.install(version)
    world.patch(refuses={"==1.3": WHY})
    assert fsp.apply()["up.one"].state is State.ARMED
    assert hash(world.patches["up.one"])


def test_a_refusal_is_announced_when_a_module_comes_without_its_hook(
    world: World, log: pytest.LogCaptureFixture
) -> None:
    world.install("1.3")
    world.patch(refuses={"==1.3": WHY})
    fsp.apply()
    name = f"{world.name}.attention"
    sys.modules[name] = types.ModuleType(name)
    fsp.status()
    assert levels(log) == [logging.INFO, logging.WARNING]


@pytest.mark.parametrize("version", ["1.1.dev0", "2.0rc1", "1.0.post1", "1.0+cu128"])
def test_prereleases_and_local_versions_are_in_range(world: World, version: str) -> None:
    world.install(version)
    world.patch()
    assert fsp.apply()["up.one"].state is State.ARMED


@pytest.mark.parametrize(
    ("version", "state"), [("2.0", State.OBSOLETE), ("2.0.1", State.OBSOLETE), ("2.0rc1", State.ARMED)]
)
def test_obsolete(world: World, version: str, state: State) -> None:
    world.install(version)
    world.patch(fixed_in="2.0")
    assert fsp.apply()["up.one"].state is state
    assert fsp.apply("up.one")["up.one"].state is state  # named, and still no reason to stop a job


def test_armed_then_applied(world: World, log: pytest.LogCaptureFixture) -> None:
    world.install()
    world.patch()
    armed = fsp.apply()["up.one"]
    assert armed.state is State.ARMED
    assert armed.fingerprint is None
    assert f"{world.name}.attention" in armed.reason
    assert [t.state for t in armed.targets] == ["waiting"]
    assert world.load().forward(2, scale=3) == 1006
    now = fsp.status()["up.one"]
    assert (now.state, now.fingerprint, now.reason) == (State.APPLIED, "known", "")
    assert [t.state for t in now.targets] == ["ours"]
    assert not [r for r in log.records if r.levelno >= logging.WARNING]


@pytest.mark.parametrize("version", ["N/A", "", "not a version"])
def test_unreadable_version_is_drifted(world: World, version: str) -> None:
    world.install(version)
    world.patch()
    status = fsp.apply()["up.one"]
    assert status.state is State.DRIFTED
    assert "Reinstall" in status.reason


def test_metadata_without_a_version_is_drifted(world: World) -> None:
    world.install()
    (world.folder / f"{world.name}-1.dist-info" / "METADATA").unlink()
    world.patch()
    assert fsp.apply()["up.one"].state is State.DRIFTED


def test_drifted_names_what_changed(world: World, log: pytest.LogCaptureFixture) -> None:
    world.install()
    world.patch(relies_on=(f"{world.name}.attention:helper",))
    world.edit("attention", "def forward(x, *, scale=1):\n    return x * scale\ndef helper(x):\n    return -x\n")
    world.shapes["up.one"] = (world.shapes["up.one"][0],)
    fsp.apply()
    assert world.load().forward(1) == 1
    status = fsp.status()["up.one"]
    assert (status.state, status.fingerprint) == (State.DRIFTED, "unknown")
    assert f"{world.name}.attention:helper" in status.reason
    assert "attention:forward" not in status.reason, "a docstring that went away is no drift"
    assert "1.0" in status.reason
    assert [r.levelno for r in log.records if "drifted" in r.message] == [logging.WARNING]


def test_allow_drift_is_explicit_and_shown(world: World) -> None:
    world.install()
    world.patch(known=False)
    world.load()
    assert fsp.apply()["up.one"].state is State.DRIFTED
    status = fsp.apply("up.one", allow_drift=("up.one",))["up.one"]
    assert (status.state, status.fingerprint) == (State.APPLIED, "allowed")
    assert "allowed" in status.reason
    assert world.load().forward(1) == 1001


def test_a_renamed_argument_and_a_removed_symbol_are_drift(world: World) -> None:
    world.install()
    world.patch(id="up.renamed")
    world.patch(world.target("helper"), id="up.removed")
    world.edit("attention", "def forward(y, *, scale=1):\n    '''Multiply.'''\n    return y * scale\n")
    world.load()
    report = fsp.apply()
    assert {s.state for s in report.patches} == {State.DRIFTED}
    with pytest.raises(PatchError, match="attention:helper"):
        fsp.apply("up.removed")


def test_a_missing_package_with_metadata_is_drift(world: World) -> None:
    world.install()
    world.patch()
    world.patches["up.one"] = fsp.Patch(
        **{
            **vars(world.patches["up.one"]),
            "targets": (fsp.Target("sys:intern", true),),
            "relies_on": ("no_such_pkg:f",),
        }
    )
    status = fsp.apply()["up.one"]
    assert status.state is State.DRIFTED
    assert "no_such_pkg" in status.reason


def test_failed_keeps_the_traceback_and_the_import_goes_on(world: World, log: pytest.LogCaptureFixture) -> None:
    world.install()
    world.patch(world.target("forward"), world.target("Model.supported", boom, kind="value"))
    fsp.apply()
    module = world.load()
    status = fsp.status()["up.one"]
    assert status.state is State.FAILED
    assert status.traceback is not None
    assert "half-way" in status.traceback
    assert "boom" in status.traceback
    assert module.forward(1) == 1, "the target installed before the failure was not taken back"
    assert [r.levelno for r in log.records if "failed" in r.message] == [logging.WARNING]


@pytest.mark.parametrize("how", ["named", "strict", "environment"])
def test_a_failing_hook_breaks_the_import_only_if_asked_for_and_every_time(world: World, how: str) -> None:
    world.install()
    world.patch(world.target("Model.supported", boom, kind="value"))
    if how == "environment":
        world.monkeypatch.setenv(_engine.STRICT, "1")
    fsp.apply(*(["up.one"] if how == "named" else []), strict=True if how == "strict" else None)
    for _ in range(3):  # wrapt drops a hook that raised, and the second import would succeed unpatched
        with pytest.raises(PatchError, match=r"up\.one: failed") as caught:
            world.load()
        assert caught.value.statuses[0].state is State.FAILED


@pytest.mark.parametrize("strict", ["0", "1"])
@pytest.mark.parametrize("imported", ["before", "after"])
def test_autoload_is_loud_only_under_strict_whatever_the_import_order(
    world: World, imported: str, strict: str, log: pytest.LogCaptureFixture
) -> None:
    world.install()
    world.patch(known=False)
    world.monkeypatch.setenv(_engine.SELECT, "up.one")
    world.monkeypatch.setenv(_engine.STRICT, strict)
    world.monkeypatch.delitem(sys.modules, "fsdp_sink_patches.autoload", raising=False)

    def both() -> None:
        if imported == "before":
            world.load()
        importlib.import_module("fsdp_sink_patches.autoload")
        world.load()

    if strict == "1":
        with pytest.raises(PatchError, match=r"up\.one: drifted"):
            both()
    else:
        both()
    assert any("up.one: drifted" in r.message and r.levelno >= logging.WARNING for r in log.records)
    assert fsp.status()["up.one"].state is State.DRIFTED


def test_a_block_leaves_no_loudness_behind(world: World) -> None:
    world.install()
    world.patch(world.target("Model.supported", boom, kind="value"))
    fsp.apply()
    with fsp.applied("up.one"):
        pass
    world.load()
    assert fsp.status()["up.one"].state is State.FAILED


def test_a_block_keeps_the_loudness_that_was_there(world: World) -> None:
    world.install()
    world.patch(world.target("Model.supported", boom, kind="value"))
    fsp.apply("up.one")
    with fsp.applied():
        pass
    with pytest.raises(PatchError, match=r"up\.one: failed"):
        world.load()


def test_named_and_strict_raise_at_apply_and_quiet_does_not(world: World) -> None:
    world.install()
    world.patch(known=False)
    world.load()
    fsp.apply()
    with pytest.raises(PatchError, match="drifted") as caught:
        fsp.apply("up.one")
    assert [s.id for s in caught.value.statuses] == ["up.one"]
    with pytest.raises(PatchError, match="drifted"):
        fsp.apply(strict=True)
    world.monkeypatch.setenv(_engine.STRICT, "1")
    with pytest.raises(PatchError, match="drifted"):
        fsp.apply()
    fsp.apply(strict=False)
    world.monkeypatch.setenv(_engine.STRICT, "maybe")
    with pytest.raises(ValueError, match="FSDP_SINK_PATCHES_STRICT='maybe'"):
        fsp.apply()


def test_strict_does_not_mind_what_is_not_installed(world: World) -> None:
    world.install(version=None)
    world.patch()
    assert fsp.apply(strict=True)["up.one"].state is State.ABSENT


def test_the_error_survives_pickling(world: World) -> None:
    world.install()
    world.patch(known=False)
    world.load()
    with pytest.raises(PatchError) as caught:
        fsp.apply("up.one")
    copy = pickle.loads(pickle.dumps(caught.value))
    assert str(copy) == str(caught.value)
    assert copy.statuses == caught.value.statuses


# --- selection -----------------------------------------------------------------------------------------------------


def two(world: World) -> None:
    world.install()
    world.patch(world.target("forward"), id="up.one")
    world.patch(world.target("helper"), id="up.two")
    world.load()


def states(report: fsp.Report) -> list[str]:
    return [status.state.value for status in report.patches]


@pytest.mark.parametrize(
    ("select", "disable", "expected"),
    [
        (None, None, ["applied", "applied"]),
        ("", "", ["applied", "applied"]),
        ("all", None, ["applied", "applied"]),
        ("none", None, ["disabled", "disabled"]),
        ("up.two", None, ["disabled", "applied"]),
        (" up.two , up.one,", None, ["applied", "applied"]),
        ("all", "up.one", ["disabled", "applied"]),
        ("up.one,up.two", "up.two", ["applied", "disabled"]),
    ],
)
def test_environment(world: World, select: str | None, disable: str | None, expected: list[str]) -> None:
    two(world)
    for name, value in ((_engine.SELECT, select), (_engine.DISABLE, disable)):
        if value is not None:
            world.monkeypatch.setenv(name, value)
    assert states(fsp.apply()) == expected


def test_arguments_beat_the_environment(world: World) -> None:
    two(world)
    world.monkeypatch.setenv(_engine.SELECT, "none")
    world.monkeypatch.setenv(_engine.DISABLE, "up.one")
    assert states(fsp.apply("up.one")) == ["applied", "disabled"]
    assert states(fsp.apply()) == ["applied", "disabled"], "the environment took back what was named in code"
    assert states(fsp.apply(disable=("up.one",))) == ["disabled", "disabled"]


def test_named_in_the_environment_is_named(world: World) -> None:
    world.install()
    world.patch(known=False)
    world.load()
    world.monkeypatch.setenv(_engine.SELECT, "up.one")
    with pytest.raises(PatchError):
        fsp.apply()


@pytest.mark.parametrize(
    ("variable", "source"),
    [(None, "argument"), (_engine.SELECT, _engine.SELECT), (_engine.DISABLE, _engine.DISABLE)],
)
def test_unknown_ids_raise_with_a_suggestion_and_the_source(world: World, variable: str | None, source: str) -> None:
    two(world)
    if variable:
        world.monkeypatch.setenv(variable, "up.tow")
    with pytest.raises(UnknownPatch, match=rf"'up\.tow' \(.*{source}.*did you mean 'up\.two'"):
        fsp.apply(*([] if variable else ["up.tow"]))
    assert world.load().forward(1) == 1


@pytest.mark.parametrize("call", [
    lambda: fsp.apply(disable=("up.tow",)), lambda: fsp.apply(allow_drift=("up.tow",)), lambda: fsp.unapply("up.tow"),
    lambda: fsp.assert_applied("up.tow"), lambda: fsp.applied("up.tow").__enter__(),
])  # fmt: skip
def test_unknown_ids_raise_everywhere(world: World, call: object) -> None:
    two(world)
    with pytest.raises(UnknownPatch):
        call()  # type: ignore[operator]


def test_a_string_for_a_collection_is_refused(world: World) -> None:
    two(world)
    with pytest.raises(TypeError, match=r"\('up\.one',\)"):
        fsp.apply(disable="up.one")


# --- assert_applied, log, survey -----------------------------------------------------------------------------------


def test_assert_applied(world: World) -> None:
    world.install()
    world.patch()
    with pytest.raises(PatchError, match="has not run in this process"):
        fsp.assert_applied()
    fsp.apply()
    fsp.assert_applied()
    with pytest.raises(PatchError, match=r"up\.one: armed"):
        fsp.assert_applied("up.one")
    module = world.load()
    assert fsp.assert_applied("up.one")["up.one"].state is State.APPLIED
    module.forward = lambda x: x
    with pytest.raises(PatchError, match=r"up\.one: shadowed"):
        fsp.assert_applied()


def test_each_line_is_logged_once(world: World, log: pytest.LogCaptureFixture) -> None:
    world.install("0.1")
    world.patch()
    for _ in range(3):
        fsp.apply()
        fsp.status()
    assert len(log.records) == 1


def test_survey_changes_nothing(world: World) -> None:
    world.install()
    world.patch(id="up.one")
    world.patch(world.target("helper"), id="up.two", known=False)
    report = _engine.survey()
    assert [(s.state.value, s.fingerprint) for s in report.patches] == [("armed", "known"), ("drifted", "unknown")]
    assert _engine.survey(allow_drift=("up.two",))["up.two"].fingerprint == "allowed"
    assert world.name not in importlib.sys.modules  # type: ignore[attr-defined]
    assert world.load().forward(1) == 1
