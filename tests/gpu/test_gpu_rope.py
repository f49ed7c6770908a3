"""The rotation's kernel on the card against complex multiplication in fp64, and DeepSeek-V4 with it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import fsdp_sink_patches
from fsdp_sink_patches import _registry, monitor, settings
from fsdp_sink_patches.ops.rope import _op, apply_rotary, cos_sin, reference, tables
from fsdp_sink_patches.ops.sink_attention.oracle import relative_error
from tests.ops.rope_oracle import LAYOUTS, laid_out, rotated

LIMITS = {torch.float32: 3e-7, torch.bfloat16: 2e-3, torch.float16: 3e-4}
PAIRINGS = pytest.mark.parametrize("interleaved", [True, False], ids=["interleaved", "half-split"])
INPLACE = pytest.mark.parametrize("inplace", [False, True], ids=["out of place", "in place"])


@pytest.fixture(autouse=True)
def nan_in_fresh_memory():
    """``torch.empty`` comes back full of NaN, so that an unwritten element can't pass."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(False)


def case(
    batch: int, heads: int, tokens: int, dim: int, half: int, dtype: torch.dtype, rows: int = 1
) -> tuple[Tensor, Tensor]:
    x = torch.randn(batch, heads, tokens, dim, device="cuda", dtype=dtype)
    return x, 9 * torch.randn(rows, tokens, half, device="cuda", dtype=torch.float64)


def tables_of(angles: Tensor) -> tuple[Tensor, Tensor]:
    return angles.cos().float(), angles.sin().float()


@INPLACE
@pytest.mark.parametrize("conjugate", [False, True], ids=["forward", "conjugate"])
@PAIRINGS
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", LIMITS, ids=str)
def test_every_layout(dtype, layout, interleaved, conjugate, inplace):
    x, angles = case(2, 3, 137, 80, 16, dtype, rows=2)
    x = laid_out(x, layout)
    options = {"interleaved": interleaved, "conjugate": conjugate}
    expected, kept = rotated(x, angles, **options), x[..., :48].clone()
    plain = reference.rotate(x, *tables_of(angles), **options)
    out = apply_rotary(x, *tables_of(angles), inplace=inplace, **options)
    assert relative_error(out, expected) <= LIMITS[dtype]
    assert torch.equal(out[..., :48], kept)
    assert torch.equal(out, plain), "the kernel and plain torch give the same bits"


@INPLACE
@PAIRINGS
@pytest.mark.parametrize(
    ("batch", "heads", "tokens", "dim", "half"),
    [
        (1, 64, 4096, 512, 32), (1, 128, 300, 512, 32), (2, 1, 4099, 512, 32), (1, 64, 1000, 64, 32),
        (1, 17, 33, 66, 33), (3, 5, 7, 9, 1), (1, 1, 1, 2, 1), (2, 4, 0, 16, 4), (70000, 2, 3, 8, 2),
        (1, 33, 9, 80, 5),
    ],
)  # fmt: skip
def test_every_size(batch, heads, tokens, dim, half, interleaved, inplace):
    """V4's queries and its one key head; more rows of the batch than a grid's second axis has."""
    x, angles = case(batch, heads, tokens, dim, half, torch.bfloat16)
    expected = reference.rotate(x, *tables_of(angles), interleaved=interleaved)
    out = apply_rotary(x, *tables_of(angles), interleaved=interleaved, inplace=inplace)
    assert torch.equal(out, expected)


def test_more_elements_than_32_bits_count():
    x, angles = case(1, 64, 70000, 512, 32, torch.bfloat16)
    cos, sin = tables_of(angles)
    out = apply_rotary(x.transpose(1, 2), cos, sin, interleaved=True, unsqueeze_dim=2).transpose(1, 2)
    for tokens in (slice(0, 64), slice(-64, None)):
        plain = reference.rotate(x[:, :, tokens], cos[:, tokens], sin[:, tokens], interleaved=True)
        assert torch.equal(out[:, :, tokens], plain)
    apply_rotary(x, cos, sin, interleaved=True, inplace=True)
    assert torch.equal(x, out)


@INPLACE
def test_gradients(inplace):
    x, angles = case(2, 5, 61, 96, 16, torch.bfloat16)
    x, dout = x.requires_grad_(), torch.randn_like(x)
    out = apply_rotary(x * 1.0, *tables_of(angles), interleaved=True, inplace=inplace)
    (dx,) = torch.autograd.grad(out, x, dout)
    assert torch.equal(dx, reference.rotate(dout, *tables_of(angles), interleaved=True, conjugate=True))
    assert relative_error(dx, rotated(dout, angles, interleaved=True, conjugate=True)) <= 2e-3


def test_an_expanded_gradient():
    x, angles = case(2, 5, 61, 96, 16, torch.float32)
    x.requires_grad_()
    (dx,) = torch.autograd.grad(apply_rotary(x, *tables_of(angles), interleaved=True).sum(), x)
    expected = rotated(torch.ones_like(x), angles, interleaved=True, conjugate=True)
    assert relative_error(dx, expected) <= 3e-7


