"""The rotation against complex multiplication in fp64, and the operator around it."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from fsdp_sink_patches.ops.rope import _op, apply_rotary
from fsdp_sink_patches.ops.sink_attention.oracle import relative_error
from tests.ops.rope_oracle import LAYOUTS, draw, laid_out, rotated, tables

ANGLES = 9 * draw(2, 11, 6)
COS, SIN = tables(ANGLES, torch.float64)
LIMITS = {torch.float64: 1e-15, torch.float32: 3e-7, torch.bfloat16: 2e-3, torch.float16: 3e-4}
PAIRINGS = pytest.mark.parametrize("interleaved", [True, False], ids=["interleaved", "half-split"])
INPLACE = pytest.mark.parametrize("inplace", [False, True], ids=["out of place", "in place"])


def x_of(dtype: torch.dtype = torch.float64) -> Tensor:
    return draw(2, 3, 11, 20, dtype=dtype)


@INPLACE
@PAIRINGS
@pytest.mark.parametrize("conjugate", [False, True], ids=["forward", "conjugate"])
@pytest.mark.parametrize("dtype", LIMITS, ids=str)
def test_equals_complex_multiplication(dtype, conjugate, interleaved, inplace):
    x = x_of(dtype)
    expected = rotated(x, ANGLES, interleaved=interleaved, conjugate=conjugate)
    before = x.clone()
    out = apply_rotary(x, COS, SIN, interleaved=interleaved, conjugate=conjugate, inplace=inplace)
    assert out.dtype == dtype
    assert (out is x) == inplace
    assert relative_error(out, expected) <= LIMITS[dtype]
    assert torch.equal(out[..., :8], before[..., :8])
    assert inplace or torch.equal(x, before)


@PAIRINGS
def test_one_rounding_with_exact_tables_and_more_with_rounded_ones(interleaved):
    """bf16 activations: fp32 tables cost the rounding of the result and nothing else."""
    x = x_of(torch.bfloat16)
    expected = rotated(x, ANGLES, interleaved=interleaved)
    exact = apply_rotary(x, *tables(ANGLES), interleaved=interleaved)
    assert torch.equal(exact, expected.to(torch.bfloat16))
    rounded = apply_rotary(x, *tables(ANGLES, torch.bfloat16), interleaved=interleaved)
    assert relative_error(rounded, expected) > 1.2 * relative_error(exact, expected)


@INPLACE
@PAIRINGS
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_keeps_its_values_and_dense_ones_their_strides(layout, interleaved, inplace):
    x = laid_out(x_of(), layout)
    strides = torch.empty_like(x).stride()
    expected = rotated(x, ANGLES, interleaved=interleaved)
    out = apply_rotary(x, COS, SIN, interleaved=interleaved, inplace=inplace)
    assert relative_error(out, expected) <= 1e-15
    assert inplace or out.stride() == strides


@INPLACE
def test_every_place_of_the_heads(inplace):
    x, cos, sin = x_of(), COS[:1], SIN[:1]
    expected = rotated(x, ANGLES[:1], interleaved=True)
    options = {"interleaved": True, "inplace": inplace}
    packed = cos[0], sin[0]
    seen = [
        apply_rotary(x.clone(), cos, sin, **options),
        apply_rotary(x.clone(), *packed, **options),
        apply_rotary(x.transpose(1, 2).clone(), cos, sin, unsqueeze_dim=2, **options).transpose(1, 2),
        torch.stack([apply_rotary(row.transpose(0, 1).clone(), cos[0], sin[0], **options) for row in x]).transpose(
            1, 2
        ),
        torch.stack([apply_rotary(row.clone(), *packed, unsqueeze_dim=0, **options) for row in x]),
    ]
    for out in seen:
        assert relative_error(out, expected) <= 1e-15


def test_llama_and_gpt_oss_tables():
    """transformers' own formulas, written out: Llama's with tables twice as wide, gpt-oss's with halves."""
    x, cos, sin = x_of()[..., :12], COS[:, None], SIN[:, None]
    a, b = x.chunk(2, -1)
    gpt_oss = torch.cat((a * cos - b * sin, b * cos + a * sin), -1)
    wide_cos, wide_sin = torch.cat((COS, COS), -1), torch.cat((SIN, SIN), -1)
    llama = x * wide_cos[:, None] + torch.cat((-b, a), -1) * wide_sin[:, None]
    assert torch.equal(apply_rotary(x, COS, SIN, interleaved=False), gpt_oss)
    assert torch.equal(apply_rotary(x, wide_cos, wide_sin, interleaved=False, full_tables=True), llama)
    twice = COS.repeat_interleave(2, -1), SIN.repeat_interleave(2, -1)
    assert torch.equal(
        apply_rotary(x, *twice, interleaved=True, full_tables=True), apply_rotary(x, COS, SIN, interleaved=True)
    )


