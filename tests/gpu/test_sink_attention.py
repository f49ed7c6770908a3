"""Every flash backend that this card can run, with sinks, against the fp64 oracle and against itself without sinks."""

from __future__ import annotations

import functools
import itertools

import pytest
import torch
from torch import Tensor

from fsdp_sink_patches.ops.sink_attention import _kernels, _merge, backends, flash_attn_func, flash_attn_varlen_func
from fsdp_sink_patches.ops.sink_attention._backends import BACKENDS, Request
from fsdp_sink_patches.ops.sink_attention.oracle import oracle_attention, relative_error
from fsdp_sink_patches.ops.sink_attention.reference import backward as reference_backward
from fsdp_sink_patches.ops.sink_attention.reference import forward as reference_forward

AVAILABLE = [name for name, state in backends().items() if state == "available" and name != "reference"]
LENGTHS = [1, 37, 512, 1, 300, 37, 37]
SINKS = ("4", "8", "20", "random")
WINDOWS = ((-1, 0), (0, 0), (126, 0))  # none, 1 key, 127 keys


def make_sinks(kind: str, heads: int, seed: int = 0) -> Tensor:
    if kind == "random":
        generator = torch.Generator("cuda").manual_seed(seed)
        return 3 * torch.randn(heads, device="cuda", generator=generator)
    return torch.full((heads,), float(kind), device="cuda")


