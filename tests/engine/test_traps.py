"""The traps of monkey patching: imports, reloads, inheritance, stale names, other patchers, threads, forks."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import logging
import multiprocessing
import os
import pickle
import sys
import threading
from typing import Any

import pytest
import wrapt
from fakes import World, add_name, add_one, boom, true

import fsdp_sink_patches as fsp
from fsdp_sink_patches import PatchError, State, _engine


def state(id: str = "up.one") -> State:
    return fsp.status()[id].state


def foreign_function(source: str, name: str = "theirs", **names: Any) -> Any:
    """A function whose code comes from a module of another patcher."""
    module = type(sys)("other_patcher.monkey_patch")
    module.__file__ = f"/site-packages/other_patcher/{name}.py"
    vars(module).update(names)
    exec(compile(source, module.__file__, "exec"), vars(module))
    sys.modules[module.__name__] = module
    return vars(module)[name]


@pytest.fixture(autouse=True)
def _forget_the_other() -> Any:
    yield
    sys.modules.pop("other_patcher.monkey_patch", None)


# --- order of import and apply -------------------------------------------------------------------------------------


@pytest.mark.parametrize("imported_first", [True, False])
def test_order_of_import_and_apply_does_not_matter(world: World, imported_first: bool) -> None:
    world.install()
    world.patch()
    if imported_first:
        world.load()
    fsp.apply()
    module = world.load()
    assert state() is State.APPLIED
    assert module.forward(1) == 1001


def test_twice_is_once_and_one_wrapper_deep(world: World) -> None:
    world.install()
    world.patch()
    original = world.load().forward
    for _ in range(3):
        fsp.apply()
    module = world.load()
    assert module.forward(1) == 1001
    assert module.forward.__wrapped__ is original
    assert not hasattr(original, "__wrapped__")


def test_the_replacement_looks_like_the_original(world: World) -> None:
    world.install()
    world.patch()
    module = world.load()
    original = module.forward
    fsp.apply()
    ours = module.forward
    assert type(ours) is type(original)
    assert (ours.__name__, ours.__qualname__, ours.__module__, ours.__doc__) == (
        original.__name__, original.__qualname__, original.__module__, original.__doc__,
    )  # fmt: skip
    assert inspect.signature(ours) == inspect.signature(original)
    assert pickle.loads(pickle.dumps(ours)) is ours


def test_marks_on_the_original_are_not_copied(world: World) -> None:
    world.install()
    world.patch()
    module = world.load()
    module.forward._torchdynamo_disable = True  # pytorch/pytorch#172732
    fsp.apply()
    assert not hasattr(module.forward, "_torchdynamo_disable")


def test_importing_the_package_does_not_import_the_submodule(world: World) -> None:
    world.install()
    world.patch()
    fsp.apply()
    importlib.import_module(world.name)
    assert state() is State.ARMED


CIRCULAR = """
import fsdp_sink_patches
REPORT = fsdp_sink_patches.apply()
def forward(x, *, scale=1):
    return x * scale
