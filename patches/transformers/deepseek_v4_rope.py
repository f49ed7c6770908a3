"""DeepSeek-V4 turns queries, keys and outputs by exact angles, from tables that its layers share.

What breaks for the user: transformers rounds cos and sin to the activations' dtype, servers (vLLM, SGLang, the
reference implementation) keep them in fp32, so in bf16 trainer and server disagree by rope alone. Before 5.19 the
angles are a matrix product, which TF32 may round to nothing useful beyond position 2048. And every compressor and
indexer computes its own tables, 85 pairs a forward in V4-Flash for 4 distinct ones, twice that under activation
checkpointing, while each rotation writes twenty times the bytes that it changes.

With the patch the tables are fp32, an elementwise product of position and frequency, remembered by the tensor of
positions that they belong to (:mod:`fsdp_sink_patches.ops.rope.tables`), and the rotation is one kernel on CUDA.
``fsdp_sink_patches.settings`` has ``rope_dtype = "activation"`` for tables with upstream's bits in every release. The
model and its indexers share by themselves; compressors make positions of their own in each layer, so they share only
once ``transformers.deepseek-v4-packing`` hands all of them the same ones.

Frequencies are read from the module's buffers, whatever is in them: ``transformers.rotary-buffers`` keeps those
right. Rope types whose frequencies follow the longest row (``dynamic``, ``longrope``) run upstream's code, each call
anew, as do tensors that the kernel doesn't know (DTensor, fake tensors, tables that require a gradient).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fsdp_sink_patches import Measurement, Patch, Target

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor


def rotary_forward(
    original: Callable[..., Any], self: Any, x: Tensor, position_ids: Tensor, layer_type: str | None = None
) -> tuple[Tensor, Tensor]:
    """``cos`` and ``sin`` ``[batch, tokens, half]`` of ``layer_type``'s frequencies, in fp32 or ``x``'s dtype."""
    from . import _deepseek_v4_rope

    return _deepseek_v4_rope.rotary_forward(original, self, x, position_ids, layer_type)


def apply_rotary_pos_emb(
    original: Callable[..., Any], x: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1
) -> Tensor:
    """``x`` ``[batch, heads, tokens, dim]`` with its last ``2 * half`` channels rotated, in a new tensor."""
    from . import _deepseek_v4_rope

    return _deepseek_v4_rope.apply_rotary_pos_emb(original, x, cos, sin, unsqueeze_dim)


_MODELLING = "transformers.models.deepseek_v4.modeling_deepseek_v4"

PATCH = Patch(
    id="transformers.deepseek-v4-rope",
    gives="exact, shared RoPE in DeepSeek-V4",
    distribution="transformers",
    requires=">=5.8.1",
    fixed_in=None,
    link="https://github.com/PrimeIntellect-ai/prime-rl/issues/3584",
    remove_when="transformers keeps DeepSeek-V4's cos and sin in fp32 and computes each table once a forward",
    targets=(
        Target(f"{_MODELLING}:DeepseekV4RotaryEmbedding.forward", rotary_forward),
        Target(f"{_MODELLING}:apply_rotary_pos_emb", apply_rotary_pos_emb),
    ),
    relies_on=(
        f"{_MODELLING}:DeepseekV4RotaryEmbedding.__init__",
        f"{_MODELLING}:rotate_half",
        "transformers.modeling_rope_utils:dynamic_rope_update",
    ),
)


def validate(device: str) -> Measurement:
    """A tiny DeepSeek-V4 in bf16, its tables and rotations against fp64; see :mod:`_deepseek_v4_rope_validation`."""
    from . import _deepseek_v4_rope_validation

    return _deepseek_v4_rope_validation.validate(device)