@functools.cache
def packed_case(heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    torch.manual_seed(heads * 1000 + kv_heads * 100 + head_dim)
    tokens = sum(LENGTHS)
    q, k, v, dout = (
        torch.randn(tokens, h, head_dim, device="cuda", dtype=dtype) for h in (heads, kv_heads, kv_heads, heads)
    )
    starts = [0, *itertools.accumulate(LENGTHS)]
    return q, k, v, dout, torch.tensor(starts, dtype=torch.int32, device="cuda")


def errors(case: tuple[Tensor, ...], window: tuple[int, int], sinks: Tensor | None, backend: str) -> dict[str, float]:
    """Relative L2 errors of one backend against the oracle, by name."""
    q, k, v, dout, cu = case
    names = ["q", "k", "v"] + ([] if sinks is None else ["sinks"])
    given = [q, k, v] + ([] if sinks is None else [sinks])
    ours = [t.detach().clone().requires_grad_() for t in given]
    out = flash_attn_varlen_func(
        *ours[:3], cu, cu, max(LENGTHS), max(LENGTHS), window_size=window,
        s_aux=ours[3] if sinks is not None else None, backend=backend,
    )  # fmt: skip
    grads = torch.autograd.grad(out, ours, dout)
    exact = [t.detach().double().requires_grad_() for t in given]
    expected, _ = oracle_attention(
        *exact[:3], exact[3] if sinks is not None else None, cu_seqlens_q=cu, cu_seqlens_k=cu, window_size=window
    )
    expected_grads = torch.autograd.grad(expected, exact, dout.double())
    found = {"out": relative_error(out, expected)}
    return found | {f"d{n}": relative_error(a, b) for n, a, b in zip(names, grads, expected_grads, strict=True)}


@functools.cache
def plain_errors(heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype, window: tuple[int, int], backend: str):
    return errors(packed_case(heads, kv_heads, head_dim, dtype), window, None, backend)


def shapes_for(backend: str) -> list[tuple[int, int, int, torch.dtype]]:
    """Head counts, head_dim and dtype that the backend takes on this card; flash-attn 4 compiles for each, so fewer.

    64 heads, as gpt-oss has: a head's dsink is a sum of random signs, so over a few heads its relative error says more
    about the draw than about the kernel (0.8e-3 to 4.8e-3 for the same exact kernel rounded once, over draws of 8
    heads).
    """
    grid = list(itertools.product((64,), (64, 8), (64, 128, 256), (torch.bfloat16, torch.float16)))
    if backend == "flash-attn-4":
        grid = [(64, 64, 64, torch.bfloat16), (64, 8, 64, torch.float16), (64, 8, 128, torch.bfloat16)]
    if backend == "flash-attn-2":  # a build may hold some head_dims and dtypes only; these are what gpt-oss uses
        grid = [(64, kv, d, torch.bfloat16) for kv in (64, 8) for d in (64, 128)]
    return grid


CASES = [(name, *shape) for name in AVAILABLE for shape in shapes_for(name)]


def rounding_errors(case: tuple[Tensor, ...], window: tuple[int, int], sinks: Tensor) -> dict[str, float]:
    """What the dtype alone costs: the exact backward, fed an ``out`` rounded to the dtype, its results rounded once."""
    q, k, v, dout, cu = case
    options = {"cu_seqlens_q": cu, "cu_seqlens_k": cu, "scale": q.shape[-1] ** -0.5, "window": window, "softcap": 0.0}
    exact = [t.double() for t in (q, k, v)]
    out, lse = oracle_attention(*exact, sinks.double(), cu_seqlens_q=cu, cu_seqlens_k=cu, window_size=window)
    rounded = out.to(q.dtype)

    def gradients(saved: Tensor) -> list[Tensor]:
        return [
            *reference_backward(dout.double(), *exact, saved, lse, **options),
            _merge.sink_gradient_reference(dout.double()[None], saved[None], lse[None], sinks.double()),
        ]

    found = {"out": relative_error(rounded, out)}
    pairs = zip(("dq", "dk", "dv", "dsinks"), gradients(rounded.double()), gradients(out), strict=True)
    return found | {name: relative_error(a if name == "dsinks" else a.to(q.dtype), b) for name, a, b in pairs}


@pytest.mark.parametrize("window", WINDOWS, ids=("causal", "window1", "window127"))
@pytest.mark.parametrize(("backend", "heads", "kv_heads", "head_dim", "dtype"), CASES)
def test_sinks_cost_no_accuracy(backend, heads, kv_heads, head_dim, dtype, window):
    """out, dq, dk, dv within 1.3x of the same kernel's error without sinks; dsink within 4e-3.

    The yardstick also knows the kernel without a window, because with one key P is 1 and q and k have no gradient to
    be wrong
    about, and the dtype itself: fp16 can't hold what a sink of 20 leaves of a value.
    """
    case = packed_case(heads, kv_heads, head_dim, dtype)
    plain = plain_errors(heads, kv_heads, head_dim, dtype, window, backend)
    unbounded = plain_errors(heads, kv_heads, head_dim, dtype, (-1, 0), backend)
    for kind in SINKS:
        sinks = make_sinks(kind, heads)
        found, dtype_alone = errors(case, window, sinks, backend), rounding_errors(case, window, sinks)
        if dtype == torch.float16 and kind == "20":
            # e^-20 of a value lies below fp16's smallest number, so out itself is all that can be asked for
            assert found["out"] <= 1.3 * dtype_alone["out"], f"{found}, dtype: {dtype_alone}"
            continue
        for name in ("out", "dq", "dk", "dv"):
            limit = 1.3 * max(plain[name], unbounded[name], dtype_alone[name])
            assert found[name] <= limit, f"{name} with sinks {kind}: {found}, without: {plain}, dtype: {dtype_alone}"
        assert found["dsinks"] <= max(4e-3, 1.3 * dtype_alone["dsinks"]), f"sinks {kind}: {found}, dtype: {dtype_alone}"


@pytest.mark.parametrize("backend", AVAILABLE)
@pytest.mark.parametrize("sink_dtype", [torch.float32, torch.bfloat16])
def test_slots_and_sinks(backend, sink_dtype):
    """Learned slots join as one more part, with gradients, whatever the window."""
    q, k, v, dout, cu = packed_case(64, 8, 64, torch.bfloat16)
    torch.manual_seed(1)
    slots = [torch.randn(5, 8, 64, device="cuda", dtype=torch.bfloat16) for _ in range(2)]
    given = [q, k, v, make_sinks("random", 64).to(sink_dtype), *slots]
    ours = [t.detach().clone().requires_grad_() for t in given]
    out, lse, _ = flash_attn_varlen_func(
        *ours[:3], cu, cu, 512, 512, causal=True, window_size=(126, 0), s_aux=ours[3], sink_kv=(ours[4], ours[5]),
        return_attn_probs=True, backend=backend,
    )  # fmt: skip
    grads = torch.autograd.grad(out, ours, dout)
    exact = [t.detach().double().requires_grad_() for t in given]
    expected, expected_lse = oracle_attention(
        *exact[:4], cu_seqlens_q=cu, cu_seqlens_k=cu, window_size=(126, 0), sink_kv=(exact[4], exact[5])
    )
    assert relative_error(lse, expected_lse) <= 1e-4
    assert relative_error(out, expected) <= 5e-3
    assert grads[3].dtype == sink_dtype
    for grad, reference in zip(grads, torch.autograd.grad(expected, exact, dout.double()), strict=True):
        assert relative_error(grad, reference) <= 6e-3


@pytest.mark.parametrize("backend", AVAILABLE)
@pytest.mark.parametrize("window", [(-1, 0), (126, 0)], ids=("full", "window127"))
@pytest.mark.parametrize("tokens", [8192, 32768])
def test_long_rows(backend, window, tokens):
    """S up to 32768: against the fp64 reference, which test_reference.py holds against the oracle."""
    torch.manual_seed(tokens)
    heads, d = 16, 64
    cu = torch.tensor([0, tokens // 3, tokens // 3, tokens], dtype=torch.int32, device="cuda")
    q, k, v, dout = (torch.randn(tokens, h, d, device="cuda", dtype=torch.bfloat16) for h in (heads, 2, 2, heads))
    found = {}
    for kind in (None, "4", "random"):
        sinks = None if kind is None else make_sinks(kind, heads)
        ours = [t.detach().clone().requires_grad_() for t in (q, k, v, *([] if sinks is None else [sinks]))]
        s_aux = ours[3] if sinks is not None else None
        out = flash_attn_varlen_func(
            *ours[:3], cu, cu, tokens, tokens, window_size=window, s_aux=s_aux, backend=backend
        )
        grads = torch.autograd.grad(out, ours, dout)
        options = {"cu_seqlens_q": cu, "cu_seqlens_k": cu, "scale": d**-0.5, "window": window, "softcap": 0.0}
        exact = [t.double() for t in (q, k, v)]
        doubled = None if sinks is None else sinks.double()
        part, part_lse = reference_forward(*exact, **options)
        merged, merged_lse = _merge.merge_reference(part[None], part_lse[None], doubled, None, None)
        expected = list(reference_backward(dout.double(), *exact, merged[0], merged_lse[0], **options))
        if doubled is not None:
            expected.append(_merge.sink_gradient_reference(dout.double()[None], merged, merged_lse, doubled))
        wanted = merged[0]
        found[kind] = [relative_error(a, b) for a, b in zip([out, *grads], [wanted, *expected], strict=True)]
    for kind in ("4", "random"):
        assert all(e <= 1.3 * p for e, p in zip(found[kind][:4], found[None], strict=True)), found
        assert found[kind][4] <= 4e-3, found


@pytest.mark.parametrize("backend", AVAILABLE)
def test_dense_batches_and_transposed_layouts(backend):
    """transformers hands over [batch, seqlen, heads, d] as a transposed view; no layout may change the result."""
    if backend == "flash-attn-2":
        lengths = 1024  # long enough that no build needs its split-kv kernels
    else:
        lengths = 129
    torch.manual_seed(2)
    q, k, v = (torch.randn(2, h, lengths, 64, device="cuda", dtype=torch.bfloat16) for h in (8, 2, 2))
    sinks = make_sinks("random", 8)
    views = [t.transpose(1, 2).requires_grad_() for t in (q, k, v)]
    dout = torch.randn(2, lengths, 8, 64, device="cuda", dtype=torch.bfloat16)
    out = flash_attn_func(*views, causal=True, s_aux=sinks, backend=backend)
    grads = torch.autograd.grad(out, views, dout)
    exact = [t.detach().double().requires_grad_() for t in views]
    expected, _ = oracle_attention(*exact, sinks, causal=True)
    assert out.is_contiguous()
    assert relative_error(out, expected) <= 3.5e-3
    for grad, reference in zip(grads, torch.autograd.grad(expected, exact, dout.double()), strict=True):
        assert relative_error(grad, reference) <= 4.5e-3


@pytest.mark.parametrize("backend", AVAILABLE)
@pytest.mark.parametrize("head_dims", [(72, 72), (60, 60), (192, 128), (64, 40)])
def test_odd_head_dims_are_padded(backend, head_dims):
    request = Request(
        "cuda", torch.cuda.get_device_capability(), torch.bfloat16, *head_dims, 4, 4, softcap=False, deterministic=False
    )
    chosen = next(b for b in BACKENDS if b.name == backend)
    if backend == "flash-attn-2" or chosen.refuses(request):
        pytest.skip("not in every build" if backend == "flash-attn-2" else str(chosen.refuses(request)))
    torch.manual_seed(3)
    qk, vd = head_dims
    q, k, v, dout = (torch.randn(150, 4, d, device="cuda", dtype=torch.bfloat16) for d in (qk, qk, vd, vd))
    cu = torch.tensor([0, 70, 150], dtype=torch.int32, device="cuda")
    given = [q, k, v, make_sinks("4", 4)]
    ours = [t.detach().clone().requires_grad_() for t in given]
    out = flash_attn_varlen_func(*ours[:3], cu, cu, 80, 80, causal=True, s_aux=ours[3], backend=backend)
    grads = torch.autograd.grad(out, ours, dout)
    exact = [t.detach().double().requires_grad_() for t in given]
    expected, _ = oracle_attention(*exact, cu_seqlens_q=cu, cu_seqlens_k=cu, causal=True)
    assert relative_error(out, expected) <= 3.5e-3
    for grad, reference in zip(grads, torch.autograd.grad(expected, exact, dout.double()), strict=True):
        assert relative_error(grad, reference) <= 5e-3


@pytest.mark.parametrize("backend", AVAILABLE)
def test_rows_without_keys_and_empty_documents(backend):
    """More queries than keys, so the first rows see nothing: out 0, lse = sink, every gradient finite and right."""
    torch.manual_seed(4)
    cu_q = torch.tensor([0, 0, 40, 41, 41], dtype=torch.int32, device="cuda")
    cu_k = torch.tensor([0, 0, 10, 11, 11], dtype=torch.int32, device="cuda")
    q, dout = (torch.randn(41, 8, 64, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    k, v = (torch.randn(11, 2, 64, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    for kind in SINKS:
        given = [q, k, v, make_sinks(kind, 8)]
        ours = [t.detach().clone().requires_grad_() for t in given]
        out, lse, _ = flash_attn_varlen_func(
            *ours[:3], cu_q, cu_k, 40, 10, causal=True, s_aux=ours[3], return_attn_probs=True, backend=backend
        )
        grads = torch.autograd.grad(out, ours, dout)
        exact = [t.detach().double().requires_grad_() for t in given]
        expected, expected_lse = oracle_attention(*exact, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, causal=True)
        assert (out[:30] == 0).all()
        assert relative_error(lse, expected_lse) <= 1e-4
        assert relative_error(out, expected) <= 4e-3
        for grad, reference in zip(grads, torch.autograd.grad(expected, exact, dout.double()), strict=True):
            assert relative_error(grad, reference) <= 6e-3


@pytest.fixture
def nan_in_fresh_memory():
    """``torch.empty`` comes back full of NaN, so that an unwritten element can't pass."""
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("nan_in_fresh_memory")
@pytest.mark.parametrize("head_dim", [40, 64, 128, 256])
@pytest.mark.parametrize("tokens", [1, 63, 1000])
@pytest.mark.parametrize("slots", [False, True])
@pytest.mark.parametrize("transposed", [False, True])
def test_kernels_equal_plain_torch(head_dim, tokens, slots, transposed):
    torch.manual_seed(5)

    def draw() -> tuple[Tensor, Tensor]:
        shape = (2, 8, tokens, head_dim) if transposed else (2, tokens, 8, head_dim)
        out = torch.randn(shape, device="cuda", dtype=torch.bfloat16)
        lse = 4 * torch.randn(2, 8, tokens, device="cuda")
        lse[0, 0, 0], lse[1, 1, -1], lse[1, 2, 0], lse[0, 3, 0] = float("inf"), float("-inf"), 1e4, -1e4
        return (out.transpose(1, 2) if transposed else out), lse

    out, lse = draw()
    slot_out, slot_lse = draw() if slots else (None, None)
    for kind in SINKS:
        sinks = make_sinks(kind, 8)
        wanted, wanted_lse = _merge.merge_reference(
            out.double(), lse.double(), sinks, *(None if t is None else t.double() for t in (slot_out, slot_lse))
        )
        merged, merged_lse = _kernels.merge(out.clone(), lse.clone(), sinks, slot_out, slot_lse)
        assert merged.isfinite().all()
        assert relative_error(merged, wanted) <= 1.02 * relative_error(wanted.bfloat16(), wanted)  # rounded once
        torch.testing.assert_close(merged_lse.double(), wanted_lse, rtol=1e-5, atol=1e-5)
        dout = torch.randn_like(merged)
        torch.testing.assert_close(
            _kernels.sink_gradient(dout, merged, merged_lse, sinks),
            _merge.sink_gradient_reference(dout.double(), merged.double(), merged_lse.double(), sinks.double()).float(),
            rtol=1e-4, atol=1e-4 * tokens**0.5,
        )  # fmt: skip


@pytest.mark.parametrize("backend", AVAILABLE)
def test_gradients_repeat_bit_for_bit_when_asked(backend):
    q, k, v, dout, cu = packed_case(8, 1, 64, torch.bfloat16)
    sinks = make_sinks("random", 8).requires_grad_()
    runs = []
    for _ in range(3):
        leaves = [t.detach().clone().requires_grad_() for t in (q, k, v)]
        out = flash_attn_varlen_func(
            *leaves, cu, cu, 512, 512, causal=True, s_aux=sinks, deterministic=True, backend=backend
        )
        runs.append(torch.autograd.grad(out, [*leaves, sinks], dout))
    for run in runs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(run, runs[0], strict=True))


@pytest.mark.parametrize("backend", AVAILABLE)
def test_sinks_of_any_stride(backend):
    q, k, v, _, cu = packed_case(8, 1, 64, torch.bfloat16)
    table = make_sinks("random", 24).view(8, 3)

    def attend(sinks: Tensor) -> Tensor:
        return flash_attn_varlen_func(q, k, v, cu, cu, 512, 512, causal=True, s_aux=sinks, backend=backend)

    for sinks in (table[:, 1], make_sinks("random", 16)[::2], make_sinks("8", 1).expand(8)):
        assert torch.equal(attend(sinks), attend(sinks.contiguous()))


def test_inference_mode():
    q, k, v, _, cu = packed_case(8, 1, 64, torch.bfloat16)
    expected = flash_attn_varlen_func(q, k, v, cu, cu, 512, 512, causal=True, s_aux=make_sinks("4", 8))
    with torch.inference_mode():
        starts = cu.clone()
        out = flash_attn_varlen_func(q, k, v, starts, starts, 512, 512, causal=True, s_aux=make_sinks("4", 8))
    assert torch.equal(out, expected)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two cards")
def test_tensors_on_the_second_card():
    q, k, v, _, cu = packed_case(8, 1, 64, torch.bfloat16)
    first = flash_attn_varlen_func(q, k, v, cu, cu, 512, 512, causal=True, s_aux=make_sinks("4", 8))
    second = [t.to("cuda:1") for t in (q, k, v, cu, make_sinks("4", 8))]
    out = flash_attn_varlen_func(*second[:3], second[3], second[3], 512, 512, causal=True, s_aux=second[4])
    assert torch.equal(out.cpu(), first.cpu())


def test_traces_whole_and_passes_opcheck():
    q, k, v, dout, cu = packed_case(8, 1, 64, torch.bfloat16)
    leaves = [t.detach().clone().requires_grad_() for t in (q, k, v, make_sinks("4", 8))]

    def attend(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Tensor:
        return flash_attn_varlen_func(q * 1.0, k, v, cu, cu, 512, 512, causal=True, s_aux=sinks)

    eager = attend(*leaves)
    compiled = torch.compile(attend, fullgraph=True)(*leaves)
    torch.testing.assert_close(compiled, eager, rtol=0, atol=0)
    for a, b in zip(torch.autograd.grad(compiled, leaves, dout), torch.autograd.grad(eager, leaves, dout), strict=True):
        assert relative_error(a, b.double()) <= 2e-3
    from fsdp_sink_patches.ops.sink_attention._op import sink_attention

    torch.library.opcheck(
        sink_attention,
        (*leaves, None, None, cu, cu, 512, 512, 0.125, 126, 0, 0.0, False, "torch"),
    )


def test_cpu_tensors_beside_cuda_are_refused():
    q, k, v, _, cu = packed_case(8, 1, 64, torch.bfloat16)
    with pytest.raises(ValueError, match="s_aux must be on cuda"):
        flash_attn_varlen_func(q, k, v, cu, cu, 512, 512, s_aux=torch.zeros(8))
    with pytest.raises(ValueError, match="cu_seqlens_q must be on cuda"):
        flash_attn_varlen_func(q, k, v, cu.cpu(), cu, 512, 512, s_aux=make_sinks("4", 8))
