"""compressed_attention's kernels on a card: no worse than bf16 eager, the same bits when asked, memory that grows with
the tokens."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor

from fsdp_sink_patches.ops.compressed_attention import compressed_attention
from fsdp_sink_patches.ops.sink_attention.oracle import relative_error
from tests.ops.compressed_oracle import KINDS, SINKS, case, compressed_oracle, sinks_of

LENGTHS = [1, 37, 512, 129, 1000]
NAMES = ("out", "dq", "dkv", "dentries", "dsinks")
RATES = {"sliding": 4, "csa": 4, "hca": 128}


def eager(q: Tensor, kv: Tensor, entries: Tensor, sinks: Tensor, **sees: Any) -> Tensor:
    """transformers' formula in the dtype of its inputs, on masks of who sees what."""
    tokens = q.shape[0]
    place = torch.arange(tokens, device=q.device)
    seen = (place >= sees["window_starts"][:, None]) & (place <= place[:, None])
    slots = torch.arange(entries.shape[0], device=q.device)
    chosen = torch.zeros(tokens, entries.shape[0], dtype=torch.bool, device=q.device)
    if "entry_ranges" in sees:
        chosen = (slots >= sees["entry_ranges"][:, :1]) & (slots < sees["entry_ranges"][:, 1:])
    if "topk_indices" in sees:
        picks = sees["topk_indices"]
        chosen = chosen.new_zeros(tokens, entries.shape[0] + 1).scatter(
            1, torch.where(picks >= 0, picks, entries.shape[0]), True
        )[:, :-1]
    keys = torch.cat((kv, entries))
    weights = torch.einsum("thd,kd->htk", q, keys) * q.shape[-1] ** -0.5
    weights = weights.masked_fill(~torch.cat((seen, chosen), 1), float("-inf"))
    logits = torch.cat((weights, sinks.to(weights.dtype)[:, None, None].expand(-1, tokens, 1)), -1)
    probs = (logits - logits.amax(-1, keepdim=True)).softmax(-1)[..., :-1]
    return torch.einsum("htk,kd->thd", probs, keys)


def gradients(compute: Any, given: list[Tensor], dout: Tensor) -> list[Tensor]:
    leaves = [t.detach().clone().requires_grad_() for t in given]
    out = compute(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, dout.to(out.dtype), materialize_grads=True)]


@functools.cache
def drawn(kind: str, heads: int, dim: int, dtype: torch.dtype) -> tuple[list[Tensor], dict[str, Tensor], Tensor]:
    return case(kind, LENGTHS, heads, dim, dtype, window=128, rate=RATES[kind], picks=128, device="cuda")


def errors(found: list[Tensor], exact: list[Tensor]) -> dict[str, float]:
    pairs = zip(NAMES, found, exact, strict=True)
    return {name: relative_error(mine, true) for name, mine, true in pairs if true.numel() > 0 and true.any()}


@pytest.mark.parametrize("sink", SINKS)
@pytest.mark.parametrize(
    ("heads", "dim", "dtype"),
    [
        (64, 512, torch.bfloat16), (128, 512, torch.bfloat16), (64, 512, torch.float16), (64, 128, torch.bfloat16),
        (64, 192, torch.bfloat16), (64, 256, torch.bfloat16), (5, 512, torch.bfloat16),
    ],
)  # fmt: skip
@pytest.mark.parametrize("kind", KINDS)
def test_no_worse_than_eager(kind, heads, dim, dtype, sink):
    """Within 1.3x of bf16 eager's own error against fp64."""
    given, sees, dout = drawn(kind, heads, dim, dtype)
    given = [*given, sinks_of(sink, heads, "cuda")]
    exact = gradients(lambda *x: compressed_oracle(*x, **sees)[0], [t.double() for t in given], dout)
    mine = errors(gradients(lambda *x: compressed_attention(*x, **sees), given, dout), exact)
    theirs = errors(gradients(lambda *x: eager(*x, **sees), given, dout), exact)
    for name, error in mine.items():
        if dtype == torch.float16 and sink == "20" and name != "out":
            continue  # e^-20 of a value lies below fp16's smallest number, eager's too
        assert error <= 1.3 * theirs[name], f"{name}: {mine}, eager: {theirs}"


def test_what_would_be_wrong_is_far_off():
    """A bias that is left out, a sink that is dropped, entries of the document before."""
    given, sees, _ = drawn("hca", 64, 512, torch.bfloat16)
    given = [*given, sinks_of("4", 64, "cuda")]
    right = compressed_oracle(*given, **sees)[0]
    assert relative_error(compressed_attention(*given, **sees), right) < 5e-3
    no_bias = {**sees, "entry_ranges": torch.tensor([[0, given[2].shape[0]]], device="cuda").expand(sum(LENGTHS), 2)}
    shifted = {**sees, "entry_ranges": (sees["entry_ranges"] - 1).clamp(min=0)}
    no_sink = [*given[:3], torch.full((64,), -1e9, device="cuda")]
    for arguments, who in ((given, no_bias), (given, shifted), (no_sink, sees)):
        assert relative_error(compressed_attention(*arguments, **who), right) > 2e-2


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_bits_in_every_run(kind):
    given, sees, dout = drawn(kind, 64, 512, torch.bfloat16)
    given = [*given, sinks_of("random", 64, "cuda")]
    runs = [gradients(lambda *x: compressed_attention(*x, **sees, deterministic=True), given, dout) for _ in range(3)]
    assert all(torch.equal(a, b) for again in runs[1:] for a, b in zip(runs[0], again, strict=True))
    loose = gradients(lambda *x: compressed_attention(*x, **sees), given, dout)
    assert relative_error(loose[3], runs[0][3]) <= 2e-3 or kind == "sliding"


@pytest.mark.parametrize("kind", KINDS)
def test_fresh_memory_of_nan_changes_nothing(kind):
    given, sees, dout = drawn(kind, 64, 512, torch.bfloat16)
    given = [*given, sinks_of("8", 64, "cuda")]
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        assert all(t.isfinite().all() for t in gradients(lambda *x: compressed_attention(*x, **sees), given, dout))
    finally:
        torch.use_deterministic_algorithms(False)


def test_no_call_waits_for_the_device():
    for kind in KINDS:
        given, sees, dout = drawn(kind, 64, 512, torch.bfloat16)
        given = [*given, sinks_of("8", 64, "cuda")]
        gradients(lambda *x, sees=sees: compressed_attention(*x, **sees), given, dout)
        torch.cuda.set_sync_debug_mode("error")
        try:
            gradients(lambda *x, sees=sees: compressed_attention(*x, **sees), given, dout)
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("kind", KINDS)
def test_memory_grows_with_the_tokens(kind):
    """Beyond its inputs a forward and backward need out, dout's twins and sums, a few times the size of q."""
    for tokens in (4096, 16384):
        given, sees, dout = case(
            kind, [tokens], 64, 512, torch.bfloat16, window=128, rate=RATES[kind], picks=64, device="cuda"
        )
        given = [*given, sinks_of("8", 64, "cuda")]
        gradients(lambda *x, sees=sees: compressed_attention(*x, **sees), given, dout)
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        gradients(lambda *x, sees=sees: compressed_attention(*x, **sees), given, dout)
        peak = torch.cuda.max_memory_allocated() - before
        assert peak <= 4 * given[0].numel() * 2 + 256 * 2**20, f"{tokens}: {peak / 2**20:.0f} MiB"
