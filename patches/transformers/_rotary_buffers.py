"""Rotary modules whose frequencies live outside them.

A module is taken on by giving it a class of its own, derived from its class and of the same name, as FSDP2 does. That
class lends upstream's forward the frequencies themselves, and shows copies of them to everyone else.
"""

from __future__ import annotations

import copy
import copyreg
import functools
import inspect
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

import fsdp_sink_patches
from fsdp_sink_patches.ops.rope.frequencies import Frequencies, copied, frequencies, is_real

_log = logging.getLogger("fsdp_sink_patches")


@dataclass
class _Held:
    """The frequencies of one module.

    Args:
        source: where they come from; held so that other modules of the same config share it.
        truth: fp32, on the module's device, read by upstream's forward and handed to nobody else.
        dynamic: upstream's forward replaces the frequencies when a row is longer, or short again.
        lengths: the module's ``max_seq_len_cached`` attributes that ``truth`` belongs to (dynamic types).
        shown: what the module's attributes hold between forwards, with its ``_version`` and that of the truth at the
            time when both were equal.
        lent: what upstream's forward was last handed; in an fp64 model that is not ``truth`` itself.
        rebuilt: ``source`` is what the module gives when it is built again, so that it can follow a changed config.
        looked: a write in place was looked at; DDP writes before every forward, and looking waits for the device.
    """

    source: Frequencies
    truth: dict[str, Tensor]
    dynamic: bool
    lengths: tuple[Any, ...]
    shown: dict[str, tuple[Tensor, int, int]] = field(default_factory=dict)
    lent: dict[str, Tensor] = field(default_factory=dict)
    rebuilt: bool = False
    looked: bool = False


_held: WeakKeyDictionary[nn.Module, _Held] = WeakKeyDictionary()  # not in the modules: a pickle would carry it
_warned: set[type] = set()


# --- taking modules on ---------------------------------------------------------------------------------------------


def hold(model: nn.Module, fresh: bool) -> None:
    """Take on the rotary modules of ``model``, and put right those that are.

    Args:
        model: any module; each of its modules that has non-persistent ``*inv_freq`` buffers counts.
        fresh: its constructor has just ended, so that values, where there are any, are right.

    Under a mode that makes tensors fake, which estimators and planners build in, the model stays upstream's.
    """
    if torch._C._len_torch_dispatch_stack():
        return
    for path, module in model.named_modules():
        if module in _held:
            if not fresh:
                _follow_config(module, _held[module])
            _show(module, _held[module], again=True)
        elif names := _names(module):
            source = _source(module, names, fresh)
            if source is None:
                _warn(path, module)
                continue
            if not isinstance(module, _Holding):
                upstream: Any = type(module)
                module.__class__ = _holding(upstream)
            dynamic = "dynamic" in _rope(module)
            _held[module] = held = _Held(source, source.copies(), dynamic, _lengths(module, dynamic))
            held.rebuilt = source is _built_again(module, names)
            _show(module, held, again=True)


def _follow_config(module: nn.Module, held: _Held) -> None:
    """Take over what the module's config says now, where it was changed and the weights are initialised again."""
    if not held.rebuilt or held.dynamic:
        return
    built = _built_again(module, list(held.truth))
    if built is not None and built is not held.source:
        held.source, held.truth = built, {**built.copies()}


def _names(module: nn.Module) -> list[str]:
    buffers = [name for name, buffer in module._buffers.items() if name.endswith("inv_freq") and buffer is not None]
    names = [name for name in buffers if name in module._non_persistent_buffers_set]
    if names and isinstance(vars(module).get("original_inv_freq"), Tensor):  # no buffer before 5.0
        names.append("original_inv_freq")
    return names


def _source(module: nn.Module, names: list[str], fresh: bool) -> Frequencies | None:
    """The frequencies of a module of this class and config; None if they can't be known."""
    now = {name: _place(module, name)[name] for name in names}
    real = all(map(is_real, now.values()))
    built = _built_again(module, names)
    if built is not None:
        expected = built.copies()
        if all(expected[name].shape == now[name].shape for name in names) and (
            not (fresh and real) or all(torch.equal(now[name], expected[name].to(now[name])) for name in names)
        ):
            return built
    # Built with arguments that it does not keep, or on a GPU, whose powers differ from the CPU's in the last bit.
    if fresh and real and all(tensor.dtype == torch.float32 for tensor in now.values()):
        return Frequencies(now)
    return None


