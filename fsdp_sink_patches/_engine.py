"""Arm, apply, look, restore: one lock, one entry per patch.

What a patch with several targets means here: each target is installed as soon as its module has been imported, because
upstreams import lazily and some modules of a patch may never be imported in a job. The patch is ``applied`` once every
target that is not optional is ours, and ``armed`` until then. It stays all or nothing: if any target drifts, is held by
someone else, or raises, those installed before it are taken back.

A foreign wrapper around ours counts as applied if it reaches ours through ``__wrapped__``, which ``functools.wraps``
and wrapt set to the function they call; without that proof the patch is ``shadowed``.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import os
import sys
import threading
import types
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from fsdp_sink_patches import _gates, _registry
from fsdp_sink_patches._patch import Patch, Target
from fsdp_sink_patches._state import PatchError, PatchStatus, Report, State, TargetState, TargetStatus

if TYPE_CHECKING:
    from fsdp_sink_patches import _fingerprint

# _fingerprint, _ownership and wrapt are imported where they are first needed: with nothing to patch yet, apply() should
# cost a process a few milliseconds.

_log = logging.getLogger("fsdp_sink_patches")

SELECT, DISABLE, STRICT = "FSDP_SINK_PATCHES", "FSDP_SINK_PATCHES_DISABLE", "FSDP_SINK_PATCHES_STRICT"


@dataclass
class _Slot:
    """One installed target: where it is, what was there, and what is there now."""

    target: Target
    holder: Any
    name: str
    original: Any
    inherited: bool
    ours: Any


@dataclass
class _Entry:
    """What this process knows about one patch. ``slots`` holds the current installation of each target by path."""

    patch: Patch
    gate: _gates.Gate
    state: State = State.DISABLED
    reason: str = "not requested in this process; call fsdp_sink_patches.apply()."
    traceback: str | None = None
    wanted: bool = False
    loud: bool = False  # the user named it, or strict: a failure raises
    allow_drift: bool = False
    fingerprint: Literal["known", "unknown", "allowed"] | None = None
    match: _fingerprint.Match | None = None
    slots: dict[str, _Slot] = field(default_factory=dict)
    retired: list[_Slot] = field(default_factory=list)  # lost to a reload; names elsewhere may still be bound to them
    skipped: set[str] = field(default_factory=set)
    stale: tuple[str, ...] = ()


_lock = threading.RLock()
_entries: dict[str, _Entry] = {}
_called = False
_hooked: set[str] = set()  # modules whose import will call _imported
_half_imported: set[str] = set()  # modules that were being imported when we looked; no hook will fire for those
_rehook: set[str] = set()  # modules whose import we made fail; the next try must fail too, not succeed unpatched
_logged: set[tuple[str, State, str, int]] = set()
_here = threading.local()


# --- public --------------------------------------------------------------------------------------------------------


def apply(
    *ids: str, disable: Collection[str] = (), strict: bool | None = None, allow_drift: Collection[str] = ()
) -> Report:
    """Put patches in force, now where the upstream is imported and at its import where it is not.

    Arguments win over the environment, which wins over the default (all). Calling it again changes nothing that is
    already in force and repairs what a reload undid.

    Args:
        ids: the patches to apply; none means ``FSDP_SINK_PATCHES`` (``all``, ``none`` or ``id,id``), or all.
        disable: patches to leave out, or to take back if they are in force; added to ``FSDP_SINK_PATCHES_DISABLE``,
            which does not touch patches named in ``ids``.
        strict: any failure raises; None means ``FSDP_SINK_PATCHES_STRICT``.
        allow_drift: patches that may be applied to upstream source that nobody has checked; shown in the report.

    Returns:
        Every registered patch as it stands now.

    Raises:
        UnknownPatch: an id that is not registered, with the nearest one that is.
        PatchError: a patch that the caller named can't be in force, or, in strict mode, any failure. What could be
            applied stays applied, and a failure at a later import raises there.
        ValueError: an environment variable that can't be read.
    """
    return _apply(ids, disable, strict, allow_drift, naming_is_loud=True)


def autoload() -> Report:
    """`apply` for a host that did not ask for exceptions: a failure at a later import raises only under strict."""
    return _apply((), (), None, (), naming_is_loud=False)


def _apply(
    ids: Sequence[str],
    disable: Collection[str],
    strict: bool | None,
    allow_drift: Collection[str],
    naming_is_loud: bool,
) -> Report:
    global _called
    registered = _registry.patches()
    chosen, named, off = _select(registered, ids, disable)
    _check(registered, allow_drift, "allow_drift argument")
    loud = _flag(STRICT) if strict is None else strict
    with _lock:
        _called = True
        _add_entries(registered)
        for id in disable:
            if _entries[id].slots:
                _restore(_entries[id])
        for id, entry in _entries.items():
            if id in chosen:
                entry.wanted = True
                entry.loud = entry.loud or loud or (named and naming_is_loud)
                entry.allow_drift = entry.allow_drift or id in allow_drift
                _advance(entry)
            elif id in disable or not entry.wanted:
                entry.wanted = False
                if not entry.slots:
                    entry.state, entry.reason = State.DISABLED, off.get(id, "not among the patches that were named.")
                    _announce(entry)
        _forget()
        report = _report()
    wrong = [s for s in report.patches if s.id in chosen and (s.state.is_failure if not named else not _in_force(s))]
    if wrong and (named or loud):
        raise PatchError(wrong)
    return report


def unapply(*ids: str) -> Report:
    """Take patches back and disarm what waits for an import; no ids means all.

    Names that were bound to ours elsewhere (``from x import f``) are bound to the original again.

    Raises:
        UnknownPatch: an id that is not registered.
        PatchError: an attribute is not ours any more, so it is left alone, with all the patch's other targets; the
            message says who holds it. With no ids this is only logged and reported.
    """
    registered = _registry.patches()
    _check(registered, ids, "argument")
    with _lock:
        _add_entries(registered)
        refused = [id for id in (ids or _entries) if not _restore(_entries[id])]
        report = _report()
    if refused and ids:
        raise PatchError([report[id] for id in refused], "not restored, because someone else holds the attribute now:")
    return report


@contextlib.contextmanager
def applied(*ids: str) -> Iterator[Report]:
    """`apply` for a block; afterwards takes back what was not requested before, and leaves the rest as it was.

    Scoping cannot undo what a module built inside the block keeps: closures, instance attributes, compiled graphs.
    """
    with _lock:
        before = {id: (entry.loud, entry.allow_drift) for id, entry in _entries.items() if entry.wanted}
    try:
        yield apply(*ids)
    finally:
        with _lock:
            mine = [id for id, entry in _entries.items() if entry.wanted and id not in before]
            for id, (loud, allow_drift) in before.items():
                if _entries[id].wanted:
                    _entries[id].loud, _entries[id].allow_drift = loud, allow_drift
        if mine:
            unapply(*mine)


def status() -> Report:
    """Every registered patch as it stands now; attributes are looked at, not remembered."""
    registered = _registry.patches()
    with _lock:
        _add_entries(registered)
        _retry()
        for entry in _entries.values():
            if entry.wanted and entry.state in (State.ARMED, State.INAPPLICABLE):
                _advance(entry)  # a module may have come without its hook: put into sys.modules by hand, or by a loader
        return _report()


def assert_applied(*ids: str) -> Report:
    """Raise unless the patches are in force; for the line before step 0, after the model is built, on every rank.

    With ids, each must be ``applied``. Without, no requested patch may have failed, and ``apply()`` must have run in
    this process: a driver's patches do not travel to its workers.

    Raises:
        PatchError: with the statuses of those that are not in force.
        UnknownPatch: an id that is not registered.
    """
    _check(_registry.patches(), ids, "argument")
    report = status()
    if ids:
        wrong = [report[id] for id in dict.fromkeys(ids) if report[id].state is not State.APPLIED]
    elif not _called:
        raise PatchError(
            (),
            "no patch is in force: fsdp_sink_patches.apply() has not run in this process. Patches do not travel from a "
            "driver to its workers; call apply() here, or import fsdp_sink_patches.autoload.",
        )
    else:
        wrong = list(report.failures)
    if wrong:
        raise PatchError(wrong)
    return report


def survey(allow_drift: Collection[str] = (), environment: bool = True) -> Report:
    """What ``apply()`` would find here, from files and metadata alone: nothing is imported, armed or changed.

    ``armed`` means that the version and the source are fine and the patch would be applied.

    Args:
        allow_drift: as for `apply`.
        environment: whether the patches that ``FSDP_SINK_PATCHES`` and ``FSDP_SINK_PATCHES_DISABLE`` leave out are
            ``disabled``; without it they are looked at like the others.

    Raises:
        UnknownPatch: an id in ``allow_drift`` or in one of those variables that no patch has.
    """
    registered = _registry.patches()
    _check(registered, allow_drift, "allow_drift argument")
    chosen, _, off = _select(registered, (), ()) if environment else (set(registered), False, {})
    statuses = []
    for id, patch in registered.items():
        entry = _Entry(patch, _gates.look(patch), allow_drift=id in allow_drift)
        if id not in chosen:
            entry.state, entry.reason = State.DISABLED, off[id]
        elif entry.gate.state is not None:
            entry.state, entry.reason = entry.gate.state, entry.gate.reason
        else:
            try:
                entry.state, entry.reason = State.ARMED, "would be applied when its modules are imported."
                _read_source(entry)
            except Exception as error:  # one patch that can't be read must not hide the others' rows
                _failed(entry, error)
        statuses.append(_status(entry, [TargetStatus(target.path, "waiting") for target in patch.targets]))
    return Report(tuple(statuses))


# --- selection -----------------------------------------------------------------------------------------------------


def _select(
    registered: dict[str, Patch], ids: Sequence[str], disable: Collection[str]
) -> tuple[set[str], bool, dict[str, str]]:
    """The chosen ids, whether the user named them, and why each other one is off."""
    _check(registered, ids, "argument")
    _check(registered, disable, "disable argument")
    env_disable = _ids_from(DISABLE)
    _check(registered, env_disable, f"in {DISABLE}")
    off: dict[str, str] = {}
    if ids:
        chosen, named = set(ids), True
    else:
        words = _ids_from(SELECT)
        chosen, named = set(registered), False
        if words == ["none"]:
            chosen, off = set(), dict.fromkeys(registered, f"{SELECT}=none.")
        elif words and words != ["all"]:
            _check(registered, words, f"in {SELECT}")
            chosen, named = set(words), True
            off = dict.fromkeys(registered, f"not named in {SELECT}.")
        chosen -= set(env_disable)
        off |= dict.fromkeys(env_disable, f"named in {DISABLE}.")
    off |= dict.fromkeys(disable, "named in disable=.")
    return chosen - set(disable), named, off


def _check(registered: Collection[str], ids: Collection[str], source: str) -> None:
    if isinstance(ids, str):
        raise TypeError(f"{source}: expected a collection of ids, found the string {ids!r}; write ({ids!r},).")
    for id in ids:
        if id not in registered:
            raise _registry.UnknownPatch(id, registered, source)


def _ids_from(variable: str) -> list[str]:
    return [word.strip() for word in os.environ.get(variable, "").split(",") if word.strip()]


def _flag(variable: str) -> bool:
    value = os.environ.get(variable, "").strip().lower()
    if value in ("1", "true", "yes", "on"):
        return True
    if value in ("", "0", "false", "no", "off"):
        return False
    raise ValueError(f"{variable}={value!r}: expected 1 or 0.")


def is_strict() -> bool:
    """What ``FSDP_SINK_PATCHES_STRICT`` says; a value that can't be read counts as strict."""
    try:
        return _flag(STRICT)
    except ValueError:
        return True


