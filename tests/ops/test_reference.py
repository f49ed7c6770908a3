"""The reference backend, forward and backward, against the oracle."""

from __future__ import annotations

import pytest
import torch

from fsdp_sink_patches.ops.sink_attention import flash_attn_func, flash_attn_varlen_func, reference
from fsdp_sink_patches.ops.sink_attention.oracle import oracle_attention, relative_error
from tests.ops.cases import LENGTHS, SINKS, WINDOWS, draw, leaves, sinks_of, starts

TOLERANCE = {torch.float64: 1e-9, torch.float32: 2e-6, torch.bfloat16: 2e-2, torch.float16: 3e-3}


def compare(given, run, expected_run, dout, tolerance):
    ours, exact = leaves(*given), leaves(*(t.double() for t in given))
    out, (expected, _) = run(*ours), expected_run(*exact)
    assert relative_error(out, expected) <= tolerance
    grads = torch.autograd.grad(out, ours, dout.to(out.dtype))
    for ours_, grad, reference_grad in zip(
        ours, grads, torch.autograd.grad(expected, exact, dout.double()), strict=True
    ):
        assert grad.dtype == ours_.dtype
        assert relative_error(grad, reference_grad) <= tolerance


@pytest.mark.parametrize("kind", SINKS)
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_packed_documents(kind, window, dtype):
    if dtype == torch.float16 and kind == "20":
        kind = "8"  # exp(-20) of a value is below float16's smallest number
    tokens, cu = sum(LENGTHS), starts(LENGTHS)
    given = [*(draw(tokens, h, 16, dtype=dtype, seed=h) for h in (8, 2, 2)), sinks_of(kind, 8, dtype)]
    compare(
        given,
        lambda q, k, v, s: flash_attn_varlen_func(q, k, v, cu, cu, 37, 37, window_size=window, s_aux=s),
        lambda q, k, v, s: oracle_attention(q, k, v, s, cu_seqlens_q=cu, cu_seqlens_k=cu, window_size=window),
        draw(tokens, 8, 16, seed=9),
        TOLERANCE[dtype],
    )


@pytest.mark.parametrize("kind", SINKS)
@pytest.mark.parametrize("head_dims", [(16, 16), (7, 7), (24, 16), (512, 512)])
@pytest.mark.parametrize("lengths", [(19, 19), (5, 19), (19, 5)])
def test_dense_batches_of_any_shape(kind, head_dims, lengths):
    """Odd and wide head_dims, another head_dim for v, more keys than queries (decode) and fewer (rows without keys)."""
    (qk, vd), (sq, sk) = head_dims, lengths
    given = [draw(2, sq, 4, qk), draw(2, sk, 1, qk, seed=1), draw(2, sk, 1, vd, seed=2), sinks_of(kind, 4)]
    compare(
        given,
        lambda q, k, v, s: flash_attn_func(q, k, v, causal=True, window_size=(8, -1), s_aux=s),
        lambda q, k, v, s: oracle_attention(q, k, v, s, causal=True, window_size=(8, -1)),
        draw(2, sq, 4, vd, seed=3),
        1e-9,
    )


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("sinks", [True, False])
@pytest.mark.parametrize("packed", [True, False])
def test_slots_are_seen_by_every_query_whatever_the_window(window, sinks, packed):
    cu = starts(LENGTHS)
    shape = (sum(LENGTHS),) if packed else (2, 11)
    given = [draw(*shape, h, 16, seed=h) for h in (4, 2, 2)]
    given += [draw(3, 2, 16, seed=20), draw(3, 2, 16, seed=21)] + ([sinks_of("random", 4)] if sinks else [])

    def run(q, k, v, slot_k, slot_v, s=None):
        options = {"window_size": window, "s_aux": s, "sink_kv": (slot_k, slot_v)}
        if packed:
            return flash_attn_varlen_func(q, k, v, cu, cu, 37, 37, **options)
        return flash_attn_func(q, k, v, **options)

    def expected(q, k, v, slot_k, slot_v, s=None):
        borders = {"cu_seqlens_q": cu, "cu_seqlens_k": cu} if packed else {}
        return oracle_attention(q, k, v, s, window_size=window, sink_kv=(slot_k, slot_v), **borders)

    compare(given, run, expected, draw(*shape, 4, 16, seed=30), 1e-9)


