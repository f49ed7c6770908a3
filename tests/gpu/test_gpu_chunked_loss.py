"""The chunked losses on a card: as near to fp64 as all logits are, without waiting for the device, within memory."""

from __future__ import annotations

import itertools

import pytest
import torch

from fsdp_sink_patches.ops.chunked_loss import _tiles, backends, linear_cross_entropy, linear_log_probs, reference
from fsdp_sink_patches.ops.sink_attention.oracle import relative_error

OPTIONS = {"softcap": 8.0, "temperature": 0.7, "label_smoothing": 0.1, "z_loss": 1e-3}
LIBRARIES = [name for name, state in backends().items() if state == "available" and name != "torch"]


def case(tokens, vocab, hidden=256, dtype=torch.bfloat16, device="cuda"):
    """Logits with a spread of 2; a third of the labels is ignored."""
    torch.manual_seed(tokens + vocab)
    labels = torch.randint(0, vocab, (tokens,), device=device)
    return (
        torch.randn(tokens, hidden, device=device).to(dtype),
        (2 * hidden**-0.5 * torch.randn(vocab, hidden, device=device)).to(dtype),
        torch.randn(vocab, device=device).to(dtype),
        labels.masked_fill(torch.rand(tokens, device=device) < 0.3, -100),
    )


def run(compute, given, dtype=None):
    """Results of ``compute`` and their gradients, on copies of ``given`` in ``dtype``."""
    inputs = [t.detach().to(dtype or t.dtype).clone().requires_grad_() for t in given]
    out = compute(*inputs)
    out = out if isinstance(out, tuple) else (out,)
    total = sum(((i + 1) * o).sum() for i, o in enumerate(out))
    return [*(o.detach() for o in out), *torch.autograd.grad(total, inputs)]


def no_worse(found, plain, exact, slack=1.02, bias_slack=None):
    for index, (mine, unchunked, true) in enumerate(zip(found, plain, exact, strict=True)):
        error, allowed = relative_error(mine, true), relative_error(unchunked, true)
        last = index == len(found) - 1 and bias_slack is not None
        limit = (bias_slack if last else slack) * allowed + 1e-6
        assert error <= limit, f"result {index}: {error} against {allowed} unchunked"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize(("tokens", "vocab"), [(1, 129280), (127, 20011), (2048, 50257), (1031, 151936)])
@pytest.mark.parametrize("options", [{}, OPTIONS], ids=["plain", "all"])
def test_losses_are_no_worse_than_unchunked(dtype, tokens, vocab, options):
    """With every option the losses are summed: most rows then have the same derivative of their label's logit, so how
    far one rounding of it goes depends on where it lies between two powers of two, and we round the sum's."""
    *given, labels = case(tokens, vocab, dtype=dtype)
    reduction = "sum" if options else "mean"
    scale = 2.0**12 if dtype == torch.float16 and reduction == "mean" else 1.0  # what a GradScaler brings

    def unchunked(h, w, b):
        return scale * reference.cross_entropy(h, w, labels, bias=b, reduction=reduction, **options)

    # The bias has one large term a token, its label's: the error of so few roundings is itself uncertain, by
    # sqrt(0.2 / n) of itself (uniform errors), for either of the two.
    counted = int((labels != -100).sum())
    bias_slack = 1.02 + 3 * (0.4 / max(counted, 1)) ** 0.5 if dtype.itemsize == 2 else 3
    plain, exact = run(unchunked, given), run(unchunked, given, torch.float64)
    for chunk, recompute in ((512, True), (64, True), (64, False), (4096, False)):
        settings = {"chunk_size": chunk, "recompute": recompute, "reduction": reduction, **options}
        found = run(lambda h, w, b, s=settings: scale * linear_cross_entropy(h, w, labels, bias=b, **s), given)
        # fp32 sums go in another order than one matmul's, and tanh is made of exp
        no_worse(found, plain, exact, 1.02 if dtype.itemsize == 2 else 3, bias_slack)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("tokens", "vocab"), [(127, 20011), (2048, 50257)])