def _in_force(status: PatchStatus) -> bool:
    """What the caller who named a patch may live with: it works, it will, or upstream no longer needs it."""
    return status.state in (State.APPLIED, State.ARMED, State.OBSOLETE)


# --- installing ----------------------------------------------------------------------------------------------------


def _add_entries(registered: dict[str, Patch]) -> None:
    for id, patch in registered.items():
        if id not in _entries:
            _entries[id] = _Entry(patch, _gates.look(patch))


def _advance(entry: _Entry, finished: str | None = None) -> None:
    """Bring a wanted patch as far as the imported modules allow. ``finished``: a module whose import just ended."""
    if entry.gate.state is not None:
        entry.state, entry.reason = entry.gate.state, entry.gate.reason
        _announce(entry, _needs(entry, finished))
        return
    if entry.slots and any(status.state in ("foreign", "original") for status in _look(entry)):
        # Shadowed. Ours is put back where upstream's own code has come back (a reload); someone else's stays.
        if any(status.state == "foreign" for status in _look(entry)):
            return
        for path in [status.path for status in _look(entry) if status.state == "original"]:
            entry.retired.append(entry.slots.pop(path))
        entry.match = None  # the file may have changed before it was reloaded
    waiting: list[str] = []
    ready: list[tuple[Target, types.ModuleType]] = []
    for target in entry.patch.targets:
        if target.path in entry.slots:
            continue
        module = _imported_module(target.module, finished)
        if module is None:
            _arm(target.module)
            module = _imported_module(target.module, finished)  # another thread may have imported it meanwhile
        if module is not None:
            ready.append((target, module))
        elif not target.optional:
            waiting.append(target.module)
    try:
        if ready:
            _read_source(entry)
            if entry.state is State.DRIFTED:
                _take_back(entry)
            else:
                _install(entry, ready)
    except _Conflict as conflict:
        _take_back(entry)
        entry.state, entry.reason = State.CONFLICT, conflict.reason
    except Exception as error:
        _take_back(entry)
        _failed(entry, error)
    except BaseException:  # an interrupt: leave a known state and go
        _take_back(entry)
        entry.state, entry.reason = State.FAILED, "interrupted while it was being applied; call apply() again."
        raise
    else:
        if entry.state is not State.DRIFTED:
            entry.traceback = None
            entry.state = State.ARMED if waiting or not (entry.slots or entry.skipped) else State.APPLIED
            entry.reason = _waiting_for(entry, waiting) if entry.state is State.ARMED else _note(entry)
    _announce(entry)


