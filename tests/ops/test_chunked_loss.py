"""The chunked losses against fp64 on all logits; torch's machinery, memory, and what is refused."""

from __future__ import annotations

import itertools
import math
import weakref

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from fsdp_sink_patches.ops.chunked_loss import _op, _tiles, linear_cross_entropy, linear_log_probs, reference
from fsdp_sink_patches.ops.chunked_loss import shift_labels as shift
from fsdp_sink_patches.ops.sink_attention.oracle import relative_error
from tests.ops.cases import draw, leaves

OPTIONS = {
    "softcap": 3.0,
    "temperature": 0.7,
    "label_smoothing": 0.1,
    "z_loss": 0.02,
}
"""Each far enough from neutral to show when it is lost."""


def case(tokens, vocab, hidden=6, *, ignored=0.3, dtype=torch.float64, seed=0):
    """``hidden, weight, bias, labels, token_weights``; logits of a few units."""
    labels = torch.randint(0, vocab, (tokens,), generator=torch.Generator().manual_seed(seed))
    dropped = torch.rand(tokens, generator=torch.Generator().manual_seed(seed + 1)) < ignored
    return (
        draw(tokens, hidden, dtype=dtype, seed=seed),
        draw(vocab, hidden, dtype=dtype, seed=seed + 1),
        draw(vocab, dtype=dtype, seed=seed + 2),
        labels.masked_fill(dropped, -100),
        draw(tokens, dtype=dtype, seed=seed + 3).abs(),
    )


def both(tensors, labels, mine, exact, *, weighting=None):
    """Results and gradients of ``mine`` and of ``exact`` (which gets fp64 copies), as two lists in one order."""
    ours = leaves(*tensors)
    theirs = leaves(*(t.double() for t in tensors))
    lists = []
    for inputs, compute in ((ours, mine), (theirs, exact)):
        out = compute(*inputs, labels)
        out = out if isinstance(out, tuple) else (out,)
        upstream = weighting or [draw(*o.shape, seed=i) if o.dim() else torch.tensor(1.7) for i, o in enumerate(out)]
        total = sum((o * g.to(o.dtype)).sum() for o, g in zip(out, upstream, strict=True))
        grads = torch.autograd.grad(total, inputs)
        lists.append([*out, *grads])
    return lists


def assert_close(found, wanted, bound):
    for index, (mine, exact) in enumerate(zip(found, wanted, strict=True)):
        assert mine.shape == exact.shape
        assert not mine.isnan().any(), index
        error = (mine.detach().double() - exact.detach()).abs().max() if mine.numel() else torch.tensor(0.0)
        scale = max(1.0, float(exact.detach().abs().max())) if exact.numel() else 1.0
        assert error <= bound * scale, f"result {index}: off by {error}, scale {scale}"


@pytest.fixture
def small_blocks(monkeypatch):
    """Blocks of the vocabulary so small that a row of a small test has several."""
    monkeypatch.setattr(_tiles, "VOCAB_BLOCK", 7)


# The oracle itself


def test_the_oracle_says_what_the_formula_says():
    hidden, weight, bias, labels, weights = (t.tolist() for t in case(5, 4, 3, seed=4))
    labels[2], total, mass = -100, 0.0, 0.0
    options = {"softcap": 2.0, "temperature": 0.5, "label_smoothing": 0.2, "z_loss": 0.3}
    for h, label, w in zip(hidden, labels, weights, strict=True):
        raw = [sum(x * y for x, y in zip(h, row, strict=True)) + b for row, b in zip(weight, bias, strict=True)]
        z = [2.0 * math.tanh(x / 2.0) / 0.5 for x in raw]
        lse = math.log(sum(math.exp(x) for x in z))
        if label != -100:
            loss = 0.8 * (lse - z[label]) + 0.2 * sum(lse - x for x in z) / 4 + 0.3 * lse**2
            total, mass = total + w * loss, mass + w
    h, wt, b, w = (torch.tensor(x, dtype=torch.float64) for x in (hidden, weight, bias, weights))
    found = reference.cross_entropy(h, wt, torch.tensor(labels), bias=b, token_weights=w, **options)
    assert float(found) == pytest.approx(total / mass, rel=1e-12)


# Exactness


