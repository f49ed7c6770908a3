"""What must stay fp32 when a bf16 model goes into FSDP2, and how to wrap it so that it does.

Some models want a few parameters in fp32 beside bf16 weights: sinks, norms, hyper-connections, position_bias.
transformers keeps them so at ``from_pretrained(dtype=torch.bfloat16)``, and ``fully_shard`` then refuses the model
("FSDP expects uniform original parameter dtype"), because one FSDP unit has one dtype. The usual ways round it lose
what was wanted: cast everything to bf16, or leave the fp32 parameters out (``ignored_params``), and every rank trains
its own sinks (https://github.com/NVIDIA-NeMo/Automodel/issues/2143,
https://github.com/verl-project/verl/issues/7092).

    from fsdp_sink_patches.fsdp import shard_fp32_units

    shard_fp32_units(model, mesh)          # first; then as always:
    bf16 = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=bf16)
    fully_shard(model, mesh=mesh, mp_policy=bf16)

(``cast_forward_inputs=False``: what layers hand to each other is bf16 already, and the default would round fp32 cos and
sin, which are inputs of a layer.)

**How.** A module that is fp32 as a whole (a norm, a hyper-connection) becomes a unit of its own with an fp32 policy. A
bare fp32 parameter among bf16 ones (``self_attn.sinks``) has no module of its own. Here the module that reads it
becomes the fp32 unit, which holds its fp32 parameters and those of its sub-modules, one unit an attention; its bf16
weights go to the unit around it, the user's layer. So every parameter stays where upstream put it, under its own
name, a DTensor of the same mesh as all others, and the rest is plain FSDP2 with its own hooks on the inputs and
outputs of the attention: state dicts, distributed checkpoints, optimizer states, ``clip_grad_norm_``, accumulation,
activation checkpointing, HSDP.

**Why not otherwise**

- A holder sub-module for ``sinks`` (a parametrization, a property) gives the parameter another name. State-dict hooks
  hide that from ``state_dict()``, but not from ``named_parameters()``, and ``torch.distributed.checkpoint`` looks names
  up with ``getattr``, which would run the holder's all-gather. Without inputs, its gradient is reduced only when the
  whole backward is done.
- Replicated parameters and an all-reduce in a gradient hook are plain tensors among DTensors, which ``clip_grad_norm_``
  and full state dicts do not mix, and each later ``fully_shard`` must be told to ignore them.
- A unit for each linear layer of the attention, so that only fp32 is left in it, costs some ten collectives a layer;
  one unit over the list of them reduces gradients when its first module is done, and q and kv are parallel branches.

The one thing that ``fully_shard`` does not do by itself is to let the outer unit have the bf16 weights below a module
that is a unit already: it stops there. :class:`_Rest`, a child without parameters of its own, hands them to it.
"""

from __future__ import annotations

import inspect
import logging
import re
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecision, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.fsdp.wrap import CustomPolicy
from torch.distributed.tensor import DTensor

_LOGGER = logging.getLogger(__name__)


@dataclass(frozen=True)
class Fp32Units:
    """What of a model is fp32, by upstream's names; ``str()`` is a table with one line a kind.

    Attributes:
        modules: modules whose parameters are all fp32, outermost ones, in the order of the model.
        parameters: fp32 parameters beside which the module that reads them has others, in the order of the model. One
            of a child whose own forward never runs counts here: ``causal_conv1d_fn(..., self.conv1d.weight)``.
    """

    modules: tuple[str, ...]
    parameters: tuple[str, ...]

    def __bool__(self) -> bool:
        return bool(self.modules or self.parameters)

    def __str__(self) -> str:
        if not self:
            return "no fp32 units: nothing in this model wants fp32 among lower precision"
        return "\n".join(
            f"{title}: {kind} ({count})"
            for title, names in (("fp32 module", self.modules), ("fp32 parameter", self.parameters))
            for kind, count in _kinds(names).items()
        )


def _kinds(names: Iterable[str]) -> dict[str, int]:
    """Names with their numbers replaced by ``*``, and how many there are of each."""
    kinds: dict[str, int] = {}
    for name in names:
        kind = re.sub(r"(?<=\.)\d+(?=\.)", "*", name)
        kinds[kind] = kinds.get(kind, 0) + 1
    return kinds


