"""How each flash package is called: fakes with the real signatures, on the reference, in fp64 on the CPU.

A fake behaves as its kernel does where that matters: what it returns for a row without keys, who allocates the
gradients, which words it takes. Its results then have to equal the oracle's, so a swapped or lost argument shows.
"""

from __future__ import annotations

import logging
import sys
import types

import pytest
import torch

from fsdp_sink_patches.ops.sink_attention import _backends, _merge, reference
from fsdp_sink_patches.ops.sink_attention._backends import FlashAttn2, FlashAttn3, FlashAttn4, Part, Request, TorchFlash
from fsdp_sink_patches.ops.sink_attention.oracle import oracle_attention, relative_error
from tests.ops.cases import LENGTHS, SINKS, draw, leaves, sinks_of, starts

CALLS: list[str] = []


def compute(q, k, v, cu_q, cu_k, scale, window, softcap, empty):
    out, lse = reference.forward(
        q, k, v, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, scale=scale, window=window, softcap=softcap
    )
    return out, lse.masked_fill(lse == float("-inf"), empty)


def differentiate(dout, q, k, v, out, lse, cu_q, cu_k, scale, window, softcap):
    return reference.backward(
        dout, q, k, v, out, lse, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, scale=scale, window=window, softcap=softcap
    )


def flash_attn_2() -> types.ModuleType:
    """flash-attn 2.7.4.post1 to 2.8.3: rows without keys have lse = +inf; the caller allocates dq, dk, dv."""
    api = types.ModuleType("flash_attn.flash_attn_interface")

    def forward(
        q,
        k,
        v,
        dropout_p,
        softmax_scale,
        causal,
        window_size_left,
        window_size_right,
        softcap,
        alibi_slopes,
        return_softmax,
    ):
        CALLS.append("dense")
        window = (window_size_left, 0 if causal else window_size_right)
        return (
            *compute(q, k, v, None, None, softmax_scale, window, softcap, float("inf")),
            torch.empty(0),
            torch.empty(2),
        )

    def varlen_forward(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, causal,
        window_size_left=-1, window_size_right=-1, softcap=0.0, alibi_slopes=None, return_softmax=False,
        block_table=None, leftpad_k=None, seqused_k=None, zero_tensors=False,
    ):  # fmt: skip
        CALLS.append("varlen")
        assert isinstance(max_seqlen_q, int)
        window = (window_size_left, 0 if causal else window_size_right)
        pair = compute(q, k, v, cu_seqlens_q, cu_seqlens_k, softmax_scale, window, softcap, float("inf"))
        return *pair, torch.empty(0), torch.empty(2)

    def backward(
        dout, q, k, v, out, softmax_lse, dq, dk, dv, dropout_p, softmax_scale, causal, window_size_left,
        window_size_right, softcap, alibi_slopes, deterministic, rng_state=None,
    ):  # fmt: skip
        window = (window_size_left, 0 if causal else window_size_right)
        grads = differentiate(dout, q, k, v, out, softmax_lse, None, None, softmax_scale, window, softcap)
        for target, grad in zip((dq, dk, dv), grads, strict=True):
            target.copy_(grad)
        return torch.empty(0)

    def varlen_backward(
        dout, q, k, v, out, softmax_lse, dq, dk, dv, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p,
        softmax_scale, causal, window_size_left, window_size_right, softcap, alibi_slopes, deterministic,
        rng_state=None, zero_tensors=False,
    ):  # fmt: skip
        window = (window_size_left, 0 if causal else window_size_right)
        grads = differentiate(
            dout, q, k, v, out, softmax_lse, cu_seqlens_q, cu_seqlens_k, softmax_scale, window, softcap
        )
        for target, grad in zip((dq, dk, dv), grads, strict=True):
            target.copy_(grad)
        return torch.empty(0)

    api._flash_attn_forward, api._flash_attn_varlen_forward = forward, varlen_forward
    api._flash_attn_backward, api._flash_attn_varlen_backward = backward, varlen_backward
    return api