def _built_again(module: nn.Module, names: list[str]) -> Frequencies | None:
    """What a new module shows that is built with the arguments this one keeps; None if it can't be or is another."""
    if isinstance(module, PreTrainedModel) or next(module.parameters(), None) is not None:
        return None  # a constructor of more than frequencies: it costs memory, and may build what it is part of
    cls: Any = module._upstream if isinstance(module, _Holding) else type(module)
    arguments = {}
    for parameter in inspect.signature(cls).parameters.values():
        if parameter.name in vars(module):
            arguments[parameter.name] = vars(module)[parameter.name]
        elif parameter.default is parameter.empty and parameter.kind not in (
            parameter.VAR_POSITIONAL,
            parameter.VAR_KEYWORD,
        ):
            return None

    def compute() -> dict[str, Tensor]:
        new = cls(**arguments)
        if _rope(new) != _rope(module):
            raise ValueError(f"{_rope(new)} is not {_rope(module)}")
        return {name: _place(new, name)[name] for name in names}

    key = (cls, repr({name: vars(a) if hasattr(a, "to_dict") else a for name, a in arguments.items()}), _rope(module))
    try:
        return frequencies(key, compute)
    except Exception:
        # A constructor that needs more than it keeps, or a mode that makes its tensors fake or meta. It decides nothing
        # by itself: values that the module has are kept, and where it has none, `_warn` says so.
        _log.debug("transformers.rotary-buffers: %s can't be built again", cls.__qualname__, exc_info=True)
        return None


def _rope(module: nn.Module) -> str:
    """What tells two modules of one class apart whose constructor had arguments that it did not keep."""
    kept = {name: value for name, value in vars(module).items() if name.endswith(("rope_type", "attention_scaling"))}
    return repr(sorted(kept.items()))


def _warn(path: str, module: nn.Module) -> None:
    if type(module) not in _warned:
        _warned.add(type(module))
        _log.warning(
            "transformers.rotary-buffers: found %s (%s) without fp32 values, and it can't be built again from what it "
            "keeps; expected one or the other. It is left to upstream: build the model on a real device, or copy its "
            "inv_freq from one that was.",
            path or "the module",
            type(module).__qualname__,
        )


# --- lending and showing -------------------------------------------------------------------------------------------


def _place(module: nn.Module, name: str) -> dict[str, Any]:
    """The dict that holds an attribute of a module; for ``original_inv_freq`` of 4.x it is the instance's."""
    return module._buffers if name in module._buffers else vars(module)


def _form(module: nn.Module, held: _Held) -> tuple[torch.device, torch.dtype] | None:
    """Device and dtype of the module's frequencies; None while they have no values (meta, fake, offloaded)."""
    buffer = module._buffers.get(next(iter(held.truth)))
    if buffer is None or not is_real(buffer):
        return None
    return buffer.device, torch.float64 if buffer.dtype == torch.float64 else torch.float32


def _move(held: _Held, device: torch.device) -> None:
    for name, truth in held.truth.items():
        if truth.device != device:
            held.truth[name] = copied(truth, device)


def _lengths(module: nn.Module, dynamic: bool) -> tuple[Any, ...]:
    if not dynamic:
        return ()
    return tuple(value for name, value in vars(module).items() if name.endswith("max_seq_len_cached"))


def _lend(module: nn.Module, held: _Held) -> bool:
    """Let the module's attributes be the truth itself; False if the module is not in a state to compute."""
    _catch_up(module, held)
    form = _form(module, held)
    if form is None:
        return False
    _move(held, form[0])
    _say_what_is_undone(module, held)
    for name, truth in held.truth.items():
        held.lent[name] = truth if form[1] == torch.float32 else truth.double()
        _place(module, name)[name] = held.lent[name]
    return True


def _say_what_is_undone(module: nn.Module, held: _Held) -> None:
    """Warn once a class of fp32 frequencies that somebody put in place by hand, since they are not used.

    Casts, moves and loads don't come here: they put the copies right at once.
    """
    if type(module) in _undone:
        return
    for name, (shown, version, _) in held.shown.items():
        now: Any = _place(module, name).get(name)
        assigned = is_real(now) and now is not shown and now is not held.truth.get(name)
        written = now is shown and shown._version != version and not held.looked
        held.looked |= written
        if (assigned or written) and not torch.equal(now.to(held.truth[name]), held.truth[name]):
            _undone.add(type(module))
            _log.warning(
                "transformers.rotary-buffers: found other values in %s of a %s than its config gives, and undid them; "
                "expected the config's. To scale positions, change config.rope_parameters (rope_scaling in 4.57) "
                "before the model is built; to keep values of your own, disable this patch.",
                name, type(module).__qualname__,
            )  # fmt: skip
            return


_undone: set[type] = set()


