"""Every builder against its rule written out for one pair of tokens, and its lists against ``create_block_mask``'s."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo.testing
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fsdp_sink_patches.ops import block_masks
from fsdp_sink_patches.ops.block_masks import _builders, _conversion
from fsdp_sink_patches.ops.sink_attention.oracle import oracle_attention, relative_error

Rule = Callable[[int, int, int], bool]
LISTS = (
    "kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices",
    "q_num_blocks", "q_indices", "full_q_num_blocks", "full_q_indices",
)  # fmt: skip

# --- the rules, for one query and one key ----------------------------------------------------------------------------


def document(position: int, starts: Sequence[int] | None) -> int:
    return max((s for s in starts or () if 0 <= s <= position), default=0)


def causal_rule(q: int, k: int, starts: Sequence[int] | None, window: int | None, sinks: int = 0) -> bool:
    if k > q or document(k, starts) != document(q, starts):
        return False
    return window is None or q - k < window or k - document(q, starts) < sinks


def dflash_rule(
    q: int, k: int, anchors: Sequence[int], context: int, block: int, *,
    starts: Sequence[int] | None = None, window: int | None = None, causal_blocks: bool = False, all_ask: bool = False,
) -> bool:  # fmt: skip
    if all_ask:
        if q < context:
            return k < context and causal_rule(q, k, starts, window)
        q -= context
    anchor, offset = anchors[q // block], q % block
    if anchor < 0:
        return False
    if k >= context:
        same = (k - context) // block == q // block
        return same and (not causal_blocks or (k - context) % block <= offset)
    if k >= anchor or document(k, starts) != document(min(anchor, context - 1), starts):
        return False
    return window is None or anchor + offset - k < window


def lora_rule(
    q: int, k: int, block: int, anchors: Sequence[int] | None, starts: Sequence[int] | None, window: int | None
) -> bool:
    def owner(x: int) -> int | None:
        own = document(x, starts)
        if anchors is None:
            return x - (x - own) % block
        anchor = max((a for a in anchors if 0 <= a <= x), default=None)
        return anchor if anchor is not None and anchor >= own and x - anchor < block else None

    if document(q, starts) != document(k, starts):
        return False
    if owner(q) is not None and owner(q) == owner(k):
        return True
    return k <= q and (window is None or q - k < window)


def written_out(rule: Rule, batch: int, q_len: int, kv_len: int) -> Tensor:
    rows = [[[rule(b, q, k) for k in range(kv_len)] for q in range(q_len)] for b in range(batch)]
    return torch.tensor(rows)[:, None]


# --- what a BlockMask says, read here once more ----------------------------------------------------------------------


def evaluated(mask: BlockMask) -> Tensor:
    """Absent blocks are invisible, full ones visible, ``mask_mod`` decides in the others; no block is listed twice."""
    (q_block, kv_block), (q_len, kv_len) = mask.BLOCK_SIZE, mask.shape[-2:]
    batch, heads = mask.kv_num_blocks.shape[:2]
    out = torch.zeros(batch, heads, q_len, kv_len, dtype=torch.bool)
    seen = set()
    for full, numbers, indices in (
        (False, mask.kv_num_blocks, mask.kv_indices),
        (True, mask.full_kv_num_blocks, mask.full_kv_indices),
    ):
        assert numbers is not None
        assert indices is not None
        for b in range(batch):
            for h in range(heads):
                for row in range(numbers.shape[2]):
                    for column in indices[b, h, row, : numbers[b, h, row]].tolist():
                        assert (b, h, row, column) not in seen
                        seen.add((b, h, row, column))
                        q = torch.arange(row * q_block, min(q_len, (row + 1) * q_block))
                        k = torch.arange(column * kv_block, min(kv_len, (column + 1) * kv_block))
                        values = (
                            torch.ones(len(q), len(k), dtype=torch.bool)
                            if full
                            else mask.mask_mod(torch.tensor(b), torch.tensor(h), q[:, None], k[None, :])
                        )
                        out[b, h, q[0] : q[-1] + 1, k[0] : k[-1] + 1] = values
    return out


def check(mask: BlockMask, expected: Tensor) -> None:
    """Element by element the rule; the lists, with those for the backward pass, exactly create_block_mask's."""
    batch, heads, q_len, kv_len = expected.shape
    assert mask.shape == expected.shape
    assert torch.equal(evaluated(mask), expected)
    assert torch.equal(block_masks.dense(mask), expected)
    reference = create_block_mask(
        lambda b, h, q, k: expected[b, h, q, k], batch, heads, q_len, kv_len, device="cpu", BLOCK_SIZE=mask.BLOCK_SIZE
    )
    for name in LISTS:
        ours, theirs = getattr(mask, name), getattr(reference, name)
        assert ours.dtype == torch.int32
        assert ours.is_contiguous()
        assert torch.equal(ours, theirs), name


