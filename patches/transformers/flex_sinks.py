"""``attn_implementation="flex_attention"`` computes attention sinks exactly, forward and backward, on a CPU as well.

What breaks for the user: a model that passes sinks (``s_aux``) is trained under flex attention. Upstream rounds the
log-sum-exp to bf16 before the sinks join: the output's error is 2.7 times what bf16 has to cost, and the sinks'
gradient is off by 1 to 3 %. On a CPU it raises. Each flip between train and eval makes a new compiled function,
head_dim 512 asks for more shared memory than an H100 has, fp32 queries under autocast run the fp32 kernel, and
mimo_v2_flash refuses flex.

With the patch every layer that passes ``s_aux`` runs :mod:`fsdp_sink_patches.ops.flex_attention`: the rescale is
``sigmoid(lse - sink)`` in fp32, with the sinks' exact gradient; on a CPU an equal result in plain operators.
mimo_v2_flash is admitted. A mask made for more tokens than the batch has is cut, one for fewer raises.

Layers of models without sinks run upstream's code, and so does a layer on CUDA for which torch can't build ours: an
error in the log says so. hy_v4 and deepseek_v4 stay refused: their indexers and compressors
compute with a mask tensor, which a BlockMask is not. transformers 4.55 and 4.56 are out of range: they put the sink
into ``score_mod``, where no sink can be computed, and their mask functions differ.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fsdp_sink_patches import Measurement, Patch, Target

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

ADMITTED = ("mimo_v2_flash",)
"""Models that refuse flex attention though nothing but sinks and unequal head dimensions is in the way."""


def flex_attention_forward(
    original: Callable[..., Any],
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    *a: Any,
    **k: Any,
) -> Any:
    """The attention function of a layer: ours where the layer's model has sinks, upstream's elsewhere."""
    if "s_aux" not in k and not a:
        return original(module, query, key, value, attention_mask, *a, **k)
    from . import _flex_sinks

    return _flex_sinks.layer_forward(original, module, query, key, value, attention_mask, *a, **k)


def can_dispatch(original: Callable[..., bool], self: Any, *a: Any, **k: Any) -> bool:
    """Admit the models of :data:`ADMITTED`."""
    if self.config.model_type in ADMITTED and not self._supports_flex_attn:
        return True
    return original(self, *a, **k)


PATCH = Patch(
    id="transformers.flex-sinks",
    gives="exact sinks under flex attention",
    distribution="transformers",
    requires=">=4.57",
    fixed_in=None,
    link="https://github.com/huggingface/transformers/pull/41249",
    remove_when="flex_attention_forward keeps lse in fp32 and computes sinks on a CPU",
    targets=(
        Target("transformers.integrations.flex_attention:flex_attention_forward", flex_attention_forward),
        Target("transformers.modeling_utils:PreTrainedModel._flex_attn_can_dispatch", can_dispatch),
    ),
    relies_on=(
        "transformers.masking_utils:flex_attention_mask",
        "transformers.modeling_utils:AttentionInterface",
        "transformers.models.gpt_oss.modeling_gpt_oss:GptOssAttention.forward",
    ),
)


def validate(device: str) -> Measurement:
    """Layers against fp64 with a real gpt-oss around them; see :mod:`_flex_sinks`."""
    from . import _flex_sinks

    return _flex_sinks.measure(device)