def _needs(entry: _Entry, finished: str | None) -> int | None:
    """How loudly an inapplicable patch is announced: only a process that imports what it is for would miss it."""
    if entry.state is not State.INAPPLICABLE:
        return None
    name = entry.patch.targets[0].module
    if _imported_module(name, finished) is None:
        _arm(name)
    return logging.INFO if _imported_module(name, finished) is None else logging.WARNING


class _Conflict(Exception):  # noqa: N818 (control flow inside this module)
    def __init__(self, reason: str) -> None:
        self.reason = reason


def _read_source(entry: _Entry) -> None:
    """The fingerprint gate; read once, when the first module of the patch is there."""
    from fsdp_sink_patches import _fingerprint

    patch = entry.patch
    if entry.match is None:
        try:
            entry.match = _fingerprint.match(patch)
        except ModuleNotFoundError as error:
            entry.fingerprint, entry.state = "unknown", State.DRIFTED
            entry.reason = (
                f"found {patch.distribution} {entry.gate.version} installed but {error}; expected its files. "
                f"Reinstall {patch.distribution}; if two distributions share the folder, the other one shadows it."
            )
            return
    match = entry.match
    entry.fingerprint = "known" if match.known else "allowed" if entry.allow_drift else "unknown"
    if entry.fingerprint != "unknown":
        if entry.state is State.DRIFTED:
            entry.state = State.ARMED
        return
    if match.shape is None:
        found, expected = "", "a source recorded in compat_matrix/, which has none for this patch"
    else:
        found = f" with other source at {', '.join(match.changed)}"
        expected = f"the source recorded for {_versions(match.shape.versions)}"
    entry.state = State.DRIFTED
    entry.reason = (
        f"found {patch.distribution} {entry.gate.version}{found}; expected "
        f"{expected}. Nothing was patched. See python -m fsdp_sink_patches.check --explain {patch.id}; to apply it all "
        f"the same, allow_drift=({patch.id!r},)."
    )


