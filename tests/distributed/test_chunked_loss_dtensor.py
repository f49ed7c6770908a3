"""A sharded head over two gloo ranks: gathered once, its gradient what FSDP2 makes of it; labels across ranks."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode

from fsdp_sink_patches.ops.chunked_loss import _tiles, linear_cross_entropy, linear_log_probs, reference, shift_labels
from fsdp_sink_patches.ops.sink_attention.oracle import relative_error
from tests.ops.cases import draw, leaves

VOCAB, HIDDEN, TOKENS = 23, 6, 9  # 23 rows do not divide by two ranks


def _data(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Each rank its own tokens, as many to count on one as on the other."""
    labels = torch.randint(0, VOCAB, (TOKENS,), generator=torch.Generator().manual_seed(rank))
    return draw(TOKENS, HIDDEN, seed=10 * rank), labels.index_fill(0, torch.tensor([rank]), -100)


def _weights() -> tuple[torch.Tensor, torch.Tensor]:
    return draw(VOCAB, HIDDEN, seed=1), draw(VOCAB, seed=2)


def _averaged() -> tuple[list[torch.Tensor], torch.Tensor, torch.Tensor]:
    """Loss of each rank, and the gradients of weight and bias of their mean: what data parallel training wants."""
    weight, bias = leaves(*_weights())
    losses = [reference.cross_entropy(h, weight, y, bias=bias) for h, y in map(_data, range(2))]
    return losses, *torch.autograd.grad(sum(losses) / 2, (weight, bias))


def _gathers(mode: CommDebugMode) -> dict[str, int]:
    return {str(op).rsplit(".", 1)[-1]: n for op, n in mode.get_comm_counts().items() if n}


def _parameter_outside_its_module(rank: int) -> None:
    losses, dweight, dbias = _averaged()
    hidden, labels = _data(rank)
    for mesh, placements in (
        (init_device_mesh("cpu", (2,)), [Shard(0)]),
        (init_device_mesh("cpu", (2,)), [Replicate()]),
        (init_device_mesh("cpu", (2, 1)), [Replicate(), Shard(0)]),
        (init_device_mesh("cpu", (1, 2)), [Replicate(), Shard(0)]),
    ):
        for recompute in (True, False):
            weight, bias = (nn.Parameter(distribute_tensor(t, mesh, placements)) for t in _weights())
            mine = hidden.clone().requires_grad_()
            with CommDebugMode() as mode:
                loss = linear_cross_entropy(mine, weight, labels, bias=bias, chunk_size=2, recompute=recompute)
                forward = _gathers(mode)
                loss.backward()
            # one for the weight, one for the bias, and none of them again in the backward
            assert forward.get("all_gather_into_tensor", 0) <= 2, forward
            if placements == [Shard(0)]:
                assert forward == {"all_gather_into_tensor": 2}
                assert _gathers(mode) == {"all_gather_into_tensor": 2, "reduce_scatter_tensor": 2}
            assert relative_error(loss, losses[rank]) <= 1e-13
            for parameter, wanted in ((weight, dweight), (bias, dbias)):
                assert parameter.grad.placements == tuple(placements)
                assert relative_error(parameter.grad.full_tensor(), wanted) <= 1e-13
            assert mine.grad is not None
    frozen = distribute_tensor(_weights()[0], init_device_mesh("cpu", (2,)), [Shard(0)])
    with CommDebugMode() as mode:
        linear_log_probs(mine, frozen, labels, chunk_size=2)[0].sum().backward()
    assert _gathers(mode) == {"all_gather_into_tensor": 1}


def _bf16_in_an_fp32_shard(rank: int) -> None:
    """As FSDP2 with param_dtype=bf16, reduce_dtype=fp32: gathered in bf16, summed over the ranks in fp32."""
    mesh = init_device_mesh("cpu", (2,))
    weight = nn.Parameter(distribute_tensor(_weights()[0].float(), mesh, [Shard(0)]))
    hidden, labels = _data(rank)
    linear_cross_entropy(hidden.bfloat16(), weight, labels, chunk_size=2).backward()
    rounded = leaves(_weights()[0].bfloat16().double())[0]
    loss = sum(reference.cross_entropy(h.bfloat16().double(), rounded, y) for h, y in map(_data, range(2))) / 2
    (wanted,) = torch.autograd.grad(loss, rounded)
    assert weight.grad.dtype == torch.float32
    # each rank's part is rounded to bf16 once, their mean is not
    assert relative_error(weight.grad.full_tensor(), wanted) <= 2.5e-3


