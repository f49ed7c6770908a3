"""transformers.flex-sinks on the card: accuracy against fp64, wide heads, compilations, autocast."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from fsdp_sink_patches.patches.transformers import _flex_sinks
from fsdp_sink_patches.patches.transformers._validation import TINY, build
from torch import Tensor

import fsdp_sink_patches
from fsdp_sink_patches.ops import block_masks
from fsdp_sink_patches.ops.flex_attention import _kernel, flex_attention
from fsdp_sink_patches.ops.sink_attention.oracle import relative_error

IDS = ("transformers.flex-sinks", "transformers.packed-masks")
RIGHT = 4e-3


@pytest.fixture(scope="module", autouse=True)
def patched():
    importlib.import_module("transformers.integrations.flex_attention")
    with fsdp_sink_patches.applied(*IDS):
        yield


@pytest.mark.parametrize("window", [None, 128])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dims"),
    [(8, 2, (64, 64)), (8, 8, (128, 128)), (16, 4, (192, 128)), (40, 8, (64, 64)), (8, 1, (512, 512))],
    ids=["gpt-oss", "head_dim 128", "mimo", "40 heads", "head_dim 512"],
)
def test_a_layer_against_fp64(heads: int, kv_heads: int, dims: tuple[int, int], window: int | None) -> None:
    errors = _flex_sinks.layer_errors("cuda", torch.bfloat16, window, heads=heads, kv_heads=kv_heads, dims=dims)
    assert max(errors.values()) <= RIGHT, errors


@pytest.mark.parametrize("length", [4096, 1000, 130])
def test_lengths(length: int) -> None:
    errors = _flex_sinks.layer_errors("cuda", torch.bfloat16, None, documents=(length,))
    assert max(errors.values()) <= RIGHT, errors


def test_its_own_validation() -> None:
    measured = _flex_sinks.measure("cuda")
    assert all(error <= measured.limits[name] for name, error in measured.errors.items()), measured.errors


def test_upstream_is_off_and_that_is_measured() -> None:
    fsdp_sink_patches.unapply(*IDS)
    try:
        errors = _flex_sinks.layer_errors("cuda", torch.bfloat16, None)
    finally:
        fsdp_sink_patches.apply(*IDS)
    assert errors["dsink"] > RIGHT, errors


def test_the_callers_options_win() -> None:
    q, k, v, sinks, _ = _flex_sinks.inputs("cuda", torch.bfloat16, 300, heads=8, kv_heads=1, dims=(512, 512))
    mine = {"fwd_BLOCK_M": 16, "fwd_BLOCK_N": 16, "fwd_num_stages": 1}
    assert _kernel._options(q, v, mine) == _kernel.wide_options(q.device, 512, 2) | mine
    plain = _kernel._options(q, v, {"BLOCK_M": 16})
    assert plain is not None
    assert "fwd_BLOCK_M" not in plain
    mask = block_masks.causal(300, device="cuda")
    expected, _ = flex_attention(q, k, v, sinks, mask=mask)
    out, _ = flex_attention(q, k, v, sinks, mask=mask, kernel_options=mine)
    assert relative_error(out, expected.double()) <= RIGHT


def test_30_batches_compile_at_most_4_times() -> None:
    """A real gpt-oss: packed lengths vary, train and eval take turns, documents are captured tensors."""
    model = build({**TINY, "num_hidden_layers": 2}, "flex_attention", torch.bfloat16, "cuda")
    _kernel._compiled.cache_clear()
    torch._dynamo.reset()
    before = _kernel.compilations()
    for i in range(30):
        length = 200 + 41 * (i * 7 % 30)
        ids = torch.randint(0, TINY["vocab_size"], (1, length), device="cuda")
        cut = 60 + 3 * i
        positions = torch.cat([torch.arange(cut), torch.arange(length - cut)])[None].cuda()
        model.train(i % 3 != 2)
        with torch.set_grad_enabled(model.training):
            logits = model(input_ids=ids, position_ids=positions, use_cache=False).logits
        if model.training:
            logits.float().square().mean().backward()
    assert 1 <= _kernel.compilations() - before <= 4, _kernel._compilations[before:]


def test_a_real_gpt_oss_on_a_packed_row() -> None:
    validation = importlib.import_module("fsdp_sink_patches.patches.transformers._validation")
    errors = validation._errors(build(TINY, "flex_attention", torch.bfloat16, "cuda"))
    eager = validation._errors(build(TINY, "eager", torch.bfloat16, "cuda"))
    for name, error in errors.items():
        assert error <= 1.2 * eager[name], f"{name}: flex {error:.2e}, eager {eager[name]:.2e}"


def test_fp32_queries_under_autocast_run_in_bf16() -> None:
    q, k, v, sinks, dout = _flex_sinks.inputs("cuda", torch.float32)
    leaves: Any = [t.requires_grad_() for t in (q, k, v, sinks)]
    mask = block_masks.causal(q.shape[2], device="cuda")
    with torch.autocast("cuda", torch.bfloat16):
        out = _flex_sinks.layer(leaves[0], leaves[1], leaves[2].bfloat16(), leaves[3], mask)
    assert out.dtype == torch.bfloat16
    grads = torch.autograd.grad(out, leaves, dout.bfloat16())
    assert [g.dtype for g in grads] == [torch.float32] * 4
    assert all(bool(g.isfinite().all()) for g in grads)


def test_rows_that_see_nothing_and_masks_that_are_cut() -> None:
    q, k, v, sinks, dout = _flex_sinks.inputs("cuda", torch.bfloat16, 300)
    leaves: Any = [t.requires_grad_() for t in (q, k, v, sinks)]
    visible = torch.ones(300, 300, dtype=torch.bool, device="cuda").tril()
    visible[70:220] = False
    longer = torch.zeros(1, 1, 300, 420, dtype=torch.bool, device="cuda")
    longer[..., :300] = visible

    def gradients(mask: Any) -> tuple[Tensor, ...]:
        out = flex_attention(*leaves, mask=mask)[0].transpose(1, 2)
        return (out.detach(), *torch.autograd.grad(out, leaves, dout))

    found = gradients(block_masks.to_block_mask(longer))
    assert all(bool(t.isfinite().all()) for t in found)
    assert float(found[0][:, 70:220].abs().max()) == 0
    assert float(found[1][:, :, 70:220].abs().max()) == 0
    for got, wanted in zip(found, gradients(visible[None, None]), strict=True):
        assert relative_error(got, wanted.double()) <= RIGHT


def test_inside_a_compiled_function() -> None:
    q, k, v, sinks, _ = _flex_sinks.inputs("cuda", torch.bfloat16)
    mask = block_masks.causal(q.shape[2], device="cuda")
    expected = flex_attention(q, k, v, sinks, mask=mask)[0]
    compiled = torch.compile(lambda *a: flex_attention(*a, mask=mask)[0])(q, k, v, sinks)
    assert relative_error(compiled, expected.double()) <= RIGHT