def _versions(versions: Sequence[str]) -> str:
    return ", ".join(versions) if len(versions) <= 3 else f"{versions[0]} ... {versions[-1]}"


def _install(entry: _Entry, ready: list[tuple[Target, types.ModuleType]]) -> None:
    from fsdp_sink_patches import _fingerprint, _ownership

    assert entry.match is not None
    found = []
    for target, module in ready:
        if target.optional and entry.match.digests[target.path] == _fingerprint.ABSENT:
            entry.skipped.add(target.path)  # also where a base class has the name: this release does not define it
            continue
        try:
            at = _ownership.place(module, target.qualname)
        except _ownership.Missing:
            if entry.match.digests[target.path] == _fingerprint.ABSENT:
                raise LookupError(
                    f"{target.path} does not exist in this release, so there is nothing to patch"
                ) from None
            raise _Conflict(
                f"found no {target.qualname} in the imported {target.module}, expected upstream's: someone removed or "
                "replaced it. Apply before whatever does that, or disable one of the two."
            ) from None
        held = _owned_by_us(at.raw) or _ownership.foreign(at, module, target.qualname)
        if held:
            raise _Conflict(
                f"found {target.path} held by {held}, expected upstream's own. Nothing was patched. Disable one of the "
                "two, or call fsdp_sink_patches.apply() before the other."
            )
        found.append((target, at))
    swaps: dict[int, tuple[Any, Any]] = {}
    for target, at in found:
        ours = _make(target, at.raw)
        entry.slots[target.path] = _Slot(target, at.holder, at.name, at.raw, at.inherited, ours)
        setattr(at.holder, at.name, ours)
        if isinstance(_ownership.inner(at.raw), types.FunctionType | type) and not at.inherited:
            swaps[id(at.raw)] = (at.raw, ours)
    if swaps:
        _ownership.rebind(swaps, ready[0][0].module.partition(".")[0])
        stale = _ownership.holders([original for original, _ in swaps.values()])
        entry.stale = tuple(sorted({*stale, *entry.stale}))