def test_what_a_backward_needs_is_not_overwritten_in_silence():
    x, angles = case(2, 5, 61, 96, 16, torch.float32)
    y = x.requires_grad_().exp()
    apply_rotary(y, *tables_of(angles), interleaved=True, inplace=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@INPLACE
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing(reentrant, inplace):
    x, angles = case(2, 5, 61, 96, 16, torch.bfloat16)
    x.requires_grad_()

    def block(x: Tensor) -> Tensor:
        return apply_rotary(x * 1.5, *tables_of(angles), interleaved=True, inplace=inplace).sin()

    (expected,) = torch.autograd.grad(block(x).sum(), x)
    checkpoint(block, x, use_reentrant=reentrant).sum().backward()
    assert torch.equal(x.grad, expected)


@INPLACE
def test_compiles_whole(inplace):
    x, angles = case(2, 5, 61, 96, 16, torch.bfloat16)
    cos, sin = tables_of(angles)
    x.requires_grad_()

    def attend(x: Tensor) -> Tensor:
        y = apply_rotary((x * 1.5).transpose(1, 2), cos, sin, interleaved=True, unsqueeze_dim=2, inplace=inplace)
        return y * 2

    out, compiled = attend(x), torch.compile(attend, fullgraph=True)(x)
    assert torch.equal(compiled, out)
    assert torch.equal(torch.autograd.grad(compiled.sum(), x)[0], torch.autograd.grad(out.sum(), x)[0])


def test_opcheck():
    x, angles = case(2, 5, 61, 96, 16, torch.bfloat16)
    cos, sin = tables_of(angles)
    torch.library.opcheck(_op._apply_rotary, (x.requires_grad_(), cos, sin, 1, True, False))
    torch.library.opcheck(_op._apply_rotary_, (x.detach().clone(), cos, sin, 1, True, False))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two cards")
def test_tensors_on_the_second_card():
    x, angles = case(2, 5, 61, 96, 16, torch.bfloat16)
    expected = apply_rotary(x, *tables_of(angles), interleaved=True)
    out = apply_rotary(x.to("cuda:1"), *tables_of(angles.to("cuda:1")), interleaved=True)
    assert torch.equal(out.cpu(), expected.cpu())


# --- tables --------------------------------------------------------------------------------------------------------


def test_tables_are_exact_whatever_is_allowed():
    frequencies = 10000.0 ** -(torch.arange(32, device="cuda") / 32)
    where = torch.arange(70000, 70064, device="cuda").expand(2, -1)
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        cos, _ = cos_sin(where, frequencies)
    finally:
        torch.backends.cuda.matmul.allow_tf32 = False
    angles = where[..., None].double() * frequencies.double()
    assert (cos.double() - angles.cos()).abs().max() <= 2.0**-8 + 1e-6  # half an ulp of 70000


def test_each_stream_has_its_own():
    frequencies, where = torch.rand(8, device="cuda"), torch.arange(5, device="cuda")[None]

    def ask() -> Tensor:
        return tables.remembered(where, "main", lambda: cos_sin(where, frequencies))[0]

    first, stream = ask(), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        second = ask()
        assert second is ask()
    torch.cuda.current_stream().wait_stream(stream)
    assert second is not first
    assert torch.equal(second, first)
    assert ask() is first


def test_a_captured_graph_computes_its_own():
    """A graph that had read remembered tables would replay them for positions that have moved on."""
    frequencies, where = torch.rand(8, device="cuda"), torch.arange(5, device="cuda")[None].clone()

    def ask() -> Tensor:
        return tables.remembered(where, "main", lambda: cos_sin(where, frequencies))[0] * 1.0

    ask()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = ask()
    where.add_(100)
    graph.replay()
    assert torch.equal(out, cos_sin(where, frequencies)[0])


# --- DeepSeek-V4 ---------------------------------------------------------------------------------------------------

ID = "transformers.deepseek-v4-rope"


def logits_and_gradients(dtype: torch.dtype, checkpointing: bool = False) -> tuple[Tensor, Tensor]:
    from fsdp_sink_patches.patches.transformers._deepseek_v4_models import CSA, HCA, SLIDING, build

    model = build((SLIDING, CSA, HCA), dtype, "cuda")
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    ids = torch.randint(3, 512, (2, 100), generator=torch.Generator().manual_seed(3)).cuda()
    logits = model(input_ids=ids, use_cache=False).logits
    logits.float().square().mean().backward()
    gradients = [p.grad.float().flatten() for p in model.parameters() if p.grad is not None]
    return logits.detach(), torch.cat(gradients)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_upstreams_bits_with_rounded_tables(dtype):
    expected, _ = logits_and_gradients(dtype)
    with fsdp_sink_patches.applied(ID), settings.using(rope_dtype="activation"):
        logits, _ = logits_and_gradients(dtype)
    assert torch.equal(logits, expected)


def test_recomputing_changes_nothing_and_finds_the_models_tables():
    with fsdp_sink_patches.applied(ID):
        monitor.reset()
        logits, gradients = logits_and_gradients(torch.bfloat16)
        assert monitor.rope_table_computations() == 5  # main, compress, and the entries of two compressors, one indexer
        again, recomputed = logits_and_gradients(torch.bfloat16, checkpointing=True)
    assert torch.equal(again, logits)
    assert relative_error(recomputed, gradients) <= 1e-3  # sums by atomics differ from run to run


def test_its_own_validation():
    validate = _registry.module(ID).validate
    assert not validate("cuda").right
    with fsdp_sink_patches.applied(ID):
        measured = validate("cuda")
    assert measured.right, measured.errors