class Head(nn.Linear):
    """A head that computes the loss in its own forward, where FSDP2 has its parameter gathered."""

    def forward(self, hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        assert not isinstance(self.weight, DTensor)
        return linear_cross_entropy(hidden, self.weight, labels, bias=self.bias, chunk_size=2)


class Model(nn.Module):
    def __init__(self, head: nn.Module) -> None:
        super().__init__()
        self.body = nn.Linear(HIDDEN, HIDDEN, dtype=torch.float64)
        self.lm_head = head
        with torch.no_grad():
            self.body.weight.copy_(draw(HIDDEN, HIDDEN, seed=3))
            self.body.bias.copy_(draw(HIDDEN, seed=4))
            for parameter, value in zip((head.weight, head.bias), _weights(), strict=True):
                parameter.copy_(value)


def _an_fsdp2_unit(rank: int) -> None:
    """Inside its own forward, inside the root's (the unit is the root), and outside of both: one gradient."""
    exact = Model(nn.Linear(HIDDEN, VOCAB, dtype=torch.float64))
    losses = [
        reference.cross_entropy(exact.body(h).tanh(), exact.lm_head.weight, y, bias=exact.lm_head.bias)
        for h, y in map(_data, range(2))
    ]
    (sum(losses) / 2).backward()
    hidden, labels = _data(rank)
    mesh = init_device_mesh("cpu", (2,))

    def check(model: nn.Module, loss: torch.Tensor) -> None:
        assert relative_error(loss, losses[rank]) <= 1e-13
        loss.backward()
        for (name, found), wanted in zip(model.named_parameters(), exact.parameters(), strict=True):
            assert isinstance(found.grad, DTensor), name
            assert relative_error(found.grad.full_tensor(), wanted.grad) <= 1e-13, name

    class Inside(Model):
        def forward(self, h: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return self.lm_head(self.body(h).tanh(), y)

    inside = Inside(Head(HIDDEN, VOCAB, dtype=torch.float64))
    fully_shard(inside.lm_head, mesh=mesh)
    fully_shard(inside, mesh=mesh)
    check(inside, inside(hidden, labels))

    class Root(Model):
        def forward(self, h: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            h = self.body(h).tanh()
            return linear_cross_entropy(h, self.lm_head.weight, y, bias=self.lm_head.bias, chunk_size=2)

    root = Root(nn.Linear(HIDDEN, VOCAB, dtype=torch.float64))
    fully_shard(root, mesh=mesh)
    check(root, root(hidden, labels))

    # verl with fused kernels and an untied head: the head is its own unit and its weight is read without its forward
    outside = Root(nn.Linear(HIDDEN, VOCAB, dtype=torch.float64))
    fully_shard(outside.lm_head, mesh=mesh)
    fully_shard(outside, mesh=mesh)
    check(outside, outside(hidden, labels))

    mixed = Inside(Head(HIDDEN, VOCAB, dtype=torch.float64)).float()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    fully_shard(mixed.lm_head, mesh=mesh, mp_policy=policy)
    fully_shard(mixed, mesh=mesh, mp_policy=policy)
    loss = mixed(hidden.float(), labels)
    assert loss.dtype == torch.float32
    loss.backward()
    assert relative_error(mixed.lm_head.weight.grad.full_tensor(), exact.lm_head.weight.grad) <= 2e-2


def _refusals(rank: int) -> None:
    hidden, labels = _data(rank)
    weight, _ = _weights()
    line, square = init_device_mesh("cpu", (2,)), init_device_mesh("cpu", (2, 1))
    sharded = distribute_tensor(weight, line, [Shard(0)])
    with pytest.raises(ValueError, match=r"weight is a DTensor placed .*; expected one Shard, and Replicate"):
        linear_cross_entropy(hidden, distribute_tensor(weight, square, [Shard(0), Shard(1)]), labels)
    with pytest.raises(ValueError, match=r"hidden is a DTensor placed .* pass hidden\.to_local\(\)"):
        linear_cross_entropy(distribute_tensor(hidden, line, [Shard(0)]), sharded, labels)


def _labels_of_a_split_row(rank: int) -> None:
    """Two rows of three documents, split after the labels exist nowhere but as tokens: the sum is that of one rank."""
    tokens = torch.randint(0, VOCAB, (2, 12), generator=torch.Generator().manual_seed(5))
    for positions in (
        None,
        torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4, 0, 1, 2, 3], [0, 1, 2, 3, 4, 5, 0, 1, 0, 1, 2, 3]]),  # border on the cut
    ):
        mine = slice(6 * rank, 6 * rank + 6)
        whole = shift_labels(tokens, positions)
        local = shift_labels(tokens[:, mine], None if positions is None else positions[:, mine], group=dist.group.WORLD)
        assert torch.equal(local, whole[:, mine])
        hidden, (weight, _) = draw(2, 12, HIDDEN), _weights()
        part = linear_cross_entropy(hidden[:, mine], weight, local, reduction="sum")
        both = torch.stack([part, (local != -100).sum().double()])
        dist.all_reduce(both)
        assert relative_error(both[0] / both[1], reference.cross_entropy(hidden, weight, whole)) <= 1e-13
        # shifted after the split, as upstream: a label is lost
        assert not torch.equal(shift_labels(tokens[:, mine]), whole[:, mine]) or rank == 1


def _rank(rank: int, store: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    _tiles.VOCAB_BLOCK = 7
    _parameter_outside_its_module(rank)
    _bf16_in_an_fp32_shard(rank)
    _an_fsdp2_unit(rank)
    _labels_of_a_split_row(rank)
    _refusals(rank)
    dist.barrier()  # a rank that leaves early takes its connections away under the other's last collective
    dist.destroy_process_group()
    # All is asserted. Leave without the interpreter's teardown, in which a thread of torch's that is still running ends
    # the process with SIGABRT now and then ("terminate called without an active exception").
    os._exit(0)


def test_two_ranks(tmp_path: Path) -> None:
    mp.spawn(_rank, args=(str(tmp_path / "store"),), nprocs=2)  # one pair of processes: starting them is what costs