def flash_attn_3(flag: str) -> types.ModuleType:
    """The Hopper build; `flag` is what its backward calls causal attention."""
    api = types.ModuleType("flash_attn_interface")

    def forward(
        q, k, v, k_new=None, v_new=None, qv=None, out_=None, cu_seqlens_q=None, cu_seqlens_k=None,
        cu_seqlens_k_new=None, seqused_q=None, seqused_k=None, max_seqlen_q=None, max_seqlen_k=None, page_table=None,
        kv_batch_idx=None, leftpad_k=None, rotary_cos=None, rotary_sin=None, seqlens_rotary=None, q_descale=None,
        k_descale=None, v_descale=None, softmax_scale=None, causal=False, window_size_left=-1, window_size_right=-1,
        attention_chunk=0, softcap=0.0, rotary_interleaved=True, scheduler_metadata=None, num_splits=1, pack_gqa=None,
    sm_margin=0, ):  # fmt: skip
        CALLS.append("dense" if cu_seqlens_q is None else "varlen")
        window = (window_size_left, 0 if causal else window_size_right)
        pair = compute(q, k, v, cu_seqlens_q, cu_seqlens_k, softmax_scale, window, softcap, float("inf"))
        return *pair, torch.empty(0), torch.empty(0)

    def run(dout, q, k, v, out, softmax_lse, cu_q, cu_k, dq, dk, dv, scale, causal, left, right, softcap):
        grads = differentiate(
            dout, q, k, v, out, softmax_lse, cu_q, cu_k, scale, (left, 0 if causal else right), softcap
        )
        for target, grad in zip((dq, dk, dv), grads, strict=True):
            target.copy_(grad)
        return torch.empty(0)

    def newer(
        dout, q, k, v, out, softmax_lse, cu_seqlens_q=None, cu_seqlens_k=None, sequed_q=None, sequed_k=None,
        max_seqlen_q=None, max_seqlen_k=None, dq=None, dk=None, dv=None, softmax_scale=None, is_causal=False,
        window_size_left=-1, window_size_right=-1, softcap=0.0, deterministic=False, sm_margin=0,
    ):  # fmt: skip
        return run(
            dout, q, k, v, out, softmax_lse, cu_seqlens_q, cu_seqlens_k, dq, dk, dv, softmax_scale, is_causal,
            window_size_left, window_size_right, softcap,
        )  # fmt: skip

    def older(
        dout, q, k, v, out, softmax_lse, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dq, dk, dv,
        softmax_scale, causal, window_size=(-1, -1), softcap=0.0, deterministic=False,
    ):  # fmt: skip
        return run(
            dout, q, k, v, out, softmax_lse, cu_seqlens_q, cu_seqlens_k, dq, dk, dv, softmax_scale, causal,
            *window_size, softcap,
        )  # fmt: skip

    api._flash_attn_forward, api._flash_attn_backward = forward, newer if flag == "is_causal" else older
    return api


def flash_attn_4(members: int) -> types.ModuleType:
    """flash_attn.cute from b26 on: takes the sink, an unbounded window is None; `members` is how many results it
    returns."""
    api = types.ModuleType("flash_attn.cute.interface")

    def bounds(causal, left, right):
        assert all(bound is None or bound >= 0 for bound in (left, right)), "from b30 on -1 is a window of its own"
        return (-1 if left is None else left, 0 if causal else -1 if right is None else right)

    def _flash_attn_fwd(
        q, k, v, qv=None, cu_seqlens_q=None, cu_seqlens_k=None, seqused_q=None, seqused_k=None, max_seqlen_q=None,
        max_seqlen_k=None, softmax_scale=None, causal=False, softcap=None, window_size_left=None,
        window_size_right=None, learnable_sink=None, return_lse=False,
    ):  # fmt: skip
        CALLS.append("native" if learnable_sink is not None else "dense" if cu_seqlens_q is None else "varlen")
        window = bounds(causal, window_size_left, window_size_right)
        out, lse = compute(q, k, v, cu_seqlens_q, cu_seqlens_k, softmax_scale, window, softcap or 0.0, float("-inf"))
        if learnable_sink is not None:
            joined = _merge.merge_reference(out[None], lse[None], learnable_sink, None, None) if q.dim() == 3 else None
            out, lse = (
                (t[0] for t in joined) if joined else _merge.merge_reference(out, lse, learnable_sink, None, None)
            )
        return (out, lse if return_lse else None, *[None] * (members - 2))

    def _flash_attn_bwd(
        q, k, v, out, dout, lse, softmax_scale=None, causal=False, softcap=0.0, window_size_left=None,
        window_size_right=None, cu_seqlens_q=None, cu_seqlens_k=None, seqused_q=None, seqused_k=None, max_seqlen_q=None,
        max_seqlen_k=None, deterministic=False, dlse=None, learnable_sink=None,
    ):  # fmt: skip
        window = bounds(causal, window_size_left, window_size_right)
        grads = differentiate(dout, q, k, v, out, lse, cu_seqlens_q, cu_seqlens_k, softmax_scale, window, softcap)
        if learnable_sink is None:
            return grads
        assert learnable_sink.dtype in (torch.float32, torch.bfloat16, torch.float16)
        return *grads, _merge.sink_gradient(dout.double(), out.double(), lse.double(), learnable_sink)

    api._flash_attn_fwd, api._flash_attn_bwd = _flash_attn_fwd, _flash_attn_bwd
    return api