def _make(target: Target, raw: Any) -> Any:
    """What takes the place of ``raw``.

    A value's replacement runs under our lock, so it must not import the upstream: another thread may hold the import
    lock of that module and wait for ours.
    """
    if target.kind == "value":
        return target.replacement(raw)
    if isinstance(raw, staticmethod | classmethod):
        return type(raw)(_call(target, raw.__func__))
    if not callable(raw):
        raise TypeError(
            f"{target.path} is a {type(raw).__name__}, which can't be called; expected a function. Use kind='value'."
        )
    return _call(target, raw)


def _call(target: Target, original: Callable[..., Any]) -> Callable[..., Any]:
    replacement = target.replacement

    def patched(*args: Any, **kwargs: Any) -> Any:
        return replacement(original, *args, **kwargs)

    # Not functools.wraps: a copied __dict__ carries dynamo's marks along (pytorch/pytorch#172732). The name, module and
    # qualified name make the function pickle by reference, as the original did.
    for attribute in ("__module__", "__name__", "__qualname__", "__doc__"):
        with contextlib.suppress(AttributeError):  # a callable object may lack any of these
            setattr(patched, attribute, getattr(original, attribute))
    patched.__wrapped__ = original  # type: ignore[attr-defined]
    with contextlib.suppress(TypeError, ValueError):  # builtins may have no signature
        patched.__signature__ = inspect.signature(original)  # type: ignore[attr-defined]
    return patched


def holder(raw: Any) -> str | None:
    """The id of the patch whose replacement this attribute is, unwrapped and not since replaced; or None."""
    for entry in list(_entries.values()):
        for slot in list(entry.slots.values()):
            if raw is slot.ours and slot.target.kind == "call":
                return entry.patch.id
    return None


def _owned_by_us(raw: Any) -> str | None:
    id = holder(raw)
    return None if id is None else f"the patch {id}"


def _take_back(entry: _Entry) -> None:
    """Undo what is still ours; used when a patch can't be complete, so nothing of it may stay."""
    _put_originals(entry, [*entry.slots.values(), *entry.retired])
    entry.slots.clear()
    entry.retired.clear()
    entry.skipped.clear()
    entry.stale = ()


def _put_originals(entry: _Entry, slots: list[_Slot]) -> None:
    from fsdp_sink_patches import _ownership

    swaps: dict[int, tuple[Any, Any]] = {}
    for slot in reversed(slots):
        if vars(slot.holder).get(slot.name) is slot.ours:
            if slot.inherited:
                delattr(slot.holder, slot.name)
            else:
                setattr(slot.holder, slot.name, slot.original)
        if isinstance(_ownership.inner(slot.ours), types.FunctionType | type):
            swaps[id(slot.ours)] = (slot.ours, slot.original)
    if swaps:
        _ownership.rebind(swaps, slots[0].target.module.partition(".")[0])


