"""How ``verl.fp32-islands`` brings the fp32 values through verl's cast, and makes FSDP2 units of them."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import logging
import sys
from collections.abc import Callable, Iterator, MutableMapping
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.utils.weak import WeakIdKeyDictionary
from transformers import PreTrainedModel

from fsdp_sink_patches.fsdp import fp32_units, listed_in_fp32, shard_fp32_units

_log = logging.getLogger("fsdp_sink_patches")

_exact: MutableMapping[nn.Parameter, Tensor] = WeakIdKeyDictionary()
"""The fp32 values of each parameter that a cast has rounded, for as long as the parameter lives."""

_to_load: MutableMapping[nn.Module, dict[str, Tensor]] = WeakKeyDictionary()
"""The fp32 values of each sharded model by name, until they are loaded."""

_warned: set[str] = set()


@contextlib.contextmanager
def remembering(context: Callable[[], Any]) -> Iterator[None]:
    """verl's ``context`` for building a model; while it is open, a cast of a model remembers what it rounds.

    ``_apply`` is what ``to``, ``half`` and ``bfloat16`` end in, also that of a value head around the model.
    """
    own = vars(PreTrainedModel).get("_apply")
    upstream: Callable[..., Any] = PreTrainedModel._apply

    def remember(self: Any, *a: Any, **k: Any) -> Any:
        kept = list(_in_fp32(self))
        result = upstream(self, *a, **k)
        for owner, key, value in kept:
            _remember(owner, key, value)
        return result

    kind: Any = PreTrainedModel
    kind._apply = remember
    try:
        with context():
            yield
    finally:
        if vars(kind).get("_apply") is remember:
            if own is None:
                del kind._apply
            else:
                kind._apply = own


def _in_fp32(model: nn.Module) -> Iterator[tuple[nn.Module, str, Tensor]]:
    """What ``model`` lists and has in fp32: the module that holds it, its name there, its values."""
    for name in listed_in_fp32(model):
        place, _, key = name.rpartition(".")
        owner = model.get_submodule(place)
        value: Tensor = getattr(owner, key)
        if value.dtype == torch.float32:
            yield owner, key, value.detach()


def _remember(owner: nn.Module, key: str, value: Tensor) -> None:
    now = getattr(owner, key)
    if now.dtype.itemsize >= 4:
        return
    if not isinstance(now, nn.Parameter):
        owner._buffers[key] = value.to(now.device)
    elif not now.is_meta:  # stays rounded until FSDP2 takes it: FSDP1 can't mix dtypes
        _exact[now] = value


def apply_fsdp2(original: Callable[..., Any], model: nn.Module, fsdp_kwargs: dict[str, Any], config: Any) -> Any:
    """verl's ``apply_fsdp2`` after :func:`shard_fp32_units`; the units' modules are not wrapped again."""
    units = fp32_units(model, found=False)
    whole = fsdp_kwargs["mp_policy"].param_dtype in (None, torch.float32)
    if not units or (whole and all(value.dtype == torch.float32 for value in model.parameters())):
        return original(model, fsdp_kwargs, config)
    exact = {
        name: _exact[value]
        for name, value in model.named_parameters()
        if value in _exact and torch.equal(_exact[value].to(value), value)  # else something was loaded since
    }
    passed = ("mesh", "reshard_after_forward", "offload_policy")
    try:
        if "ignored_params" not in inspect.signature(fully_shard).parameters:
            raise ValueError(f"torch {torch.__version__} has no fully_shard(ignored_params=)")
        shard_fp32_units(model, found=False, **{name: fsdp_kwargs[name] for name in passed if name in fsdp_kwargs})
    except ValueError as error:  # nothing is changed then
        _warn(type(model).__name__, error)
        return original(model, fsdp_kwargs, config)
    _to_load[model] = exact
    for name in units.modules:
        _without_autocast(model.get_submodule(name), fsdp_kwargs["mesh"].device_type)
    with _own_units_left_alone(model):
        return original(model, fsdp_kwargs, config)


@contextlib.contextmanager
def _own_units_left_alone(model: nn.Module) -> Iterator[None]:
    """While open, verl's ``fully_shard`` skips what is a unit already, and casts the inputs of ``model`` alone."""
    names = vars(sys.modules["verl.utils.fsdp_utils"])
    upstream = names["fully_shard"]

    def shard(module: Any, **options: Any) -> Any:
        if isinstance(module, FSDPModule):  # an lm_head or a tower that the model lists
            return module
        if module is not model:
            options["mp_policy"] = dataclasses.replace(options["mp_policy"], cast_forward_inputs=False)
        return upstream(module, **options)

    names["fully_shard"] = shard
    try:
        yield
    finally:
        names["fully_shard"] = upstream


def _without_autocast(module: nn.Module, device_type: str) -> None:
    """A module that is listed as a whole is written for fp32 weights: no autocast around it in transformers."""
    upstream = module.forward

    @functools.wraps(upstream)
    def forward(*a: Any, **k: Any) -> Any:
        with torch.autocast(device_type, enabled=False):
            return upstream(*a, **k)

    module.forward = forward


def give_exact(model: nn.Module, full_state: dict[str, Tensor]) -> None:
    """Put the values that the cast has rounded into rank 0's ``full_state``; on other ranks it is on meta."""
    for name, value in _to_load.pop(model, {}).items():
        if name in full_state:
            full_state[name] = value


def _warn(model: str, error: ValueError) -> None:
    if model not in _warned:
        _warned.add(model)
        _log.warning(
            "verl.fp32-islands: found that the fp32 parameters of %s can't be FSDP2 units (%s); expected units that "
            "stay fp32. verl wraps the model without them, all in its param_dtype; to have them in fp32, remove the "
            "cause, or set both fsdp_config.model_dtype and fsdp_config.mixed_precision.param_dtype to fp32.",
            model,
            error,
        )