"""


def test_half_imported_module_is_retried(world: World) -> None:
    """apply() runs while the target is being imported: wrapt would fire at once, before the attribute exists."""
    world.install(files={"attention.py": CIRCULAR})
    world.patch()
    module = world.load()
    assert module.REPORT["up.one"].state is State.ARMED
    assert state() is State.APPLIED
    assert module.forward(1) == 1001


def test_half_imported_module_is_applied_at_the_next_import_of_anything(world: World) -> None:
    world.install(files={"attention.py": CIRCULAR})
    world.patch()
    module = world.load()
    assert world.load("user").call(1) == 1001
    assert module.forward(1) == 1001


def test_a_module_that_came_without_its_hook_is_found(world: World) -> None:
    world.install()
    world.patch()
    fsp.apply()
    name = f"{world.name}.attention"
    spec = importlib.util.find_spec(name)
    assert spec is not None
    path = spec.origin
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    assert module.forward(1) == 1
    assert state() is State.APPLIED
    assert module.forward(1) == 1001


def test_imported_by_another_thread_between_look_and_hook(world: World) -> None:
    """wrapt calls a hook at once for a module that is already there; the patch must not meet itself."""
    world.install()
    world.patch()
    register = wrapt.importer.register_post_import_hook

    def late(hook: Any, name: str) -> None:
        world.load()
        register(hook, name)

    world.monkeypatch.setattr(wrapt.importer, "register_post_import_hook", late)
    assert fsp.apply()["up.one"].state is State.APPLIED
    assert len(list(depth(world.load().forward))) == 2


def test_an_import_that_fails_leaves_the_patch_armed(world: World) -> None:
    world.install(files={"attention.py": "raise ImportError('not today')"})
    world.patch(known=False)
    fsp.apply(allow_drift=("up.one",))
    with pytest.raises(ImportError, match="not today"):
        world.load()
    assert state() is State.ARMED
    world.edit("attention", "def forward(x): return x\n")
    assert world.load().forward(1) == 1001


def test_reload_is_seen_and_repaired(world: World) -> None:
    world.install()
    world.patch()
    fsp.apply()
    module = world.load()
    importlib.reload(module)
    assert module.forward(1) == 1
    status = fsp.status()["up.one"]
    assert status.state is State.SHADOWED
    assert "reload" in status.reason
    assert fsp.apply()["up.one"].state is State.APPLIED
    assert module.forward(1) == 1001
    fsp.unapply()
    assert module.forward(1) == 1
    assert not hasattr(module.forward, "__wrapped__")


def test_reload_of_an_edited_file_is_drift(world: World) -> None:
    world.install()
    world.patch()
    fsp.apply()
    module = world.load()
    world.edit("attention", "def forward(x, *, scale=1):\n    return x * scale + 0\n")
    importlib.reload(module)
    assert fsp.apply()["up.one"].state is State.DRIFTED
    assert module.forward(1) == 1


def test_a_module_imported_again_is_seen(world: World) -> None:
    world.install()
    world.patch()
    fsp.apply()
    world.load()
    del sys.modules[f"{world.name}.attention"]
    assert state() is State.SHADOWED
    again = world.load()
    assert fsp.apply()["up.one"].state is State.APPLIED
    assert again.forward(1) == 1001


# --- several targets -----------------------------------------------------------------------------------------------

TWO_MODULES = {"late.py": "def other(x):\n    return x\n"}


def test_targets_are_installed_as_their_modules_come(world: World) -> None:
    world.install(files=TWO_MODULES)
    world.patch(world.target("forward"), world.target("other", module="late"))
    fsp.apply()
    module = world.load()
    assert module.forward(1) == 1001
    status = fsp.status()["up.one"]
    assert status.state is State.ARMED
    assert [t.state for t in status.targets] == ["ours", "waiting"]
    assert f"{world.name}.late" in status.reason
    assert world.load("late").other(1) == 1001
    assert state() is State.APPLIED


def test_a_later_failure_takes_the_earlier_targets_back(world: World) -> None:
    world.install(files=TWO_MODULES)
    world.patch(world.target("forward"), world.target("other", boom, module="late", kind="value"))
    fsp.apply()
    module = world.load()
    assert module.forward(1) == 1001
    world.load("late")
    assert state() is State.FAILED
    assert module.forward(1) == 1


def test_an_interrupt_half_way_leaves_a_known_state(world: World) -> None:
    def interrupt(original: object) -> object:
        raise KeyboardInterrupt

    world.install()
    world.patch(world.target("forward"), world.target("Model.supported", interrupt, kind="value"))
    module = world.load()
    with pytest.raises(KeyboardInterrupt):
        fsp.apply()
    assert module.forward(1) == 1
    assert state() is State.FAILED
    world.patches.clear()


def test_an_optional_target_that_the_release_lacks_is_skipped(world: World) -> None:
    world.install()
    world.patch(
        world.target("forward"), world.target("gone", optional=True), world.target("Model.static", optional=True)
    )
    world.load()
    status = fsp.apply()["up.one"]
    assert status.state is State.APPLIED
    assert [t.state for t in status.targets] == ["ours", "skipped", "skipped"]
    assert world.load().Model.static(1) == 3, "an optional target that a base class defines was patched in the subclass"


def test_an_optional_target_in_a_module_that_is_never_imported_is_not_waited_for(world: World) -> None:
    world.install(files=TWO_MODULES)
    world.patch(world.target("forward"), world.target("other", module="late", optional=True))
    world.load()
    assert fsp.apply()["up.one"].state is State.APPLIED
    assert world.load("late").other(1) == 1001


def test_with_every_target_optional_the_first_module_that_comes_is_enough(world: World) -> None:
    world.install(files=TWO_MODULES)
    optional = {"optional": True}
    world.patch(world.target("forward", **optional), world.target("other", module="late", **optional))
    assert fsp.apply()["up.one"].state is State.ARMED
    assert world.load("late").other(1) == 1001
    assert state() is State.APPLIED
    assert world.load().forward(1) == 1001
    assert [t.state for t in fsp.status()["up.one"].targets] == ["ours", "ours"]


def test_two_patches_of_ours_on_one_target_conflict(world: World) -> None:
    world.install()
    world.patch(id="up.one")
    world.patch(id="up.two")
    world.load()
    report = fsp.apply()
    assert report["up.one"].state is State.APPLIED
    assert report["up.two"].state is State.CONFLICT
    assert "the patch up.one" in report["up.two"].reason


# --- methods and values --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("via", ["class", "instance"])
def test_methods_of_every_kind(world: World, via: str) -> None:
    world.install()
    world.patch(world.target("Base.step"), world.target("Base.static"), world.target("Base.kind", add_name))
    module = world.load()
    before = dict(vars(module.Base))
    fsp.apply()
    assert state() is State.APPLIED
    model = module.Model()
    assert model.run(1) == 1002
    holder = model if via == "instance" else module.Model
    assert holder.static(1) == 1003
    assert holder.kind(1) == ("Model", 1, "ours")
    fsp.unapply()
    assert dict(vars(module.Base)) == before
    assert isinstance(vars(module.Base)["static"], staticmethod)


def test_restoring_an_inherited_method_leaves_no_attribute(world: World) -> None:
    world.install()
    world.patch(world.target("Model.step"))
    module = world.load()
    fsp.apply()
    assert module.Model().step(1) == 1002
    assert module.Base().step(1) == 2
    fsp.unapply()
    assert "step" not in vars(module.Model)
    assert module.Model().step(1) == 2


def test_values(world: World) -> None:
    world.install()
    world.patch(world.target("Model.supported", true, kind="value"))
    module = world.load()
    fsp.apply()
    assert module.Model.supported is True
    assert state() is State.APPLIED
    module.Model.supported = False
    assert state() is State.SHADOWED
    fsp.apply()
    fsp.unapply()
    assert module.Model.supported is False


def test_a_value_that_someone_changed_is_a_conflict(world: World) -> None:
    world.install()
    world.patch(world.target("Model.supported", true, kind="value"))
    world.load().Model.supported = "theirs"
    status = fsp.apply()["up.one"]
    assert status.state is State.CONFLICT
    assert "'theirs'" in status.reason
    assert "False" in status.reason


# --- stale references ----------------------------------------------------------------------------------------------


def test_names_bound_earlier_are_rebound_and_restored(world: World) -> None:
    world.install()
    world.patch()
    module, user = world.load(), world.load("user")
    original = module.forward
    module.Base.alias = original
    fsp.apply()
    assert user.call(1) == 1001
    assert user.forward is module.forward
    assert module.REGISTRY["eager"] is module.forward
    assert vars(module.Base)["alias"] is module.forward
    assert fsp.status()["up.one"].stale == ()
    fsp.unapply()
    assert user.call(1) == 1
    assert user.forward is module.forward is original is module.REGISTRY["eager"] is vars(module.Base)["alias"]


def test_a_name_bound_later_is_ours_and_is_restored_too(world: World) -> None:
    world.install()
    world.patch()
    world.load()
    fsp.apply()
    user = world.load("user")
    assert user.call(1) == 1001
    fsp.unapply()
    assert user.call(1) == 1


HOLDERS = """
import functools
from .attention import forward as _f
def _close(f):
    def closed(x):
        return f(x)
    return closed