def test_log_probs_and_entropies_are_no_worse_than_unchunked(dtype, tokens, vocab):
    *given, labels = case(tokens, vocab, dtype=dtype)

    temperatures = 0.5 + torch.rand(tokens, device="cuda")

    def unchunked(h, w, b):
        return reference.log_probs(h, w, labels, bias=b, temperature=temperatures)

    found = run(lambda h, w, b: linear_log_probs(h, w, labels, bias=b, temperature=temperatures, chunk_size=100), given)
    no_worse(found, run(unchunked, given), run(unchunked, given, torch.float64), 1.02 if dtype.itemsize == 2 else 3)
    assert (found[0] <= 0).all()


def test_all_logits_negative():
    """verl #7439."""
    weight = torch.zeros(50257, 64, device="cuda")
    weight[:, 0] = -50 + torch.randn(50257, device="cuda")
    hidden = torch.zeros(300, 64, device="cuda")
    hidden[:, 0] = 1
    labels = torch.randint(0, 50257, (300,), device="cuda")
    found = linear_log_probs(hidden, weight, labels)
    for mine, exact in zip(found, reference.log_probs(hidden.double(), weight.double(), labels), strict=True):
        assert relative_error(mine, exact) <= 2e-6
    assert (found[0] <= 0).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_likeliest_label_is_never_above_zero(dtype):
    *given, _ = case(2048, 50257, dtype=dtype)
    for scale in (1e-3, 1.0, 30.0, 1000.0):
        hidden = given[0] * scale
        labels = (hidden.float() @ given[1].float().T).argmax(1)
        assert (linear_log_probs(hidden, given[1], labels)[0] <= 0).all()


def test_kernels_give_what_plain_torch_gives(monkeypatch):
    *given, labels = case(600, 30011, dtype=torch.float32)

    def both(h, w, b):
        loss = linear_cross_entropy(h, w, labels, bias=b, chunk_size=40, recompute=True, **OPTIONS)
        kept = linear_cross_entropy(h, w, labels, bias=b, chunk_size=40, recompute=False, **OPTIONS)
        return *linear_log_probs(h, w, labels, bias=b, chunk_size=40), loss, kept

    kernels = run(both, given)
    monkeypatch.setattr(_tiles, "_use_kernels", lambda z: False)
    for mine, plain in zip(kernels, run(both, given), strict=True):
        assert relative_error(mine, plain) <= 1e-5


@pytest.mark.parametrize("recompute", [True, False])
def test_no_call_waits_for_the_device(recompute):
    hidden, weight, bias, labels = case(1000, 20011)
    inputs = [t.requires_grad_() for t in (hidden, weight, bias)]

    def step():
        loss = linear_cross_entropy(*inputs[:2], labels, bias=bias, recompute=recompute, **OPTIONS)
        log_probs, entropies = linear_log_probs(*inputs[:2], labels, bias=bias)
        (loss + (log_probs - entropies).mean()).backward()

    step()  # compiles kernels, and tries the matmuls once
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("recompute", [True, False])
def test_a_label_outside_gives_nan_and_no_device_assert(recompute):
    hidden, weight, _, labels = case(700, 20011)
    for bad in (20011, -1):
        labels[5] = bad
        assert linear_cross_entropy(hidden, weight, labels).isnan()
        found = run(lambda h, w: linear_cross_entropy(h, w, labels, recompute=recompute), (hidden, weight))
        assert found[0].isnan()
        assert found[1][5].isnan().any()
        assert found[2].isnan().any()
    torch.cuda.synchronize()


@pytest.mark.parametrize("frozen", [False, True])
def test_memory(frozen):
    """The gradients and a tile and a half, all in all less than an eighth of all fp32 logits."""
    tokens, vocab, size = 16384, 129280, 1024
    hidden, weight, _, labels = case(tokens, vocab, size)
    hidden.requires_grad_()
    weight.requires_grad_(not frozen)

    def step():
        linear_cross_entropy(hidden, weight, labels).backward()

    step()
    hidden.grad = weight.grad = None
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step()
    peak = torch.cuda.max_memory_allocated() - before
    tile = (512 * vocab if frozen else 2**24) * 4
    gradients = tokens * size * (4 + 2) + (0 if frozen else vocab * size * 2)
    assert peak <= 1.05 * (1.5 * tile + gradients) + 64 * 2**20, f"{peak / 2**20:.0f} MiB"
    assert peak <= tokens * vocab * 4 / 8