def fp32_units(model: nn.Module, *, also: Iterable[str] = (), found: bool = True) -> Fp32Units:
    """Name what ``model`` wants in fp32; nothing is changed.

    A parameter is wanted in fp32 if

    - ``_keep_in_fp32_modules_strict`` of the model or of a sub-model has it (transformers 4.57 and newer), whatever
      dtype it is in now: after ``model.to(torch.bfloat16)`` these are the ones that should not have been cast;
    - or ``_keep_in_fp32_modules`` has it and the model holds fp16 parameters. At bf16 transformers gives that list no
      effect (DeepSeek-V4 names compressor projections there, for its FP8 loader), and neither do we;
    - or it is fp32 now and the model holds parameters of lower precision (not with ``found=False``);
    - or ``also`` has it.

    Args:
        model: before or after sharding, on any device, meta included.
        also: more names of modules or parameters, as in those lists: whole components of a dotted name, ``*`` for
            anything. ``("sinks",)`` is for gpt-oss, MiMo-V2-Flash and granite-swa, whose sinks upstream keeps in bf16.
        found: whether fp32 parameters that nobody names count, such as PEFT's adapters on a bf16 model.

    Returns:
        The names. Empty for a model that is fp32 throughout and asks for nothing, for example Llama.
    """
    return _units(model, _wanted(model, also, found))


def _units(model: nn.Module, wanted: set[int]) -> Fp32Units:
    modules: list[str] = []
    parameters: list[str] = []
    called = _called(model)

    def walk(module: nn.Module, name: str) -> None:
        inside = list(module.parameters())
        if not any(id(parameter) in wanted for parameter in inside):
            return
        if name and module in called and all(id(parameter) in wanted for parameter in inside):
            modules.append(name)
            return
        prefix = f"{name}." if name else ""
        parameters.extend(prefix + key for key, value in module._parameters.items() if id(value) in wanted)
        for key, child in module.named_children():
            walk(child, prefix + key)

    if len(wanted) < len(list(model.parameters())):  # else one dtype throughout: a single unit does
        walk(model, "")
    return Fp32Units(tuple(modules), tuple(parameters))


def _wanted(model: nn.Module, also: Iterable[str], found: bool = True) -> set[int]:
    """The ids of the parameters that should be fp32."""
    dtypes = {parameter.dtype for parameter in model.parameters()}
    lower = found and any(dtype.is_floating_point and dtype.itemsize < 4 for dtype in dtypes)
    wanted = {id(parameter) for parameter in model.parameters() if lower and parameter.dtype == torch.float32}
    return wanted | {id(value) for _, value in _listed(model, also) if isinstance(value, nn.Parameter)}


def listed_in_fp32(model: nn.Module) -> tuple[str, ...]:
    """The floating-point parameters and buffers that the lists of ``model`` and its sub-models name, by name.

    ``_keep_in_fp32_modules_strict``, and for a model with fp16 parameters ``_keep_in_fp32_modules``; see
    :func:`fp32_units`, which is about parameters alone. Buffers count here: ``model.to(torch.bfloat16)`` rounds a
    router's ``e_score_correction_bias`` as well.
    """
    return tuple(dict.fromkeys(name for name, _ in _listed(model)))


def _listed(model: nn.Module, also: Iterable[str] = ()) -> Iterator[tuple[str, torch.Tensor]]:
    lists = ["_keep_in_fp32_modules_strict"]
    if any(parameter.dtype == torch.float16 for parameter in model.parameters()):
        lists.append("_keep_in_fp32_modules")
    for prefix, module in model.named_modules():  # a sub-model's list speaks of its own part, also below PEFT's wrapper
        entries = [entry for name in lists for entry in getattr(module, name, None) or ()]
        if module is model:
            entries.extend(also)
        if not entries:
            continue
        pattern = "|".join(entry.replace("*", ".*") for entry in sorted(entries))
        search = re.compile(rf"(?:^|\.)(?:{pattern})(?:$|\.)").search
        for named in (module.named_parameters, module.named_buffers):
            for name, value in named(remove_duplicate=False):
                if search(name) and value.is_floating_point():
                    yield f"{prefix}.{name}" if prefix else name, value


def _called(model: nn.Module) -> set[nn.Module]:
    """The modules whose forward runs, so that a unit made of one is gathered then.

    Not: ModuleList, ParameterDict and the like, which have none; a child whose weights its parent's forward reads
    itself, as hybrid models do with ``conv1d`` (then they are the parent's parameters in all but name).
    """
    called = {module for module in model.modules() if type(module).forward is not nn.Module.forward}
    for module in model.modules():
        kind: Any = type(module)
        called -= {child for name, child in module.named_children() if name in _read_children(kind)}
    return called