@settings(deadline=None, max_examples=250, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    tokens=st.integers(0, 9), vocab=st.integers(1, 40), chunk=st.integers(1, 12), block=st.integers(1, 45),
    chosen=st.sets(st.sampled_from(sorted(OPTIONS))), with_bias=st.booleans(), weighted=st.booleans(),
    temperatures=st.booleans(),
    reduction=st.sampled_from(["mean", "sum", "none"]), recompute=st.sampled_from([None, True, False]),
    ignored=st.sampled_from([0.0, 0.3, 1.0]), seed=st.integers(0, 5),
)  # fmt: skip
def test_any_loss_equals_the_oracle(
    monkeypatch,
    tokens,
    vocab,
    chunk,
    block,
    chosen,
    with_bias,
    weighted,
    temperatures,
    reduction,
    recompute,
    ignored,
    seed,
):
    monkeypatch.setattr(_tiles, "VOCAB_BLOCK", block)
    hidden, weight, bias, labels, weights = case(tokens, vocab, ignored=ignored, seed=seed)
    options = {name: OPTIONS[name] for name in chosen} | {"reduction": reduction}
    options |= {"token_weights": weights} if weighted else {}
    options |= {"temperature": 0.3 + weights.flip(0)} if temperatures else {}
    mine = {"chunk_size": chunk, "recompute": None if reduction == "none" else recompute}

    def run(loss, extra):
        return lambda h, w, b, y: loss(h, w, y, bias=b if with_bias else None, **options, **extra)

    inputs = (hidden, weight, bias if with_bias else torch.zeros(0).double())
    if with_bias:
        found, wanted = both(inputs, labels, run(linear_cross_entropy, mine), run(reference.cross_entropy, {}))
    else:
        found, wanted = both(
            inputs[:2], labels,
            lambda h, w, y: run(linear_cross_entropy, mine)(h, w, None, y),
            lambda h, w, y: run(reference.cross_entropy, {})(h, w, None, y),
        )  # fmt: skip
    assert_close(found, wanted, 1e-12)


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    tokens=st.integers(0, 9), vocab=st.integers(1, 40), chunk=st.integers(1, 12), block=st.integers(1, 45),
    softcap=st.sampled_from([None, 3.0]), temperature=st.sampled_from([1.0, 0.7, "each"]), seed=st.integers(0, 5),
)  # fmt: skip
def test_log_probs_and_entropies_equal_the_oracle(monkeypatch, tokens, vocab, chunk, block, softcap, temperature, seed):
    monkeypatch.setattr(_tiles, "VOCAB_BLOCK", block)
    hidden, weight, bias, labels, _ = case(tokens, vocab, seed=seed)
    if temperature == "each":
        temperature = 0.3 + draw(tokens, seed=seed).abs()
    options = {"softcap": softcap, "temperature": temperature}
    found, wanted = both(
        (hidden, weight, bias), labels,
        lambda h, w, b, y: linear_log_probs(h, w, y, bias=b, chunk_size=chunk, **options),
        lambda h, w, b, y: reference.log_probs(h, w, y, bias=b, **options),
    )  # fmt: skip
    assert_close(found, wanted, 1e-12)
    alone = linear_log_probs(hidden, weight, labels, bias=bias, chunk_size=chunk, with_entropy=False, **options)
    assert torch.equal(alone, found[0])


@pytest.mark.parametrize("tokens", [0, 1, 127])
@pytest.mark.parametrize("chunk", [1, 128, 4096])
def test_a_large_vocabulary(tokens, chunk):
    """Blocks of their real width, 20011 columns, in fp32: as near to fp64 as the same formula on all logits is."""
    if tokens == 127 and chunk == 1:
        tokens = 31  # one row at a time over this width is slow, and no other than 31 times over
    hidden, weight, _, labels, _ = case(tokens, 20011, 16, dtype=torch.float32)
    for recompute in (True, False):
        found, wanted = both(
            (hidden, weight), labels,
            lambda h, w, y, r=recompute: linear_cross_entropy(h, w, y, chunk_size=chunk, recompute=r, **OPTIONS),
            lambda h, w, y: reference.cross_entropy(h, w, y, **OPTIONS),
        )  # fmt: skip
        plain, _ = both((hidden, weight), labels, *(lambda h, w, y: reference.cross_entropy(h, w, y, **OPTIONS),) * 2)
        for mine, unchunked, exact in zip(found, plain, wanted, strict=True):
            assert relative_error(mine, exact) <= 2 * relative_error(unchunked, exact) + 5e-7


@pytest.mark.parametrize("chunk", [128, 4096])
def test_many_tokens(small_blocks, monkeypatch, chunk):
    monkeypatch.setattr(_tiles, "VOCAB_BLOCK", 100)
    hidden, weight, _, labels, _ = case(4099, 257, 16, dtype=torch.float32)
    found, wanted = both(
        (hidden, weight), labels,
        lambda h, w, y: linear_log_probs(h, w, y, chunk_size=chunk),
        lambda h, w, y: reference.log_probs(h, w, y),
    )  # fmt: skip
    assert_close(found, wanted, 2e-6)


