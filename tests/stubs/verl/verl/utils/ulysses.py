"""verl.utils.ulysses in small: the group, and the all-to-all between a part of the tokens and a part of the heads."""

import torch
import torch.distributed as dist

_GROUP = None


def set_ulysses_sequence_parallel_group(group):
    global _GROUP
    _GROUP = group


def get_ulysses_sequence_parallel_group():
    return _GROUP


def get_ulysses_sequence_parallel_world_size(group=None):
    group = group or _GROUP
    return dist.get_world_size(group) if group else 1


def get_ulysses_sequence_parallel_rank(group=None):
    group = group or _GROUP
    return dist.get_rank(group) if group else 0


class SeqAllToAll(torch.autograd.Function):
    """Split ``scatter_dim`` over the ranks and join what they send along ``gather_dim``; the gradient goes back."""

    @staticmethod
    def forward(ctx, group, x, scatter_dim, gather_dim):
        ctx.group, ctx.dims = group, (scatter_dim, gather_dim)
        sent = [part.contiguous() for part in x.chunk(dist.get_world_size(group), scatter_dim)]
        received = [torch.empty_like(part) for part in sent]
        dist.all_to_all(received, sent, group=group)
        return torch.cat(received, gather_dim)

    @staticmethod
    def backward(ctx, gradient):
        scatter_dim, gather_dim = ctx.dims
        return None, SeqAllToAll.apply(ctx.group, gradient, gather_dim, scatter_dim), None, None


def gather_seq_scatter_heads(x, seq_dim, head_dim, unpadded_dim_size=0, group=None):
    return SeqAllToAll.apply(group or _GROUP, x, head_dim, seq_dim)


def gather_heads_scatter_seq(x, head_dim, seq_dim, group=None):
    return SeqAllToAll.apply(group or _GROUP, x, seq_dim, head_dim)
