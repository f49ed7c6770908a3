"""The public functions: bad input is named, layouts and dtypes are kept, torch's machinery works through them."""

from __future__ import annotations

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from fsdp_sink_patches.ops.sink_attention import (
    _merge,
    backends,
    flash_attn_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_qkvpacked_func,
)
from fsdp_sink_patches.ops.sink_attention._op import sink_attention
from fsdp_sink_patches.ops.sink_attention.oracle import oracle_attention, relative_error
from tests.ops.cases import LENGTHS, SINKS, draw, leaves, sinks_of, starts

CU = starts(LENGTHS)
TOKENS = sum(LENGTHS)


def packed(**changes):
    arguments = {
        "q": draw(TOKENS, 8, 16), "k": draw(TOKENS, 2, 16, seed=1), "v": draw(TOKENS, 2, 16, seed=2),
        "cu_seqlens_q": CU, "cu_seqlens_k": CU, "max_seqlen_q": 37, "max_seqlen_k": 37, "s_aux": sinks_of("4", 8),
    }  # fmt: skip
    return flash_attn_varlen_func(**{**arguments, **changes})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"s_aux": torch.zeros(7)}, r"s_aux must have one logit per query head; got 7 for 8 heads"),
        ({"s_aux": torch.zeros(8, 1)}, r"s_aux must be \[heads\]"),
        ({"s_aux": torch.zeros(8, dtype=torch.int32)}, r"s_aux must be .* floating point"),
        ({"cu_seqlens_q": CU + 1}, r"cu_seqlens_q must start at 0; it starts at 1"),
        ({"cu_seqlens_k": torch.tensor([0, 9, 4, 82, 82, 82, TOKENS])}, r"never decrease; got 9 then 4"),
        ({"cu_seqlens_q": CU[:-1]}, r"cu_seqlens_q must end at the number of tokens, 82; it ends at 81"),
        ({"cu_seqlens_q": torch.tensor([0, TOKENS]), "max_seqlen_q": TOKENS}, r"as many documents; got 1 and 6"),
        ({"cu_seqlens_q": CU.float()}, r"cu_seqlens_q must be int32"),
        ({"cu_seqlens_q": CU.tolist()}, r"cu_seqlens_q must be an int32 tensor; got list"),
        ({"max_seqlen_q": 36}, r"max_seqlen_q must be at least the longest document of cu_seqlens_q, 37; got 36"),
        ({"max_seqlen_k": 5}, r"max_seqlen_k must be at least .* 37; got 5"),
        ({"s_aux": [4.0] * 8}, r"s_aux must be a tensor \[heads\]; got list"),
        ({"window_size": 128}, r"window_size must be \(left, right\); got 128"),
        ({"k": draw(TOKENS, 3, 16), "v": draw(TOKENS, 3, 16)}, r"kv_heads must divide heads"),
        ({"v": draw(TOKENS, 4, 16)}, r"kv_heads must divide heads and be one for k and v"),
        ({"k": draw(TOKENS, 2, 8)}, r"q and k must have one head_dim"),
        ({"k": draw(TOKENS, 2, 16, dtype=torch.float32)}, r"one floating dtype; got torch.float64, torch.float32"),
        ({"q": draw(1, TOKENS, 8, 16)}, r"must be \[tokens, heads, head_dim\]; got q \[1, 82, 8, 16\]"),
        ({"dropout_p": 0.1}, r"dropout_p must be 0; got 0.1"),
        ({"alibi_slopes": torch.zeros(8)}, r"alibi_slopes must be None"),
        ({"block_table": torch.zeros(1)}, r"block_table must be None"),
        ({"softcap": -1.0}, r"softcap must be 0"),
        ({"sink_kv": (draw(3, 8, 16), draw(3, 8, 16))}, r"sink_kv's k must be \[slots, 2, 16\]"),
        ({"sink_kv": (draw(3, 2, 16), draw(4, 2, 16))}, r"as many slots; got 3 and 4"),
        ({"sink_kv": (draw(0, 2, 16), draw(0, 2, 16))}, r"at least one slot"),
        ({"backend": "torch"}, r"backend 'torch' cannot serve cpu float64 heads 8/2 head_dim 16: no CUDA device"),
        ({"backend": "flash-attn-4"}, r"backend 'flash-attn-4' cannot serve .*: flash-attn-4 is not installed"),
        ({"backend": "fa5"}, r"backend is 'fa5'; expected one of flash-attn-4, flash-attn-3"),
    ],
)
def test_bad_input_is_named(changes, message):
    with pytest.raises(ValueError, match=message):
        packed(**changes)