@pytest.mark.parametrize("recompute", [True, False])
@pytest.mark.parametrize("options", [{}, OPTIONS], ids=["plain", "all"])
def test_bf16_is_no_worse_than_unchunked(small_blocks, recompute, options):
    """Loss, and gradients in bf16, against fp64 on the same bf16 inputs."""
    hidden, weight, _, labels, _ = case(301, 97, 64, dtype=torch.bfloat16)
    hidden = hidden * 0.3
    found, wanted = both(
        (hidden, weight), labels,
        lambda h, w, y: linear_cross_entropy(h, w, y, chunk_size=40, recompute=recompute, **options),
        lambda h, w, y: reference.cross_entropy(h, w, y, **options),
    )  # fmt: skip
    unchunked, _ = both(
        (hidden, weight), labels,
        lambda h, w, y: reference.cross_entropy(h, w, y, **options),
        lambda h, w, y: reference.cross_entropy(h, w, y, **options),
    )  # fmt: skip
    assert found[0].dtype == torch.float32
    assert found[1].dtype == found[2].dtype == torch.bfloat16
    for mine, plain, exact in zip(found, unchunked, wanted, strict=True):
        assert relative_error(mine, exact) <= relative_error(plain, exact)
    # rounded once: the error of the dtype itself and no more
    for mine, exact in zip(found[1:], wanted[1:], strict=True):
        assert relative_error(mine, exact) <= 1.02 * relative_error(exact.to(torch.bfloat16), exact)


@pytest.mark.parametrize("recompute", [True, False])
def test_fp16_keeps_small_gradients_of_a_mean(recompute):
    """1 / tokens is below fp16's normal numbers times a probability; a loss scale of 2^15 is what GradScaler brings."""
    hidden, weight, _, labels, _ = case(2000, 50, 8, dtype=torch.float16, ignored=0)
    found, wanted = both(
        (hidden, weight), labels,
        lambda h, w, y: linear_cross_entropy(h, w, y, chunk_size=512, recompute=recompute),
        lambda h, w, y: reference.cross_entropy(h, w, y),
        weighting=[torch.tensor(2.0**15)],
    )  # fmt: skip
    for mine, exact in zip(found, wanted, strict=True):
        assert relative_error(mine, exact) <= 5e-4


@pytest.mark.parametrize("tokens", [1, 9])
def test_all_logits_negative(small_blocks, tokens):
    """verl #7439: its fused entropy starts a maximum at 0, which -50 +- 1 never reaches."""
    weight = torch.cat([-50 + draw(40, 1), 0 * draw(40, 2)], 1).float()
    hidden = torch.ones(tokens, 3)
    labels = torch.arange(tokens) % 40
    found, wanted = both(
        (hidden, weight), labels,
        lambda h, w, y: linear_log_probs(h, w, y, chunk_size=2),
        lambda h, w, y: reference.log_probs(h, w, y),
    )  # fmt: skip
    plain, _ = both((hidden, weight), labels, *(lambda h, w, y: reference.log_probs(h, w, y),) * 2)
    for mine, unchunked, exact in zip(found, plain, wanted, strict=True):
        assert relative_error(mine, exact) <= 2 * relative_error(unchunked, exact) + 1e-6


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(scale=st.sampled_from([0.0, 1e-3, 1.0, 30.0, 3e3]), vocab=st.integers(1, 30), seed=st.integers(0, 99))
def test_log_probs_are_never_above_zero(small_blocks, scale, vocab, seed):
    """verl #2656: log-probs above zero, and the reward collapses. The likeliest token is the one that gets there."""
    hidden, weight = draw(6, 4, dtype=torch.float32, seed=seed), scale * draw(vocab, 4, dtype=torch.float32, seed=seed)
    labels = (hidden @ weight.T).argmax(1)
    log_probs, entropies = linear_log_probs(hidden, weight, labels, chunk_size=2)
    assert (log_probs <= 0).all()
    assert (entropies >= -1e-6).all()
    assert (entropies <= math.log(vocab) + 1e-5).all()


@pytest.mark.parametrize("hidden_rows", [3, 16])
def test_a_bias_of_minus_infinity_hides_padding(small_blocks, hidden_rows):
    """A vocabulary padded to a round number: all is as if the rows at its end were not there, whole blocks of them."""
    hidden, weight, bias, labels, _ = case(5, 16 + hidden_rows, ignored=0)
    labels, bias = labels % 16, bias.index_fill(0, torch.arange(16, 16 + hidden_rows), float("-inf"))

    def ours(h, w, b, y):
        return linear_log_probs(h, w, y, bias=b, chunk_size=2)

    def exact(h, w, b, y):
        return reference.log_probs(h, w, y, bias=b)

    found, _ = both((hidden, weight, bias), labels, ours, ours)
    _, wanted = both((hidden, weight[:16], bias[:16]), labels, exact, exact)
    assert_close([*found[:3], found[3][:16], found[4][:16]], wanted, 1e-12)
    assert (found[3][16:] == 0).all()
    assert (found[4][16:] == 0).all()


# Nothing to count


