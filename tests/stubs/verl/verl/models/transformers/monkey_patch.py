"""verl.models.transformers.monkey_patch in small: the wrapper around flash attention, and what puts it into place."""

import torch
from transformers.modeling_flash_attention_utils import _flash_attention_forward

from verl.utils.ulysses import (
    gather_heads_scatter_seq,
    gather_seq_scatter_heads,
    get_ulysses_sequence_parallel_group,
    get_ulysses_sequence_parallel_world_size,
)


def _ulysses_flash_attention_forward(
    query_states, key_states, value_states, attention_mask, query_length, *args, position_ids=None, **kwargs
):
    size = get_ulysses_sequence_parallel_world_size()
    if size == 1 or position_ids is None:
        return _flash_attention_forward(
            query_states, key_states, value_states, attention_mask, query_length, *args,
            position_ids=position_ids, **kwargs,
        )  # fmt: skip
    repeats = max(size // key_states.shape[2], 1)
    key_states, value_states = (x.repeat_interleave(repeats, 2) for x in (key_states, value_states))
    q, k, v = (gather_seq_scatter_heads(x, 1, 2) for x in (query_states, key_states, value_states))
    positions = [torch.empty_like(position_ids) for _ in range(size)]
    torch.distributed.all_gather(positions, position_ids.contiguous(), group=get_ulysses_sequence_parallel_group())
    out = _flash_attention_forward(
        q, k, v, attention_mask, q.shape[1], *args, position_ids=torch.cat(positions, -1), **kwargs
    )
    return gather_heads_scatter_seq(out, 2, 1)


def apply_monkey_patch(
    model, ulysses_sp_size=1, use_remove_padding=True, use_fused_kernels=False, fused_kernels_backend=None,
    use_prefix_grouper=False, use_tiled_mlp=False, tiled_mlp_shards=4,
):  # fmt: skip
    if use_remove_padding or ulysses_sp_size > 1:
        from transformers.integrations import flash_attention

        flash_attention._flash_attention_forward = _ulysses_flash_attention_forward