def test_bad_dense_and_qkvpacked_shapes_are_named():
    with pytest.raises(ValueError, match=r"must be \[batch, seqlen, heads, head_dim\]"):
        flash_attn_func(draw(5, 4, 8), draw(5, 4, 8), draw(5, 4, 8))
    with pytest.raises(ValueError, match="one batch size"):
        flash_attn_func(draw(2, 5, 4, 8), draw(1, 5, 4, 8), draw(1, 5, 4, 8))
    with pytest.raises(ValueError, match=r"qkv must be \[batch, seqlen, 3, heads, head_dim\]"):
        flash_attn_qkvpacked_func(draw(2, 5, 2, 4, 8))
    with pytest.raises(ValueError, match=r"qkv must be \[total, 3, heads, head_dim\]"):
        flash_attn_varlen_qkvpacked_func(draw(5, 2, 4, 8), CU, 37)


def test_starts_that_change_in_place_are_looked_at_again():
    cu = CU.clone()
    packed(cu_seqlens_q=cu, cu_seqlens_k=cu)
    cu[0] = 1
    with pytest.raises(ValueError, match="must start at 0"):
        packed(cu_seqlens_q=cu, cu_seqlens_k=cu)


@pytest.mark.parametrize("kind", SINKS)
def test_qkvpacked_functions(kind):
    qkv, sinks = draw(TOKENS, 3, 4, 16), sinks_of(kind, 4)
    out = flash_attn_varlen_qkvpacked_func(qkv, CU, 37, causal=True, s_aux=sinks)
    expected, _ = oracle_attention(*qkv.unbind(1), sinks, cu_seqlens_q=CU, cu_seqlens_k=CU, causal=True)
    assert relative_error(out, expected) <= 1e-12
    dense = qkv.unflatten(0, (2, -1))
    out, lse, probs = flash_attn_qkvpacked_func(dense, causal=True, s_aux=sinks, return_attn_probs=True)
    expected, expected_lse = oracle_attention(*dense.unbind(2), sinks, causal=True)
    assert relative_error(out, expected) <= 1e-12
    assert relative_error(lse, expected_lse) <= 1e-12
    assert probs is None
    assert not lse.requires_grad


@pytest.mark.parametrize("kind", SINKS)
def test_rows_without_keys_and_documents_without_tokens(kind):
    cu_q, cu_k = starts([0, 6, 1, 0]), starts([0, 2, 0, 0])
    given = leaves(draw(7, 4, 8), draw(2, 2, 8, seed=1), draw(2, 2, 8, seed=2), sinks_of(kind, 4))
    out, lse, _ = flash_attn_varlen_func(
        *given[:3], cu_q, cu_k, 6, 2, causal=True, s_aux=given[3], return_attn_probs=True
    )
    assert (out[:4] == 0).all()
    assert (out[6] == 0).all()
    assert torch.equal(lse[:, 0], given[3])
    grads = torch.autograd.grad(out, given, draw(7, 4, 8, seed=3))
    assert all(g.isfinite().all() for g in grads)
    exact = leaves(*given)
    expected, _ = oracle_attention(*exact, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, causal=True)
    for grad, wanted in zip(grads, torch.autograd.grad(expected, exact, draw(7, 4, 8, seed=3)), strict=True):
        assert relative_error(grad, wanted) <= 1e-12


def test_nothing_at_all():
    none, cu = draw(0, 4, 8), torch.zeros(3, dtype=torch.int32)
    given = leaves(none, draw(0, 2, 8), draw(0, 2, 8), sinks_of("4", 4))
    out = flash_attn_varlen_func(*given[:3], cu, cu, 0, 0, causal=True, s_aux=given[3])
    assert out.shape == (0, 4, 8)
    assert [g.abs().sum() for g in torch.autograd.grad(out.sum(), given)] == [0, 0, 0, 0]


@pytest.mark.parametrize("lse", [float("inf"), float("-inf"), 0.0, 1e4, -1e4])
@pytest.mark.parametrize("sink", [-100.0, 0.0, 100.0])
def test_the_merge_stays_finite_whatever_a_kernel_reports(lse, sink):
    out = torch.zeros(1, 2, 1, 4) if abs(lse) != 1e4 else draw(1, 2, 1, 4, dtype=torch.float32)
    sinks = torch.tensor([sink])
    merged, merged_lse = _merge.merge(out, torch.full((1, 1, 2), lse), sinks)
    gradient = _merge.sink_gradient(torch.ones_like(merged), merged, merged_lse, sinks)
    assert merged.isfinite().all()
    assert merged_lse.isfinite().all()
    assert gradient.isfinite().all()
    if abs(lse) == float("inf"):
        assert (merged == 0).all()
        assert (merged_lse == sink).all()