@pytest.mark.parametrize("softcap", [0.5, 30.0])
def test_softcap(softcap):
    given = [draw(1, 23, 4, 16), draw(1, 23, 2, 16, seed=1), draw(1, 23, 2, 16, seed=2), sinks_of("4", 4)]
    compare(
        given,
        lambda q, k, v, s: flash_attn_func(q, k, v, causal=True, softcap=softcap, s_aux=s),
        lambda q, k, v, s: oracle_attention(q, k, v, s, causal=True, softcap=softcap),
        draw(1, 23, 4, 16, seed=3),
        1e-9,
    )


@pytest.mark.parametrize("rows", [16, 24])
def test_chunks_do_not_show(monkeypatch, rows):
    """The same numbers with one chunk a document and with many; the chunk bounds the memory, not the result."""
    given = [draw(1, 100, 4, 16), draw(1, 100, 2, 16, seed=1), draw(1, 100, 2, 16, seed=2), sinks_of("random", 4)]
    whole = flash_attn_func(*given[:3], causal=True, window_size=(30, 0), s_aux=given[3])
    monkeypatch.setattr(reference, "SCORE_BYTES", 4 * 4 * 31 * rows)
    compare(
        given,
        lambda q, k, v, s: flash_attn_func(q, k, v, causal=True, window_size=(30, 0), s_aux=s),
        lambda q, k, v, s: oracle_attention(q, k, v, s, causal=True, window_size=(30, 0)),
        draw(1, 100, 4, 16, seed=3),
        1e-9,
    )
    pieces = flash_attn_func(*given[:3], causal=True, window_size=(30, 0), s_aux=given[3])
    assert relative_error(pieces, whole) <= 1e-14


def test_a_window_counts_the_token_itself():
    """transformers' window of 4 keys is (3, 0) here: row i sees exactly min(i + 1, 4) keys, packed or not."""
    lengths, width = [12, 3], 4
    v = torch.cat([torch.eye(12, dtype=torch.float64)[:n] for n in lengths])[:, None]
    q = k = torch.zeros(15, 1, 12, dtype=torch.float64)
    out = flash_attn_varlen_func(
        q, k, v, starts(lengths), starts(lengths), 12, 12, causal=True, window_size=(width - 1, 0)
    )
    seen = (out[:, 0] > 0).sum(-1).tolist()
    assert seen == [min(i + 1, width) for n in lengths for i in range(n)]


def test_a_detached_rescale_would_fail_these_tests():
    """flash-attn drops the gradient of lse, so rescaling its output outside the kernel gives a wrong dq: seen here."""
    given = [draw(1, 20, 2, 8), draw(1, 20, 1, 8, seed=1), draw(1, 20, 1, 8, seed=2)]
    sinks, dout = sinks_of("4", 2), draw(1, 20, 2, 8, seed=3)
    exact = leaves(*given)
    expected = torch.autograd.grad(oracle_attention(*exact, sinks, causal=True)[0], exact, dout)
    ours = leaves(*given)
    plain, lse = oracle_attention(*ours, causal=True)
    rescaled = plain * torch.sigmoid(lse.detach() - sinks[:, None]).transpose(1, 2)[..., None]
    wrong = torch.autograd.grad(rescaled, ours, dout)
    assert relative_error(wrong[0], expected[0]) > 0.05


def test_changing_the_sink_changes_the_output():
    q, k, v = draw(1, 50, 2, 8), draw(1, 50, 1, 8, seed=1), draw(1, 50, 1, 8, seed=2)
    outs = [flash_attn_func(q, k, v, causal=True, s_aux=torch.full((2,), s)) for s in (4.0, 8.0)]
    assert relative_error(outs[0], outs[1]) > 0.1
