"""Masks that the caller prepared, as BlockMasks, and what proves it: a small Qwen3 against itself in fp64."""

from __future__ import annotations

import contextlib
import copy
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.attention.flex_attention as torch_flex
import transformers.integrations.flex_attention as flex
from torch import Tensor

from fsdp_sink_patches import Measurement
from fsdp_sink_patches.ops.block_masks import NotAMaskError, to_block_mask
from fsdp_sink_patches.ops.sink_attention.oracle import relative_error

BATCH, HEADS, LENGTH, LONG = 2, 4, 200, 4096


def with_block_mask(original: Callable[..., Any], result: Any, a: tuple[Any, ...], k: dict[str, Any]) -> Any:
    """``result`` of ``_preprocess_mask_arguments(*a, **k)`` with the 4-D mask that it hands through as a BlockMask."""
    mask = result[1]
    if not isinstance(mask, Tensor) or mask.dim() != 4:
        return result
    config = a[0] if a else k["config"]
    if _uses_masks_itself(config):
        return result
    if mask.shape[1] != 1 and mask.stride(1) != 0 and mask.shape[1] != vars(config).get("num_attention_heads"):
        return result  # heads of another sharding: upstream reads the first, a BlockMask would be read past its end
    if mask.dtype != torch.bool and torch.compiler.is_compiling():
        return result  # whether it is a mask or a bias is in its values
    if not mask.is_floating_point() and mask.dtype != torch.bool and not _zeros_and_ones(mask):
        return result  # integers that are added, such as 0 and -10**9
    queries, keys, offset = _lengths(original, a, k)
    if offset != 0 or mask.shape[2] != queries or mask.shape[3] < keys:
        return result
    try:
        return (result[0], to_block_mask(mask[..., :keys]), *result[2:])
    except NotAMaskError:
        return result


def _uses_masks_itself(config: Any) -> bool:
    """Whether the config's modelling file names BlockMask, as doge's does: it adds up masks that are tensors only."""
    modelling = sys.modules.get(type(config).__module__.replace(".configuration_", ".modeling_"))
    return hasattr(modelling, "BlockMask")


def _zeros_and_ones(mask: Tensor) -> bool:
    low, high = mask.aminmax()
    return int(low) >= 0 and int(high) == 1


def _lengths(original: Callable[..., Any], a: tuple[Any, ...], k: dict[str, Any]) -> tuple[int, int, int]:
    """Queries, keys and the first key's position, as upstream finds them where it has to make the mask itself."""
    if len(a) > 2:
        a = (*a[:2], None, *a[3:])
    else:
        k = {**k, "attention_mask": None}
    found = original(*a, **k)
    if len(found) == 5:  # to 5.3: early_exit, mask, packed, kv_length, kv_offset
        embeds: Any = a[1] if len(a) > 1 else k.get("inputs_embeds", k.get("input_embeds"))
        return embeds.shape[1], found[3], found[4]
    return found[3], found[4], found[6]


def measure(device: str) -> Measurement:
    """fp32, so that only the mask can be wrong; a step of 4096 tokens in bf16 is timed on a GPU."""
    model, ids = build(torch.float32, device), tokens(BATCH, LENGTH, device)
    with uncompiled(device):
        errors = {name: logits_error(model, ids, mask) for name, mask in masks(BATCH, HEADS, LENGTH, device).items()}
    cuda = device == "cuda"
    length = LONG if cuda else LENGTH
    model = build(torch.bfloat16 if cuda else torch.float32, device)
    ids, mask = tokens(1, length, device), additive(blocks(1, 1, length, device), model.dtype)

    def step() -> None:
        if not cuda:  # flex attention has no backward pass there
            with torch.no_grad():
                model(input_ids=ids, attention_mask=mask, use_cache=False)
            return
        model.zero_grad(set_to_none=True)
        torch.autograd.backward(model(input_ids=ids, attention_mask=mask, use_cache=False).logits.float().mean())

    with uncompiled(device):
        time_ms, peak_bytes = _time(step, cuda)
    timed = f"{'training step' if cuda else 'forward'}, additive mask, {length} tokens, {model.dtype}"
    return Measurement(errors, dict.fromkeys(errors, 1e-4), time_ms, peak_bytes, {"timed": timed})


def build(dtype: torch.dtype, device: str, implementation: str = "flex_attention") -> Any:
    """A Qwen3 of tiny size with fixed random weights."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        num_hidden_layers=2, hidden_size=128, intermediate_size=128, num_attention_heads=HEADS, num_key_value_heads=2,
        head_dim=32, vocab_size=256,
    )  # fmt: skip
    with torch.device(device):
        model = Qwen3ForCausalLM._from_config(config, attn_implementation=implementation, dtype=dtype)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.mul_(8 if "q_proj" in name or "k_proj" in name else 4)  # attention that moves the logits
    return model.train()


def tokens(rows: int, length: int, device: str) -> Tensor:
    return torch.randint(0, 256, (rows, length), generator=torch.Generator().manual_seed(2)).to(device)


def blocks(batch: int, heads: int, length: int, device: str) -> Tensor:
    """Visible ``[batch, heads, length, length]``: causal across blocks of 8, 16 ..., both ways inside of them."""
    position = torch.arange(length, device=device)
    size = 8 * (1 + torch.arange(batch * heads, device=device)).view(batch, heads, 1)
    block = position // size
    return block[..., :, None] >= block[..., None, :]


def additive(visible: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.zeros(visible.shape, dtype=dtype, device=visible.device).masked_fill(~visible, torch.finfo(dtype).min)


def masks(batch: int, heads: int, length: int, device: str) -> dict[str, Tensor]:
    """The three forms in which a user hands a mask over; the last differs between heads."""
    shared, of_heads = blocks(batch, 1, length, device), blocks(batch, heads, length, device)
    return {
        "boolean": shared,
        "additive": additive(shared, torch.float32),
        "per head": additive(of_heads, torch.float32),
    }


def logits_error(model: Any, ids: Tensor, mask: Tensor) -> float:
    """Relative L2 error of the logits against the model in fp64, in eager attention with the mask added."""
    exact = copy.deepcopy(model).double()
    exact.set_attn_implementation("eager")
    added = additive(mask, torch.float64) if mask.dtype == torch.bool else mask.double()
    with torch.no_grad():
        expected = exact(input_ids=ids, attention_mask=added, use_cache=False).logits
        return relative_error(model(input_ids=ids, attention_mask=mask, use_cache=False).logits, expected)


@contextlib.contextmanager
def uncompiled(device: str = "cpu") -> Iterator[None]:
    """On a CPU, flex attention as plain operators: the compiled kernel of torch 2.13 aborts on upstream's call."""
    if device != "cpu":
        yield
        return
    called, debug = flex.WrappedFlexAttention.__call__, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG"
    held = getattr(torch_flex, debug, False)
    flex.WrappedFlexAttention.__call__ = lambda self: torch_flex.flex_attention
    setattr(torch_flex, debug, True)
    try:
        yield
    finally:
        flex.WrappedFlexAttention.__call__ = called
        setattr(torch_flex, debug, held)


def _time(step: Callable[[], None], cuda: bool) -> tuple[float, int]:
    """Median milliseconds of five steps after two, and the device's peak memory of one."""
    times = []
    for _ in range(7):
        if cuda:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        begin = time.perf_counter()
        step()
        if cuda:
            torch.cuda.synchronize()
        times.append(1000 * (time.perf_counter() - begin))
    return statistics.median(times[2:]), torch.cuda.max_memory_allocated() if cuda else 0
