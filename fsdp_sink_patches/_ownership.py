"""Who holds an attribute now, and who still holds what it was before.

The owner of a function is the file its code came from. ``functools.wraps`` copies ``__module__`` and ``__name__``, so
those lie; ``__code__.co_filename`` does not, and no other patcher has to cooperate for us to name it.
"""

from __future__ import annotations

import ast
import gc
import inspect
import os
import sys
import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from fsdp_sink_patches import _fingerprint

OURS = "fsdp_sink_patches"


class Missing(LookupError):  # noqa: N818 (reads as what it is)
    """The attribute, or a class on the way to it, is not in the imported module."""


@dataclass(frozen=True)
class Place:
    """An attribute as it is stored, without the descriptor protocol (``getattr`` on a class binds).

    Args:
        holder: the module or class that the path names.
        raw: what is stored: a function, staticmethod, classmethod, or value.
        inherited: ``raw`` comes from a base class; the holder has no such attribute of its own.
    """

    holder: Any
    name: str
    raw: Any
    inherited: bool


def place(module: types.ModuleType, qualname: str) -> Place:
    """Look at ``qualname`` in an imported module. Raises `Missing`."""
    holder: Any = module
    *outer, name = qualname.split(".")
    try:
        for part in outer:
            holder = inspect.getattr_static(holder, part)
        raw = inspect.getattr_static(holder, name)
    except AttributeError:
        raise Missing(f"{module.__name__}:{qualname}") from None
    return Place(holder, name, raw, inherited=name not in vars(holder))


def inner(raw: Any) -> Any:
    """The function inside a staticmethod or classmethod, else ``raw`` itself."""
    return raw.__func__ if isinstance(raw, staticmethod | classmethod) else raw


def reaches(raw: Any, ours: Any) -> bool:
    """Whether a foreign wrapper leads to ``ours`` through ``__wrapped__``.

    That attribute is what ``functools.wraps`` and wrapt proxies set to the function they call; a wrapper without it may
    call ours too, but there is no proof of it.
    """
    wanted, current = inner(ours), inner(raw)
    for _ in range(100):
        if current is wanted:
            return True
        current = inner(getattr(current, "__wrapped__", None))
        if current is None:
            return False
    return False


def owner(raw: Any) -> str:
    """The module whose code an attribute runs, as well as it can be told; for messages."""
    value = inner(raw)
    if _is_proxy(value):
        wrapper = getattr(value, "_self_wrapper", None)
        # wrapt.decorator puts an adapter of its own in between; the user's function is in its closure or __wrapped__.
        return f"{owner(wrapper)} (a {type(value).__name__})" if wrapper is not None else f"a {type(value).__name__}"
    if isinstance(value, partial):
        return owner(value.func)
    if isinstance(value, types.MethodType):
        return owner(value.__func__)
    if isinstance(value, property):
        return owner(value.fget)
    code = getattr(value, "__code__", None)
    if isinstance(code, types.CodeType):
        module = _module_of_file(code.co_filename)
        if module is None and isinstance(value, types.FunctionType):
            module = value.__globals__.get("__name__")
            module = f"{module}, by exec" if module else None
        return f"{module or 'code'} ({code.co_filename}:{code.co_firstlineno})"
    if isinstance(value, type):
        return f"{value.__module__} (class {value.__qualname__})"
    return f"an unknown owner (the value is {value!r:.80})"