@PAIRINGS
def test_no_tokens_and_no_rows(interleaved):
    for shape in ((2, 3, 0, 20), (0, 3, 11, 20), (2, 0, 11, 20)):
        x = torch.empty(shape, requires_grad=True)
        cos = torch.ones(shape[0], shape[2], 6)
        out = apply_rotary(x, cos, cos, interleaved=interleaved)
        assert out.shape == shape
        (grad,) = torch.autograd.grad(out.sum(), x)
        assert grad.shape == shape


# --- autograd ------------------------------------------------------------------------------------------------------


@INPLACE
@PAIRINGS
def test_gradients_to_second_order(interleaved, inplace):
    x = x_of()[:, :2, :3].clone().requires_grad_()
    cos, sin = COS[:, :3], SIN[:, :3]

    def rotation(x: Tensor) -> Tensor:
        return apply_rotary(x * 1.5, cos, sin, interleaved=interleaved, inplace=inplace).sin()

    assert torch.autograd.gradcheck(rotation, x)
    assert torch.autograd.gradgradcheck(rotation, x)


@PAIRINGS
def test_gradients_through_a_view_rotated_in_place(interleaved):
    """What ``kv_norm(...).view(...).transpose(1, 2)`` is to its caller; the base sees the change."""
    x = x_of()[:, :2, :3].clone().requires_grad_()

    def through_a_view(x: Tensor) -> Tensor:
        base = (x * 1.5).transpose(1, 2).contiguous()
        apply_rotary(base.transpose(1, 2), COS[:, :3], SIN[:, :3], interleaved=interleaved, inplace=True)
        return base

    assert torch.autograd.gradcheck(through_a_view, x)
    expected = rotated(x.detach() * 1.5, ANGLES[:, :3], interleaved=interleaved)
    assert relative_error(through_a_view(x).detach().transpose(1, 2), expected) <= 1e-15


def test_the_backward_of_bf16_rounds_once():
    x, dout = x_of(torch.bfloat16).requires_grad_(), draw(2, 3, 11, 20, dtype=torch.bfloat16, seed=1)
    (dx,) = torch.autograd.grad(apply_rotary(x, *tables(ANGLES), interleaved=True), x, dout)
    assert torch.equal(dx, rotated(dout, ANGLES, interleaved=True, conjugate=True).to(torch.bfloat16))


def test_the_gradient_that_came_is_left_alone():
    x, dout = x_of().requires_grad_(), draw(2, 3, 11, 20, seed=1)
    before = dout.clone()
    torch.autograd.grad(apply_rotary(x * 1.0, COS, SIN, interleaved=True, inplace=True), x, dout)
    assert torch.equal(dout, before)


def test_nothing_but_the_tables_is_saved():
    saved: list[Tensor] = []
    x = x_of().requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        apply_rotary(x, COS, SIN, interleaved=True)
        y = x * 1.0
        saved.clear()
        apply_rotary(y, COS, SIN, interleaved=True, inplace=True)
    assert [t.data_ptr() for t in saved] == [COS.data_ptr(), SIN.data_ptr()]


def saves_its_output(x: Tensor) -> tuple[Tensor, Tensor]:
    y = x.exp()
    return y, y


def saves_its_output_behind_a_view(x: Tensor) -> tuple[Tensor, Tensor]:
    y = x.exp()
    return y.transpose(1, 2).transpose(1, 2), y


def saved_by_another(x: Tensor) -> tuple[Tensor, Tensor]:
    y = x * 1.0
    return y, y.sin()


