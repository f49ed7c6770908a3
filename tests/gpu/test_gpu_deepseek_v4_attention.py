"""DeepSeek-V4's fused attention on the card, through transformers: eager's numbers, documents apart, linear memory."""

from __future__ import annotations

import copy
import gc
import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import fsdp_sink_patches
from fsdp_sink_patches import settings
from fsdp_sink_patches.ops.index_scores import top_entries
from fsdp_sink_patches.ops.sink_attention.oracle import relative_error

pytest.importorskip("transformers", minversion="5.8.1")

from fsdp_sink_patches.patches.transformers._deepseek_v4_models import CSA, HCA, SLIDING, build

PATCHES = ("transformers.deepseek-v4-attention", "transformers.deepseek-v4-packing", "transformers.deepseek-v4-rope")
LENGTHS = (1, 37, 512, 129, 345)
FLASH: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 1024,
    "moe_intermediate_size": 128,
    "head_dim": 512,
    "qk_rope_head_dim": 64,
    "q_lora_rank": 256,
    "o_groups": 8,
    "o_lora_rank": 128,
    "index_n_heads": 64,
    "index_head_dim": 128,
    "sliding_window": 128,
    "compress_rates": {CSA: 4, HCA: 128},
    "initializer_range": 0.03,
}
"""The attention of V4-Flash on a narrow model."""


@pytest.fixture(autouse=True)
def applied() -> Iterator[None]:
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    with fsdp_sink_patches.applied(*PATCHES), settings.using(compressed_attention="auto"):
        yield
    gc.collect()
    torch.cuda.empty_cache()


def model_of(kind: str, heads: int, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    model = build((kind,) * 2, dtype, "cuda", **{**FLASH, "num_attention_heads": heads, **changes})
    for layer in model.model.layers:
        layer.mlp.forward = lambda x, input_ids=None: x
    return model


def row(lengths: tuple[int, ...], vocabulary: int = 128) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, vocabulary, (1, sum(lengths)), generator=generator)
    return ids.cuda(), torch.cat([torch.arange(n) for n in lengths])[None].cuda()


def step(model: Any, **batch: Any) -> tuple[Tensor, Tensor]:
    """Logits, and all gradients as one vector."""
    model.zero_grad(set_to_none=True)
    logits = model(use_cache=False, **batch).logits
    weights = torch.linspace(-3, 3, logits.numel(), dtype=torch.float64, device="cuda").view_as(logits).cos()
    (logits.double() - weights).square().mean().backward()
    gradients = [p.grad.double().flatten() for p in model.parameters() if p.grad is not None]
    return logits.detach(), torch.cat(gradients)


@pytest.mark.parametrize("heads", [16, 64, 128])
@pytest.mark.parametrize("kind", [SLIDING, CSA, HCA])
def test_a_packed_bf16_step_is_as_exact_as_eager(kind: str, heads: int) -> None:
    """Every entry is picked, so that rounding can't choose others; against fp64 eager on the same patches."""
    ids, positions = row(LENGTHS)
    low = model_of(kind, heads).bfloat16()
    exact = copy.deepcopy(low).double()
    batch = {"input_ids": ids, "position_ids": positions}
    with settings.using(compressed_attention="eager"):
        expected = step(exact, **batch)
        eager = step(low, **batch)
    fused = step(low, **batch)
    for name, ours, theirs, right in zip(("logits", "gradients"), fused, eager, expected, strict=True):
        assert relative_error(ours, right) <= 1.3 * relative_error(theirs, right), name
    shifted = batch["position_ids"].clone()
    shifted[0, 38:] = torch.arange(len(shifted[0, 38:]), device="cuda")  # one document in place of three
    assert relative_error(step(low, input_ids=ids, position_ids=shifted)[0], expected[0]) > 5e-2


