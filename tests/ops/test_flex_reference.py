"""Flex attention in plain operators: what it keeps between forward and backward."""

from __future__ import annotations

import gc

import torch
from torch import Tensor

from fsdp_sink_patches.ops import block_masks
from fsdp_sink_patches.ops.flex_attention import reference


def test_no_mask_is_kept_for_the_backward(monkeypatch):
    """All chunks together would hold a boolean for each pair of tokens that a block touches."""
    monkeypatch.setattr(reference, "SCORE_BYTES", 2**20)
    length = 2048
    mask = block_masks.causal(length)
    query, key, value = (torch.randn(1, 2, length, 8, requires_grad=True) for _ in range(3))
    out = reference.forward(query, key, value, torch.ones(2), mask, None, None, 0.0, 0.3)
    gc.collect()
    alive = [t for t in gc.get_objects() if type(t) is Tensor and t.dtype == torch.bool]
    assert sum(t.numel() for t in alive) < length * 16
    out.sum().backward()
    assert query.grad.isfinite().all()