PACKAGES = {
    "flash-attn-2": (FlashAttn2(), flash_attn_2),
    "flash-attn-3": (FlashAttn3(), lambda: flash_attn_3("is_causal")),
    "flash-attn-3, older": (FlashAttn3(), lambda: flash_attn_3("causal")),
    "flash-attn-4 b26": (FlashAttn4(), lambda: flash_attn_4(4)),
    "flash-attn-4 b36": (FlashAttn4(), lambda: flash_attn_4(5)),
}


@pytest.fixture(params=list(PACKAGES))
def package(request, monkeypatch):
    backend, build = PACKAGES[request.param]
    api = build()
    monkeypatch.setitem(sys.modules, api.__name__, api)
    CALLS.clear()
    return backend


def attend(backend, given, part, dout):
    """What the operator does: parts from the backend, joined with the sink, and its gradients from the merged pair."""
    q, k, v, sinks = given
    native = backend.native_sinks
    out, lse = backend.forward(q, k, v, part, sinks if native else None)
    if not native:
        out, lse = _merge.merge(out, lse, sinks)
    grads = backend.backward(dout, q, k, v, out, lse, part)
    if backend.native_sink_gradient:
        *again, dsinks = backend.backward_with_sinks(dout, q, k, v, out, lse, part, sinks.float())
        torch.testing.assert_close(tuple(again), grads)
        assert relative_error(dsinks, _merge.sink_gradient(dout, out, lse, sinks)) <= 1e-6  # the sinks went in as fp32
    return out, lse, grads


@pytest.mark.parametrize("kind", SINKS)
@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (7, 0), (3, 2)])
@pytest.mark.parametrize("shape", ["packed", "dense", "no keys", "odd head_dims"])
def test_each_package_is_called_as_it_wants(package, kind, window, shape):
    qk, vd = (20, 13) if shape == "odd head_dims" else (16, 16)
    if shape == "dense":
        borders, sizes = (None, None), ((2, 30), (2, 30))
    elif shape == "no keys":
        borders, sizes = (starts([9, 3]), starts([4, 3])), ((12,), (7,))
    else:
        borders, sizes = (starts(LENGTHS), starts(LENGTHS)), ((sum(LENGTHS),),) * 2
    given = [
        draw(*sizes[0], 4, qk), draw(*sizes[1], 2, qk, seed=1), draw(*sizes[1], 2, vd, seed=2), sinks_of(kind, 4),
    ]  # fmt: skip
    dout = draw(*sizes[0], 4, vd, seed=3)
    part = Part(*borders, 37, 37, 0.3, window, 0.0, False)
    out, lse, grads = attend(package, given, part, dout)
    exact = leaves(*given)
    named = {} if borders[0] is None else {"cu_seqlens_q": borders[0], "cu_seqlens_k": borders[1]}
    expected, expected_lse = oracle_attention(*exact, softmax_scale=0.3, window_size=window, **named)
    assert relative_error(out, expected) <= 1e-12
    assert relative_error(lse, expected_lse) <= 1e-12
    for grad, wanted in zip(grads, torch.autograd.grad(expected, exact[:3], dout), strict=True):
        assert grad.shape == wanted.shape
        assert relative_error(grad, wanted) <= 1e-12
    native = isinstance(package, FlashAttn4)
    assert set(CALLS) == ({"native"} if native else {"dense" if borders[0] is None else "varlen"})


def wanted(**changes):
    request = {
        "device": "cuda", "capability": (9, 0), "dtype": torch.bfloat16, "head_dim": 64, "head_dim_v": 64, "heads": 8,
        "kv_heads": 2, "softcap": False, "deterministic": False,
    }  # fmt: skip
    return Request(**{**request, **changes})


