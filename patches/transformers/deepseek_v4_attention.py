"""DeepSeek-V4's attention in memory that grows with the row, not with its square: training and prefill on CUDA.

What breaks for the user: transformers has eager attention alone for DeepSeek-V4, which writes out every head's scores
over all tokens and entries, in fp32 where the sinks are: 43 GiB and 295 ms for one sparse layer at 8192 tokens, nothing
at all above. Flash attention stops at head_dim 256, and any other name for ``attn_implementation`` loses the bias that
says who sees which compressed entry. The indexer writes ``[tokens, 64, tokens / 4]`` twice more.

With the patch a layer is one call of :func:`fsdp_sink_patches.ops.compressed_attention.compressed_attention`, forward
and backward: Triton kernels in bf16 and fp16, plain torch in chunks of tokens for other dtypes. ``attn_implementation``
stays ``"eager"``. With ``transformers.deepseek-v4-packing`` (applied by default) no mask or bias exists either: layers
get the windows, ranges and picks themselves, for packed, padded and cut rows, and the indexer scores a chunk of tokens
at a time. Without it windows are read off upstream's mask and bias, which is right for rows of one document each
without padding; a mask that holds more runs upstream's attention.

Upstream's own code runs for rows that go on from a cache, where ``output_attentions`` is asked for, on the CPU, and
where ``attn_implementation`` is not eager; a log line says so. ``attention_dropout`` above 0 is refused in training.
``settings.compressed_attention`` chooses: ``"auto"`` is all of this, ``"fused"`` runs it on the CPU too (plain torch),
``"eager"`` runs upstream's everywhere, and is the default until the kernels have run on a card. The indexer is trained
by nothing, as upstream: its objective is not built.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fsdp_sink_patches import Measurement, Patch, Target

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor


def attention_forward(
    original: Callable[..., Any],
    self: Any,
    hidden_states: Tensor,
    position_embeddings: Any,
    position_ids: Tensor,
    attention_mask: Any,
    *a: Any,
    **k: Any,
) -> Any:
    """One layer's attention, fused or upstream's; see :func:`_deepseek_v4_attention.upstreams_because`."""
    from . import _deepseek_v4_attention

    return _deepseek_v4_attention.attention_forward(
        original, self, hidden_states, position_embeddings, position_ids, attention_mask, *a, **k
    )


_MODELLING = "transformers.models.deepseek_v4.modeling_deepseek_v4"

PATCH = Patch(
    id="transformers.deepseek-v4-attention",
    gives="fused DeepSeek-V4 attention",
    distribution="transformers",
    requires=">=5.8.1",
    fixed_in=None,
    link="https://github.com/Dao-AILab/flash-attention/pull/2621",
    remove_when="transformers has a DeepSeek-V4 attention that writes out no scores, with sinks, forward and backward",
    targets=(Target(f"{_MODELLING}:DeepseekV4Attention.forward", attention_forward),),
    relies_on=(
        f"{_MODELLING}:DeepseekV4Attention.__init__",
        f"{_MODELLING}:DeepseekV4DecoderLayer.forward",
        f"{_MODELLING}:DeepseekV4Model.forward",
        f"{_MODELLING}:DeepseekV4HCACompressor.forward",
        f"{_MODELLING}:DeepseekV4CSACompressor.forward",
        f"{_MODELLING}:DeepseekV4Indexer.forward",
        f"{_MODELLING}:DeepseekV4HCACache.update",
        f"{_MODELLING}:eager_attention_forward",
        f"{_MODELLING}:apply_rotary_pos_emb",
    ),
    refuses={
        "==5.8.0": "DeepSeek-V4 in transformers 5.8.0 is not causal: its mask is padded with zeros over the compressed "
        "entries, so every query sees the future"
    },
)


def validate(device: str) -> Measurement:
    """Three layers against upstream's in fp64, and the largest tensor that they write."""
    from . import _deepseek_v4_attention_validation

    return _deepseek_v4_attention_validation.validate(device)
