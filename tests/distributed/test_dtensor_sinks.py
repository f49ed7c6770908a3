"""Sinks as a DTensor, over two gloo ranks: the gradient has the dtype and the placement of the parameter."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from fsdp_sink_patches.ops.sink_attention import flash_attn_func
from fsdp_sink_patches.ops.sink_attention.oracle import oracle_attention, relative_error

HEADS = 4


def _draw():
    torch.manual_seed(0)
    return [torch.randn(1, 12, h, 8, dtype=torch.float64) for h in (HEADS, 2, 2)], torch.tensor([4.0, 8.0, 1.0, -2.0])


def _rank(rank: int, store: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    (q, k, v), sinks = _draw()
    exact = sinks.double().requires_grad_()
    expected, _ = oracle_attention(q, k, v, exact, causal=True)
    (wanted,) = torch.autograd.grad(expected.square().sum(), exact)

    def check(placement, heads, dtype):
        """`heads`: which query heads this rank holds."""
        parameter = torch.nn.Parameter(distribute_tensor(sinks.to(dtype), mesh, [placement]))
        group = slice(heads.start // 2, -(-heads.stop // 2))
        out = flash_attn_func(q[:, :, heads], k[:, :, group], v[:, :, group], causal=True, s_aux=parameter)
        assert relative_error(out, expected[:, :, heads]) <= 1e-6
        out.square().sum().backward()
        assert parameter.grad.placements == (placement,)
        assert parameter.grad.dtype == dtype
        assert relative_error(parameter.grad.full_tensor(), wanted) <= (1e-6 if dtype == torch.float32 else 1e-2)

    mine = slice(rank * 2, rank * 2 + 2)
    for dtype in (torch.float32, torch.bfloat16):
        check(Shard(0), mine, dtype)  # tensor parallel: this rank's heads and its shard of the sinks
        check(Shard(0), slice(0, HEADS), dtype)  # every head on every rank
        check(Replicate(), slice(0, HEADS), dtype)
    with pytest.raises(ValueError, match="s_aux is a DTensor of 4 logits"):
        flash_attn_func(q[:, :, :1], k[:, :, :1], v[:, :, :1], s_aux=distribute_tensor(sinks, mesh, [Shard(0)]))
    dist.barrier()  # a rank that leaves early takes its connections away under the other's last collective
    dist.destroy_process_group()
    # All is asserted. Leave without the interpreter's teardown, in which a thread of torch's that is still running ends
    # the process with SIGABRT now and then ("terminate called without an active exception").
    os._exit(0)


def test_gradient_has_the_placement_of_the_parameter(tmp_path: Path) -> None:
    mp.spawn(_rank, args=(str(tmp_path / "store"),), nprocs=2)