@pytest.mark.parametrize("recompute", [True, False])
def test_equal_bits_in_every_run(recompute):
    hidden, weight, _, labels = case(2048, 50257)
    runs = [run(lambda h, w: linear_cross_entropy(h, w, labels, recompute=recompute), (hidden, weight)) for _ in (1, 2)]
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


def test_more_rows_than_a_grid_axis_takes():
    hidden, weight, _, labels = case(70001, 100, 64, dtype=torch.float32)
    found, exact = (
        run(lambda h, w, f=f: f(h, w, labels), (hidden, weight), dtype)
        for f, dtype in (
            (lambda h, w, y: linear_cross_entropy(h, w, y, chunk_size=70001), torch.float32),
            (reference.cross_entropy, torch.float64),
        )
    )
    for mine, true in zip(found, exact, strict=True):
        assert relative_error(mine, true) <= 1e-5


def test_compiled_and_autocast():
    hidden, weight, bias, labels = case(700, 20011, dtype=torch.float32)

    def step(h, w, b):
        with torch.autocast("cuda", dtype=torch.bfloat16):
            return linear_cross_entropy(h, w, labels, bias=b), *linear_log_probs(h, w, labels, bias=b)

    eager = run(step, (hidden, weight, bias))
    compiled = run(torch.compile(step, fullgraph=True), (hidden, weight, bias))
    for a, b in zip(eager, compiled, strict=True):
        assert relative_error(a, b) <= 1e-5
    assert eager[0].dtype == torch.float32


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs a second card")
def test_the_second_card():
    *given, labels = case(700, 20011, dtype=torch.float32, device="cuda:1")
    found = run(lambda h, w, b: linear_cross_entropy(h, w, labels, bias=b), given)
    exact = run(lambda h, w, b: reference.cross_entropy(h, w, labels, bias=b), given, torch.float64)
    for mine, true in zip(found, exact, strict=True):
        assert relative_error(mine, true) <= 1e-5


@pytest.mark.parametrize("backend", LIBRARIES)
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_named_libraries_are_as_good_as_bf16_logits(backend, reduction):
    """They round more than we do, which is why they are not taken unasked: within four times the unchunked error."""
    hidden, weight, _, labels = case(2048, 50257)

    def unchunked(h, w):
        return reference.cross_entropy(h, w, labels, reduction=reduction)

    plain = run(unchunked, (hidden, weight))
    exact = run(unchunked, (hidden, weight), torch.float64)
    found = run(lambda h, w: linear_cross_entropy(h, w, labels, reduction=reduction, backend=backend), (hidden, weight))
    no_worse(found, plain, exact, slack=4)
    nothing = linear_cross_entropy(hidden, weight, torch.full_like(labels, -100), backend=backend, reduction=reduction)
    assert nothing == 0


def test_matmuls_take_halves_on_this_card():
    """Where this fails, every product widens its factors to fp32 first: right, and many times slower."""
    device = torch.device("cuda", torch.cuda.current_device())
    if torch.cuda.get_device_capability(device) < (8, 0):
        pytest.skip("below compute capability 8.0 the widening path is the one that runs")
    assert _tiles._half_in_full_out(device)
    for transposed, dtype in itertools.product((False, True), (torch.bfloat16, torch.float16)):
        a, b = (torch.randn(100, 100, device=device).to(dtype) for _ in range(2))
        a = a.t() if transposed else a
        out, total = torch.empty(100, 100, device=device), torch.ones(100, 100, device=device)
        _tiles.product(a, b.t(), out=out)
        _tiles.add_product(total, a, b.t())
        exact = a.double() @ b.t().double()
        assert relative_error(out, exact) <= 1e-6
        assert relative_error(total, exact + 1) <= 1e-6