@pytest.mark.parametrize("tokens", [0, 5])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("options", [{}, OPTIONS], ids=["plain", "all"])
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("weighted", [False, True])
def test_all_ignored_is_zero_with_zero_gradients(tokens, reduction, options, frozen, weighted):
    hidden, weight, bias, labels, _ = case(tokens, 11, ignored=1.1)
    hidden, weight, bias = leaves(hidden, weight, bias)
    weight.requires_grad_(not frozen)
    weights = {"token_weights": torch.full((tokens,), float("nan"))} if weighted else {}
    loss = linear_cross_entropy(hidden, weight, labels, bias=bias, reduction=reduction, **options, **weights)
    assert (loss == 0).all()
    loss.sum().backward()
    for leaf in (hidden, bias) if frozen else (hidden, weight, bias):
        assert leaf.grad is not None
        assert (leaf.grad == 0).all()


def test_weights_that_are_all_zero_give_a_zero_mean():
    hidden, weight, _, labels, weights = case(5, 11)
    assert linear_cross_entropy(hidden, weight, labels, token_weights=0 * weights) == 0


def test_weights_that_cancel_out_do_not_look_like_a_loss():
    hidden, weight, _, _, _ = case(2, 11)
    loss = linear_cross_entropy(hidden, weight, torch.tensor([1, 2]), token_weights=torch.tensor([1.0, -1.0]))
    assert loss.isinf()


# Which gradients


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("needs", list(itertools.product([False, True], repeat=3)))
@pytest.mark.parametrize("recompute", [None, False])
def test_only_what_is_trained_gets_a_gradient(small_blocks, monkeypatch, needs, reduction, recompute):
    if reduction == "none" and recompute is False:
        recompute = True
    asked = []
    for name in ("gradients", "loss_and_gradients"):
        real = getattr(_tiles, name)
        monkeypatch.setattr(_tiles, name, lambda *a, real=real, name=name: asked.append((name, a[-1])) or real(*a))
    hidden, weight, bias, labels, _ = case(9, 23)
    inputs = [t.requires_grad_(need) for t, need in zip((hidden, weight, bias), needs, strict=True)]
    loss = linear_cross_entropy(*inputs[:2], labels, bias=inputs[2], chunk_size=3, reduction=reduction,
                                recompute=recompute)  # fmt: skip
    assert loss.requires_grad == any(needs)
    if not any(needs):
        assert recompute is False or not asked
        return
    loss.sum().backward()
    exact = leaves(hidden, weight, bias)
    reference.cross_entropy(*exact[:2], labels, bias=exact[2], reduction=reduction).sum().backward()
    for leaf, need, twin in zip(inputs, needs, exact, strict=True):
        assert (leaf.grad is not None) == need
        assert not need or relative_error(leaf.grad, twin.grad) <= 1e-13
    assert asked[0][1] == needs
    in_forward = reduction == "mean" and (recompute is False or not needs[1])
    assert [name for name, _ in asked] == ["loss_and_gradients" if in_forward else "gradients"]


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_token_weights_can_be_trained(reduction):
    hidden, weight, _, labels, weights = case(9, 23)
    found, wanted = both(
        (hidden, weight, weights), labels,
        lambda h, w, t, y: linear_cross_entropy(h, w, y, token_weights=t, reduction=reduction),
        lambda h, w, t, y: reference.cross_entropy(h, w, y, token_weights=t, reduction=reduction),
    )  # fmt: skip
    assert_close(found, wanted, 1e-12)


def test_a_tied_weight_gets_both_gradients(small_blocks):
    tokens = torch.randint(0, 23, (2, 8), generator=torch.Generator().manual_seed(0))

    def train(loss, table):
        table = table.clone().requires_grad_()
        hidden = torch.tanh(F.embedding(tokens, table))
        loss(hidden, table, shift(tokens)).backward()
        return table.grad

    table = draw(23, 6)
    assert relative_error(train(linear_cross_entropy, table), train(reference.cross_entropy, table)) <= 1e-13


def test_gradients_do_not_depend_on_when_or_how_often_backward_runs(small_blocks):
    hidden, weight, _, labels, _ = case(9, 23, dtype=torch.float32)
    for recompute in (True, False):
        h, w = leaves(hidden, weight)
        loss = linear_cross_entropy(h, w, labels, chunk_size=3, recompute=recompute)
        first = torch.autograd.grad(loss, (h, w), retain_graph=True)
        second = torch.autograd.grad(loss, (h, w), torch.tensor(-2.0))
        for a, b in zip(first, second, strict=True):
            assert torch.equal(-2 * a, b)


@pytest.mark.parametrize("recompute", [True, False])
def test_a_second_derivative_is_refused(recompute):
    hidden, weight, _, labels, _ = case(9, 23)
    hidden, weight = leaves(hidden, weight)
    loss = linear_cross_entropy(hidden, weight, labels, recompute=recompute)
    (grad,) = torch.autograd.grad(loss, hidden, create_graph=True)
    with pytest.raises(RuntimeError, match=r"ops\.chunked_loss: a second derivative .* full logits"):
        grad.sum().backward()