closed = _close(_f)
bound = functools.partial(_f, scale=2)
class Holder:
    def __init__(self):
        self.f = _f
holder = Holder()
"""


def test_what_cannot_be_rebound_is_named(world: World, log: pytest.LogCaptureFixture) -> None:
    world.install(files={"holders.py": HOLDERS})
    world.patch()
    world.load("holders")
    status = fsp.apply()["up.one"]
    assert status.state is State.APPLIED
    text = " ".join(status.stale)
    assert f"closure of {world.name}.holders.closed" in text
    assert "functools.partial of forward" in text
    assert f"{world.name}.holders.Holder" in text
    assert len(status.stale) == 3, status.stale
    assert "still held by" in status.reason
    assert [r.levelno for r in log.records] == [logging.WARNING]


def test_lazy_containers_are_not_made_to_work(world: World) -> None:
    """transformers' auto mappings import every model when asked for their items."""
    lazy = """
        class Lazy(dict):
            def _no(self, *a): raise RuntimeError("touched")
            items = values = keys = __iter__ = __getitem__ = _no
        class LazyList(list):
            def _no(self, *a): raise RuntimeError("touched")
            __iter__ = __getitem__ = __len__ = _no
        from .attention import forward
        MAPPING = Lazy(f=forward)
        LIST = LazyList([forward])
        class Proxy:
            @property
            def __class__(self): raise RuntimeError("touched")
        PROXY = Proxy()
        PROXY.f = forward
    """
    world.install(files={"lazy.py": lazy})
    world.patch()
    module = world.load("lazy")
    assert fsp.apply()["up.one"].state is State.APPLIED
    assert dict.__getitem__(module.MAPPING, "f") is list.__getitem__(module.LIST, 0) is world.load().forward