@pytest.mark.parametrize(
    ("backend", "changes", "reason"),
    [
        (TorchFlash(), {}, None),
        (TorchFlash(), {"softcap": True}, "no softcap"),
        (TorchFlash(), {"head_dim": 512, "head_dim_v": 512}, "head_dim goes up to 256, got 512"),
        (TorchFlash(), {"dtype": torch.float32}, "needs float16 or bfloat16, got float32"),
        (TorchFlash(), {"capability": (7, 5)}, "needs compute capability 8.0"),
        (TorchFlash(), {"device": "cpu"}, "needs CUDA tensors, got cpu"),
        (FlashAttn3(), {"capability": (10, 0)}, "built for Hopper"),
        (FlashAttn3(), {}, None),
        (FlashAttn4(), {}, None),
        (FlashAttn4(), {"capability": (12, 0)}, "its sink backward runs on compute capability 9.x, 10.x and 11.x"),
        (FlashAttn4(), {"capability": (10, 0), "head_dim": 256, "head_dim_v": 256}, "goes up to 128, got 256"),
        (FlashAttn2(), {"head_dim": 257, "head_dim_v": 257}, "head_dim goes up to 256"),
    ],
)
def test_what_each_backend_refuses(backend, changes, reason):
    found = backend.refuses(wanted(**changes))
    assert found is None if reason is None else reason in found


@pytest.fixture
def installed(monkeypatch):
    """Backends by name that count as installed; the choice is made afresh."""

    def install(*names):
        monkeypatch.setattr(_backends, "_unavailable", lambda name: None if name in (*names, "reference") else "absent")
        _backends.select.cache_clear()

    yield install
    _backends.select.cache_clear()


def test_a_request_that_only_the_reference_serves(installed):
    installed("torch")
    assert _backends.select(wanted(softcap=True)).name == "reference"
    assert _backends.select(wanted(device="cpu", dtype=torch.float32)).name == "reference"


def test_the_best_that_serves_is_chosen_and_named(installed, caplog):
    installed("flash-attn-4", "flash-attn-2", "torch")
    with caplog.at_level(logging.DEBUG, logger="fsdp_sink_patches"):
        assert _backends.select(wanted()).name == "flash-attn-4"
        assert _backends.select(wanted(capability=(8, 0))).name == "flash-attn-2"
        for _ in range(3):
            assert _backends.select(wanted(head_dim=512)).name == "reference"
    installed("torch")
    assert _backends.select(wanted()).name == "torch"
    assert _backends.select(wanted(deterministic=True)).name == "torch"
    messages = [r.getMessage() for r in caplog.records]
    assert any("flash-attn-4 for cuda sm90 bfloat16 heads 8/2 head_dim 64" in m for m in messages)
    slow = [r for r in caplog.records if r.levelno == logging.WARNING]
    assert len(slow) == 1, "a reference on CUDA is said aloud, once"
    assert "right, but slow" in slow[0].getMessage()


@pytest.mark.parametrize(
    ("version", "reason"),
    [
        (None, "flash-attn-4 is not installed"),
        ("4.0.0b25", "flash-attn-4 4.0.0b25 is older than 4.0.0b26"),
        ("N/A", "flash-attn-4 has no readable version"),
    ],
)
def test_versions_come_from_distribution_metadata(monkeypatch, version, reason):
    def metadata(name):
        if version is None:
            raise _backends.importlib.metadata.PackageNotFoundError(name)
        return version

    monkeypatch.setattr(_backends.importlib.metadata, "version", metadata)
    assert reason in FlashAttn4().unavailable()


def test_a_package_whose_binary_does_not_load_is_passed_over(monkeypatch, tmp_path):
    package = tmp_path / "flash_attn"
    package.mkdir()
    (package / "__init__.py").write_text("raise OSError('undefined symbol: _ZN3c10')")
    monkeypatch.syspath_prepend(tmp_path)
    for name in [n for n in sys.modules if n.split(".")[0] == "flash_attn"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(_backends.importlib.metadata, "version", lambda _: "2.8.3")
    assert "importing flash_attn.flash_attn_interface failed: OSError: undefined symbol" in FlashAttn2().unavailable()


def test_a_flash_attn_4_without_a_sink_gradient_is_refused(monkeypatch):
    api = types.ModuleType("flash_attn.cute.interface")
    api._flash_attn_bwd = lambda q, k, v, out, dout, lse: None
    monkeypatch.setitem(sys.modules, api.__name__, api)
    monkeypatch.setattr(_backends.importlib.metadata, "version", lambda _: "4.0.0b26")
    monkeypatch.setattr(_backends, "_import_problem", lambda _: None)
    assert "sinks would get no gradient" in FlashAttn4().unavailable()