@pytest.mark.parametrize("recorded", [True, False], ids=["recorded", "no_grad"])
@pytest.mark.parametrize("make", [saves_its_output, saves_its_output_behind_a_view, saved_by_another])
def test_overwriting_what_a_backward_needs_is_an_error(make: Callable, recorded):
    x = x_of().requires_grad_()
    y, loss = make(x)
    with torch.set_grad_enabled(recorded):
        apply_rotary(y, COS, SIN, interleaved=True, inplace=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.sum().backward()


def test_in_place_is_noticed_once_at_least_and_out_of_place_never():
    x = x_of()
    version = x._version
    apply_rotary(x, COS, SIN, interleaved=True)
    assert x._version == version
    apply_rotary(x, COS, SIN, interleaved=True, inplace=True)
    assert x._version > version


@pytest.mark.parametrize("view", [False, True])
def test_a_leaf_is_refused_before_it_is_written(view):
    leaf = x_of().requires_grad_()
    before = leaf.detach().clone()
    x = leaf.transpose(1, 2).transpose(1, 2) if view else leaf
    with pytest.raises(RuntimeError, match="leaf that requires a gradient"):
        apply_rotary(x, COS, SIN, interleaved=True, inplace=True)
    assert torch.equal(leaf.detach(), before)
    with torch.no_grad():
        apply_rotary(x, COS, SIN, interleaved=True, inplace=True)
    assert not torch.equal(leaf.detach(), before)


def test_inference_mode():
    expected = rotated(x_of(), ANGLES, interleaved=True)
    with torch.inference_mode():
        x = x_of()
        assert relative_error(apply_rotary(x, COS, SIN, interleaved=True), expected) <= 1e-15
        assert relative_error(apply_rotary(x, COS, SIN, interleaved=True, inplace=True), expected) <= 1e-15


@pytest.mark.parametrize("reentrant", [False, True])
@INPLACE
def test_under_checkpointing(inplace, reentrant):
    def block(x: Tensor) -> Tensor:
        return apply_rotary(x * 1.5, COS, SIN, interleaved=True, inplace=inplace).sin()

    x = x_of().requires_grad_()
    (expected,) = torch.autograd.grad(block(x).sum(), x)
    checkpoint(block, x, use_reentrant=reentrant).sum().backward()
    assert torch.equal(x.grad, expected)


def test_autocast_changes_nothing():
    x = x_of(torch.float32)
    expected = apply_rotary(x, *tables(ANGLES), interleaved=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(apply_rotary(x, *tables(ANGLES), interleaved=True), expected)


# --- the compiler --------------------------------------------------------------------------------------------------


@INPLACE
@pytest.mark.parametrize("layout", LAYOUTS[:2])
def test_opcheck(layout, inplace):
    x = laid_out(x_of(), layout)
    for options in ((1, True, False), (1, False, True)):
        if inplace:
            torch.library.opcheck(_op._apply_rotary_, (x.clone(), COS, SIN, *options))
        else:
            torch.library.opcheck(_op._apply_rotary, (x.clone().requires_grad_(), COS, SIN, *options))


def compiles_whole(backend: str, inplace: bool) -> None:
    def attend(x: Tensor) -> Tensor:
        y = apply_rotary((x * 1.5).transpose(1, 2), COS, SIN, interleaved=True, unsqueeze_dim=2, inplace=inplace)
        return y.transpose(1, 2).sin()

    x = x_of().requires_grad_()
    out, compiled = attend(x), torch.compile(attend, fullgraph=True, backend=backend)(x)
    torch.testing.assert_close(compiled, out, rtol=0, atol=1e-14)
    (expected,), (grad,) = torch.autograd.grad(out.sum(), x), torch.autograd.grad(compiled.sum(), x)
    torch.testing.assert_close(grad, expected, rtol=0, atol=1e-14)


@INPLACE
def test_compiles_whole(inplace):
    compiles_whole("aot_eager", inplace)


def test_compiles_with_inductor():
    """In a process of its own: inductor imports setuptools, which can't be done any more where a test imported pip."""
    code = "import test_rope\nfor inplace in (False, True):\n    test_rope.compiles_whole('inductor', inplace)"
    here = Path(__file__).resolve()
    paths = os.pathsep.join([str(here.parent), str(here.parent.parent.parent), os.environ.get("PYTHONPATH", "")])
    child = [sys.executable, "-c", code]
    done = subprocess.run(child, env={**os.environ, "PYTHONPATH": paths}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]


def test_compiled_with_any_number_of_tokens():
    compiled = torch.compile(apply_rotary, fullgraph=True, backend="aot_eager", dynamic=True)
    for tokens in (4, 7, 11):
        x = x_of()[:, :, :tokens]
        expected = rotated(x, ANGLES[:, :tokens], interleaved=True)
        assert relative_error(compiled(x, COS[:, :tokens], SIN[:, :tokens], interleaved=True), expected) <= 1e-15


# --- refusals ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.zeros(11, 20)}, "x of shape"),
        ({"unsqueeze_dim": 0}, "unsqueeze_dim=0"),
        ({"unsqueeze_dim": 3}, "unsqueeze_dim=3"),
        ({"unsqueeze_dim": -3}, "unsqueeze_dim=-3"),
        ({"unsqueeze_dim": 2}, "pass unsqueeze_dim"),
        ({"x": torch.zeros(2, 3, 11, 20, dtype=torch.int64)}, "floating point"),
        ({"cos": COS[:, :10]}, "cos of shape"),
        ({"cos": COS[:, :10], "sin": SIN[:, :10]}, "cos of shape"),
        ({"x": torch.zeros(3, 3, 11, 20)}, "cos of shape"),
        ({"x": torch.zeros(2, 3, 11, 10)}, "full_tables=True"),
        ({"cos": COS[..., :0], "sin": SIN[..., :0]}, "cos of shape"),
        ({"cos": COS[:, None], "sin": SIN[:, None]}, "cos of shape"),
        ({"x": torch.zeros(2, 3, 11, 20, device="meta")}, "one device"),
        ({"cos": COS.clone().requires_grad_()}, "requires a gradient"),
        ({"sin": SIN.clone().requires_grad_()}, "requires a gradient"),
        ({"x": torch.zeros(2, 1, 11, 20).expand(2, 3, 11, 20), "inplace": True}, "expanded"),
    ],
    ids=str,
)
def test_what_does_not_fit_is_refused(change, message):
    arguments = {"x": x_of(), "cos": COS, "sin": SIN, "interleaved": True, **change}
    with pytest.raises(ValueError, match=message):
        apply_rotary(arguments.pop("x"), **arguments)


