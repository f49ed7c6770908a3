"""compressed_attention on the CPU: plain torch against the fp64 oracle, what it refuses, and how autograd, compile and
checkpointing see it. Its kernels run through Triton's interpreter in a process of their own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from fsdp_sink_patches.ops.compressed_attention import compressed_attention, reference
from fsdp_sink_patches.ops.sink_attention.oracle import relative_error
from tests.ops.compressed_oracle import KINDS, SINKS, case, compressed_oracle, sinks_of

LENGTHS = [1, 37, 50, 6, 29]


def gradients(compute, given, dout):
    leaves = [t.detach().clone().requires_grad_() for t in given]
    out = compute(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, dout.to(out.dtype), materialize_grads=True)]


@pytest.mark.parametrize("sink", SINKS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_against_the_oracle(kind, sink, dtype, monkeypatch):
    monkeypatch.setattr(reference, "SCORES_AT_ONCE", 20000)  # several chunks
    given, sees, dout = case(kind, LENGTHS, 3, 20, dtype)
    given = [*given, sinks_of(sink, 3)]
    found = gradients(lambda *x: compressed_attention(*x, **sees), given, dout)
    exact = gradients(lambda *x: compressed_oracle(*x, **sees)[0], [t.double() for t in given], dout)
    limit = {torch.float64: 1e-6, torch.float32: 1e-5, torch.bfloat16: 5e-3}[dtype]
    for name, mine, true in zip(("out", "dq", "dkv", "dentries", "dsinks"), found, exact, strict=True):
        assert relative_error(mine, true) <= limit or true.numel() == 0, name
    _, lse = compressed_attention(*given, **sees, return_lse=True)
    assert relative_error(lse, compressed_oracle(*given, **sees)[1]) <= max(limit / 10, 1e-7)


def test_what_would_be_wrong_is_far_off():
    """The oracle tells: a sink that is dropped, entries of another document, a window one key too wide."""
    given, sees, _ = case("hca", LENGTHS, 3, 20, torch.float64)
    given = [*given, sinks_of("4", 3)]
    right = compressed_oracle(*given, **sees)[0]
    no_sink = compressed_attention(*given[:3], torch.full((3,), -1e9), **sees)
    shifted = compressed_attention(*given, **{**sees, "entry_ranges": (sees["entry_ranges"] - 1).clamp(min=0)})
    wider = compressed_attention(*given, **{**sees, "window_starts": (sees["window_starts"] - 1).clamp(min=0)})
    for wrong in (no_sink, shifted, wider):
        assert relative_error(wrong, right) > 3e-2


@pytest.mark.parametrize("kind", KINDS)
def test_opcheck_checkpoint_and_frozen_inputs(kind):
    given, sees, dout = case(kind, [9, 14], 2, 8, torch.float32)
    given = [*given, sinks_of("random", 2)]
    leaves = [t.clone().requires_grad_() for t in given]
    arguments = (*leaves, sees["window_starts"], sees.get("entry_ranges"), sees.get("topk_indices"), 0.3, False)
    torch.library.opcheck(torch.ops.fsdp_sink_patches.compressed_attention.default, arguments)
    plain = gradients(lambda *x: compressed_attention(*x, **sees), given, dout)
    again = gradients(
        lambda *x: checkpoint(lambda *y: compressed_attention(*y, **sees), *x, use_reentrant=False), given, dout
    )
    assert all(torch.equal(a, b) for a, b in zip(plain, again, strict=True))
    only_kv = given[1].clone().requires_grad_()
    out = compressed_attention(given[0], only_kv, *given[2:], **sees)
    assert torch.equal(torch.autograd.grad(out, only_kv, dout)[0], plain[2])


def test_autocast_rounds_nothing():
    """Neither around the call nor around its backward."""
    given, sees, dout = case("csa", [9, 14], 2, 8, torch.float32)
    given = [*given, sinks_of("random", 2)]
    plain = gradients(lambda *x: compressed_attention(*x, **sees), given, dout)
    with torch.autocast("cpu", torch.bfloat16):
        under = gradients(lambda *x: compressed_attention(*x, **sees), given, dout)
    assert all(torch.equal(a, b) for a, b in zip(plain, under, strict=True))


def test_views_and_no_tokens():
    given, sees, dout = case("csa", LENGTHS, 4, 16, torch.float32)
    given = [*given, sinks_of("8", 4)]
    plain = gradients(lambda *x: compressed_attention(*x, **sees), given, dout)
    laid_out = [given[0].transpose(0, 1).contiguous().transpose(0, 1), given[1].t().contiguous().t(), *given[2:]]
    for a, b in zip(gradients(lambda *x: compressed_attention(*x, **sees), laid_out, dout), plain, strict=True):
        torch.testing.assert_close(a, b)
    none = [t[:0] for t in given[:2]]
    out = compressed_attention(*none, *given[2:], window_starts=sees["window_starts"][:0])
    assert out.shape == (0, 4, 16)


def test_compiled():
    program = """