@cache
def _read_children(cls: type[nn.Module]) -> frozenset[str]:
    """The names of the children whose weight or bias a forward of ``cls`` reads, by its source."""
    found: set[str] = set()
    for name in dir(cls):  # also slow_forward, cuda_kernels_forward and the like
        if "forward" in name and getattr(cls, name) is not getattr(nn.Module, name, None):
            try:
                source = inspect.getsource(inspect.unwrap(getattr(cls, name)))
            except (OSError, TypeError):  # no source, or no function
                continue
            found.update(re.findall(r"\bself\.(\w+)\.(?:weight|bias)\b(?!\.(?:dtype|device|shape)\b)", source))
    return frozenset(found)


def shard_fp32_units(
    model: nn.Module,
    mesh: DeviceMesh,
    *,
    also: Iterable[str] = (),
    found: bool = True,
    mp_policy: MixedPrecisionPolicy | None = None,
    reshard_after_forward: bool | int | None = None,
    offload_policy: OffloadPolicy | None = None,
) -> Fp32Units:
    """Shard what :func:`fp32_units` names over ``mesh`` as FSDP2 units of their own, which stay fp32.

    Call it once, on the whole model, before any ``fully_shard`` of a module that holds such parameters; then
    ``fully_shard`` the layers and the root as always. Parameters that are wanted in fp32 and are not (after
    ``model.to(torch.bfloat16)``, or on the meta device) become fp32; what rounding has lost stays lost.

    Inside the units parameters are gathered in fp32 and gradients reduced in fp32, and neither inputs nor outputs are
    cast: the module sees exactly what it sees in the unsharded model. All other parameters follow the policy of the
    ``fully_shard`` call that takes them. docs/fsdp.md says which dtype arrives where.

    Args:
        model: not compiled and not yet sharded; may be on meta (then ``to_empty`` and load after sharding, as always).
        mesh: the mesh that the layers are sharded on, 1-D (FSDP) or 2-D (HSDP).
        also, found: see :func:`fp32_units`.
        mp_policy: of the units, for another ``reduce_dtype`` or ``output_dtype``. ``param_dtype`` must be None or fp32;
            give ``cast_forward_inputs=False`` too, else the units compute on fp32 inputs.
        reshard_after_forward, offload_policy: of ``fully_shard``, for the units.

    Returns:
        What was sharded: nothing for a model that asks for nothing, which is left as it is.

    Raises:
        ValueError: a policy that is not fp32; a model already sharded; an fp32 parameter that is tied to one outside
            its unit; a bare fp32 parameter directly in the model or in one of its layers (``_no_split_modules``), which
            you are about to shard yourself; fp32 adapters of PEFT's ``target_parameters``. The model is unchanged then.
        RuntimeError: from the first forward, if no ``fully_shard`` has taken the rest of a unit's trainable weights
            (frozen ones would only stay whole on every rank, and nothing is said).
    """
    policy = mp_policy or MixedPrecisionPolicy(torch.float32, torch.float32, cast_forward_inputs=False)
    if policy.param_dtype not in (None, torch.float32):
        raise _error(
            f"found mp_policy.param_dtype={policy.param_dtype}",
            "None or torch.float32, since these units exist to be fp32",
            "give the bf16 policy to your own fully_shard calls only",
        )
    wanted = _wanted(model, also, found)
    names = _units(model, wanted)
    _say_without_gradient(model)
    if not names:
        return names
    called = _called(model)
    bare = sorted({_reader(model, name, called) for name in names.parameters})
    owners = [name for name in bare if not any(_below(name, other) for other in bare)]
    wholes = [name for name in names.modules if not any(_below(name, owner) for owner in owners)]
    _check(model, wanted, owners, wholes)

    for parameter in model.parameters():
        if id(parameter) in wanted and parameter.dtype != torch.float32:
            parameter.data = parameter.data.float()
    options: dict[str, Any] = {"mesh": mesh, "mp_policy": policy, "reshard_after_forward": reshard_after_forward}
    if offload_policy is not None:
        options["offload_policy"] = offload_policy
    layers = _layers(model)
    for name in wholes:
        whole = model.get_submodule(name)
        for module in reversed(list(whole.modules())):  # an fp32 tower is gathered layer by layer
            if module is whole or type(module).__name__ in layers:
                fully_shard(module, **options)
    for name in owners:
        unit = model.get_submodule(name)
        rest = [
            (module, key, value)
            for module in _outside_units(unit)
            for key, value in module._parameters.items()
            if value is not None and id(value) not in wanted
        ]
        fully_shard(unit, **options, ignored_params={value for _, _, value in rest})
        place, _, key = name.rpartition(".")
        while model.get_submodule(place) not in called:  # a ModuleList counts its children
            place, _, above = place.rpartition(".")
            key = f"{above}_{key}"
        model.get_submodule(place).add_module(f"rest_of_{key}", _Rest(name, unit, rest))
    return names