# --- other patchers ------------------------------------------------------------------------------------------------

PLAIN = "def theirs(x, *, scale=1):\n    return -x\n"
WRAPS = (
    "import functools\ndef wrap(f):\n    @functools.wraps(f)\n    def inner(*a, **k):\n        return f(*a, **k)\n"
    "    return inner\ntheirs = wrap(original)\n"
)
CLOSURE = (
    "def wrap(f):\n    def inner(*a, **k):\n        return f(*a, **k)\n    return inner\ntheirs = wrap(original)\n"
)
PROXY = (
    "import wrapt\n@wrapt.decorator\ndef deco(wrapped, instance, args, kwargs):\n    return wrapped(*args, **kwargs)\n"
    "theirs = deco(original)\n"
)
FUNCTION_WRAPPER = (
    "import wrapt\ndef w(wrapped, instance, args, kwargs):\n    return wrapped(*args, **kwargs)\n"
    "theirs = wrapt.FunctionWrapper(original, w)\n"
)


@pytest.mark.parametrize("source", [PLAIN, WRAPS, CLOSURE, PROXY, FUNCTION_WRAPPER])
def test_someone_elses_function_is_a_conflict_that_names_them(world: World, source: str) -> None:
    world.install()
    world.patch()
    module = world.load()
    theirs = foreign_function(source, original=module.forward)
    module.forward = theirs
    status = fsp.apply()["up.one"]
    assert status.state is State.CONFLICT
    assert "other_patcher.monkey_patch" in status.reason
    assert f"{world.name}.attention:forward" in status.reason
    assert module.forward is theirs
    with pytest.raises(PatchError, match="conflict"):
        fsp.apply("up.one")


def test_another_function_of_the_same_upstream_is_a_conflict(world: World) -> None:
    world.install()
    world.patch()
    module, user = world.load(), world.load("user")
    module.forward = user.call
    status = fsp.apply()["up.one"]
    assert status.state is State.CONFLICT
    assert f"{world.name}.user" in status.reason


def test_an_execed_function_is_a_conflict(world: World) -> None:
    world.install()
    world.patch()
    module = world.load()
    names: dict[str, Any] = {"__name__": "axolotl_like"}
    exec("def forward(x, *, scale=1):\n    return 0", names)
    module.forward = names["forward"]
    status = fsp.apply()["up.one"]
    assert status.state is State.CONFLICT
    assert "<string>" in status.reason
    assert "axolotl_like" in status.reason


def test_a_swapped_class_is_a_conflict(world: World) -> None:
    world.install()
    world.patch(world.target("Base.step"))
    module = world.load()

    class Base:  # as Liger does
        def step(self, x: int) -> int:
            return 0

    module.Base = Base
    assert fsp.apply()["up.one"].state is State.CONFLICT


def test_a_deleted_attribute_is_a_conflict(world: World) -> None:
    world.install()
    world.patch()
    del world.load().forward
    status = fsp.apply()["up.one"]
    assert status.state is State.CONFLICT
    assert "removed or replaced" in status.reason