import torch
from fsdp_sink_patches.ops.compressed_attention import compressed_attention
from tests.ops.compressed_oracle import case, sinks_of
from tests.ops.test_compressed_attention import gradients
given, sees, dout = case("csa", [20, 31], 2, 16, torch.float32)
given.append(sinks_of("4", 2))
def step(*x):
    return 2 * compressed_attention(*x, **sees)
eager = gradients(step, given, dout)
compiled = gradients(torch.compile(step, fullgraph=True, backend="aot_eager"), given, dout)
for a, b in zip(eager, compiled, strict=True):
    torch.testing.assert_close(a, b)
"""
    subprocess.run([sys.executable, "-c", program], check=True, cwd=Path(__file__).parents[2])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"q": torch.zeros(5, 8)}, "flatten rows of a batch"),
        ({"kv": torch.zeros(4, 8)}, r"kv of shape \(4, 8\)"),
        ({"kv": torch.zeros(5, 8, dtype=torch.float64)}, "kv of shape"),
        ({"compressed_kv": torch.zeros(3, 1, 8)}, "0 entries for none"),
        ({"sinks": torch.zeros(3)}, "one for each head"),
        ({"sinks": torch.zeros(2, dtype=torch.int64)}, "sinks of shape"),
        ({"window_starts": torch.zeros(5)}, "window_starts of shape"),
        ({"entry_ranges": torch.zeros(5, 3, dtype=torch.int64)}, "one past the last"),
        ({"topk_indices": torch.zeros(4, 3, dtype=torch.int64)}, "-1 for none"),
        ({"entry_ranges": torch.zeros(5, 2, dtype=torch.int64), "topk_indices": torch.zeros(5, 3)}, "expected one of"),
        ({"sinks": torch.zeros(2, device="meta")}, "where q is"),
        ({"softmax_scale": 0.0}, "finite one above 0"),
        ({"softmax_scale": -0.3}, "finite one above 0"),
        ({"softmax_scale": float("nan")}, "finite one above 0"),
        ({"softmax_scale": float("inf")}, "finite one above 0"),
        (
            {
                **{n: torch.zeros(s, dtype=torch.float16) for n, s in (("q", (5, 2, 8)), ("kv", (5, 8)))},
                "compressed_kv": torch.zeros(3, 8, dtype=torch.float16),
                "softmax_scale": 1e-5,
            },
            "Scale q instead",
        ),
    ],
)
def test_bad_input_is_refused_by_name(change, words):
    given = {
        "q": torch.zeros(5, 2, 8), "kv": torch.zeros(5, 8), "compressed_kv": torch.zeros(3, 8), "sinks": torch.zeros(2),
        "window_starts": torch.arange(5), **change,
    }  # fmt: skip
    with pytest.raises(ValueError, match=words):
        compressed_attention(**given)


def test_the_kernels_through_the_interpreter():
    tests = Path(__file__).with_name("interpreted_compressed.py")
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tests)],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        cwd=tests.parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stdout[-6000:] + run.stderr[-2000:]
    assert int(re.search(r"(\d+) passed", run.stdout).group(1)) >= 20, run.stdout[-500:]
