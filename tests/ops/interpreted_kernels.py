"""The Triton kernels through Triton's interpreter, in fp32: what they compute, not how fast. Run by
``test_kernels.py``."""

from __future__ import annotations

import pytest
import torch
from triton.runtime.errors import OutOfResources
from triton.runtime.interpreter import InterpretedFunction

from fsdp_sink_patches.ops.sink_attention import _forward_kernel, _kernels, _merge
from fsdp_sink_patches.ops.sink_attention.oracle import oracle_attention, relative_error
from tests.ops.cases import SINKS, draw, sinks_of, starts

SMALL = {"BLOCK_M": 32, "BLOCK_N": 16, "num_warps": 4, "num_stages": 1}


@pytest.fixture(autouse=True)
def nan_in_fresh_memory(monkeypatch):
    """Outputs and scratch start as NaN, so that an element nobody writes can't pass."""
    empty = torch.empty

    def poisoned(*args, **kwargs):
        tensor = empty(*args, **kwargs)
        return tensor.fill_(float("nan")) if tensor.is_floating_point() else tensor

    monkeypatch.setattr(torch, "empty", poisoned)


def test_they_are_interpreted():
    assert isinstance(_kernels._merge_kernel, InterpretedFunction)
    assert isinstance(_forward_kernel._forward_kernel, InterpretedFunction)


@pytest.mark.parametrize("kind", SINKS)
@pytest.mark.parametrize("slots", [False, True])
@pytest.mark.parametrize("transposed", [False, True])
def test_merge_and_sink_gradient(kind, slots, transposed):
    batch, tokens, heads, head_dim = 2, 19, 3, 24

    def part(seed):
        shape = (batch, heads, tokens, head_dim) if transposed else (batch, tokens, heads, head_dim)
        out, lse = (
            draw(*shape, dtype=torch.float32, seed=seed),
            4 * draw(batch, heads, tokens, dtype=torch.float32, seed=seed),
        )
        # every way a kernel reports a row without keys, and both ends of the range
        lse[0, 0, 0], lse[1, 1, -1], lse[1, 2, 0], lse[0, 2, 3] = float("inf"), float("-inf"), 1e4, -1e4
        return (out.transpose(1, 2) if transposed else out), lse

    out, lse = part(1)
    slot_out, slot_lse = part(2) if slots else (None, None)
    sinks = sinks_of(kind, heads, torch.float32)
    wanted = _merge.merge_reference(out.double(), lse.double(), sinks, slot_out, slot_lse)
    given_lse = lse.clone()
    merged, merged_lse = _kernels.merge(out.clone(), given_lse, sinks, slot_out, slot_lse)
    assert merged.is_contiguous()
    assert torch.equal(given_lse, lse)  # on a card one warp would read what another has stored
    assert relative_error(merged, wanted[0]) <= 1e-6
    assert relative_error(merged_lse, wanted[1]) <= 1e-6
    dout = draw(batch, tokens, heads, head_dim, dtype=torch.float32, seed=3)
    gradient = _kernels.sink_gradient(dout, merged, merged_lse, sinks)
    expected = _merge.sink_gradient_reference(dout.double(), *(t.double() for t in wanted), sinks.double())
    assert relative_error(gradient, expected) <= 1e-5


@pytest.mark.parametrize("kind", SINKS)
@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (0, 0), (6, 0), (40, 0), (3, 2)])
@pytest.mark.parametrize(
    ("queries", "keys"), [([2, 37, 0, 70, 1],) * 2, ([40, 1, 0], [10, 1, 0]), ([3, 10], [70, 33])], ids=("same",
"fewer", "more") )  # fmt: skip
def test_forward_with_a_sink(kind, window, queries, keys):
    """Documents of every length, rows without keys, decode-like rows with more keys than queries."""
    q, k, v = (draw(sum(n), h, 24, dtype=torch.float32, seed=h) for n, h in ((queries, 4), (keys, 2), (keys, 2)))
    borders = {"cu_seqlens_q": starts(queries), "cu_seqlens_k": starts(keys)}
    sinks = sinks_of(kind, 4, torch.float32)
    out, lse = _forward_kernel.forward(
        q, k, v, sinks, max_seqlen_q=max(queries), scale=24**-0.5, window=window, **borders, **SMALL
    )
    expected, expected_lse = oracle_attention(q, k, v, sinks, window_size=window, **borders)
    assert relative_error(out, expected) <= 2e-6
    assert relative_error(lse, expected_lse) <= 2e-6


def test_forward_on_a_dense_transposed_batch():
    q, k, v = (draw(2, h, 50, 64, dtype=torch.float32, seed=h).transpose(1, 2) for h in (4, 2, 2))
    sinks = sinks_of("random", 4, torch.bfloat16)
    out, lse = _forward_kernel.forward(
        q, k, v, sinks, cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=50, scale=0.125, window=(-1, 0), **SMALL
    )
    expected, expected_lse = oracle_attention(q, k, v, sinks, causal=True)
    assert relative_error(out, expected) <= 2e-6
    assert relative_error(lse, expected_lse) <= 2e-6


def test_a_sink_of_minus_infinity_is_no_sink():
    q, k, v = (draw(1, 20, 1, 16, dtype=torch.float32, seed=s) for s in range(3))
    out, lse = _forward_kernel.forward(
        q, k, v, torch.tensor([float("-inf")]),
        cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=20, scale=0.25, window=(-1, 0), **SMALL,
    )  # fmt: skip
    expected, expected_lse = oracle_attention(q, k, v, causal=True)
    assert relative_error(out, expected) <= 2e-6
    assert relative_error(lse, expected_lse) <= 2e-6


def test_sink_gradient_of_a_row_that_sees_nothing():
    """Under a sink of -inf such a row has lse = -inf; its share must be 0, not exp(-inf - -inf)."""
    out, dout = draw(1, 4, 1, 8, dtype=torch.float32), draw(1, 4, 1, 8, dtype=torch.float32, seed=1)
    out[:, 0], lse = 0, torch.tensor([[[float("-inf"), 1.0, 2.0, 3.0]]])
    gradient = _kernels.sink_gradient(dout, out, lse, torch.tensor([float("-inf")]))
    assert gradient.tolist() == [0.0]


def test_tiles_that_do_not_fit_are_never_tried_twice(monkeypatch):
    """First the fast tiles, then the small ones; with none left the caller takes another path, and knows so at once."""
    tried = []

    class TooLarge:
        def __getitem__(self, grid):
            def launch(*_, **options):
                tried.append(options["BLOCK_M"])
                raise OutOfResources(300_000, 100_000, "shared memory")

            return launch

    monkeypatch.setattr(_forward_kernel, "_forward_kernel", TooLarge())
    monkeypatch.setattr(_forward_kernel, "_too_large", set())
    q, k, v = (draw(1, 20, 1, 16, dtype=torch.float32, seed=s) for s in range(3))
    borders = {"cu_seqlens_q": None, "cu_seqlens_k": None, "max_seqlen_q": 20}
    for _ in range(2):
        assert _forward_kernel.forward(q, k, v, torch.zeros(1), scale=0.25, window=(-1, 0), **borders) is None
    assert tried == [tiles["BLOCK_M"] for tiles in _forward_kernel.tiles(16, windowed=False)]
