"""Log-probs of bf16 logits are fp32, whichever cross-entropy is installed.

What breaks for the user: verl computes log-probs by flash-attn's Triton cross-entropy, in fp32. Where that is not
installed (flash-attn 4 only, kernels from the hub, torch's own kernels) it falls back to a loop that rounds them to the
logits' bf16: a log-prob of -5 is then off by up to 0.016, the ratio of two policies by percents, and the same job gives
other losses on the next cluster. Here they are summed and handed out in fp32, some rows at a time, and the backward
computes the softmax again instead of keeping it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fsdp_sink_patches import Measurement, Patch, Target

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor


def logprobs_from_logits_v2(original: Callable[..., Tensor], logits: Tensor, labels: Tensor) -> Tensor:
    """``log_softmax(logits)[..., labels]``.

    ``logits``: [..., vocab]; ``labels``: int64 [...]. Returns [...], in fp32 where upstream returns bf16 or fp16.
    """
    import torch

    if logits.dtype not in (torch.bfloat16, torch.float16):
        return original(logits, labels)
    if type(logits) is not torch.Tensor:  # sharded over ranks: a DTensor's own operators know how to sum
        return original(logits.float(), labels)
    from . import _log_probs

    return _log_probs.log_probs(logits, labels)


PATCH = Patch(
    id="verl.logprobs-fp32",
    gives="fp32 log-probs without flash-attn",
    distribution="verl",
    requires=">=0.5",
    fixed_in=None,
    link="https://github.com/verl-project/verl/blob/v0.9.1/verl/utils/torch_functional.py",
    remove_when="verl's own fallback computes log-probs in fp32",
    targets=(Target("verl.utils.torch_functional:logprobs_from_logits_v2", logprobs_from_logits_v2),),
    relies_on=("verl.utils.torch_functional:logprobs_from_logits",),
)


def validate(device: str) -> Measurement:
    """Log-probs of bf16 logits, and their gradient, against fp64."""
    from . import _log_probs_validation

    return _log_probs_validation.logprobs_fp32(device)