def foreign(at: Place, module: types.ModuleType, qualname: str) -> str | None:
    """Who else than upstream holds the attribute, or None when it is upstream's own.

    An undecorated ``def`` in the source must be code of that very file. A decorated one, an imported one and an
    inherited one may be code of the upstream package, or of the packages that its decorators come from.
    """
    nodes = _definition_nodes(module, qualname)
    value = inner(at.raw)
    if len(nodes) == 1 and isinstance(nodes[0], ast.Assign | ast.AnnAssign) and nodes[0].value is not None:
        try:
            written = ast.literal_eval(nodes[0].value)
        except ValueError:
            pass  # not a literal, so nothing to compare with; its type and code are looked at below
        else:
            return None if value == written else f"{owner(value)}; the source says {written!r:.80}"
    file = getattr(module, "__file__", None)
    plain = bool(nodes) and all(
        isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not node.decorator_list for node in nodes
    )
    if plain and not at.inherited and file is not None:
        # type(), not isinstance(): a wrapt proxy claims the class of what it wraps.
        same = type(value) is types.FunctionType and os.path.realpath(value.__code__.co_filename) == os.path.realpath(
            file
        )
        return None if same else owner(at.raw)
    # A proxy forwards __code__, so ask the function that does its work.
    origin = _origin(getattr(value, "_self_wrapper", value) if _is_proxy(value) else value)
    allowed = {module.__name__.partition(".")[0], *_decorator_packages(module, nodes)}
    if at.inherited:
        bases = [base for base in at.holder.__mro__ if at.name in vars(base)] if isinstance(at.holder, type) else []
        allowed.update(base.__module__.partition(".")[0] for base in bases[:1])
    return None if origin is None or origin in allowed else owner(at.raw)


def _definition_nodes(module: types.ModuleType, qualname: str) -> list[ast.stmt]:
    try:
        return _fingerprint.definitions(f"{module.__name__}:{qualname}")
    except (ModuleNotFoundError, SyntaxError, OSError):
        return []  # a module made in memory: only its runtime objects can be looked at


def _origin(value: Any) -> str | None:
    """The top-level package whose code ``value`` runs; None when it says nothing (a plain value)."""
    code = getattr(value, "__code__", None)
    if isinstance(code, types.CodeType):
        name = _module_of_file(code.co_filename)
        return name.partition(".")[0] if name else code.co_filename
    if isinstance(value, partial):
        return _origin(value.func)
    if isinstance(value, type):
        return value.__module__.partition(".")[0]
    if not callable(value):
        return None
    return type(value).__module__.partition(".")[0]


def _decorator_packages(module: types.ModuleType, nodes: list[ast.stmt]) -> Iterator[str]:
    for node in nodes:
        for decorator in getattr(node, "decorator_list", ()):
            expression: ast.expr = decorator
            while isinstance(expression, ast.Call | ast.Attribute):
                expression = expression.func if isinstance(expression, ast.Call) else expression.value
            if isinstance(expression, ast.Name):
                found = vars(module).get(expression.id)
                name = found.__name__ if isinstance(found, types.ModuleType) else getattr(found, "__module__", None)
                if isinstance(name, str):
                    yield name.partition(".")[0]
                # What a decorator returns may be made elsewhere: functools.lru_cache, contextlib.contextmanager.
                if (origin := _origin(found)) is not None:
                    yield origin


def _is_proxy(value: Any) -> bool:
    """A wrapt proxy: it forwards ``__code__`` and ``__class__``, so only its real type tells."""
    return any(base.__module__.partition(".")[0] in ("wrapt", "_wrappers") for base in type(value).__mro__)


def _module_of_file(file: str) -> str | None:
    wanted = os.path.realpath(file)
    for name, module in list(sys.modules.items()):
        found = getattr(module, "__file__", None) if isinstance(module, types.ModuleType) else None
        # Names first: realpath of every module costs a system call each.
        if found and os.path.basename(found) == os.path.basename(file) and os.path.realpath(found) == wanted:
            return name
    return None


# --- stale references ----------------------------------------------------------------------------------------------


