"""torch's flex attention with the rescale behind it, compiled so that batches of other lengths compile nothing."""

from __future__ import annotations

import functools
import itertools
import logging
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import flex_attention as torch_flex
from torch.nn.attention.flex_attention import BlockMask

LISTS = (
    "kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices",
    "q_num_blocks", "q_indices", "full_q_num_blocks", "full_q_indices",
)  # fmt: skip
NEAR = 2
"""How many compilations before torch's limit the warning comes."""
DEEPEST = 8
"""How far mask functions are followed into the functions that they capture."""
FORWARD_TILES = ((64, 32, 2, 8), (64, 16, 2, 4), (32, 32, 2, 4), (32, 16, 1, 4), (16, 16, 1, 4))
"""Queries, keys, stages and warps to try for head_dim above 256, the fastest on an H200 first."""

_log = logging.getLogger("fsdp_sink_patches")

_names = itertools.count()
_compilations: list[str] = []
"""The shape that each compilation of this process was for."""

BACKEND = "inductor"
"""What compiles; tests count with another one."""


def forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sinks: Tensor | None,
    block_mask: BlockMask | None,
    added: Tensor | None,
    position_bias: Tensor | None,
    softcap: float | None,
    scale: float,
    kernel_options: dict[str, Any] | None,
) -> tuple[Tensor, Tensor]:
    """``out`` and the fp32 log-sum-exp without the sinks."""
    options = _options(query, value, kernel_options)
    if query.shape[1] & (query.shape[1] - 1):  # flex attention's grouped heads want a power of two
        group = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    lists = None if block_mask is None else tuple(getattr(block_mask, name) for name in LISTS)
    mask_mod = None if block_mask is None else block_mask.mask_mod
    block_size = None if block_mask is None else block_mask.BLOCK_SIZE
    arguments = (
        query, key, value, sinks, lists, mask_mod, block_size, added, position_bias, softcap, scale, options,
    )  # fmt: skip
    if torch.compiler.is_compiling():
        return _attend(*arguments)
    for tensor in (query, key, value):
        torch._dynamo.maybe_mark_dynamic(tensor, 2)
    for tensor in (*(lists or ()), added, position_bias):
        if tensor is not None:
            torch._dynamo.maybe_mark_dynamic(tensor, list(range(2, tensor.dim())))
    for tensor in _captured(mask_mod):
        torch._dynamo.maybe_mark_dynamic(tensor, [i for i, size in enumerate(tensor.shape) if size > 1])
    kind = (
        query.device, query.dtype, query.shape[1], key.shape[1], query.shape[3], value.shape[3], sinks is None,
        added is None, position_bias is None, softcap, torch.is_grad_enabled(), _shape_of(mask_mod),
    )  # fmt: skip
    compiled = _compiled(kind, BACKEND)
    compiled.shape = f"query {list(query.shape)}, key {list(key.shape)}, value {list(value.shape)}, {query.dtype}"
    out, lse = compiled.call(*arguments)
    return out, lse


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sinks: Tensor | None,
    lists: tuple[Tensor | None, ...] | None,
    mask_mod: Callable[..., Tensor] | None,
    block_size: tuple[int, int] | None,
    added: Tensor | None,
    position_bias: Tensor | None,
    softcap: float | None,
    scale: float,
    options: dict[str, Any] | None,
) -> tuple[Tensor, Tensor]:
    block_mask = None
    if lists is not None:
        # Built here, so that the lengths are those of the tensors and no Python number that is guarded.
        lengths: Any = (query.shape[2], key.shape[2])
        named: dict[str, Any] = dict(zip(LISTS, lists, strict=True))
        block_mask = BlockMask(lengths, **named, BLOCK_SIZE=block_size, mask_mod=mask_mod)  # type: ignore[arg-type]
    score_mod = None
    if softcap is not None or added is not None or position_bias is not None:

        def score_mod(score: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
            if softcap is not None:
                score = softcap * torch.tanh(score / softcap)
            if added is not None:
                score = score + added[b if added.shape[0] > 1 else 0, h if added.shape[1] > 1 else 0, q, kv]
            if position_bias is not None:
                score = score + position_bias[b, h, q, kv]
            return score

    gqa = query.shape[1] != key.shape[1]
    flex: Callable[..., Any] = torch_flex.flex_attention
    common = {
        "score_mod": score_mod, "block_mask": block_mask, "scale": scale, "enable_gqa": gqa, "kernel_options": options,
    }  # fmt: skip
    if hasattr(torch_flex, "AuxRequest"):  # 2.9
        request = torch_flex.AuxRequest(lse=True)
        out, aux = flex(query, key, value, **common, return_aux=request)
        lse = aux.lse
    else:
        out, lse = flex(query, key, value, **common, return_lse=True)
    if sinks is not None:
        # A row that sees nothing has lse = -inf, of which sigmoid makes 0; exp(lse - logaddexp(lse, sink)) may be NaN.
        kept = torch.sigmoid(lse.float() - sinks.float()[None, :, None])
        out = (out.float() * kept[..., None]).to(out.dtype)
    return out, lse.detach()


class _Compiled:
    """One compiled function of one kind of call, with a code object and so a limit of recompilations of its own."""

    def __init__(self, backend: str | Callable[..., Any]) -> None:
        self.shape = ""
        self.count = 0
        self._backend = torch._dynamo.lookup_backend(backend) if isinstance(backend, str) else backend
        # torch keeps which sizes have changed by a code's place and name: of one name, heads would become dynamic.
        code = _attend.__code__.replace(co_name=f"_attend_{next(_names)}")
        function = types.FunctionType(code, _attend.__globals__, _attend.__name__, _attend.__defaults__)
        self.call: Callable[..., tuple[Tensor, Tensor]] = torch.compile(function, backend=self._compile)

    def _compile(self, graph: Any, inputs: Any, **k: Any) -> Any:
        self.count += 1
        _compilations.append(self.shape)
        limit = getattr(torch._dynamo.config, "recompile_limit", 8)
        if self.count >= limit - NEAR:
            _log.warning(
                "fsdp_sink_patches.ops.flex_attention: compiled %d times, now for %s; expected other lengths to "
                "compile nothing. torch stops at %d (torch._dynamo.config.recompile_limit) and then computes the "
                "whole score matrix. Keep the batch size and the kind of mask the same; TORCH_LOGS=recompiles tells "
                "what changed.",
                self.count, self.shape, limit,
            )  # fmt: skip
        return self._backend(graph, inputs, **k)


@functools.lru_cache(maxsize=256)
def _compiled(kind: tuple[Any, ...], backend: str | Callable[..., Any]) -> _Compiled:
    return _Compiled(backend)


def compilations() -> int:
    """How often this process has compiled attention here."""
    return len(_compilations)


def _shape_of(function: Any, depth: int = 0) -> Any:
    """What code a mask function runs, through the functions that it captures; the captured values don't count."""
    if not isinstance(function, types.FunctionType) or depth > DEEPEST:
        return None
    inner = tuple(_shape_of(value, depth + 1) for value in _cells(function))
    return (function.__code__, *(found for found in inner if found is not None))


def _captured(function: Any, depth: int = 0) -> list[Tensor]:
    if isinstance(function, Tensor):
        return [function]
    if not isinstance(function, types.FunctionType) or depth > DEEPEST:
        return []
    return [tensor for value in _cells(function) for tensor in _captured(value, depth + 1)]


def _cells(function: types.FunctionType) -> list[Any]:
    """The values a closure holds, those in tuples and lists among them (``and_masks`` keeps its functions so)."""
    found: list[Any] = []
    for cell in function.__closure__ or ():
        try:
            content = cell.cell_contents
        except ValueError:  # not filled yet
            continue
        found += _flat(content)
    return found


def _flat(value: Any) -> list[Any]:
    return [inner for item in value for inner in _flat(item)] if isinstance(value, tuple | list) else [value]


def _options(query: Tensor, value: Tensor, given: dict[str, Any] | None) -> dict[str, Any] | None:
    if given is not None and given.get("BACKEND") == "FLASH":
        raise NotImplementedError(
            "flex attention with sinks: kernel_options asked for BACKEND=FLASH, whose log-sum-exp is wrong by a factor "
            "or has no gradient in some releases of torch (pytorch#181645, #189784); expected the Triton backend. "
            'Leave BACKEND out, or use attn_implementation="flash_attention_2"'
        )
    head_dim = max(query.shape[-1], value.shape[-1])
    if head_dim <= 256 or query.device.type != "cuda":
        return given
    found = wide_options(query.device, head_dim, query.dtype.itemsize)
    given = given or {}
    return {name: n for name, n in found.items() if name[4:] not in given} | given


@functools.cache
def wide_options(device: torch.device, head_dim: int, itemsize: int) -> dict[str, int]:
    """Block sizes for a head_dim above 256 that fit the card's shared memory.

    A forward program holds ``BLOCK_M`` queries and ``num_stages`` times ``BLOCK_N`` keys and values: torch's default
    asks for 256 KiB at head_dim 512 in bf16, of an H200's 227. The backward's are torch's own from 2.10 on.
    """
    limit = int(getattr(torch.cuda.get_device_properties(device), "shared_memory_per_block_optin"))  # noqa: B009
    return fitting_options(limit, head_dim, itemsize)


def fitting_options(limit: int, head_dim: int, itemsize: int) -> dict[str, int]:
    """:func:`wide_options` for ``limit`` bytes of shared memory a program."""
    for rows, keys, stages, warps in FORWARD_TILES:
        if (rows + 2 * stages * keys) * head_dim * itemsize <= limit:
            return {
                "fwd_BLOCK_M": rows, "fwd_BLOCK_N": keys, "fwd_num_stages": stages, "fwd_num_warps": warps,
                "bwd_BLOCK_M1": 16, "bwd_BLOCK_N1": 16, "bwd_BLOCK_M2": 16, "bwd_BLOCK_N2": 16, "bwd_num_stages": 1,
            }  # fmt: skip
    raise ValueError(
        f"flex attention with sinks: head_dim {head_dim} with {itemsize} bytes an element needs more shared memory "
        f"than the {limit} bytes a program of this card has, even in blocks of 16; expected less. Pass "
        'kernel_options, or use attn_implementation="eager"'
    )
