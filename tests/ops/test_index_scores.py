"""The indexer's picks against every score written out, sorted so that equal scores come in order."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fsdp_sink_patches.ops import index_scores
from fsdp_sink_patches.ops.compressed_layout import compressed_layout


def naive(q: Tensor, keys: Tensor, weights: Tensor, ranges: Tensor, k: int, scale: float) -> Tensor:
    """All scores at once; Python's stable sort decides between equal ones."""
    scores = (torch.einsum("bthd,bsd->bths", q, keys).relu() * scale * weights.unsqueeze(-1)).sum(2)
    rows, tokens, entries = scores.shape
    picks = torch.full((rows, tokens, min(k, entries)), -1)
    for row in range(rows):
        for token in range(tokens):
            first, end = ranges[row % len(ranges), token].tolist()
            best = sorted(range(first, end), key=lambda s, row=row, token=token: -float(scores[row, token, s]))[:k]
            picks[row, token, : len(best)] = torch.tensor(sorted(best), dtype=torch.long)
    return picks


def case(seed: int = 0, heads: int = 5, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Two rows: packed documents and a row cut and padded, at rate 4."""
    generator = torch.Generator().manual_seed(seed)
    positions = torch.stack(
        (
            torch.cat([torch.arange(n) for n in (1, 37, 60, 3)]),
            torch.cat((torch.full((7,), -1), torch.arange(5, 70), torch.arange(29))),
        )
    )
    layout = compressed_layout(positions, 4)
    entries = layout.starts.shape[1]
    q = torch.randn(2, 101, heads, 8, generator=generator, dtype=dtype)
    keys = torch.randn(2, entries, 8, generator=generator, dtype=dtype)
    return q, keys, torch.randn(2, 101, heads, generator=generator), layout.ranges


@pytest.mark.parametrize("at_once", [1, 1000, 2**24])
@pytest.mark.parametrize("k", [1, 6, 25, 40])
def test_picks_of_packed_padded_and_cut_rows(monkeypatch: pytest.MonkeyPatch, k: int, at_once: int) -> None:
    monkeypatch.setattr(index_scores, "SCORES_AT_ONCE", at_once)
    q, keys, weights, ranges = case()
    picks = index_scores.top_entries(q, keys, weights, ranges, k, 0.3)
    assert picks.dtype == torch.int32
    assert torch.equal(picks.long(), naive(q, keys, weights, ranges, k, 0.3))
    assert (picks >= 0).sum() > 100


def test_equal_scores_go_to_lower_entries() -> None:
    q, keys, weights, ranges = case()
    whole = [x.round() for x in (q, keys, weights)]  # exact sums, and many ties
    whole[1][:, 5:] = whole[1][:, :-5]
    for k in (3, 9):
        found = index_scores.top_entries(*whole, ranges, k, 1.0)
        assert torch.equal(found.long(), naive(*whole, ranges, k, 1.0))
    silent = index_scores.top_entries(q, keys, torch.zeros_like(weights), ranges, 4, 1.0)
    first = ranges[..., :1] + torch.arange(4)
    assert torch.equal(silent.long(), torch.where(first < ranges[..., 1:], first, -1))


def test_one_row_of_ranges_serves_all_rows() -> None:
    q, keys, weights, ranges = case()
    found = index_scores.top_entries(q, keys, weights, ranges[:1], 6, 1.0)
    assert torch.equal(found, index_scores.top_entries(q, keys, weights, ranges[:1].expand(2, -1, -1), 6, 1.0))


def test_the_same_picks_as_upstreams_sums_where_nothing_ties() -> None:
    """Against torch.topk over transformers' formula, for scores that are all different."""
    q, keys, weights, _ = case(seed=3, heads=32)
    count = torch.arange(1, 102) // 4
    ranges = torch.stack((torch.zeros_like(count), count), -1)[None]
    scores = ((q @ keys.transpose(1, 2).unsqueeze(1)).relu() * 0.25 * weights.unsqueeze(-1)).sum(2)
    scores = scores.masked_fill(torch.arange(keys.shape[1]) >= count[:, None], float("-inf"))
    upstream = scores.topk(6, -1).indices
    upstream = torch.where(upstream >= count[:, None], -1, upstream)
    found = index_scores.top_entries(q, keys, weights, ranges, 6, 0.25)
    assert torch.equal(found.long().sort(-1).values, upstream.sort(-1).values)


def test_memory_is_that_of_a_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    """No product has more than a chunk's scores, where all of them would be 60 times as many."""
    monkeypatch.setattr(index_scores, "SCORES_AT_ONCE", 2000)
    sizes = []
    scores = index_scores._scores

    def counted(q: Tensor, keys: Tensor, *a: object) -> Tensor:
        sizes.append(q.shape[0] * q.shape[1] * keys.shape[0])
        return scores(q, keys, *a)

    monkeypatch.setattr(index_scores, "_scores", counted)
    q, keys, weights, ranges = case(heads=48)
    index_scores.top_entries(q, keys, weights, ranges, 6, 1.0)
    assert max(sizes) <= 2000 < q[..., 0].numel() * keys.shape[1] // 60


def test_nothing_to_pick_from() -> None:
    q, keys, weights, ranges = case()
    assert index_scores.top_entries(q, keys[:, :0], weights, torch.zeros_like(ranges), 4, 1.0).shape == (2, 101, 0)
    none = index_scores.top_entries(q, keys, weights, torch.zeros_like(ranges), 4, 1.0)
    assert bool((none == -1).all())


def test_no_graph_and_no_autocast() -> None:
    q, keys, weights, ranges = case()
    picks = index_scores.top_entries(q, keys, weights, ranges, 6, 1.0)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = index_scores.top_entries(q.requires_grad_(), keys.requires_grad_(), weights, ranges, 6, 1.0)
    assert torch.equal(found, picks)
    assert not found.requires_grad


def test_half_precision_rounds_nothing_or_products_alone() -> None:
    """Under autocast transformers multiplies in bf16 and sums in fp32."""
    q, keys, weights, ranges = case(dtype=torch.bfloat16)
    products = torch.einsum("bthd,bsd->bths", q, keys)
    scores = ((products.relu() * 0.25) * weights.unsqueeze(-1)).sum(2)
    found = index_scores.top_entries(q, keys, weights, ranges, 3, 0.25, rounded=True)
    wide = index_scores.top_entries(q, keys, weights, ranges, 3, 0.25)
    assert torch.equal(wide.long(), naive(q.float(), keys.float(), weights, ranges, 3, 0.25))
    one = (q[0], keys[0], weights[0], 0.25)
    assert not torch.equal(index_scores._scores(*one, True), index_scores._scores(*one, False))
    for row in range(2):
        for token in range(101):
            first, end = ranges[row, token].tolist()
            mine = scores[row, token, found[row, token][found[row, token] >= 0].long()]
            best = scores[row, token, first:end].sort(descending=True).values[:3]
            assert torch.equal(mine.sort(descending=True).values, best)


def test_opcheck_and_compile() -> None:
    inputs = (*case(), 6, 0.5, False)
    torch.library.opcheck(torch.ops.fsdp_sink_patches.top_entries.default, inputs)
    compiled = torch.compile(index_scores.top_entries, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(*inputs), index_scores.top_entries(*inputs))


def test_shapes_that_do_not_fit() -> None:
    q, keys, weights, ranges = case()
    with pytest.raises(ValueError, match=r"top_entries: found q .* expected"):
        index_scores.top_entries(q, keys[:1], weights, ranges, 6, 1.0)
    with pytest.raises(ValueError, match="same dtype"):
        index_scores.top_entries(q, keys.double(), weights, ranges, 6, 1.0)
