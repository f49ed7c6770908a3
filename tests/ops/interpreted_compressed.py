"""The kernels of compressed_attention through Triton's interpreter: what they compute, not how fast. Run by
``test_compressed_attention.py``."""

from __future__ import annotations

import pytest
import torch
from triton.runtime.interpreter import InterpretedFunction

from fsdp_sink_patches.ops.compressed_attention import _kernels
from fsdp_sink_patches.ops.sink_attention.oracle import relative_error
from tests.ops.compressed_oracle import KINDS, SINKS, case, compressed_oracle, sinks_of

TILES = [{"BLOCK_N": 16, "num_warps": 4, "num_stages": 1}]
LIMITS = {torch.float32: 2e-5, torch.float16: 3e-3}


def run(given, sees, sinks, dout, deterministic, tiles=TILES):
    arguments = sees["window_starts"], sees.get("entry_ranges"), sees.get("topk_indices")
    scale = given[0].shape[-1] ** -0.5
    out, lse = _kernels.forward(*given, sinks, *arguments, scale, tiles)
    *grads, delta = _kernels.backward(dout, *given, *arguments, out, lse, scale, deterministic, tiles)
    dsinks = (-((sinks - lse).exp() * delta).sum(0)).to(sinks.dtype)
    return out, lse.t(), *grads, dsinks


def check(kind, lengths, heads, dim, dtype, sink, deterministic, tiles=TILES, **options):
    given, sees, dout = case(kind, lengths, heads, dim, dtype, **options)
    sinks = sinks_of(sink, heads)
    leaves = [t.double().requires_grad_() for t in (*given, sinks)]
    expected, lse = compressed_oracle(*leaves, **sees)
    exact = expected, lse, *torch.autograd.grad(expected, leaves, dout.double(), materialize_grads=True)
    found = run(given, sees, sinks, dout, deterministic, tiles)
    for name, mine, true in zip(("out", "lse", "dq", "dkv", "dentries", "dsinks"), found, exact, strict=True):
        assert mine.isfinite().all(), name
        assert relative_error(mine, true) <= LIMITS[dtype] or true.numel() == 0, name
    return found


def test_it_is_interpreted():
    assert isinstance(_kernels._forward_kernel, InterpretedFunction)


@pytest.fixture(autouse=True)
def nan_in_fresh_memory():
    """``torch.empty`` comes back full of NaN, so that an unwritten element can't pass."""
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("sink", SINKS)
@pytest.mark.parametrize(("kind", "deterministic"), [*((kind, False) for kind in KINDS), ("csa", True)])
def test_packed_documents(kind, sink, deterministic):
    check(kind, [1, 19, 6, 13], 3, 16, torch.float32, sink, deterministic)


@pytest.mark.parametrize("dtype", LIMITS, ids=str)
@pytest.mark.parametrize(
    ("heads", "dim", "kind"),
    [(2, 128, "csa"), (8, 192, "hca"), (64, 64, "csa"), (70, 16, "hca"), (5, 256, "sliding"), (16, 512, "csa")],
)
def test_head_counts_and_dims(heads, dim, kind, dtype):
    check(kind, [9, 6], heads, dim, dtype, "random", False, window=5, rate=3, picks=5)


def test_a_deterministic_backward_in_steps(monkeypatch):
    monkeypatch.setattr(_kernels, "WRITTEN_AT_ONCE", 7 * 8 * 32 * 4 * 2)
    whole = check("csa", [40, 5], 3, 32, torch.float32, "4", False)
    steps = check("csa", [40, 5], 3, 32, torch.float32, "4", True)
    torch.testing.assert_close(whole[4], steps[4])


def test_ranges_in_several_chunks(monkeypatch):
    monkeypatch.setattr(_kernels, "PROGRAMS", 1)
    check("hca", [70], 2, 16, torch.float32, "8", False)


def test_more_picks_than_entries_and_none_at_all():
    check("csa", [3, 2, 1], 2, 16, torch.float32, "4", False)  # no window of 4 tokens closes
    check("csa", [12], 2, 16, torch.float32, "4", False, picks=64)
    check("hca", [3, 3], 2, 16, torch.float32, "4", False)


@pytest.mark.parametrize(("kind", "dim"), [("sliding", 32), ("hca", 32), ("csa", 512)])
def test_the_tiles_that_a_card_gets(kind, dim):
    check(kind, [9, 6], 2, dim, torch.float16, "random", False, tiles=None, window=5, rate=3, picks=5)


@pytest.mark.parametrize("kind", ["csa", "hca"])
def test_entries_that_are_the_keys_themselves(kind):
    given, sees, dout = case(kind, [9, 6], 2, 16, torch.float32, window=5, rate=3)
    sinks = sinks_of("4", 2)
    twice = run([given[0], given[1], given[1]], sees, sinks, dout, True)
    apart = run([given[0], given[1], given[1].clone()], sees, sinks, dout, True)
    assert all(torch.equal(a, b) for a, b in zip(twice, apart, strict=True))


def test_missing_picks_between_others():
    given, sees, dout = case("csa", [9, 6], 2, 16, torch.float32, window=5, rate=3)
    picks = sees["topk_indices"]
    gaps = torch.cat((torch.full((len(picks), 20), -1), picks), 1)[:, torch.randperm(20 + picks.shape[1])]
    sinks = sinks_of("4", 2)
    plain = run(given, sees, sinks, dout, False)
    for deterministic in (False, True):
        for a, b in zip(
            run(given, {**sees, "topk_indices": gaps.int()}, sinks, dout, deterministic), plain, strict=True
        ):
            torch.testing.assert_close(a, b)