def _reader(model: nn.Module, parameter: str, called: set[nn.Module]) -> str:
    """The innermost module around ``parameter`` that is called: not a ParameterList."""
    name = parameter.rpartition(".")[0]
    while name and model.get_submodule(name) not in called:
        name = name.rpartition(".")[0]
    return name


def _layers(model: nn.Module) -> set[str]:
    """The classes of the layers that a training script makes units of."""
    return {name for module in model.modules() for name in getattr(module, "_no_split_modules", None) or ()}


def _below(name: str, other: str) -> bool:
    return name != other and (not other or name.startswith(f"{other}."))


def _outside_units(module: nn.Module) -> Iterator[nn.Module]:
    """``module`` and its sub-modules, without those that are FSDP2 units already and what is below them."""
    yield module
    for child in module.children():
        if not isinstance(child, FSDPModule):
            yield from _outside_units(child)


def _check(model: nn.Module, wanted: set[int], owners: list[str], wholes: list[str]) -> None:
    """Raise for what can't be sharded, before anything is."""
    layers = _layers(model)
    units = {model.get_submodule(name): name for name in [*owners, *wholes]}
    unit_of: dict[int, set[str]] = {}

    def walk(module: nn.Module, name: str, unit: str, sharded: bool) -> None:
        unit = unit or units.get(module, "")
        sharded = sharded or isinstance(module, FSDPModule)
        for key, value in module._parameters.items():
            if value is not None and id(value) in wanted:
                unit_of.setdefault(id(value), set()).add(unit or f"{name}.{key}")
                if sharded:
                    raise _error(
                        f"found {name}.{key} in an FSDP2 unit already",
                        "a model whose fp32 parameters are not sharded yet",
                        "call shard_fp32_units once, before the first fully_shard",
                    )
        for key, child in module.named_children():
            walk(child, f"{name}.{key}" if name else key, unit, sharded)

    walk(model, "", "", False)
    for name, module in model.named_modules():
        adapters = module if any(kind.__name__ == "ParamWrapper" for kind in type(module).__mro__) else None
        for key, child in adapters.named_children() if adapters else ():
            if key.startswith("lora_") and any(id(value) in wanted for value in child.parameters()):
                raise _error(
                    f"found fp32 adapters in {name}.{key}, whose weights PEFT's ParamWrapper reads, not calling them",
                    "adapters of target_parameters in the dtype of the weights they adapt",
                    "cast them to the base model's dtype: get_peft_model(..., autocast_adapter_dtype=False)",
                )
    for places in unit_of.values():
        if len(places) > 1:
            raise _error(
                f"found one fp32 parameter shared by {' and '.join(sorted(places))}",
                "fp32 parameters that belong to one unit, since an FSDP2 parameter is in one unit",
                "untie them, or make all of it one dtype",
            )
    for owner in owners:
        kind = type(model.get_submodule(owner)).__name__
        if not owner or kind in layers:
            raise _error(
                f"found a bare fp32 parameter directly in {owner or 'the model'} ({kind})",
                "it in a module inside a layer, because your own fully_shard makes this one a unit of another dtype",
                "move the parameter into a sub-module, or cast it to the dtype of the weights beside it",
            )