def test_gradcheck(small_blocks):
    hidden, weight, bias, labels, _ = case(4, 9, 3)
    given = leaves(hidden, weight, bias)
    assert torch.autograd.gradcheck(
        lambda h, w, b: linear_log_probs(h, w, labels, bias=b, softcap=4.0, temperature=0.6, chunk_size=2), given
    )
    for recompute in (True, False):
        assert torch.autograd.gradcheck(
            lambda h, w, b, r=recompute: linear_cross_entropy(h, w, labels, bias=b, chunk_size=2, recompute=r), given
        )


# Layouts, dtypes, torch's machinery


def test_batches_and_strides(small_blocks):
    hidden, weight, _, labels, _ = case(24, 23)
    flat = linear_cross_entropy(hidden, weight, labels, reduction="none")
    batched = hidden.view(2, 12, 6)
    strided = batched.transpose(0, 1).contiguous().transpose(0, 1)
    assert not strided.is_contiguous()
    columns = weight.t().contiguous().t()
    for h, w in (
        (batched, weight),
        (strided, weight),
        (batched, columns),
        (hidden.flip(0).flip(0).view(2, 12, 6), weight),
    ):
        found, wanted = both(
            (h, w), labels.view(2, 12),
            lambda h, w, y: linear_cross_entropy(h, w, y, chunk_size=5),
            lambda h, w, y: reference.cross_entropy(h, w, y),
        )  # fmt: skip
        assert_close(found, wanted, 1e-12)
        out = linear_cross_entropy(h, w, labels.view(2, 12).to(torch.int32), reduction="none")
        assert out.shape == (2, 12)
        assert relative_error(out.flatten(), flat) <= 1e-13
    one = linear_log_probs(hidden[3], weight, torch.tensor(5))
    assert one[0].shape == one[1].shape == ()
    every_other = leaves(torch.cat([hidden, hidden], 1))[0]
    linear_cross_entropy(every_other[:, ::2], weight, labels, recompute=False).backward()
    assert every_other.grad.shape == (24, 12)


def test_autocast_casts_as_a_linear_layer_does():
    hidden, weight, bias, labels, _ = case(33, 23, 16, dtype=torch.float32)
    hidden, weight, bias = leaves(hidden, weight, bias)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = linear_cross_entropy(hidden, weight, labels, bias=bias)
        log_probs, _ = linear_log_probs(hidden, weight, labels, bias=bias)
        mixed = linear_cross_entropy(hidden.bfloat16(), weight, labels, bias=bias)
    rounded = [t.detach().bfloat16().double() for t in (hidden, weight, bias)]
    exact = reference.cross_entropy(*rounded[:2], labels, bias=rounded[2])
    assert loss.dtype == log_probs.dtype == torch.float32
    assert relative_error(loss, exact) <= 1e-6
    assert torch.equal(loss, mixed)
    loss.backward()
    assert hidden.grad.dtype == weight.grad.dtype == bias.grad.dtype == torch.float32


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("frozen", [False, True])
def test_checkpointing(reentrant, frozen):
    hidden, weight, _, labels, _ = case(9, 23)

    def run(wrapped):
        h, w = leaves(hidden, weight)
        w.requires_grad_(not frozen)
        f = linear_cross_entropy
        loss = checkpoint(f, h.tanh(), w, labels, use_reentrant=reentrant) if wrapped else f(h.tanh(), w, labels)
        loss.backward()
        return [loss, h.grad, *([] if frozen else [w.grad])]

    for mine, plain in zip(run(True), run(False), strict=True):
        assert torch.equal(mine, plain)


def test_compiles_into_one_graph_for_any_number_of_tokens():
    graphs = []

    def counting(module, inputs):
        graphs.append(module)
        return make_boxed_func(module.forward)

    def loss(h, w, b, y):
        log_probs, entropies = linear_log_probs(h, w, y, bias=b, chunk_size=4)
        frozen = linear_cross_entropy(h, w.detach(), y, bias=b.detach(), chunk_size=4, softcap=3.0)
        return linear_cross_entropy(h, w, y, bias=b) + frozen + (log_probs - entropies).sum()

    compiled = torch.compile(loss, fullgraph=True, dynamic=True, backend=aot_autograd(fw_compiler=counting))
    for tokens in (9, 14, 23):
        hidden, weight, bias, labels, _ = case(tokens, 29)
        found, wanted = both((hidden, weight, bias), labels, compiled, loss)
        assert_close(found, wanted, 1e-13)
    assert len(graphs) == 2  # a forward and a backward


def test_registration_holds_up():
    hidden, weight, bias, labels, weights = case(9, 23)
    given = leaves(hidden, weight, bias)
    checks = ("test_schema", "test_faketensor", "test_autograd_registration")
    torch.library.opcheck(
        _op.logit_statistics, (*given, labels.clamp(0), 0.2 + weights, 3, 2.0, True), test_utils=checks
    )
    torch.library.opcheck(
        _op.linear_loss,
        (*given, labels.clamp(0), 0.2 + weights, weights, 0.1, 0.1, 3, 2.0, True, True, True),
        test_utils=checks,
    )


