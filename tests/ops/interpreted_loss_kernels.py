"""The loss's Triton kernels through Triton's interpreter, in fp32. Run by ``test_chunked_loss_kernels.py``."""

from __future__ import annotations

import pytest
import torch
from triton.runtime.interpreter import InterpretedFunction

from fsdp_sink_patches.ops.chunked_loss import _kernels, _op, _tiles, linear_cross_entropy, linear_log_probs, reference
from fsdp_sink_patches.ops.sink_attention.oracle import relative_error
from tests.ops.cases import draw, leaves


@pytest.fixture(autouse=True)
def kernels_everywhere(monkeypatch):
    """The kernels take every fp32 tile; outputs and scratch start as NaN, so that what nobody writes can't pass."""
    empty = torch.Tensor.new_empty

    def poisoned(self, *args, **kwargs):
        tensor = empty(self, *args, **kwargs)
        return tensor.fill_(float("nan")) if tensor.is_floating_point() else tensor

    monkeypatch.setattr(torch.Tensor, "new_empty", poisoned)
    monkeypatch.setattr(_tiles, "_use_kernels", lambda z: z.dtype == torch.float32)


def test_they_are_interpreted():
    assert isinstance(_kernels._update_kernel, InterpretedFunction)
    assert isinstance(_kernels._differentiate_kernel, InterpretedFunction)


@pytest.mark.parametrize(
    ("softcap", "temperature"), [(None, 1.0), (3.0, 1.0), (None, torch.tensor([0.7, 1.0, 2.0, 0.5, 0.9])), (3.0, 0.7)]
)
@pytest.mark.parametrize(
    ("vocab", "block", "shift"), [(5000, 4096, 0.0), (37, 14, -50.0), (37, 14, 800.0), (1, 4096, 0.0)]
)
def test_results_are_those_of_plain_torch(monkeypatch, softcap, temperature, vocab, block, shift):
    monkeypatch.setattr(_tiles, "VOCAB_BLOCK", block)
    tokens = 5
    hidden, weight = draw(tokens, 6, dtype=torch.float32), draw(vocab, 6, dtype=torch.float32, seed=1)
    bias = draw(vocab, dtype=torch.float32, seed=2) + shift
    labels = torch.tensor([0, vocab - 1, vocab // 2, -100, min(block, vocab - 1)])

    def run(compute, dtype):
        given = leaves(*(t.to(dtype) for t in (hidden, weight, bias)))
        return [*(outs := compute(*given)), *torch.autograd.grad(sum((i + 1) * o.sum() for i, o in enumerate(outs)),
                                                                 given)]  # fmt: skip

    shaping = {"softcap": softcap, "temperature": temperature}
    extra = shaping | {"label_smoothing": 0.1, "z_loss": 0.02 if shift == 0 else 0.0}

    def ours(h, w, b):
        return (
            *linear_log_probs(h, w, labels, bias=b, chunk_size=2, **shaping),
            linear_cross_entropy(h, w, labels, bias=b, chunk_size=2, recompute=True, **extra),
            linear_cross_entropy(h, w, labels, bias=b, chunk_size=2, recompute=False, **extra),
        )

    def exact(h, w, b):
        loss = reference.cross_entropy(h, w, labels, bias=b, **extra)
        return (*reference.log_probs(h, w, labels, bias=b, **shaping), loss, loss)

    found, wanted, unchunked = run(ours, torch.float32), run(exact, torch.float64), run(exact, torch.float32)
    for mine, plain, true in zip(found, unchunked, wanted, strict=True):
        # tanh by exp, and products of a block at a time: up to a few units in the last place of the logits
        assert relative_error(mine, true) <= 3 * relative_error(plain, true) + 2e-6


def test_a_label_outside_gives_nan():
    hidden, weight = leaves(draw(2, 6, dtype=torch.float32), draw(40, 6, dtype=torch.float32))
    labels = torch.tensor([1, 40])
    found = _op.logit_statistics(hidden, weight, None, labels, None, 2, 0.0, False)[_tiles.LOG_PROB]
    found.sum().backward()
    assert found.isnan().tolist() == hidden.grad.isnan().any(1).tolist() == [False, True]