# --- properties ------------------------------------------------------------------------------------------------------

some_blocks = st.sampled_from([(4, 4), (8, 8), (16, 16), (4, 16), (16, 8), (128, 128)])
windows = st.one_of(st.none(), st.integers(1, 40))


def rows_of_marks(batch: int, highest: int) -> st.SearchStrategy[list[list[int]]]:
    """Sorted positions with padding behind, as many in each row."""
    return st.integers(1, 8).flatmap(
        lambda n: st.lists(
            st.lists(st.integers(-1, highest), min_size=n, max_size=n).map(
                lambda r: sorted(r, key=lambda x: (x < 0, x))
            ),
            min_size=batch,
            max_size=batch,
        )
    )


@st.composite
def marks(draw: st.DrawFn, batch: int, highest: int, optional: bool = True) -> list[list[int]] | None:
    if optional and draw(st.booleans()):
        return None
    return draw(rows_of_marks(batch, highest))


def tensor(rows: list[list[int]] | None) -> Tensor | None:
    return None if rows is None else torch.tensor(rows)


def row(rows: list[list[int]] | None, b: int) -> list[int] | None:
    return None if rows is None else rows[b]


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_causal(data: st.DataObject) -> None:
    batch, length = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 60))
    starts = data.draw(marks(batch, length + 3))
    window, sinks, block = data.draw(windows), data.draw(st.integers(0, 20)), data.draw(some_blocks)
    mask = block_masks.causal(length, documents=tensor(starts), window=window, sinks=sinks, block_size=block)
    batch = 1 if starts is None else batch
    check(mask, written_out(lambda b, q, k: causal_rule(q, k, row(starts, b), window, sinks), batch, length, length))


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_dflash(data: st.DataObject) -> None:
    batch, context, draft = (data.draw(st.integers(1, n)) for n in (3, 40, 6))
    anchors = data.draw(marks(batch, context, optional=False))
    assert anchors is not None
    starts = data.draw(marks(batch, context + 3))
    window, block = data.draw(windows), data.draw(some_blocks)
    causal_blocks, all_ask = data.draw(st.booleans()), data.draw(st.booleans())
    mask = block_masks.dflash(
        torch.tensor(anchors), context, draft, documents=tensor(starts), window=window,
        causal_blocks=causal_blocks, queries="all" if all_ask else "drafts", block_size=block,
    )  # fmt: skip
    drafts = len(anchors[0]) * draft
    expected = written_out(
        lambda b, q, k: dflash_rule(
            q, k, anchors[b], context, draft, starts=row(starts, b), window=window,
            causal_blocks=causal_blocks, all_ask=all_ask,
        ), batch, drafts + context * all_ask, context + drafts,
    )  # fmt: skip
    check(mask, expected)


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_dflash_lora(data: st.DataObject) -> None:
    batch, length, draft = (data.draw(st.integers(1, n)) for n in (3, 60, 9))
    anchors, starts = data.draw(marks(batch, length + 3)), data.draw(marks(batch, length + 3))
    window, block = data.draw(windows), data.draw(some_blocks)
    mask = block_masks.dflash_lora(
        length, draft, anchors=tensor(anchors), documents=tensor(starts), window=window, block_size=block
    )
    batch = 1 if anchors is None and starts is None else batch
    expected = written_out(
        lambda b, q, k: lora_rule(q, k, draft, row(anchors, b), row(starts, b), window), batch, length, length
    )
    check(mask, expected)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_to_block_mask(data: st.DataObject) -> None:
    batch, heads, q_len, kv_len = (data.draw(st.integers(1, n)) for n in (2, 2, 40, 50))
    seed, block = data.draw(st.integers(0, 99)), data.draw(some_blocks)
    generator = torch.Generator().manual_seed(seed)
    # Tiles of one value make empty and full blocks, single flipped elements make partial ones.
    tiles = torch.rand(batch, heads, -(-q_len // 8), -(-kv_len // 8), generator=generator) < 0.5
    visible = tiles.repeat_interleave(8, 2).repeat_interleave(8, 3)[:, :, :q_len, :kv_len]
    visible = visible ^ (torch.rand(visible.shape, generator=generator) < 0.01)
    for dtype in (torch.bool, torch.float32, torch.bfloat16, torch.float16, torch.float64):
        given_mask = visible
        if dtype != torch.bool:
            never = -math.inf if seed % 2 else torch.finfo(dtype).min
            given_mask = torch.zeros(visible.shape, dtype=dtype).masked_fill(~visible, never)
        check(block_masks.to_block_mask(given_mask, block_size=block), visible)


# --- the default block size, edges and lengths that are no multiple of it --------------------------------------------


@pytest.mark.parametrize("length", [1, 127, 128, 129, 300])
@pytest.mark.parametrize(("window", "sinks"), [(None, 0), (1, 0), (128, 0), (130, 4), (40, 200)])
def test_causal_at_blocks_of_128(length: int, window: int | None, sinks: int) -> None:
    mask = block_masks.causal(length, window=window, sinks=sinks)
    check(mask, written_out(lambda b, q, k: causal_rule(q, k, None, window, sinks), 1, length, length))


def test_full_blocks_are_recognised_across_a_seam() -> None:
    # Context and own block meet inside of a block of keys: two intervals that only together cover it.
    mask = block_masks.dflash(torch.tensor([[24]]), 24, 40, block_size=8)
    assert mask.full_kv_num_blocks is not None
    assert mask.full_kv_num_blocks.tolist() == [[[8] * 5]]
    assert mask.kv_num_blocks.sum() == 0
    mask = block_masks.dflash(torch.tensor([[20]]), 20, 40, block_size=4)
    assert mask.full_kv_num_blocks is not None
    assert mask.full_kv_num_blocks.tolist() == [[[15] * 10]]


def test_cu_seqlens_and_padding_behind_them() -> None:
    cu_seqlens = torch.tensor([0, 3, 7, 10], dtype=torch.int32)
    expected = written_out(lambda b, q, k: causal_rule(q, k, [0, 3, 7, 10], None), 1, 13, 13)
    assert not expected[0, 0, 10:, :10].any()
    check(block_masks.causal(13, documents=cu_seqlens, block_size=4), expected)
    check(block_masks.causal(10, documents=cu_seqlens, block_size=4), expected[:, :, :10, :10])
    # The order of the marks, where the padding stands, and repeated marks (empty documents) change nothing.
    shuffled = torch.tensor([[-1, 7, 10, 3, -1, 0, 3]])
    check(block_masks.causal(13, documents=shuffled, block_size=4), expected)


@pytest.mark.parametrize("few", ["anchors", "documents"])
def test_one_row_of_documents_or_anchors_serves_all(few: str) -> None:
    anchors, starts = [[3, 9, -1], [5, 6, 14]], [[0, 4], [0, 8]]
    if few == "anchors":
        anchors = anchors[:1]
    else:
        starts = starts[:1]
    mask = block_masks.dflash(torch.tensor(anchors), 16, 4, documents=torch.tensor(starts), queries="all", block_size=8)
    expected = written_out(
        lambda b, q, k: dflash_rule(
            q, k, anchors[b % len(anchors)], 16, 4, starts=starts[b % len(starts)], all_ask=True
        ), 2, 28, 28,
    )  # fmt: skip
    check(mask, expected)
    mask = block_masks.dflash_lora(16, 4, anchors=torch.tensor(anchors), documents=torch.tensor(starts), block_size=8)
    expected = written_out(
        lambda b, q, k: lora_rule(q, k, 4, anchors[b % len(anchors)], starts[b % len(starts)], None), 2, 16, 16
    )
    check(mask, expected)


def test_queries_that_only_fill_up_the_last_block_see_nothing() -> None:
    mask = block_masks.causal(5, documents=torch.tensor([[0], [2]]), block_size=8)
    inside = mask.mask_mod(torch.tensor(1), torch.tensor(0), torch.tensor(4), torch.arange(5))
    behind = mask.mask_mod(torch.tensor(1), torch.tensor(0), torch.arange(5, 8)[:, None], torch.arange(5))
    assert inside.tolist() == [False, False, True, True, True]
    assert not behind.any()


# --- cases D6 and D7: draft training ---------------------------------------------------------------------------------

SEEN_BY_DRAFTS = {0: {0, 1, 2, 12, 13, 14, 15}, 1: {0, 1, 2, 3, 4, 5, 6, 16, 17, 18, 19}, 2: set()}
"""Context 12, anchors 3, 7 and padding, blocks of 4: keys that each block sees, by hand."""


def by_hand(window: int | None = None, causal_blocks: bool = False) -> Tensor:
    expected = torch.zeros(1, 1, 12, 24, dtype=torch.bool)
    for block, keys in SEEN_BY_DRAFTS.items():
        for offset in range(4):
            for key in keys:
                position = (3, 7, -1)[block] + offset
                if key < 12 and window is not None and key <= position - window:
                    continue
                if key >= 12 and causal_blocks and (key - 12) % 4 > offset:
                    continue
                expected[0, 0, 4 * block + offset, key] = True
    return expected


@pytest.mark.parametrize(("window", "causal_blocks"), [(None, False), (4, False), (5, True), (2, False)])
def test_drafts_by_hand(window: int | None, causal_blocks: bool) -> None:
    expected = by_hand(window, causal_blocks)
    mask = block_masks.dflash(torch.tensor([[3, 7, -1]]), 12, 4, window=window, causal_blocks=causal_blocks)
    check(mask, expected)
    additive = torch.zeros(expected.shape).masked_fill(~expected, -math.inf)
    check(block_masks.to_block_mask(expected), expected)
    check(block_masks.to_block_mask(additive), expected)
    q, k, v = attention_inputs(1, 2, 12, 24)
    outs = [
        torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=expected),
        flex_attention(q, k, v, block_mask=mask),
        flex_attention(q, k, v, block_mask=block_masks.to_block_mask(additive)),
    ]
    for out in outs:
        assert relative_error(out, exact(q, k, v, expected)) < 1e-6
        assert torch.equal(out[:, :, 8:], torch.zeros(1, 2, 4, 16))


def test_the_lora_form_by_hand() -> None:
    mask = block_masks.dflash_lora(10, 3, anchors=torch.tensor([[2, 6, -1]]))
    last_seen = [0, 1, 4, 4, 4, 5, 8, 8, 8, 9]
    expected = torch.tensor([[[[k <= last for k in range(10)] for last in last_seen]]])
    check(mask, expected)


def test_anchors_of_the_size_that_ran_out_of_memory() -> None:
    """D6: 3072 anchors, blocks of 8, context 4096: a bf16 additive mask of it takes 1.3 GiB."""
    generator = torch.Generator().manual_seed(0)
    anchors = torch.randint(0, 4096, (1, 3072), generator=generator).sort(1).values
    build: dict[str, Callable[[], BlockMask]] = {
        "drafts": lambda: block_masks.dflash(anchors, 4096, 8),
        "window": lambda: block_masks.dflash(anchors, 4096, 8, window=512, causal_blocks=True),
        "all": lambda: block_masks.dflash(anchors, 4096, 8, queries="all"),
        "lora": lambda: block_masks.dflash_lora(28672, 8, anchors=anchors * 7),
        "sinks": lambda: block_masks.causal(28672, documents=anchors * 7, window=512, sinks=4),
    }
    for name, builder in build.items():
        with Allocated() as allocated:
            mask = builder()
        q_len, kv_len = mask.shape[-2:]
        blocks = (q_len // 128) * (kv_len // 128)
        assert mask.shape[1] == 1
        assert allocated.largest <= 2 * max(q_len, blocks), name
        assert allocated.total_bytes < 50 << 20, name  # of everything ever made, so of the peak as well


def test_the_measure_of_memory_sees_a_dense_mask() -> None:
    with Allocated() as allocated:
        create_block_mask(lambda b, h, q, k: q >= k, 1, 1, 512, 512, device="cpu")
    assert allocated.largest >= 512 * 512


class Allocated(TorchDispatchMode):
    """Elements of the largest tensor and bytes of all tensors that operators make; views make none."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = self.total_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given = {t.untyped_storage().data_ptr() for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor) and tensor.untyped_storage().data_ptr() not in given:
                self.largest = max(self.largest, tensor.untyped_storage().nbytes() // tensor.element_size())
                self.total_bytes += tensor.untyped_storage().nbytes()
        return out


@pytest.mark.parametrize("q_rows", [1, 5])
def test_a_dense_mask_is_read_in_chunks(q_rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    mask = torch.zeros(1, 1, 1024, 1024).masked_fill(torch.ones(1024, 1024).triu(1).bool(), -math.inf)
    monkeypatch.setattr(_conversion, "_CHUNK_ELEMENTS", q_rows * 64 * 1024)
    with Allocated() as allocated:
        found = block_masks.to_block_mask(mask, block_size=64)
    assert allocated.largest <= q_rows * 64 * 1024
    assert torch.equal(block_masks.dense(found), mask == 0)
    # The mask itself is what is read in partial blocks.
    mask[0, 0, 70, 69] = -math.inf
    assert not block_masks.dense(found)[0, 0, 70, 69]


# --- given masks -----------------------------------------------------------------------------------------------------


def test_an_expanded_dimension_counts_as_one() -> None:
    visible = torch.ones(20, 20).tril().bool()
    mask = block_masks.to_block_mask(visible[None, None].expand(4, 8, 20, 20), block_size=8)
    check(mask, visible[None, None])
    q, k, v = attention_inputs(4, 8, 20, 20)
    assert relative_error(flex_attention(q, k, v, block_mask=mask), exact(q, k, v, visible[None, None])) < 1e-6


def test_heads_are_kept_apart() -> None:
    visible = torch.rand(2, 3, 20, 24, generator=torch.Generator().manual_seed(1)) < 0.4
    q, k, v = attention_inputs(2, 3, 20, 24)
    for given_mask in (visible, visible[:1], visible[:, :1]):
        out = flex_attention(q, k, v, block_mask=block_masks.to_block_mask(given_mask, block_size=8))
        assert relative_error(out, exact(q, k, v, given_mask)) < 1e-6


def test_a_mask_cast_up_from_half_precision_keeps_its_meaning() -> None:
    visible = torch.ones(1, 1, 9, 9).tril().bool()
    made = torch.zeros(1, 1, 9, 9, dtype=torch.bfloat16).masked_fill(~visible, torch.finfo(torch.bfloat16).min)
    check(block_masks.to_block_mask(made.float(), block_size=4), visible)
    check(block_masks.to_block_mask(made.float().bfloat16(), block_size=4), visible)


@pytest.mark.parametrize("value", [-1.5, -1e4, -1e9, 1.0, math.inf, math.nan])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_bias_is_not_a_mask(value: float, dtype: torch.dtype) -> None:
    mask = torch.zeros(1, 1, 200, 150, dtype=dtype)
    mask[0, 0, 199, 149] = value
    with pytest.raises(block_masks.NotAMaskError, match="What to do: pass mask == 0") as raised:
        block_masks.to_block_mask(mask)
    assert f"such as {float(mask[0, 0, 199, 149])}" in str(raised.value)


def test_a_learned_mask_is_not_a_mask() -> None:
    with pytest.raises(block_masks.NotAMaskError, match="gradient"):
        block_masks.to_block_mask(torch.zeros(1, 1, 4, 4, requires_grad=True))


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: block_masks.to_block_mask(torch.ones(1, 1, 4, 4, dtype=torch.long)), "mask.bool"),
        (lambda: block_masks.to_block_mask(torch.ones(4, 4).bool()), "shape"),
        (lambda: block_masks.to_block_mask(torch.ones(1, 1, 0, 4).bool()), "shape"),
        (lambda: block_masks.causal(0), "seq_len=0"),
        (lambda: block_masks.causal(4, window=0), "window=None"),
        (lambda: block_masks.causal(4, window=-1), "window=None"),
        (lambda: block_masks.causal(4, sinks=-1), "sinks=-1"),
        (lambda: block_masks.causal(4, block_size=0), "block_size=0"),
        (lambda: block_masks.causal(4, documents=torch.ones(1, 4).bool()), "nonzero"),
        (lambda: block_masks.causal(4, documents=torch.ones(1, 4)), "integers"),
        (lambda: block_masks.causal(4, documents=torch.ones(1, 1, 4).long()), "shape"),
        (lambda: block_masks.dflash(torch.ones(1, 0).long(), 4, 2), "pad with -1"),
        (lambda: block_masks.dflash(torch.ones(1, 1).long(), 4, 0), "draft_block=0"),
        (lambda: block_masks.dflash(torch.ones(1, 1).long(), 4, 2, queries="noise"), "drafts"),
        (lambda: block_masks.dflash(torch.ones(2, 1).long(), 4, 2, documents=torch.ones(3, 1).long()), "rows"),
        (lambda: block_masks.dflash_lora(4, 0), "draft_block=0"),
        (lambda: block_masks.plot(block_masks.causal(4097)), "smaller"),
    ],
)
def test_bad_arguments_are_named(call: Callable[[], Any], words: str) -> None:
    with pytest.raises(ValueError, match=r"^block_masks\.\w+: found .*; expected .*\. What to do: ") as raised:
        call()
    assert words in str(raised.value)


# --- devices, graphs, recompiles -------------------------------------------------------------------------------------


def test_built_on_the_device_of_the_inputs_without_waiting_for_it() -> None:
    """A meta tensor has no values, so that anything that waits for one raises, and it refuses to meet other devices."""
    anchors, starts = (torch.ones(2, 5, dtype=torch.long, device="meta") for _ in range(2))
    with pytest.raises(RuntimeError):
        bool(anchors.any())
    masks = [
        block_masks.causal(300, device="meta", window=9, sinks=2),
        block_masks.causal(300, documents=starts, window=9, sinks=2),
        block_masks.dflash(anchors, 300, 8, documents=starts, window=9, queries="all"),
        block_masks.dflash_lora(300, 8, device="meta"),
        block_masks.dflash_lora(300, 8, anchors=anchors, documents=starts, window=9),
        block_masks.to_block_mask(torch.ones(1, 1, 300, 300, dtype=torch.bool, device="meta")),
    ]
    for mask in masks:
        assert {getattr(mask, name).device.type for name in LISTS} == {"meta"}
        b, h, q, k = (torch.zeros(1, dtype=torch.int32, device="meta") for _ in range(4))
        assert mask.mask_mod(b, h, q, k).device.type == "meta"


def test_other_documents_and_anchors_compile_nothing() -> None:
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounter()
    compiled = torch.compile(flex_attention, backend=counter)
    generator = torch.Generator().manual_seed(0)
    q, k, v = attention_inputs(2, 2, 64, 64)
    for documents in range(1, 7):
        starts = torch.randint(0, 64, (2, documents), generator=generator)
        mask = block_masks.causal(64, documents=starts, window=9, sinks=2, block_size=16)
        out = compiled(q, k, v, block_mask=mask)
        assert relative_error(out, exact(q, k, v, block_masks.dense(mask))) < 1e-6
    assert counter.frame_count == 1


def test_other_lengths_compile_a_few_times() -> None:
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounter()
    compiled = torch.compile(flex_attention, backend=counter)
    generator = torch.Generator().manual_seed(0)
    for length in (64, 96, 80, 130, 257, 64, 300, 128, 200):
        starts = torch.randint(0, length, (2, 1 + length // 50), generator=generator)
        mask = block_masks.causal(length, documents=starts, window=9, sinks=2)
        q, k, v = attention_inputs(2, 2, length, length)
        out = compiled(q, k, v, block_mask=mask)
        assert relative_error(out, exact(q, k, v, block_masks.dense(mask))) < 1e-6
    assert counter.frame_count <= 4


def test_builders_run_inside_of_a_compiled_graph() -> None:
    torch._dynamo.reset()
    q, k, v = attention_inputs(2, 2, 40, 40)

    def step(q: Tensor, k: Tensor, v: Tensor, starts: Tensor) -> Tensor:
        mask = block_masks.causal(40, documents=starts, window=9, sinks=2, block_size=16)
        return flex_attention(q, k, v, block_mask=mask)

    starts = torch.tensor([[0, 7, 30], [0, 20, -1]])
    out = torch.compile(step, backend="aot_eager", fullgraph=True)(q, k, v, starts)
    assert relative_error(out, step(q, k, v, starts)) < 1e-6


# --- attention through the masks -------------------------------------------------------------------------------------


def attention_inputs(batch: int, heads: int, q_len: int, kv_len: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    q, k, v = (torch.randn(batch, heads, n, 16, generator=generator) for n in (q_len, kv_len, kv_len))
    return 2 * q, 2 * k, v


def exact(q: Tensor, k: Tensor, v: Tensor, visible: Tensor) -> Tensor:
    scores = (q.double() @ k.double().transpose(2, 3)) / 4
    scores = scores.masked_fill(~visible, -math.inf)
    weights = torch.softmax(scores, -1).masked_fill(~visible, 0.0)  # a row that sees nothing gives 0
    return weights @ v.double()


@pytest.mark.parametrize(("window", "packed"), [(None, False), (7, False), (None, True), (7, True)])
def test_flex_attention_against_the_oracle(window: int | None, packed: bool) -> None:
    q, k, v = attention_inputs(1, 2, 150, 150)
    cu_seqlens = torch.tensor([0, 1, 60, 131, 150]) if packed else torch.tensor([0, 150])
    mask = block_masks.causal(150, documents=cu_seqlens if packed else None, window=window)
    out = flex_attention(q, k, v, block_mask=mask)[0].transpose(0, 1)
    expected, _ = oracle_attention(
        *(x[0].transpose(0, 1) for x in (q, k, v)), cu_seqlens_q=cu_seqlens, cu_seqlens_k=cu_seqlens,
        causal=True, window_size=(-1, 0) if window is None else (window - 1, 0),
    )  # fmt: skip
    assert relative_error(out, expected) < 1e-6


def test_one_row_serves_every_batch_size() -> None:
    q, k, v = attention_inputs(3, 2, 30, 30)
    mask = block_masks.causal(30, documents=torch.tensor([0, 11, 30]), block_size=8)
    out = flex_attention(q, k, v, block_mask=mask)
    assert relative_error(out, exact(q, k, v, block_masks.dense(mask))) < 1e-6


# --- pictures, and mistakes planted ----------------------------------------------------------------------------------


def test_plot(tmp_path: Path) -> None:
    mask = block_masks.causal(40, window=9, sinks=2, block_size=16)
    figure = block_masks.plot(mask, tmp_path / "mask.png", title="sinks")
    (axes,) = figure.axes
    shown = torch.as_tensor(axes.images[0].get_array().data)
    visible = block_masks.dense(mask)[0, 0]
    assert torch.equal(shown < 2, visible)
    assert set(shown.unique().tolist()) == {1, 2, 3}
    assert len(axes.lines) == 4
    assert (tmp_path / "mask.png").stat().st_size > 0
    full = block_masks.plot(block_masks.causal(40, block_size=8)).axes[0].images[0].get_array()
    assert {0, 1, 2, 3} == set(full.ravel().tolist())


MISTAKES: dict[str, tuple[str, Callable[..., Any]]] = {
    "a block too few is touched": ("_blocks_touched", lambda low, high, size: (low // size, high // size)),
    "an empty interval touches a block": (
        "_blocks_touched", lambda low, high, size: (low // size, -(-high // size) + (low == high)),
    ),
    "a partly covered block is full": ("_blocks_covered", lambda low, high, size: (low // size, high // size)),
    "a seam hides a full block": ("_merged", lambda intervals: intervals),
    "one key too many": ("_interval", lambda low, high, real=None: INTERVAL(low, high + 1, real)),
    "one key too few": ("_interval", lambda low, high, real=None: INTERVAL(low + 1, high, real)),
    "padding sees its own block": ("_interval", lambda low, high, real=None: INTERVAL(low, high)),
    "a document starts one late": ("_around", lambda marks, positions, length: AROUND(marks + 1, positions, length)),
}  # fmt: skip
INTERVAL, AROUND = _builders._interval, _builders._around


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_planted_mistake_is_caught(mistake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    anchors, starts = [24, 5, 13, -1], [0, 9, 17]

    def everything() -> None:
        mask = block_masks.dflash(torch.tensor([anchors]), 24, 4, documents=torch.tensor([starts]), block_size=4)
        check(mask, written_out(lambda b, q, k: dflash_rule(q, k, anchors, 24, 4, starts=starts), 1, 16, 40))
        mask = block_masks.causal(24, documents=torch.tensor([starts]), window=4, sinks=4, block_size=4)
        check(mask, written_out(lambda b, q, k: causal_rule(q, k, starts, 4, 4), 1, 24, 24))

    everything()
    name, replacement = MISTAKES[mistake]
    monkeypatch.setattr(_builders, name, replacement)
    with pytest.raises((AssertionError, RuntimeError, IndexError)):
        everything()