def test_an_expanded_tensor_out_of_place():
    x = x_of()[:, :1].expand(2, 3, 11, 20)
    assert relative_error(apply_rotary(x, COS, SIN, interleaved=True), rotated(x, ANGLES, interleaved=True)) <= 1e-15


def test_the_result_is_a_tensor_like_any_other():
    out = apply_rotary(x_of(), COS, SIN, interleaved=True)
    assert torch.equal(copy.deepcopy(out), out)


# --- transforms ----------------------------------------------------------------------------------------------------


@INPLACE
def test_transforms_and_forward_mode(inplace):
    x, tangent = x_of(), draw(2, 3, 11, 20, seed=1)
    expected = rotated(tangent, ANGLES, interleaved=True)

    def rotation(x: Tensor) -> Tensor:
        return apply_rotary(x * 1.0, COS, SIN, interleaved=True, inplace=inplace)

    _, turned = torch.func.jvp(rotation, (x,), (tangent,))
    torch.testing.assert_close(turned, expected)
    (gradient,) = torch.func.vjp(rotation, x)[1](expected)
    torch.testing.assert_close(gradient, tangent)
    each = torch.func.vmap(torch.func.grad(lambda x: (rotation(x) * expected).sum()))(torch.stack((x, 2 * x)))
    torch.testing.assert_close(each, tangent.expand(2, -1, -1, -1, -1))
    with torch.autograd.forward_ad.dual_level():
        out = rotation(torch.autograd.forward_ad.make_dual(x, tangent))
        torch.testing.assert_close(torch.autograd.forward_ad.unpack_dual(out).tangent, expected)
