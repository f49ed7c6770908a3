"""The oracle itself, against a formulation that shares nothing with it."""

from __future__ import annotations

import math

import pytest
import torch

from fsdp_sink_patches.ops.sink_attention.oracle import oracle_attention, relative_error
from tests.ops.cases import SINKS, draw, leaves, sinks_of, starts


def by_hand(q, k, v, sinks, lengths, window, causal):
    """Row by row in Python: a dictionary of exponentials, the sink as one of them, no mask, no matrix."""
    out = torch.zeros(q.shape[0], q.shape[1], v.shape[-1], dtype=torch.float64)
    group = q.shape[1] // k.shape[1]
    begin = 0
    for length in lengths:
        for i in range(length):
            for h in range(q.shape[1]):
                keys = [
                    j
                    for j in range(length)
                    if (not causal or j <= i) and (window[0] < 0 or i - j <= window[0]) and (window[1] < 0 or j - i <=
                window[1]) ]  # fmt: skip
                weights = [
                    math.exp(float(q[begin + i, h] @ k[begin + j, h // group]) / math.sqrt(q.shape[-1])) for j in keys
                ]
                total = sum(weights) + math.exp(float(sinks[h]))
                for j, weight in zip(keys, weights, strict=True):
                    out[begin + i, h] += weight / total * v[begin + j, h // group]
        begin += length
    return out


@pytest.mark.parametrize("kind", SINKS)
@pytest.mark.parametrize(("window", "causal"), [((-1, -1), True), ((3, -1), True), ((2, 1), False)])
def test_equals_a_row_by_row_formulation(kind, window, causal):
    lengths = [5, 1, 9]
    q, k, v, sinks = draw(15, 4, 8), draw(15, 2, 8, seed=1), draw(15, 2, 8, seed=2), sinks_of(kind, 4)
    out, _ = oracle_attention(
        q, k, v, sinks, cu_seqlens_q=starts(lengths), cu_seqlens_k=starts(lengths), causal=causal, window_size=window
    )
    assert relative_error(out, by_hand(q, k, v, sinks, lengths, window, causal)) <= 1e-12


def test_gradients_equal_finite_differences():
    given = leaves(draw(6, 2, 4), draw(6, 1, 4, seed=1), draw(6, 1, 4, seed=2), sinks_of("random", 2) / 4)
    cu = starts([2, 4])
    assert torch.autograd.gradcheck(
        lambda q, k, v, s: oracle_attention(q, k, v, s, cu_seqlens_q=cu, cu_seqlens_k=cu, causal=True), given
    )


def test_a_sink_is_not_a_logit_added_to_key_zero():
    """MiMo's vision sink changes the numerator of key 0 too: another function, which must not be taken for this one."""
    q, k, v, sinks = draw(1, 4, 1, 8), draw(1, 4, 1, 8, seed=1), draw(1, 4, 1, 8, seed=2), torch.tensor([2.0])
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * 8**-0.5
    scores[..., 0] += 2.0
    on_key_zero = torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v)
    assert relative_error(oracle_attention(q, k, v, sinks)[0], on_key_zero) > 0.1


def test_nan_never_passes():
    assert not relative_error(torch.tensor([math.nan]), torch.ones(1)) <= 1e9
    assert not relative_error(torch.tensor([math.inf]), torch.ones(1)) <= 1e9