DECORATED = """
import contextlib, functools, torchlike
from .tools import deprecate, proxied
@proxied
def own_proxy(x): return x
@deprecate("x")
def own(x): return x
@functools.lru_cache(maxsize=None)
def cached(x): return x
@contextlib.contextmanager
def managed(x): yield x
@torchlike.no_grad()
def graded(x): return x
from .tools import imported
assigned = deprecate("y")(lambda x: x)
"""
TOOLS = """
import functools, wrapt
@wrapt.decorator
def proxied(wrapped, instance, args, kwargs): return wrapped(*args, **kwargs)
def deprecate(name):
    def decorate(f):
        @functools.wraps(f)
        def inner(*a, **k): return f(*a, **k)
        return inner
    return decorate
def imported(x): return x
"""
TORCHLIKE = """
import functools
def no_grad():
    def decorate(f):
        @functools.wraps(f)
        def inner(*a, **k): return f(*a, **k)
        return inner
    return decorate
"""


@pytest.mark.parametrize("source", [WRAPS, PROXY])
@pytest.mark.parametrize("name", ["own", "own_proxy", "cached", "managed", "graded", "imported", "assigned"])
def test_upstreams_own_decorators_are_no_conflict_and_foreign_ones_are(world: World, name: str, source: str) -> None:
    world.install(files={"attention.py": DECORATED, "tools.py": TOOLS})
    (world.folder / "torchlike.py").write_text(TORCHLIKE)
    world.patch(world.target(name, lambda original, *a: original(*a)))
    module = world.load()
    status = fsp.apply()["up.one"]
    assert status.state is State.APPLIED, status.reason
    fsp.unapply()
    setattr(module, name, foreign_function(source, original=getattr(module, name)))
    status = fsp.apply()["up.one"]
    assert status.state is State.CONFLICT
    assert "other_patcher.monkey_patch" in status.reason
    sys.modules.pop("torchlike")


@pytest.mark.parametrize("source", [PLAIN, CLOSURE])
def test_replaced_after_us_is_shadowed_and_not_overwritten(
    world: World, source: str, log: pytest.LogCaptureFixture
) -> None:
    world.install()
    world.patch()
    module = world.load()
    fsp.apply()
    theirs = foreign_function(source, original=module.forward)
    module.forward = theirs
    status = fsp.status()["up.one"]
    assert status.state is State.SHADOWED
    assert "other_patcher.monkey_patch" in status.reason
    assert any(r.levelno == logging.WARNING for r in log.records)
    assert fsp.apply()["up.one"].state is State.SHADOWED
    assert module.forward is theirs
    with pytest.raises(PatchError, match="other_patcher"):
        fsp.unapply("up.one")
    assert fsp.unapply()["up.one"].state is State.SHADOWED
    assert module.forward is theirs


@pytest.mark.parametrize("source", [WRAPS, PROXY, FUNCTION_WRAPPER])
def test_a_wrapper_that_provably_reaches_ours_counts_with_a_note(world: World, source: str) -> None:
    world.install()
    world.patch()
    module = world.load()
    fsp.apply()
    ours = module.forward
    module.forward = foreign_function(source, original=ours)
    status = fsp.status()["up.one"]
    assert status.state is State.APPLIED
    assert "other_patcher.monkey_patch" in status.reason
    assert status.targets[0].state == "wrapped"
    assert fsp.apply()["up.one"].state is State.APPLIED
    assert module.forward(1) == 1001
    with pytest.raises(PatchError, match="other_patcher"):
        fsp.unapply("up.one")
    module.forward = ours
    fsp.unapply("up.one")
    assert module.forward(1) == 1


def test_when_the_other_leaves_we_are_applied_again(world: World) -> None:
    world.install()
    world.patch()
    module = world.load()
    fsp.apply()
    ours = module.forward
    module.forward = foreign_function(PLAIN)
    assert state() is State.SHADOWED
    module.forward = ours
    assert state() is State.APPLIED


def test_someone_restored_upstreams_own(world: World) -> None:
    world.install()
    world.patch()
    module = world.load()
    original = module.forward
    fsp.apply()
    module.forward = original
    assert state() is State.SHADOWED
    fsp.apply()
    assert module.forward(1) == 1001


