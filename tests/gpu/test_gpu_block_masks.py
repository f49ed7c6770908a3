"""Block masks on the card: compiled flex attention through them, forward and backward, against fp64, and their cost."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch._dynamo.testing
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

import fsdp_sink_patches
from fsdp_sink_patches.ops import block_masks
from fsdp_sink_patches.ops.sink_attention.oracle import relative_error

LISTS = (
    "kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices",
    "q_num_blocks", "q_indices", "full_q_num_blocks", "full_q_indices",
)  # fmt: skip
HEADS, KV_HEADS, HEAD_DIM = 4, 2, 64


def cuda(values: list[list[int]]) -> Tensor:
    return torch.tensor(values, device="cuda")


def dense_mask() -> Tensor:
    return torch.rand(2, HEADS, 300, 300, device="cuda", generator=torch.Generator("cuda").manual_seed(3)) < 0.3


BUILDERS: dict[str, Callable[[], BlockMask]] = {
    "causal": lambda: block_masks.causal(512, device="cuda"),
    "causal, no multiple of 128": lambda: block_masks.causal(333, device="cuda"),
    "window": lambda: block_masks.causal(512, window=100, device="cuda"),
    "sink slots": lambda: block_masks.causal(700, window=100, sinks=4, device="cuda"),
    "packed": lambda: block_masks.causal(512, documents=cuda([[0, 1, 200, -1], [0, 130, 131, 400]])),
    "packed, window, sink slots": lambda: block_masks.causal(
        500, documents=cuda([[0, 1, 200, -1], [0, 130, 131, 400]]), window=50, sinks=3
    ),
    "drafts": lambda: block_masks.dflash(cuda([[3, 70, 250, -1], [10, 11, 12, 299]]), 300, 16),
    "drafts, window": lambda: block_masks.dflash(
        cuda([[3, 70, 250, -1], [10, 11, 12, 299]]), 300, 16, window=40, causal_blocks=True
    ),
    "drafts, all ask": lambda: block_masks.dflash(cuda([[3, 70, -1], [10, 11, 299]]), 300, 16, queries="all"),
    "LoRA form": lambda: block_masks.dflash_lora(400, 16, device="cuda"),
    "LoRA form, anchors, window": lambda: block_masks.dflash_lora(
        400, 16, anchors=cuda([[5, 100, -1], [0, 8, 390]]), documents=cuda([[0, 50], [0, 200]]), window=60
    ),
    "given, boolean": lambda: block_masks.to_block_mask(dense_mask()),
    "given, additive": lambda: block_masks.to_block_mask(
        torch.zeros(2, HEADS, 300, 300, device="cuda").masked_fill(~dense_mask(), -math.inf)
    ),
}


@pytest.fixture(autouse=True)
def graphs_of_one_test() -> None:
    torch._dynamo.reset()


def inputs(mask: BlockMask, batch: int) -> list[Tensor]:
    generator = torch.Generator("cuda").manual_seed(7)
    q_len, kv_len = mask.shape[-2:]
    shapes = ((HEADS, q_len), (KV_HEADS, kv_len), (KV_HEADS, kv_len), (HEADS, q_len))
    return [torch.randn(batch, *shape, HEAD_DIM, device="cuda", generator=generator) for shape in shapes]


def exact(q: Tensor, k: Tensor, v: Tensor, visible: Tensor) -> Tensor:
    k, v = (x.repeat_interleave(HEADS // KV_HEADS, 1) for x in (k, v))
    scores = (q @ k.transpose(2, 3) / HEAD_DIM**0.5).masked_fill(~visible, -math.inf)
    # A row that sees nothing gives 0 and has gradient 0; a logsumexp of nothing has none.
    weights = torch.exp(scores - scores.detach().amax(-1, keepdim=True).nan_to_num(neginf=0.0))
    return weights @ v / weights.sum(-1, keepdim=True).clamp(min=1e-300)


@pytest.mark.parametrize("name", BUILDERS)
def test_forward_and_backward_against_fp64(name: str) -> None:
    mask = BUILDERS[name]()
    q, k, v, dout = inputs(mask, batch=2)
    visible = block_masks.dense(mask)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    out = torch.compile(flex_attention)(*leaves, block_mask=mask, enable_gqa=True)
    grads = torch.autograd.grad(out, leaves, dout)
    wide = [x.double().requires_grad_() for x in (q, k, v)]
    expected = exact(*wide, visible)
    expected_grads = torch.autograd.grad(expected, wide, dout.double())
    for actual, right in zip((out, *grads), (expected, *expected_grads), strict=True):
        assert relative_error(actual, right) < 1e-4
    blind = ~visible.any(-1).expand(2, HEADS, -1)
    assert not out[blind].any()
    assert not grads[0][blind].any()


@pytest.mark.parametrize("name", BUILDERS)
def test_lists_are_those_of_create_block_mask(name: str) -> None:
    mask = BUILDERS[name]()
    visible = block_masks.dense(mask)
    reference = create_block_mask(lambda b, h, q, k: visible[b, h, q, k], *visible.shape, device="cuda")
    for part in LISTS:
        assert torch.equal(getattr(mask, part), getattr(reference, part)), part


def test_the_cpu_builds_the_same() -> None:
    anchors = torch.randint(0, 1000, (3, 50)).sort(1).values
    for queries in ("drafts", "all"):
        here = block_masks.dflash(anchors, 1000, 8, window=70, queries=queries)
        there = block_masks.dflash(anchors.cuda(), 1000, 8, window=70, queries=queries)
        for part in LISTS:
            assert torch.equal(getattr(here, part), getattr(there, part).cpu()), part


@pytest.mark.parametrize("deterministic", [False, True])
def test_built_without_waiting_for_the_device(deterministic: bool) -> None:
    anchors, starts = cuda([[3, 70, -1], [10, 11, 299]]), cuda([[0, 90], [0, 200]])
    visible = torch.ones(1, 1, 300, 300, dtype=torch.bool, device="cuda")
    torch.use_deterministic_algorithms(deterministic)
    torch.cuda.set_sync_debug_mode("error")
    try:
        block_masks.causal(300, documents=starts, window=9, sinks=2)
        block_masks.dflash(anchors, 300, 8, documents=starts, window=9, queries="all")
        block_masks.dflash_lora(300, 8, anchors=anchors, documents=starts, window=9)
        block_masks.to_block_mask(visible)
    finally:
        torch.cuda.set_sync_debug_mode("default")
        torch.use_deterministic_algorithms(False)


def test_thirty_batches_compile_once() -> None:
    counter = torch._dynamo.testing.CompileCounterWithBackend("inductor")
    compiled = torch.compile(flex_attention, backend=counter)
    generator = torch.Generator().manual_seed(0)
    for documents in range(1, 31):
        starts = torch.randint(0, 512, (2, documents), generator=generator).cuda()
        mask = block_masks.causal(512, documents=starts, window=90, sinks=2)
        q, k, v, _ = inputs(mask, batch=2)
        compiled(q, k, v, block_mask=mask, enable_gqa=True)
    assert counter.frame_count == 1


def test_added_memory_at_3072_anchors() -> None:
    anchors = torch.randint(0, 4096, (1, 3072)).sort(1).values.cuda()
    block_masks.dflash(anchors, 4096, 8)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    mask = block_masks.dflash(anchors, 4096, 8)
    torch.cuda.synchronize()
    assert torch.cuda.max_memory_allocated() - before < 50 << 20
    assert mask.shape == (1, 1, 24576, 28672)


def test_an_additive_mask_is_not_copied() -> None:
    mask = torch.zeros(1, 1, 16384, 16384, dtype=torch.bfloat16, device="cuda")
    mask.masked_fill_(torch.ones(16384, 16384, dtype=torch.bool, device="cuda").triu_(1), -math.inf)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    block_masks.to_block_mask(mask)
    torch.cuda.synchronize()
    assert torch.cuda.max_memory_allocated() - before < mask.nbytes // 4


def test_a_model_trains_under_a_given_mask() -> None:
    """Qwen3 on flex attention: gradients under a boolean mask are those of eager attention with the mask added."""
    from fsdp_sink_patches.patches.transformers import _given_masks as given

    with fsdp_sink_patches.applied("transformers.additive-mask-to-block-mask"):
        found = {}
        for implementation in ("flex_attention", "eager"):
            model = given.build(torch.float32, "cuda", implementation)
            visible = given.blocks(2, 1, 300, "cuda")
            mask = visible if implementation == "flex_attention" else given.additive(visible, torch.float32)
            out = model(input_ids=given.tokens(2, 300, "cuda"), attention_mask=mask, use_cache=False).logits
            torch.autograd.backward((out**2).mean())
            found[implementation] = torch.cat([p.grad.flatten() for p in model.parameters()])
    assert relative_error(found["flex_attention"], found["eager"]) < 1e-3
