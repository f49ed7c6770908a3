"""gpt-oss's experts compute in eval mode what they compute in training: each expert its own tokens.

What breaks for the user: in transformers 4.57 the experts of a gpt-oss on a GPU in eval mode repeat every token over
all experts and multiply by zero what was not routed. The log-prob pass of an RL job, which is eval mode, runs out of
memory where its training step did not (32 experts of which 4 are used: 8 times the products and the activations), and
its sums run in another order than those of the step that they are compared with.

Left as it is: no more tokens than experts, as in decoding, where one product for all is faster; and compiled graphs.
transformers 5 has other experts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fsdp_sink_patches import Measurement, Patch, Target

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor


def experts_forward(original: Callable[..., Tensor], self: Any, hidden_states: Tensor, *a: Any, **k: Any) -> Tensor:
    """``hidden_states``: [batch, seqlen, hidden]; upstream's own training branch, whatever the mode."""
    import torch

    tokens = hidden_states.numel() // hidden_states.shape[-1]
    if self.training or tokens <= self.num_experts or torch.compiler.is_compiling():
        return original(self, hidden_states, *a, **k)
    self.training = True  # of this module alone, which has nothing but the branch that reads it
    try:
        return original(self, hidden_states, *a, **k)
    finally:
        self.training = False


PATCH = Patch(
    id="transformers.gpt-oss-experts-eval",
    gives="gpt-oss experts lean in eval",
    distribution="transformers",
    requires=">=4.57",
    fixed_in="5.0.0",
    link="https://github.com/huggingface/transformers/blob/v4.57.6/src/transformers/models/gpt_oss/modeling_gpt_oss.py",
    remove_when="transformers 4.57 is no longer supported",
    targets=(Target("transformers.models.gpt_oss.modeling_gpt_oss:GptOssExperts.forward", experts_forward),),
    relies_on=("transformers.models.gpt_oss.modeling_gpt_oss:GptOssExperts.__init__",),
)


def validate(device: str) -> Measurement:
    """Experts in eval mode against fp64, and the largest tensor that they write."""
    from . import _experts_validation

    return _experts_validation.experts_eval(device)