def test_no_sink_is_plain_attention():
    given = [draw(1, 20, 4, 8), draw(1, 20, 2, 8, seed=1), draw(1, 20, 2, 8, seed=2)]
    plain = flash_attn_func(*given, causal=True, s_aux=None)
    assert relative_error(plain, oracle_attention(*given, causal=True)[0]) <= 1e-12
    assert relative_error(flash_attn_func(*given, causal=True, s_aux=sinks_of("4", 4)), plain) > 0.1


@pytest.mark.parametrize("sink_dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_the_sink_keeps_its_dtype(sink_dtype):
    sinks = sinks_of("random", 8, sink_dtype).requires_grad_()
    q, k, v = (draw(1, 20, h, 16, dtype=torch.bfloat16) for h in (8, 2, 2))
    out = flash_attn_func(q, k, v, causal=True, s_aux=sinks)
    assert out.dtype == torch.bfloat16
    (gradient,) = torch.autograd.grad(out.float().sum(), sinks)
    assert gradient.dtype == sink_dtype


def test_a_frozen_sink_does_no_work(monkeypatch):
    calls = []
    monkeypatch.setattr(_merge, "sink_gradient", lambda *a: calls.append(a))
    q, k, v = leaves(draw(1, 20, 4, 8), draw(1, 20, 2, 8), draw(1, 20, 2, 8))
    flash_attn_func(q, k, v, causal=True, s_aux=sinks_of("4", 4)).sum().backward()
    assert calls == []
    assert q.grad is not None


def test_only_the_sink_trains():
    sinks = sinks_of("4", 4).requires_grad_()
    q, k, v = draw(1, 20, 4, 8), draw(1, 20, 2, 8), draw(1, 20, 2, 8)
    exact = sinks.detach().clone().requires_grad_()
    flash_attn_func(q, k, v, causal=True, s_aux=sinks).square().sum().backward()
    oracle_attention(q, k, v, exact, causal=True)[0].square().sum().backward()
    assert relative_error(sinks.grad, exact.grad) <= 1e-12


def test_layouts_do_not_matter():
    """Transposed views, slices of a fused qkv, gradients that are expanded scalars: same numbers, contiguous output."""
    q, k, v = (draw(2, h, 30, 16, seed=h).transpose(1, 2) for h in (4, 2, 2))
    sinks, dense = sinks_of("random", 4), [t.contiguous() for t in (q, k, v)]
    fused = torch.cat(dense, 2)
    views = [(q, k, v), fused.split([4, 2, 2], 2)]
    expected = leaves(*dense)
    wanted = flash_attn_func(*expected, causal=True, s_aux=sinks)
    wanted_grads = torch.autograd.grad(wanted.sum(), expected)
    for given in views:
        given = [t.detach().requires_grad_() for t in given]
        out = flash_attn_func(*given, causal=True, s_aux=sinks)
        assert out.is_contiguous()
        assert torch.equal(out, wanted)
        for grad, reference in zip(torch.autograd.grad(out.sum(), given), wanted_grads, strict=True):
            assert torch.equal(grad, reference)


def test_sinks_of_any_stride():
    """A column of a parameter for all layers, every second element, one sink shared by all heads."""
    table = draw(8, 3, seed=4)
    for sinks in (table[:, 1], draw(16, seed=5)[::2], draw(1, seed=6).expand(8)):
        assert torch.equal(packed(s_aux=sinks), packed(s_aux=sinks.contiguous()))


def test_inference_mode():
    expected = packed()
    with torch.inference_mode():
        assert torch.equal(packed(cu_seqlens_q=CU.clone(), cu_seqlens_k=CU.clone()), expected)


def test_a_sink_of_minus_infinity_is_no_sink():
    """Also for rows without keys, where exp(-inf - -inf) would be NaN."""
    sinks = torch.tensor([0.0, float("-inf"), 1.0, 2.0], dtype=torch.float64)
    given = leaves(draw(1, 6, 4, 8), draw(1, 3, 2, 8, seed=1), draw(1, 3, 2, 8, seed=2), sinks)
    out = flash_attn_func(*given[:3], causal=True, s_aux=given[3])
    grads = torch.autograd.grad(out.square().sum(), given)
    assert all(g.isfinite().all() for g in grads)
    assert grads[3][1] == 0
    expected, _ = oracle_attention(*(t.detach() for t in given[:3]), sinks, causal=True)
    assert relative_error(out, expected) <= 1e-12


def test_int64_starts_and_tensor_lengths_are_taken():
    assert torch.equal(packed(cu_seqlens_q=CU.long(), cu_seqlens_k=CU.long(), max_seqlen_q=torch.tensor(37)), packed())


def test_autocast_runs_the_kernel_in_half_precision():
    q, k, v = (draw(1, 20, h, 16, dtype=torch.float32) for h in (4, 2, 2))
    with torch.autocast("cpu", torch.bfloat16):
        out = flash_attn_func(q, k, v, causal=True, s_aux=sinks_of("4", 4, torch.float32))
    assert out.dtype == torch.bfloat16


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_traces_whole(dtype):
    given = leaves(
        draw(TOKENS, 8, 16, dtype=dtype), draw(TOKENS, 2, 16, dtype=dtype), draw(TOKENS, 2, 16, dtype=dtype),
        sinks_of("4", 8, torch.float32),
    )  # fmt: skip

    def attend(q, k, v, s):
        return flash_attn_varlen_func(q * 2, k, v, CU, CU, 37, 37, causal=True, window_size=(7, 0), s_aux=s)

    eager = attend(*given)
    traced = torch.compile(attend, fullgraph=True, backend="aot_eager")(*given)
    assert torch.equal(traced, eager)
    dout = draw(TOKENS, 8, 16, dtype=dtype, seed=5)
    for a, b in zip(torch.autograd.grad(traced, given, dout), torch.autograd.grad(eager, given, dout), strict=True):
        assert torch.equal(a, b)


def test_varying_lengths_do_not_retrace_without_end():
    traces = []

    def counting(graph, _):
        traces.append(graph)
        return graph

    def attend(q, k, v, s, cu):
        return flash_attn_varlen_func(q, k, v, cu, cu, 64, 64, causal=True, s_aux=s)

    compiled = torch.compile(attend, fullgraph=True, backend=counting)
    for tokens in (40, 41, 50, 60, 64):
        q, k, v = (draw(tokens, h, 16, dtype=torch.float32) for h in (4, 2, 2))
        compiled(q, k, v, sinks_of("4", 4, torch.float32), starts([tokens]))
    assert len(traces) <= 2


@pytest.mark.parametrize("slots", [False, True])
@pytest.mark.parametrize("dense", [False, True])
def test_opcheck(slots, dense):
    shape = (2, 41) if dense else (TOKENS,)
    q, k, v = leaves(*(draw(*shape, h, 16, dtype=torch.float32) for h in (4, 2, 2)))
    extra = leaves(draw(3, 2, 16, dtype=torch.float32), draw(3, 2, 16, dtype=torch.float32)) if slots else [None, None]
    borders = [None, None, 41, 41] if dense else [CU, CU, 37, 37]
    sinks = sinks_of("4", 4, torch.float32).requires_grad_()
    torch.library.opcheck(sink_attention, (q, k, v, sinks, *extra, *borders, 0.25, 7, 0, 0.0, False, ""))


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing(reentrant):
    given = leaves(draw(1, 20, 4, 8), draw(1, 20, 2, 8, seed=1), draw(1, 20, 2, 8, seed=2), sinks_of("4", 4))

    def attend(q, k, v, s):
        return flash_attn_func(q, k, v, causal=True, s_aux=s)

    torch.autograd.backward(checkpoint(attend, *given, use_reentrant=reentrant).sum())
    checkpointed = [t.grad.clone() for t in given]
    for grad, wanted in zip(checkpointed, torch.autograd.grad(attend(*given).sum(), given), strict=True):
        assert torch.equal(grad, wanted)


def test_a_second_derivative_is_refused():
    q, k, v, s = leaves(draw(1, 5, 2, 8), draw(1, 5, 2, 8), draw(1, 5, 2, 8), sinks_of("4", 2))
    (dq,) = torch.autograd.grad(flash_attn_func(q, k, v, s_aux=s).square().sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        dq.sum().backward()


def test_every_backend_says_what_it_is_or_why_not():
    found = backends()
    assert list(found) == ["flash-attn-4", "flash-attn-3", "flash-attn-2", "torch", "reference"]
    assert found["reference"] == "available"
    assert found["flash-attn-2"] == "flash-attn is not installed"