def test_deterministic_mode_is_enough_for_equal_bits(small_blocks):
    torch.use_deterministic_algorithms(True)
    try:
        hidden, weight, _, labels, _ = case(40, 23, dtype=torch.float32)
        runs = []
        for _ in range(2):
            h, w = leaves(hidden, weight)
            linear_cross_entropy(h, w, labels, chunk_size=3).backward()
            runs.append((h.grad, w.grad))
        assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))
    finally:
        torch.use_deterministic_algorithms(False)


def test_halves_go_into_the_matmuls_where_these_hand_out_fp32(small_blocks, monkeypatch):
    """CUDA's out_dtype, played on the CPU: what goes in is bf16, the gradient of the logits rounded once."""
    seen = []

    def mm(a, b, *, out_dtype=None, out=None):
        if out_dtype is not None:
            assert a.dtype == b.dtype == torch.bfloat16
            seen.append("mm")
        result = torch.matmul(a.float(), b.float()) if out_dtype is not None else torch.matmul(a, b)
        return result if out is None else out.copy_(result)

    def addmm(total, a, b, *, out_dtype, out):
        assert a.dtype == b.dtype == torch.bfloat16
        assert out is total
        assert total.dtype == torch.float32
        seen.append("addmm")
        return total.add_(torch.matmul(a.float(), b.float()))

    monkeypatch.setattr(_tiles, "_half_in_full_out", lambda device: True)
    monkeypatch.setattr(_tiles.torch, "mm", mm)
    monkeypatch.setattr(_tiles.torch, "addmm", addmm)
    hidden, weight, _, labels, _ = case(101, 37, 32, dtype=torch.bfloat16)
    for adds, recompute in itertools.product((True, False), repeat=2):
        monkeypatch.setattr(_tiles, "_adds_in_full", lambda device, adds=adds: adds)
        seen.clear()
        found, wanted = both(
            (hidden, weight), labels,
            lambda h, w, y, r=recompute: linear_cross_entropy(h, w, y, chunk_size=9, recompute=r),
            lambda h, w, y: reference.cross_entropy(h, w, y),
        )  # fmt: skip
        assert set(seen) == ({"mm", "addmm"} if adds else {"mm"})
        unchunked, _ = both((hidden, weight), labels, *(lambda h, w, y: reference.cross_entropy(h, w, y),) * 2)
        for mine, plain, exact in zip(found, unchunked, wanted, strict=True):
            assert relative_error(mine, exact) <= 1.02 * relative_error(plain, exact)


# Memory


class Watch(TorchDispatchMode):
    """The largest tensor and the most bytes alive at once, seen inside our operators too."""

    def __init__(self, *known):
        super().__init__()
        self.largest, self.alive, self.most = 0, 0, 0
        self._storages = {t.untyped_storage()._cdata for t in known}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        inner = {
            _op.logit_statistics: _op._statistics,
            _op.logit_statistics_backward: _op._statistics_backward,
            _op.linear_loss: _op._loss,
        }.get(func)
        if inner is not None:
            with self:
                return inner(*args)
        out = func(*args, **(kwargs or {}))
        for t in tree_leaves(out):
            if isinstance(t, torch.Tensor):
                self._see(t)
        return out

    def _see(self, t):
        storage = t.untyped_storage()
        self.largest = max(self.largest, t.numel() * t.dtype.itemsize)
        if storage._cdata in self._storages:
            return
        size, key = storage.nbytes(), storage._cdata
        self._storages.add(key)
        self.alive += size
        self.most = max(self.most, self.alive)

        def gone():
            self.alive -= size
            self._storages.discard(key)

        weakref.finalize(storage, gone)