def test_a_none_guard_in_either_order_is_one_wrapper_of_ours(world: World) -> None:
    """A third party guards against None; whoever comes second must not double ours."""
    guard = (
        "import functools\ndef wrap(f):\n    @functools.wraps(f)\n    def inner(x, **k):\n"
        "        return None if x is None else f(x, **k)\n    return inner\ntheirs = wrap(original)\n"
    )
    world.install()
    world.patch()
    module = world.load()
    fsp.apply()
    module.forward = foreign_function(guard, original=module.forward)
    fsp.apply()
    assert (module.forward(1), module.forward(None)) == (1001, None)
    assert len(list(depth(module.forward))) == 3


def depth(function: Any) -> Any:
    while function is not None:
        yield function
        function = getattr(function, "__wrapped__", None)


# --- unapply, applied ----------------------------------------------------------------------------------------------


def test_unapply_disarms(world: World) -> None:
    world.install()
    world.patch()
    fsp.apply()
    fsp.unapply()
    assert world.load().forward(1) == 1
    assert state() is State.DISABLED
    fsp.unapply()  # and again is nothing


def test_apply_after_unapply_arms_again(world: World) -> None:
    world.install()
    world.patch()
    fsp.apply()
    fsp.unapply()
    fsp.apply()
    assert world.load().forward(1) == 1001


def test_applied_is_scoped_and_keeps_what_was_there(world: World) -> None:
    world.install()
    world.patch(id="up.one")
    world.patch(world.target("helper"), id="up.two")
    module = world.load()
    fsp.apply("up.one")

    def block() -> None:
        with fsp.applied() as report:
            assert report["up.two"].state is State.APPLIED
            assert module.helper(1) == 1001
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        block()
    assert module.helper(1) == 1
    assert module.forward(1) == 1001
    with fsp.applied("up.two"):
        assert module.helper(1) == 1001
    assert module.helper(1) == 1


def test_applied_takes_back_when_a_named_patch_fails(world: World) -> None:
    world.install()
    world.patch(id="up.one")
    world.patch(world.target("Model.supported", boom, kind="value"), id="up.two")
    module = world.load()
    with pytest.raises(PatchError), fsp.applied("up.one", "up.two"):
        pytest.fail("the block ran without the patches that were asked for")
    assert module.forward(1) == 1


# --- threads and forks ---------------------------------------------------------------------------------------------


def test_concurrent_apply_and_import_give_one_wrapper(world: World) -> None:
    world.install()
    world.patch()
    barrier = threading.Barrier(12)
    errors: list[BaseException] = []

    def work(number: int) -> None:
        try:
            barrier.wait()
            for _ in range(5):
                world.load() if number % 3 == 0 else fsp.apply() if number % 3 == 1 else fsp.status()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not errors
    assert not any(thread.is_alive() for thread in threads)
    assert state() is State.APPLIED
    assert len(list(depth(world.load().forward))) == 2


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_fork_inherits_state_and_gets_its_own_lock(world: World) -> None:
    world.install(files=TWO_MODULES)
    world.patch(world.target("forward"), world.target("other", module="late"))
    world.load()
    fsp.apply()
    held, go = threading.Event(), threading.Event()

    def hold() -> None:
        with _engine._lock:
            held.set()
            go.wait(0.3)

    holder = threading.Thread(target=hold)
    holder.start()
    held.wait()
    context = multiprocessing.get_context("fork")
    queue = context.SimpleQueue()

    def child() -> None:
        thread = threading.Thread(target=world.load, args=("late",))
        thread.start()
        thread.join(20)  # with the parent's lock, another thread than the one that forked would wait for ever
        queue.put((fsp.status()["up.one"].state.value, world.load("late").other(1), world.load().forward(1)))

    process = context.Process(target=child)
    process.start()
    process.join(60)
    holder.join()
    assert process.exitcode == 0
    assert queue.get() == ("applied", 1001, 1001)
    assert state() is State.ARMED


def test_pickled_methods_and_wrapt_users_still_work(world: World) -> None:
    world.install()
    world.patch(world.target("Base.step", add_one))
    module = world.load()
    fsp.apply()
    method = pickle.loads(pickle.dumps(module.Base().step))
    assert method(1) == 1002
    assert wrapt.FunctionWrapper(module.Base.step, lambda w, i, a, k: w(*a, **k))(module.Base(), 1) == 1002
    assert functools.partial(module.Base.step, module.Base())(1) == 1002
