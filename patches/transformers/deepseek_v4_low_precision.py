"""DeepSeek-V4 loaded in bf16 runs, and keeps in fp32 what its checkpoint has in fp32.

What breaks for the user:

- ``from_pretrained(dtype=torch.bfloat16)`` keeps the norms in fp32. To 5.19 a norm multiplies bf16 activations by its
  fp32 weight and hands fp32 to a bf16 projection: ``expected m1 and m2 to have the same dtype`` in the first layer,
  unless autocast is on (5.20 casts the product back).
- To 5.9 the same load rounds ``sinks``, ``position_bias`` and ``hc_head``, which the checkpoint has in fp32.
- In every release to 5.24 the hyper-connections project their streams with ``F.linear(flat, self.fn.float())``. Under
  autocast, which is how verl and the Trainer run a forward, that is a bf16 product all the same: the weights that mix
  the streams are off by 1e-3 where the code asks for fp32 (1e-7). Logits move by less than bf16 costs them anyway.

With the patch a bf16 load runs forward and backward, with and without autocast; what is fp32 in the checkpoint is fp32
in the model; and the hyper-connections are computed in fp32 under autocast. Without autocast, an fp32 model, a model
that is bf16 throughout, and a bf16 load from 5.20 on give the same bits as upstream.

Not covered: fp16 loads (5.10 on keeps the compressors' projections in fp32, so they run under autocast only); models
made by ``from_config(dtype=bf16)``, where upstream keeps nothing in fp32 to 5.23; the sum of gate and
``position_bias``, which 5.8.1 and 5.9.0 round to bf16 (``transformers.deepseek-v4-packing`` has the compressors); and
the indexer's scores, which autocast rounds to bf16 as well (no gradient sees them, only the choice of entries).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fsdp_sink_patches import Measurement, Patch, Target

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from torch import Tensor

KEPT_IN_FP32 = ("hc_head", "sinks", "position_bias")
"""What 5.10.1 added to the names that ``from_pretrained`` does not round."""


def norm_forward(original: Callable[..., Tensor], self: Any, hidden_states: Tensor) -> Tensor:
    """fp32 weight, bf16 activations: multiplied in fp32 and rounded once to the activations' dtype, as from 5.20 on.

    Under autocast upstream's own result stays, in fp32 to 5.19: whatever reads it is cast.
    """
    if self.weight.dtype == hidden_states.dtype or _autocast(hidden_states):
        return original(self, hidden_states)
    import torch

    exact = hidden_states.to(torch.float32)
    exact = exact * torch.rsqrt(exact.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
    weighted: Tensor = self.weight * exact
    return weighted.to(hidden_states.dtype)


def strict_names(original: Collection[str]) -> list[str]:
    """The class's list of names; each model copies it when it is made, and loading matches it against parameters."""
    return [*original, *(name for name in KEPT_IN_FP32 if name not in original)]


def without_autocast(original: Callable[..., Any], self: Any, streams: Tensor) -> Any:
    """A hyper-connection, in the fp32 that its code asks for."""
    if not _autocast(streams):
        return original(self, streams)
    import torch

    with torch.autocast(streams.device.type, enabled=False):
        return original(self, streams)


def _autocast(tensor: Tensor) -> bool:
    import torch

    device = tensor.device.type
    return device != "meta" and torch.is_autocast_enabled(device)  # the meta device has no autocast to ask for


_MODEL = "transformers.models.deepseek_v4.modeling_deepseek_v4"

PATCH = Patch(
    id="transformers.deepseek-v4-low-precision",
    gives="DeepSeek-V4 in bf16, rightly",
    distribution="transformers",
    requires=">=5.8.1",
    fixed_in=None,
    link="https://github.com/huggingface/transformers/pull/47486",
    remove_when="no supported release is older than 5.20, and upstream's hyper-connections are fp32 under autocast",
    targets=(
        Target(f"{_MODEL}:DeepseekV4RMSNorm.forward", norm_forward),
        Target(f"{_MODEL}:DeepseekV4PreTrainedModel._keep_in_fp32_modules_strict", strict_names, kind="value"),
        Target(f"{_MODEL}:DeepseekV4HyperConnection.forward", without_autocast),
        Target(f"{_MODEL}:DeepseekV4HyperHead.forward", without_autocast),
    ),
    relies_on=(
        # They add an fp32 position_bias to bf16 gates and put fp32 sinks beside bf16 scores without an error.
        f"{_MODEL}:DeepseekV4HCACompressor.forward",
        f"{_MODEL}:DeepseekV4CSACompressor.forward",
        f"{_MODEL}:DeepseekV4Indexer.forward",
        f"{_MODEL}:eager_attention_forward",
        f"{_MODEL}:DeepseekV4DecoderLayer.forward",
        "transformers.modeling_utils:PreTrainedModel._get_dtype_plan",
    ),
)


def validate(device: str) -> Measurement:
    """A tiny DeepSeek-V4, saved in fp32 and loaded in bf16; see :mod:`_deepseek_v4_low_precision`."""
    from . import _deepseek_v4_low_precision

    return _deepseek_v4_low_precision.measure(device)