@pytest.mark.parametrize("what", ["loss", "loss, gradients in the forward", "log-probs"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_all_logits_never_exist(what, dtype, monkeypatch):
    monkeypatch.setattr(_tiles, "VOCAB_BLOCK", 256)
    tokens, vocab, hidden_size, chunk = 512, 2048, 16, 16
    hidden, weight, _, labels, _ = case(tokens, vocab, hidden_size, dtype=dtype)
    hidden, weight = leaves(hidden, weight)
    with Watch(hidden, weight, labels) as seen:
        if what == "log-probs":
            log_probs, entropies = linear_log_probs(hidden, weight, labels, chunk_size=chunk)
            (log_probs - 0.1 * entropies).sum().backward()
        else:
            recompute = what == "loss"
            linear_cross_entropy(hidden, weight, labels, chunk_size=chunk, recompute=recompute).backward()
    tile = chunk * vocab * 4
    assert seen.largest == max(tile, hidden_size * vocab * 4 * (what == "loss, gradients in the forward"))
    # three times the tile (logits, and what plain torch needs beside them), gradients in fp32 and in their own dtype
    # (twice where they were kept from the forward), numbers of each token
    gradients = (tokens + vocab) * hidden_size * (4 + 4)
    assert seen.most <= 3 * tile + gradients + 64 * tokens * 8
    assert seen.most < tokens * vocab * 4 / 4


def test_the_watch_sees_all_logits():
    hidden, weight, _, labels, _ = case(64, 512, dtype=torch.float32)
    with Watch(hidden, weight, labels) as seen:
        reference.cross_entropy(hidden, weight, labels)
    assert seen.largest == 64 * 512 * 4
    assert seen.most >= seen.largest


@pytest.mark.parametrize(
    ("tokens", "vocab", "chunk"),
    [
        (16384, 201088, 512), (200000, 129280, 512), (300, 201088, 512), (131072, 151936, 256),
        (16384, 4095, 1), (1, 1, 1), (0, 5, 7),
    ],
)  # fmt: skip
def test_tiles_keep_to_the_budget_and_cover_all(tokens, vocab, chunk):
    hidden, weight = torch.empty(tokens, 1, device="meta"), torch.empty(vocab, 1, device="meta")
    blocks, rows = _tiles._grid(hidden, weight, _tiles.Options(chunk, 0.0, False))
    assert 1 <= rows <= max(1, tokens)
    assert rows * blocks.step <= max(chunk * vocab, blocks.step)
    assert list(blocks)[-1] < vocab <= list(blocks)[-1] + blocks.step


# What tests are worth: a break in the maths must show


@pytest.mark.parametrize(
    ("where", "broken"),
    [
        ("coefficients", lambda real: lambda *a: real(*a) * torch.tensor([1, 1, 0, 1.0]).double()[:, None]),
        ("coefficients", lambda real: lambda *a: real(*a) * torch.tensor([1, 1, 1, -1.0]).double()[:, None]),
        ("_place", lambda real: lambda labels, first, n: (real(labels, first, n)[0], real(labels, 0, n)[1])),
        ("_place", lambda real: lambda labels, first, n: real(labels, first, max(n - 1, 1))),
        ("add_product", lambda real: lambda total, a, b: real(total, a, b * 1.001)),
        ("_slices", lambda real: lambda length, step: iter(list(real(length, step))[:-1] or [slice(0, length)])),
        ("loss_of", lambda real: lambda found, s, z: real(found, s, 0.0)),
    ],
    ids=["mean lost", "entropy sign", "block ignored", "last column", "a factor", "last tile", "z_loss lost"],
)  # fmt: skip
def test_a_planted_error_is_found(small_blocks, monkeypatch, where, broken):
    def run():
        hidden, weight, bias, labels, weights = case(11, 29)
        found, wanted = both(
            (hidden, weight, bias), labels,
            lambda h, w, b, y: (
                linear_cross_entropy(h, w, y, bias=b, chunk_size=2, token_weights=weights, **OPTIONS),
                *linear_log_probs(h, w, y, bias=b, chunk_size=2),
            ),
            lambda h, w, b, y: (
                reference.cross_entropy(h, w, y, bias=b, token_weights=weights, **OPTIONS),
                *reference.log_probs(h, w, y, bias=b),
            ),
        )  # fmt: skip
        assert_close(found, wanted, 1e-12)

    run()
    monkeypatch.setattr(_tiles, where, broken(getattr(_tiles, where)))
    with pytest.raises(AssertionError):
        run()


# What is refused


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"labels": torch.tensor([0, 23, 1])}, r"labels is 23 among them; expected -100 \(ignored\) or 0 to 22: look"),
        ({"labels": torch.tensor([0, -1, 1])}, r"labels is -1 among them"),
        ({"labels": torch.zeros(4, dtype=torch.int64)}, r"labels is torch.int64 \[4\]; expected int64 \[3\]"),
        ({"labels": torch.zeros(3)}, r"labels is torch.float32 \[3\]"),
        ({"weight": draw(23, 5)}, r"hidden and weight is \[3, 6\] and \[23, 5\]; expected \[\.\.\., hidden\] and"),
        ({"weight": draw(6)}, r"hidden and weight is"),
        ({"weight": draw(0, 6)}, r"hidden and weight is \[3, 6\] and \[0, 6\]"),
        ({"weight": draw(23, 6, dtype=torch.float32)}, r"torch.float64 and torch.float32; .* cast one"),
        ({"bias": draw(23, dtype=torch.bfloat16)}, r"hidden and bias is torch.float64 and torch.bfloat16"),
        ({"bias": draw(22)}, r"bias is \[22\]; expected \[23\]"),
        ({"hidden": torch.zeros(3, 6).long(), "weight": torch.zeros(23, 6).long()}, r"hidden is torch.int64"),
        ({"weight": torch.empty(23, 6, dtype=torch.float64, device="meta")}, r"weight is on meta; expected cpu"),
        ({"chunk_size": 0}, r"chunk_size is 0; expected an int of at least 1: None chooses"),
        ({"chunk_size": 2.0}, r"chunk_size is 2\.0"),
        ({"softcap": 0.0}, r"softcap is 0\.0; expected a positive number: None"),
        ({"temperature": 0.0}, r"temperature is 0\.0; expected a positive number"),
        ({"temperature": torch.ones(4)}, r"temperature is torch.float32 \[4\]; expected a num"),
        ({"temperature": torch.ones(3).long()}, r"temperature is torch.int64"),
        ({"temperature": torch.ones(3, requires_grad=True)}, r"temperature is torch.float32 \[3\], trained; .* detach"),
        ({"temperature": torch.tensor([1.0, 0.0, 1.0])}, r"temperature is 0\.0 among them; expected positive"),
        ({"reduction": "avg"}, r"reduction is 'avg'; expected 'mean', 'sum' or 'none'"),
        ({"label_smoothing": 1.5}, r"label_smoothing is 1\.5"),
        ({"z_loss": -1.0}, r"z_loss is -1\.0"),
        ({"token_weights": torch.ones(4)}, r"token_weights is torch.float32 \[4\]; expected floating point \[3\]"),
        ({"token_weights": torch.ones(3, dtype=torch.int64)}, r"token_weights is torch.int64"),
        ({"recompute": False, "reduction": "none"}, r"recompute is False with reduction 'none'; expected a scalar"),
        ({"recompute": False, "token_weights": torch.ones(3, requires_grad=True)}, r"trained token_weights"),
        ({"backend": "apex"}, r"backend is 'apex'; expected one of torch, liger, cut-cross-entropy, or None"),
        ({"backend": "liger"}, r"backend 'liger' cannot compute this: liger-kernel is not installed; expected"),
    ],
)  # fmt: skip
def test_bad_input_is_named(changes, message):
    arguments = {"hidden": draw(3, 6), "weight": draw(23, 6), "labels": torch.tensor([0, 1, -100])} | changes
    with pytest.raises(ValueError, match=r"^ops\.chunked_loss: .*" + message):
        linear_cross_entropy(**arguments)