def _restore(entry: _Entry) -> bool:
    """Take a patch back and disarm it; False, with nothing changed, if an attribute is someone else's now."""
    if entry.slots:
        held = [status for status in _look(entry) if status.state in ("wrapped", "foreign")]
        if held:
            entry.state = State.SHADOWED if any(status.state == "foreign" for status in held) else entry.state
            entry.reason = "not restored: " + " ".join(
                f"found {status.path} held by {status.owner}, expected ours." for status in held
            )
            entry.reason += " Take the other patch off first."
            _announce(entry, logging.WARNING)
            return False
    _take_back(entry)
    if entry.wanted or entry.state is not State.DISABLED:
        entry.wanted, entry.loud, entry.allow_drift = False, False, False
        entry.state, entry.reason, entry.traceback = State.DISABLED, "taken back by unapply().", None
        entry.fingerprint, entry.match = None, None
    return True


def _failed(entry: _Entry, error: Exception) -> None:
    entry.state = State.FAILED
    import traceback

    entry.traceback = "".join(traceback.format_exception(error))
    entry.reason = (
        f"raised {type(error).__name__}: {error}. Nothing of it was left patched. "
        f"See python -m fsdp_sink_patches.check --explain {entry.patch.id}."
    )


# --- hooks ---------------------------------------------------------------------------------------------------------


def _imported_module(name: str, finished: str | None) -> types.ModuleType | None:
    """The module if its import has ended. wrapt fires at once for a module in the middle of a circular import."""
    module = sys.modules.get(name)
    if module is None:
        return None
    if name != finished and getattr(getattr(module, "__spec__", None), "_initializing", False):
        _half_imported.add(name)
        _watch()
        return None
    return module


def _arm(name: str) -> None:
    if name in _hooked or name in sys.modules:
        return
    from wrapt.importer import register_post_import_hook

    _hooked.add(name)
    _here.registering = True
    try:
        register_post_import_hook(_imported, name)
    finally:
        _here.registering = False


def _imported(module: types.ModuleType) -> None:
    """wrapt calls this when a module that some patch waits for has been imported."""
    name = module.__name__
    if getattr(_here, "registering", False):
        # Another thread has begun or ended this import since we looked, so wrapt calls at once; _advance looks again.
        _hooked.discard(name)
        return
    with _lock:
        _hooked.discard(name)
        _half_imported.discard(name)
        _settle(name, finished=name)


def _settle(name: str, finished: str | None = None) -> None:
    loud = []
    for entry in list(_entries.values()):
        if entry.wanted and any(target.module == name for target in entry.patch.targets):
            try:
                _advance(entry, finished)
            except Exception as error:  # not even a fault of ours may break the import of an upstream
                _failed(entry, error)
                _announce(entry)
            if entry.loud and entry.state.is_failure:
                loud.append(_status(entry, _look(entry)))
    _forget()
    if loud and finished is not None:
        # The import fails here, and wrapt has dropped its hook: without a new one the next try would go through.
        _rehook.add(name)
        _watch()
        raise PatchError(loud, f"{name} was imported, and a patch that was asked for by name or in strict mode failed:")


class _Watcher:
    """First in sys.meta_path while a retry is due: every later import is a chance to look again. Finds nothing."""

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> None:
        if _half_imported or _rehook:
            with _lock:
                if fullname in _rehook:
                    _rehook.discard(fullname)
                    _arm(fullname)
                _retry()


_watcher = _Watcher()


def _watch() -> None:
    if _watcher not in sys.meta_path:
        sys.meta_path.insert(0, _watcher)


def _retry() -> None:
    for name in list(_half_imported):
        if name not in sys.modules:  # its import failed; wait for the next try
            _half_imported.discard(name)
            _arm(name)
        elif _imported_module(name, None) is not None:
            _half_imported.discard(name)
            _settle(name)


# --- looking -------------------------------------------------------------------------------------------------------


def _look(entry: _Entry) -> list[TargetStatus]:
    return [TargetStatus(target.path, *_look_at(entry, target)) for target in entry.patch.targets]