def _adopt(module: nn.Module, held: _Held) -> None:
    """Take over the tensors by which upstream's update of a dynamic type has replaced the ones it was lent."""
    for name, truth in held.truth.items():
        now = _place(module, name).get(name)
        shown = held.shown.get(name, (None,))[0]
        if now is truth or now is shown or now is held.lent.get(name) or not is_real(now):
            continue
        assert isinstance(now, Tensor)
        if now.dtype in (torch.float32, torch.float64):  # else cast meanwhile, not computed
            held.truth[name] = copied(now, now.device)
            held.shown.pop(name, None)


def _catch_up(module: nn.Module, held: _Held) -> None:
    """The same for an update that ran where nothing was lent, in a compiled graph or while the patch was off."""
    lengths = _lengths(module, held.dynamic)
    if len(lengths) != len(held.lengths) or any(a is not b for a, b in zip(lengths, held.lengths, strict=True)):
        _adopt(module, held)
        held.lengths = lengths


def _show(module: nn.Module, held: _Held, again: bool = False) -> None:
    """Let the module's attributes be copies of the truth.

    Args:
        module: the module.
        held: its frequencies.
        again: fill copies that look untouched too; a write through ``.data`` or by a collective does not show.
    """
    _catch_up(module, held)
    form = _form(module, held)
    if form is None:
        for name in held.truth:
            now = _place(module, name).get(name)
            if type(now) is Tensor and now.dtype != torch.float64:  # on meta, to be materialised in this dtype
                _place(module, name)[name] = now.to(torch.float32)
        return
    device, dtype = form
    _move(held, device)
    for name, truth in held.truth.items():
        shown, *versions = held.shown.get(name, (None, 0, 0))
        if shown is None or (shown.device, shown.dtype) != (device, dtype):
            shown = copied(truth, device, dtype)
        elif again or versions != [shown._version, truth._version]:
            with torch.no_grad():
                shown.copy_(truth)
        held.shown[name] = (shown, shown._version, truth._version)
        _place(module, name)[name] = shown


# --- the class -----------------------------------------------------------------------------------------------------


def _in_force(module: nn.Module) -> _Held | None:
    """What is held for ``module`` while the patch is applied; after ``unapply`` every module is upstream's."""
    return _held.get(module) if _is_ours(PreTrainedModel.post_init) else None


@functools.lru_cache(maxsize=8)
def _is_ours(post_init: Callable[..., Any]) -> bool:
    """Whether what is in ``post_init``'s place reaches the patch; looked at again only when something else is there."""
    return fsdp_sink_patches.status()["transformers.rotary-buffers"].state is fsdp_sink_patches.State.APPLIED


class _Holding(nn.Module):
    """What the class of a module that is taken on has before upstream's class."""

    _upstream: type

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        # Called again on a module that exists, with another config: what it builds now is what is held from here on.
        _held.pop(self, None)
        super().__init__(*args, **kwargs)
        if _is_ours(PreTrainedModel.post_init):
            hold(self, fresh=True)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        held = None if torch.compiler.is_compiling() else _in_force(self)
        if held is None or not _lend(self, held):
            return super().forward(*args, **kwargs)
        try:
            return super().forward(*args, **kwargs)
        finally:
            _adopt(self, held)
            _show(self, held)

    def _apply(self, fn: Callable[[Tensor], Tensor], *args: Any, **kwargs: Any) -> Any:
        held = _in_force(self)
        if held is not None:
            _catch_up(self, held)
        super()._apply(fn, *args, **kwargs)  # type: ignore[no-untyped-call]
        if held is not None:
            _show(self, held, again=True)
        return self

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        if (held := _in_force(self)) is not None:
            _show(self, held, again=True)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        twin = memo[id(self)] = type(self).__new__(type(self))
        twin.__setstate__(copy.deepcopy(vars(self), memo))  # type: ignore[no-untyped-call]
        if (held := _in_force(self)) is not None:
            _catch_up(self, held)
            truth = {name: copied(tensor, tensor.device) for name, tensor in held.truth.items()}
            _held[twin] = _Held(
                held.source, truth, held.dynamic, _lengths(twin, held.dynamic), rebuilt=held.rebuilt, looked=held.looked
            )
            _show(twin, _held[twin])
        return twin

    def __reduce_ex__(self, protocol: Any) -> Any:
        # Upstream's class, so that a pickle loads where this package is not. Not through copyreg.__newobj__: with that
        # pickle insists on the object's own class.
        reduced: Any = super().__reduce_ex__(protocol)
        make, arguments, *state = reduced
        if arguments[0] is _holding(self._upstream):
            make, arguments = copyreg._reconstructor, (self._upstream, object, None)  # type: ignore[attr-defined]
        return make, arguments, *state


@functools.cache
def _holding(upstream: type) -> type:
    names = {name: getattr(upstream, name) for name in ("__module__", "__qualname__", "__doc__")}
    return type(upstream.__name__, (_Holding, upstream), {**names, "_upstream": upstream})