@pytest.mark.parametrize("recompute", [True, False])
@pytest.mark.parametrize("frozen", [True, False])
def test_what_an_ignored_token_holds_is_not_in_the_loss(recompute, frozen):
    torch.manual_seed(0)
    hidden, weight, labels = torch.randn(4, 8), torch.randn(11, 8), torch.tensor([1, -100, 3, 4])
    expected = linear_cross_entropy(hidden, weight, labels)
    hidden[1] = float("nan")
    weight.requires_grad_(not frozen)
    found = linear_cross_entropy(hidden.requires_grad_(), weight, labels, recompute=recompute)
    assert torch.equal(found.detach(), expected)


def test_where_nobody_looks_a_label_outside_gives_nan(small_blocks):
    """On CUDA looking would wait for the device; under torch.compile nobody can. Loss and gradients then say so."""
    hidden, weight, _, _, _ = case(3, 23)
    for bad, recompute in itertools.product((23, -1, 10**6), (True, False)):
        h, w = leaves(hidden, weight)
        labels = torch.tensor([1, bad, 2])
        if recompute:
            found = _op.logit_statistics(h, w, None, labels, None, 2, 0.0, False)[_tiles.LOG_PROB]
            assert found.isnan().tolist() == [False, True, False]
            found.sum().backward()
        else:
            _op.linear_loss(h, w, None, labels, None, torch.ones(3).double(), 0.0, 0.0, 2, 0.0, True, True, False)[
                0
            ].backward()
        assert h.grad.isnan().any(1).tolist() == [False, True, False]
        assert w.grad.isnan().all()


# Labels


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_labels_are_the_next_tokens_of_the_same_document(dtype):
    tokens = torch.tensor([[10, 11, 12, 13, 14, 15]], dtype=dtype)
    assert shift(tokens).tolist() == [[11, 12, 13, 14, 15, -100]]
    positions = torch.tensor([[0, 1, 2, 0, 0, 1]])
    assert shift(tokens, positions, ignore_index=-7).tolist() == [[11, 12, -7, -7, 15, -7]]
    assert shift(tokens, positions).dtype == dtype
    assert shift(tokens[0], positions[0]).tolist() == [11, 12, -100, -100, 15, -100]


@pytest.mark.parametrize(
    ("tokens", "positions", "message"),
    [
        (torch.zeros(2, 3), None, r"tokens is torch.float32 \[2, 3\]; expected integers"),
        (torch.tensor(3), None, r"at least one-dimensional"),
        (
            torch.zeros(2, 3).long(),
            torch.zeros(3).long(),
            r"position_ids is torch.int64 \[3\]; expected int",
        ),
        (torch.zeros(2, 0).long(), None, r"tokens has no token"),
    ],
)
def test_bad_labels_are_named(tokens, positions, message):
    with pytest.raises(ValueError, match=r"^shift_labels: .*" + message):
        shift(tokens, positions)
