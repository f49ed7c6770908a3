"""Which patches exist: found on disk, in one order, each id once.

A patch is a module ``patches/<upstream>/<slug>.py`` that holds ``PATCH``; a name starting with ``_`` is a helper.
"""

from __future__ import annotations

import difflib
import functools
import importlib
import pkgutil
from collections.abc import Iterable
from types import ModuleType

from fsdp_sink_patches._patch import Patch

_PACKAGE = "fsdp_sink_patches.patches"


class UnknownPatch(ValueError):  # noqa: N818 (reads as what it is: "except UnknownPatch")
    """An id that no patch has; ``id`` is that id and ``source`` says where it was named."""

    def __init__(self, id: str, known: Iterable[str], source: str = "argument") -> None:
        self.id = id
        self.source = source
        names = sorted(known)
        near = difflib.get_close_matches(id, names, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]!r}?" if near else f"the registered ids are: {', '.join(names) or 'none'}."
        super().__init__(f"{id!r} ({source}) is not a registered patch; {hint}")


@functools.cache
def _modules() -> dict[str, ModuleType]:
    package = importlib.import_module(_PACKAGE)
    found: dict[str, ModuleType] = {}
    for folder in pkgutil.iter_modules(package.__path__):
        if not folder.ispkg or folder.name.startswith("_"):
            continue
        upstream = importlib.import_module(f"{_PACKAGE}.{folder.name}")
        for file in pkgutil.iter_modules(upstream.__path__):
            if file.name.startswith("_"):
                continue
            module = importlib.import_module(f"{upstream.__name__}.{file.name}")
            patch = getattr(module, "PATCH", None)
            if not isinstance(patch, Patch):
                raise TypeError(
                    f"{module.__name__} holds no PATCH: found {patch!r}, expected a fsdp_sink_patches.Patch. "
                    "Declare one, or start the file's name with an underscore if it is a helper."
                )
            if patch.id in found:
                raise ValueError(
                    f"patch id {patch.id!r} is declared twice: in {found[patch.id].__name__} and in {module.__name__}. "
                    "Rename one of them."
                )
            found[patch.id] = module
    return dict(sorted(found.items()))


def patches() -> dict[str, Patch]:
    """Every registered patch by id, sorted by id.

    Raises:
        ValueError: two modules declare the same id.
        TypeError: a patch module holds no ``PATCH``.
    """
    return {id: module.PATCH for id, module in _modules().items()}


def module(id: str) -> ModuleType:
    """The module that declares the patch ``id``. Raises `UnknownPatch`."""
    try:
        return _modules()[id]
    except KeyError:
        raise UnknownPatch(id, _modules()) from None


def get(id: str) -> Patch:
    """The patch ``id``. Raises `UnknownPatch`."""
    patch: Patch = module(id).PATCH
    return patch
