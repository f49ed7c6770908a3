"""The rotation's Triton kernel through Triton's interpreter: what it computes, not how fast. Run by
``test_rope_kernel.py``."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from triton.runtime.interpreter import InterpretedFunction

from fsdp_sink_patches.ops.rope import _kernels, reference
from fsdp_sink_patches.ops.sink_attention.oracle import relative_error
from tests.ops.rope_oracle import LAYOUTS, draw, laid_out, rotated, tables

LIMITS = {torch.float32: 3e-7, torch.float16: 3e-4}


def check(x, cos, sin, angles, *, interleaved, conjugate, inplace):
    options = {"interleaved": interleaved, "conjugate": conjugate}
    expected = rotated(x, angles, **options)
    plain = reference.rotate(x, cos, sin, **options)
    kept = x.shape[-1] - 2 * cos.shape[-1]
    before = x.clone()
    # NaN in every element: one that nobody writes can't pass
    out = x if inplace else torch.empty_like(x).fill_(float("nan"))
    _kernels.rotate(out, x, cos, sin, **options)
    assert relative_error(out, expected) <= LIMITS[x.dtype] or x.numel() == 0
    assert torch.equal(out[..., :kept], before[..., :kept])
    assert torch.equal(out, plain), "the kernel and plain torch give the same bits"
    assert inplace or torch.equal(x, before)


def test_it_is_interpreted():
    assert isinstance(_kernels._rotate_kernel, InterpretedFunction)


@pytest.mark.parametrize("inplace", [False, True], ids=["out of place", "in place"])
@pytest.mark.parametrize("conjugate", [False, True], ids=["forward", "conjugate"])
@pytest.mark.parametrize("interleaved", [True, False], ids=["interleaved", "half-split"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", LIMITS, ids=str)
def test_every_layout(layout, interleaved, conjugate, inplace, dtype):
    x = laid_out(draw(2, 3, 21, 40, dtype=dtype), layout)
    angles = 9 * draw(1, 21, 8)
    check(x, *tables(angles), angles, interleaved=interleaved, conjugate=conjugate, inplace=inplace)


@pytest.mark.parametrize("inplace", [False, True], ids=["out of place", "in place"])
@pytest.mark.parametrize("interleaved", [True, False], ids=["interleaved", "half-split"])
@pytest.mark.parametrize(
    ("batch", "heads", "tokens", "dim", "half"),
    [
        (1, 64, 70, 512, 32), (2, 1, 130, 128, 32), (1, 17, 3, 64, 32), (3, 2, 5, 66, 33), (1, 5, 7, 9, 1),
        (1, 1, 1, 2, 1), (2, 4, 0, 16, 4), (0, 4, 3, 16, 4), (1, 33, 9, 80, 5),
    ],
)  # fmt: skip
def test_every_size(batch, heads, tokens, dim, half, interleaved, inplace):
    """V4's queries, one shared key head, head counts that no power of two divides, no tokens, no batch."""
    x = draw(batch, heads, tokens, dim, dtype=torch.float32)
    angles = 9 * draw(batch, tokens, half)
    check(x, *tables(angles), angles, interleaved=interleaved, conjugate=False, inplace=inplace)


@settings(max_examples=30, deadline=None, derandomize=True)
@given(
    sizes=st.tuples(st.integers(1, 3), st.integers(1, 20), st.integers(1, 40), st.integers(1, 20), st.integers(0, 30)),
    layout=st.sampled_from(LAYOUTS), shared=st.booleans(), interleaved=st.booleans(), conjugate=st.booleans(),
    inplace=st.booleans(),
)  # fmt: skip
def test_any_shape(sizes, layout, shared, interleaved, conjugate, inplace):
    batch, heads, tokens, half, kept = sizes
    x = laid_out(draw(batch, heads, tokens, kept + 2 * half, dtype=torch.float32), layout)
    angles = 9 * draw(1 if shared else batch, tokens, half)
    check(x, *tables(angles), angles, interleaved=interleaved, conjugate=conjugate, inplace=inplace)


@pytest.mark.parametrize("interleaved", [True, False], ids=["interleaved", "half-split"])
def test_tables_of_any_strides_and_dtype(interleaved):
    x, angles = draw(2, 3, 21, 40, dtype=torch.float32), 9 * draw(2, 21, 8)
    cos, sin = tables(angles)
    for c, s in (
        (cos.repeat_interleave(2, -1)[..., ::2], sin.repeat_interleave(2, -1)[..., ::2]),
        (cos.mT.contiguous().mT, sin),  # strides that differ from each other
        (cos[:1].expand(2, -1, -1), sin[:1].expand(2, -1, -1)),
        (cos.half(), sin.half()),
    ):
        out = torch.full_like(x, float("nan"))
        _kernels.rotate(out, x, c, s, interleaved=interleaved, conjugate=False)
        assert torch.equal(out, reference.rotate(x, c, s, interleaved=interleaved))


def test_a_program_holds_no_more_than_it_should():
    for heads in (1, 2, 17, 64, 128):
        for channels in (2, 40, 64, 128, 512, 8192, 20000):
            for elements in _kernels.ELEMENTS:
                block_t, block_h = _kernels.blocks(heads, channels, elements)
                rows = block_t * block_h
                assert rows & (rows - 1) == 0
                assert rows == 1 or rows * channels <= elements