@pytest.mark.parametrize("kind", [SLIDING, CSA, HCA])
def test_documents_do_not_see_each_other(kind: str) -> None:
    """With picks: the first document's tokens change, the others' logits keep their bits."""
    model = model_of(kind, 64, torch.bfloat16, index_topk=32).eval()
    ids, positions = row((700, 324))
    other = torch.cat((ids[:, :700].roll(1, 1), ids[:, 700:]), 1)
    with torch.no_grad():
        a, b = (model(input_ids=x, position_ids=positions, use_cache=False).logits for x in (ids, other))
    assert torch.equal(a[:, 700:], b[:, 700:])
    assert not torch.equal(a[:, :700], b[:, :700])


def test_padding_inside_a_document() -> None:
    model = model_of(CSA, 64, torch.bfloat16, index_topk=32).eval()
    ids, _ = row((900,))
    mask = torch.ones_like(ids)
    mask[0, [0, 1, 300, 611, 612, 613]] = 0
    with torch.no_grad():
        found = model(input_ids=ids, attention_mask=mask, use_cache=False).logits[mask.bool()]
        expected = model(input_ids=ids[mask.bool()][None], use_cache=False).logits[0]
    assert relative_error(found, expected) <= 2e-2


def test_generates_what_eager_generates() -> None:
    model = model_of(HCA, 64).eval()
    ids, _ = row((300,))
    how = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    found = model.generate(ids, attention_mask=torch.ones_like(ids), **how)
    with settings.using(compressed_attention="eager"):
        assert torch.equal(found, model.generate(ids, attention_mask=torch.ones_like(ids), **how))


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing(reentrant: bool) -> None:
    ids, positions = row(LENGTHS)
    model = model_of(CSA, 64, torch.bfloat16)
    expected = step(model, input_ids=ids, position_ids=positions)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()
    found = step(model, input_ids=ids, position_ids=positions)
    assert torch.equal(found[0], expected[0])
    assert relative_error(found[1], expected[1]) <= 1e-3  # picked entries' gradients are added atomically


@pytest.mark.parametrize("kind", [SLIDING, CSA, HCA])
def test_memory_is_linear_in_the_row(kind: str) -> None:
    """Peak of a forward and backward over what the model itself takes; eager's would grow fourfold."""
    model = model_of(kind, 64, torch.bfloat16, index_topk=512)
    peaks = []
    for length in (8192, 16384, 32768):
        ids, positions = row((length // 2, length // 2))
        step(model, input_ids=ids, position_ids=positions)
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step(model, input_ids=ids, position_ids=positions)
        peaks.append(torch.cuda.max_memory_allocated() - before)
    assert peaks[1] <= 2.2 * peaks[0]
    assert peaks[2] <= 2.2 * peaks[1]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_indexers_picks_of_half_precision_are_those_of_fp32(dtype: torch.dtype) -> None:
    """Products are exact on tensor cores; sums in another order may swap picks that all but tie."""
    generator = torch.Generator("cuda").manual_seed(0)
    q = torch.randn(2, 3000, 64, 128, device="cuda", dtype=dtype, generator=generator)
    keys = torch.randn(2, 750, 128, device="cuda", dtype=dtype, generator=generator)
    weights = torch.randn(2, 3000, 64, device="cuda", generator=generator)
    count = (torch.arange(3000, device="cuda") + 1) // 4
    ranges = torch.stack((torch.zeros_like(count), count), -1)[None]
    found = top_entries(q, keys, weights, ranges, 128, 128**-0.5)
    expected = top_entries(q.float(), keys.float(), weights, ranges, 128, 128**-0.5)
    assert ((found >= 0).sum(-1) == count.clamp(max=128)).all()
    hits = torch.zeros(2, 3000, 751, device="cuda", dtype=torch.bool)
    hits.scatter_(-1, torch.where(found >= 0, found, 750).long(), True)
    same = hits.gather(-1, torch.where(expected >= 0, expected, 750).long())
    assert same[expected >= 0].float().mean() > 0.999