class _Rest(nn.Module):
    """The weights of an fp32 unit that are not fp32, for the unit around it.

    ``fully_shard(layer)`` asks every module below ``layer`` that is not below another unit for
    ``named_parameters(recurse=False)``. This module stands beside the unit and answers with the unit's other weights,
    for as long as nobody has sharded them. Everything else that looks here, state dicts and ``named_parameters()`` of
    the model among it, finds an empty module, and the weights where they always were. (``fully_shard`` itself then
    looks up where its parameters live, with ``remove_duplicate=False``: it must not find them here.)
    """

    def __init__(self, name: str, unit: nn.Module, rest: list[tuple[nn.Module, str, nn.Parameter]]) -> None:
        super().__init__()
        self.unit_name = name
        # No reference to a parameter itself: once it is sharded, its full storage must go.
        self._places = [(module, key, _mesh(value)) for module, key, value in rest]
        self._unsharded = [(module, key, weakref.ref(value)) for module, key, value in rest if value.requires_grad]
        self._handle = unit.register_forward_pre_hook(self._settle)

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        if recurse or not remove_duplicate:
            return
        for index, (module, key, mesh) in enumerate(self._places):
            value = module._parameters.get(key)
            if value is not None and _mesh(value) is mesh:
                yield f"{prefix}.{index}_{key}" if prefix else f"{index}_{key}", value

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _settle(self, *_: Any) -> None:
        """At the unit's first forward, every trainable one must be taken: gradients of others would not be reduced."""
        self._handle.remove()
        alive = [(module._parameters.get(key), value()) for module, key, value in self._unsharded]
        left = [value for now, value in alive if value is not None and now is value]
        self._places.clear()  # from here on they are gathered now and then, and look like unsharded ones
        self._unsharded.clear()
        if left:
            raise RuntimeError(
                f"fsdp_sink_patches.fsdp: found {len(left)} weights of {self.unit_name} that no FSDP unit has, "
                f"expected them in the unit around it: their gradients would not be reduced. After "
                f"shard_fp32_units, call fully_shard on every layer and on the model."
            )

    def forward(self, x: Any) -> Any:
        return x  # where the unit stands in an nn.Sequential, which calls its children

    def extra_repr(self) -> str:
        return f"weights of {self.unit_name} that the unit around it shards"


def _mesh(parameter: torch.Tensor) -> DeviceMesh | None:
    return parameter.device_mesh if isinstance(parameter, DTensor) else None


def _error(found: str, expected: str, do: str) -> ValueError:
    return ValueError(f"fsdp_sink_patches.fsdp: {found}, expected {expected}. To go on, {do}.")


# ---------------------------------------------------------------------------------------------------------------------
# Parameters that the loss never reaches

_INDEXERS = ("DeepseekV4Indexer",)
"""Classes whose only output is the indices of a top-k, so that no gradient passes."""

_said: set[str] = set()


def without_gradient(model: nn.Module, loss: torch.Tensor | None = None) -> tuple[str, ...]:
    """Name the trainable parameters that get no gradient.

    Without ``loss``, those known: DeepSeek-V4's Lightning Indexer, whose output is a tensor of integers (226 M
    parameters in V4-Flash, 501 M in V4-Pro; the paper, arXiv 2606.19348, trains it with a loss of its own, which
    transformers does not have).

    With ``loss``, those measured: whatever ``loss`` does not depend on. The graph of ``loss`` is used up.

    Args:
        model: for a measurement, not sharded.
        loss: a scalar computed from the parameters of ``model``, or None.

    Raises:
        ValueError: ``loss`` given for a sharded model, whose graph holds other tensors than its parameters.
    """
    named = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    if loss is None:
        known = {
            id(parameter)
            for module in model.modules()
            if any(kind.__name__ in _INDEXERS for kind in type(module).__mro__)
            for parameter in module.parameters()
        }
        return tuple(name for name, parameter in named.items() if id(parameter) in known)
    if any(isinstance(module, FSDPModule) for module in model.modules()):
        raise _error(
            "found a sharded model and a loss to measure with",
            "a model that is not sharded, since gradients of a sharded one are those of gathered copies",
            "measure before fully_shard, or leave the loss out",
        )
    gradients = torch.autograd.grad(loss, list(named.values()), allow_unused=True)
    return tuple(name for name, gradient in zip(named, gradients, strict=True) if gradient is None)


def freeze_without_gradient(model: nn.Module, loss: torch.Tensor | None = None) -> tuple[str, ...]:
    """Call ``requires_grad_(False)`` on what :func:`without_gradient` names, and return the names.

    Before wrapping and before the optimizer is made. FSDP1 then needs ``use_orig_params=True``, because a flat
    parameter is trainable as a whole or not at all. Do not freeze what you train with a loss of your own.
    """
    names = without_gradient(model, loss)
    for name in names:
        model.get_parameter(name).requires_grad_(False)
    return names