def rebind(swaps: Mapping[int, tuple[Any, Any]], package: str) -> None:
    """Replace old objects by new ones wherever a name was bound to them earlier (``from x import f``).

    Looks at the globals of every loaded module, and, in the modules of the upstream ``package``, at class attributes
    and at the items of dicts and lists that are globals or class attributes (its registries). Our own modules are left
    alone. Restoring is the same sweep the other way, so that names bound while the patch was on are restored too.

    Args:
        swaps: ``id(old) -> (old, new)``; only functions and classes belong here, small values are shared by chance.
        package: the upstream's top-level name.
    """
    for name, module in list(sys.modules.items()):
        # type() and the base classes' own methods throughout: lazy modules, lazy dicts (transformers' auto mappings
        # import every model when asked for their items) and proxies must be looked at without running their code.
        if not issubclass(type(module), types.ModuleType) or name.partition(".")[0] == OURS:
            continue
        upstream = name.partition(".")[0] == package
        namespace = vars(module)
        for key, value in list(namespace.items()):
            if id(value) in swaps:
                namespace[key] = swaps[id(value)][1]
            elif not upstream or key.startswith("__"):
                continue
            elif issubclass(type(value), type) and value.__module__ == name:
                for attribute, held in list(vars(value).items()):
                    if id(held) in swaps:
                        type.__setattr__(value, attribute, swaps[id(held)][1])
                    else:
                        _rebind_items(held, swaps)
            else:
                _rebind_items(value, swaps)


def _rebind_items(container: Any, swaps: Mapping[int, tuple[Any, Any]]) -> None:
    if issubclass(type(container), dict):
        for key, value in list(dict.items(container)):
            if id(value) in swaps:
                dict.__setitem__(container, key, swaps[id(value)][1])
    elif issubclass(type(container), list):
        for index in range(list.__len__(container)):
            value = list.__getitem__(container, index)
            if id(value) in swaps:
                list.__setitem__(container, index, swaps[id(value)][1])


def holders(originals: Sequence[Any]) -> tuple[str, ...]:
    """Who keeps any of ``originals`` where no name can be rebound: closures, partials, methods, instances.

    One walk over the heap for all of them. Containers that nothing can name (tuples, sets) are not reported.
    """
    found: set[str] = set()
    for referrer in gc.get_referrers(*originals):
        kind = type(referrer)  # not isinstance(): see `rebind`
        if issubclass(kind, types.CellType):
            found.update(_closures_over(referrer))
        elif issubclass(kind, partial):
            found.add(f"a functools.partial of {getattr(referrer.func, '__qualname__', referrer.func)}")
        elif issubclass(kind, types.MethodType):
            found.add(f"the bound method {referrer.__func__.__qualname__} of a {type(referrer.__self__).__qualname__}")
        elif issubclass(kind, dict):
            if not any(dict.get(referrer, "__wrapped__") is original for original in originals):
                found.update(_owners_of_dict(referrer))
        elif _attributes(referrer) is not None:
            found.update(_instance(referrer))
    return tuple(sorted(found))


_NAMESPACES = (types.ModuleType, type, types.FunctionType)  # their names are rebound, or belong to a wrapper


def _closures_over(cell: types.CellType) -> Iterator[str]:
    for closure in gc.get_referrers(cell):
        if isinstance(closure, tuple):
            for function in gc.get_referrers(closure):
                if isinstance(function, types.FunctionType) and function.__closure__ is closure:
                    module = _module_of_file(function.__code__.co_filename) or function.__module__
                    if (module or "").partition(".")[0] != OURS:
                        yield f"the closure of {module}.{function.__code__.co_name}"


def _owners_of_dict(namespace: dict[Any, Any]) -> Iterator[str]:
    for referrer in gc.get_referrers(namespace):
        attributes = _attributes(referrer)
        if attributes is None:
            continue
        if attributes is namespace:
            yield from _instance(referrer)
        else:
            keys = [key for key, value in attributes.items() if value is namespace]
            yield from (f"the dict {key!r} of {who}" for key in keys for who in _instance(referrer))


def _attributes(value: Any) -> dict[str, Any] | None:
    """The ``__dict__`` of an instance, without running its class's code; None for what is not one."""
    if issubclass(type(value), _NAMESPACES):
        return None
    try:
        found = object.__getattribute__(value, "__dict__")
    except AttributeError:
        return None
    return found if type(found) is dict else None


def _instance(value: Any) -> Iterator[str]:
    kind = type(value)
    if kind.__module__.partition(".")[0] != OURS:
        yield f"an instance of {kind.__module__}.{kind.__qualname__}"
