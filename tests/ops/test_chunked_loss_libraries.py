"""liger-kernel and cut-cross-entropy behind our call: taken when named, called by their real signatures, refused when
they would compute something else. Stand-ins in ``tests/stubs``, on the CPU, told that it is a GPU."""

from __future__ import annotations

import importlib
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fsdp_sink_patches.ops.chunked_loss import _libraries, backends, linear_cross_entropy, reference
from fsdp_sink_patches.ops.sink_attention.oracle import relative_error
from tests.ops.cases import draw, leaves

STUBS = Path(__file__).resolve().parents[1] / "stubs"
MODULES = {"liger": "liger_kernel.transformers.functional", "cut-cross-entropy": "cut_cross_entropy"}


@pytest.fixture(autouse=True)
def stubs(monkeypatch):
    """Both stand-ins importable, and CPU tensors taken for CUDA ones."""

    def forget():
        for name in [n for n in sys.modules if n.startswith(("liger_kernel", "cut_cross_entropy"))]:
            del sys.modules[name]
        _libraries._unavailable.cache_clear()
        importlib.invalidate_caches()

    forget()
    for folder in ("liger", "cce"):
        monkeypatch.syspath_prepend(str(STUBS / folder))
    real = _libraries._Request
    monkeypatch.setattr(_libraries, "_Request", lambda device, *rest: real("cuda", *rest))
    yield
    monkeypatch.undo()
    forget()


def inputs(dtype=torch.bfloat16):
    labels = torch.randint(0, 23, (3, 4), generator=torch.Generator().manual_seed(0)).index_fill(1, torch.tensor(2), -5)
    return *leaves(draw(3, 4, 6, dtype=dtype), draw(23, 6, dtype=dtype, seed=1)), labels


@pytest.mark.parametrize("backend", MODULES)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_the_named_library_computes(backend, reduction, softcap):
    assert backends() == {"torch": "available", "liger": "available", "cut-cross-entropy": "available"}
    hidden, weight, labels = inputs()
    options = {"reduction": reduction, "softcap": softcap, "ignore_index": -5}
    extra = {"label_smoothing": 0.1, "z_loss": 0.02, "bias": draw(23, dtype=torch.bfloat16)}
    options |= extra if backend == "liger" else {}
    calls = importlib.import_module(MODULES[backend]).CALLS
    calls.clear()
    loss = linear_cross_entropy(hidden, weight, labels, backend=backend, **options)
    wanted = reference.cross_entropy(hidden, weight, labels, **options)
    assert loss.shape == wanted.shape
    assert relative_error(loss, wanted) <= 1e-6
    loss.sum().backward()
    assert weight.grad is not None
    assert hidden.grad.shape == hidden.shape
    (call,) = calls
    if backend == "liger":
        assert call["accum_dtype"] == torch.float32
    else:
        assert call["filter_eps"] is None
        assert call["impl"] == "cce"


@pytest.mark.parametrize("backend", MODULES)
def test_nothing_to_count_is_zero(backend):
    hidden, weight, labels = inputs()
    assert linear_cross_entropy(hidden, weight, torch.full_like(labels, -100), backend=backend) == 0


def test_no_library_is_taken_unasked():
    hidden, weight, labels = inputs()
    for name in MODULES.values():
        importlib.import_module(name).CALLS.clear()
    for backend in (None, "torch"):
        linear_cross_entropy(hidden, weight, labels, ignore_index=-5, backend=backend).backward()
    assert not any(importlib.import_module(name).CALLS for name in MODULES.values())


@pytest.mark.parametrize(
    ("backend", "changes", "reason"),
    [
        ("liger", {"temperature": 0.7}, "it has no temperature"),
        ("liger", {"temperature": torch.ones(3, 4)}, "it has no temperature"),
        ("liger", {"token_weights": torch.ones(3, 4)}, "it has no token_weights"),
        (
            "liger",
            {"hidden": draw(3, 4, 6, dtype=torch.bfloat16)},
            "gives the weight and the bias no gradient",
        ),
        ("cut-cross-entropy", {"temperature": 0.7}, "it has no temperature"),
        ("cut-cross-entropy", {"token_weights": torch.ones(3, 4)}, "it has no token_weights"),
        ("cut-cross-entropy", {"bias": draw(23, dtype=torch.bfloat16)}, "it has no bias"),
        ("cut-cross-entropy", {"label_smoothing": 0.1}, "it has no label_smoothing"),
        ("cut-cross-entropy", {"z_loss": 0.1}, "it has no z_loss"),
    ],
)
def test_what_a_library_cannot_compute_is_refused(backend, changes, reason):
    hidden, weight, labels = inputs()
    arguments = {"hidden": hidden, "weight": weight, "labels": labels, "ignore_index": -5} | changes
    with pytest.raises(
        ValueError, match=rf"backend '{backend}' cannot compute this: .*{reason}.*leave backend at None"
    ):
        linear_cross_entropy(**arguments, backend=backend)
    linear_cross_entropy(**arguments)


@pytest.mark.parametrize(
    ("backend", "dtype"),
    [("liger", torch.float64), ("cut-cross-entropy", torch.float32), ("cut-cross-entropy", torch.float64)],
)
def test_a_dtype_it_does_not_keep_is_refused(backend, dtype):
    hidden, weight, labels = inputs(dtype)
    with pytest.raises(ValueError, match=r"cannot compute this: .* fp"):
        linear_cross_entropy(hidden, weight, labels, ignore_index=-5, backend=backend)


@pytest.mark.parametrize("backend", MODULES)
def test_the_cpu_is_refused(monkeypatch, backend):
    taken_for_cuda = _libraries._Request
    monkeypatch.setattr(
        _libraries, "_Request", lambda device, *rest: replace(taken_for_cuda(device, *rest), device=device)
    )
    hidden, weight, labels = inputs()
    with pytest.raises(ValueError, match="its kernels need CUDA tensors, got cpu"):
        linear_cross_entropy(hidden, weight, labels, ignore_index=-5, backend=backend)


def test_an_older_signature_is_named(monkeypatch):
    module = importlib.import_module(MODULES["liger"])
    monkeypatch.setattr(module, "liger_fused_linear_cross_entropy", lambda input, weight, target, softcap=None: None)
    assert backends()["liger"] == "liger-kernel 0.8.5 takes no accum_dtype, lse_square_scale"


def test_a_broken_installation_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "cut_cross_entropy", None)
    assert backends()["cut-cross-entropy"].startswith("cut-cross-entropy 25.1.1 does not import: ModuleNotFoundError")