def _look_at(entry: _Entry, target: Target) -> tuple[TargetState, str]:
    slot = entry.slots.get(target.path)
    if slot is None:
        return ("skipped" if target.path in entry.skipped else "waiting"), ""
    module = sys.modules.get(target.module)
    if module is None:
        return "original", ""  # unloaded: whoever imports it again gets upstream's
    from fsdp_sink_patches import _ownership

    try:
        at = _ownership.place(module, target.qualname)
    except _ownership.Missing:
        return "foreign", "nobody: the attribute is gone"
    if at.raw is slot.ours:
        return "ours", ""
    if target.kind == "call" and _ownership.reaches(at.raw, slot.ours):
        return "wrapped", _ownership.owner(at.raw)
    if at.raw is slot.original or _ownership.foreign(at, module, target.qualname) is None:
        return "original", ""
    return "foreign", _ownership.owner(at.raw)


def _report() -> Report:
    statuses = []
    for id in sorted(_entries):
        entry = _entries[id]
        targets = _look(entry)
        if entry.slots and entry.state in (State.APPLIED, State.ARMED, State.SHADOWED):
            lost = [target for target in targets if target.state in ("foreign", "original")]
            if lost:
                entry.state = State.SHADOWED
                entry.reason = " ".join(
                    f"found {target.path} held by {target.owner}, expected ours."
                    if target.state == "foreign"
                    else f"found upstream's own {target.path} again (a reload, or someone restored it), expected ours."
                    for target in lost
                )
                entry.reason += " Call fsdp_sink_patches.apply() after whatever does that, or disable one of the two."
                _announce(entry)
            elif entry.state is State.SHADOWED:
                waiting = [t.module for t in entry.patch.targets if not t.optional and t.path not in entry.slots]
                entry.state = State.ARMED if waiting else State.APPLIED
                entry.reason = _waiting_for(entry, waiting) if waiting else _note(entry)
        if entry.state is State.APPLIED:
            entry.reason = _note(entry)
        statuses.append(_status(entry, targets))
    _forget()
    return Report(tuple(statuses))


def _forget() -> None:
    """Parsed upstream files are not kept between calls."""
    if (module := sys.modules.get("fsdp_sink_patches._fingerprint")) is not None:
        module.forget()


def _note(entry: _Entry) -> str:
    notes = [
        f"{target.path} is wrapped by {target.owner}, which still calls ours."
        for target in _look(entry)
        if target.state == "wrapped"
    ]
    if entry.fingerprint == "allowed" and entry.match is not None:
        changed = f", changed at {', '.join(entry.match.changed)}" if entry.match.shape is not None else ""
        notes.append(f"the source is not one that was checked{changed}; applied because it was allowed.")
    if entry.stale:
        notes.append(f"the original is still held by {'; '.join(entry.stale)}; apply before those are made.")
    return " ".join(notes)


def _waiting_for(entry: _Entry, waiting: Sequence[str]) -> str:
    names = ", ".join(dict.fromkeys(waiting)) or "its modules"
    return f"{len(entry.slots)} of {len(entry.patch.targets)} targets are ours; waiting for the import of {names}."


def _status(entry: _Entry, targets: Sequence[TargetStatus]) -> PatchStatus:
    patch = entry.patch
    return PatchStatus(
        id=patch.id,
        gives=patch.gives,
        distribution=patch.distribution,
        version=entry.gate.version,
        fingerprint=entry.fingerprint,
        state=entry.state,
        reason=entry.reason,
        traceback=entry.traceback,
        stale=entry.stale,
        targets=tuple(targets),
    )


def _announce(entry: _Entry, level: int | None = None) -> None:
    """One line for each new state and reason; what a sink model would miss is a warning."""
    if level is None:
        serious = entry.state.is_failure
        serious = serious or (entry.state is State.APPLIED and (bool(entry.stale) or entry.fingerprint == "allowed"))
        level = logging.WARNING if serious else logging.INFO
    key = (entry.patch.id, entry.state, entry.reason, level)
    if key in _logged:
        return
    _logged.add(key)
    _log.log(level, "%s: %s. %s", entry.patch.id, entry.state, entry.reason)


# --- forks ---------------------------------------------------------------------------------------------------------


def _lock_for_fork() -> None:
    _lock.acquire()


def _unlock_in_parent() -> None:
    _lock.release()


def _new_lock_in_child() -> None:
    global _lock
    _lock = threading.RLock()


os.register_at_fork(before=_lock_for_fork, after_in_parent=_unlock_in_parent, after_in_child=_new_lock_in_child)