def _say_without_gradient(model: nn.Module) -> None:
    names = without_gradient(model)
    if not names or "indexer" in _said:
        return
    _said.add("indexer")
    if not (dist.is_initialized() and dist.get_rank()):
        _LOGGER.warning(
            "fsdp_sink_patches.fsdp: found %d trainable parameters of DeepSeek-V4's indexer, expected parameters "
            "that the loss reaches: top-k indices pass no gradient. Under FSDP1 AdamW still decays them; under "
            "FSDP2 they get no optimizer state, and the saved optimizer does not load again. Call "
            "freeze_without_gradient(model) before sharding, unless you train them with a loss of their own.",
            len(names),
        )


# ---------------------------------------------------------------------------------------------------------------------
# FSDP1


def ignored_modules(model: nn.Module) -> list[nn.Module]:
    """What to give to FSDP1's ``ignored_modules=``: modules that hold state and nothing to train, outermost ones.

    Rotary embeddings, mask builders, sink-slot buffers, schedules: buffers, and frozen parameters that are counters
    (few integers, or scalars, which FSDP1 refuses to flatten). They have nothing to shard, and ``MixedPrecision(
    buffer_dtype=torch.bfloat16)`` would round them (frequencies wrong by 0.1 rad from position 104 on). FSDP1 neither
    moves ignored modules to its device nor broadcasts them with ``sync_module_states``: do ``module.to(device)`` on
    each, and build them alike on every rank. It tells the root unit only, so give them together with
    :func:`auto_wrap_policy`, which tells the layers.

    A buffer beside weights in one module (sink slots of an attention, a router's ``e_score_correction_bias``) can't be
    ignored alone: give ``buffer_dtype=torch.float32`` then. Frozen weights are sharded like others.
    """
    found: list[nn.Module] = []

    def walk(module: nn.Module) -> None:
        parameters = list(module.parameters())
        if not all(_is_counter(value) for value in parameters):
            for child in module.children():
                walk(child)
        elif parameters or any(True for _ in module.buffers()):
            found.append(module)

    walk(model)
    return found


def _is_counter(parameter: nn.Parameter) -> bool:
    """A frozen scalar, or a few integers: more of them are quantised weights, which belong into shards."""
    few_integers = not parameter.is_floating_point() and parameter.numel() <= 1024
    return not parameter.requires_grad and (parameter.dim() == 0 or few_integers)


def auto_wrap_policy(model: nn.Module, *, also: Iterable[str] = ()) -> CustomPolicy:
    """FSDP1's ``auto_wrap_policy=``: transformer layers (``_no_split_modules``), and each fp32 module as an fp32 unit.

    For a model that is fp32 throughout, wrapped with ``mixed_precision=MixedPrecision(param_dtype=torch.bfloat16,
    ...)``. Its norms and hyper-connections then compute in fp32, and :func:`ignored_modules` inside the layers are left
    alone. Bare parameters such as ``sinks`` share a flat
    parameter with the weights beside them and are bf16 in the forward; FSDP2 with :func:`shard_fp32_units` has no
    such limit.

    Args:
        model: not wrapped yet. FSDP1 needs ``use_orig_params=True`` if some of its parameters are frozen.
        also: see :func:`fp32_units`.

    Raises:
        ValueError: bare fp32 parameters among bf16 ones, which FSDP1 cannot flatten; no ``_no_split_modules``.
    """
    units = fp32_units(model, also=also)
    for name in units.parameters:
        if len({value.dtype for value in model.get_submodule(name.rpartition(".")[0]).parameters()}) > 1:
            raise _error(
                f"found {name} in fp32 among weights of lower precision",
                "one dtype in each FSDP1 flat parameter",
                "load the model in fp32 and give FSDP1 a MixedPrecision, or use FSDP2 with shard_fp32_units",
            )
    layers = _layers(model)
    if not layers:
        raise _error("found no _no_split_modules", "a transformers model", "write the policy by hand")
    islands = {model.get_submodule(name) for name in units.modules}
    fp32 = MixedPrecision(torch.float32, torch.float32, torch.float32, cast_forward_inputs=False)
    _say_without_gradient(model)

    def wrap(module: nn.Module) -> bool | dict[str, Any]:
        if module in islands:
            return {"mixed_precision": fp32}
        if type(module).__name__ not in layers:
            return False
        # FSDP1 hands ignored parameters down to the units it makes, but not ignored modules and their buffers.
        return {"ignored_states": ignored} if (ignored := ignored_modules(module)) else True

    return CustomPolicy(wrap)
