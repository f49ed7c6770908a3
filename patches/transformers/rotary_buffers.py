"""Rotary frequencies stay what the config says, whatever a job does to the model's buffers.

What breaks for the user: ``inv_freq`` is an ordinary non-persistent buffer. ``model.to(torch.bfloat16)`` rounds it (a
phase error of 1.8 rad at position 4095 for theta 10000, 3.9 rad for DeepSeek-V4's theta 160000) and ``.float()`` does
not bring the bits back; FSDP1's ``buffer_dtype`` does the same at the first forward; after meta and ``to_empty`` it is
whatever memory held, and no ``load_state_dict`` reports or repairs it (nor, in 4.57, does ``initialize_weights``). The
model runs, agrees with itself, and is wrong, more so with every position.

With the patch every model keeps its frequencies in fp32 outside its buffers, from the end of its constructor on:

- The forward of a rotary module reads those and nothing else, so not even a write through raw memory reaches it.
- Between forwards the buffers hold fp32 copies. They are put right after each cast, move, ``to_empty``,
  ``load_state_dict`` and ``initialize_weights``, and by each forward.
- The frequencies are what the module's own class computes from its config, on the CPU in fp32. A module that can't be
  built again from what it keeps (vision modules of 4.57) is taken as it was built; if that was on the meta device, it
  is left alone and a warning names it.
- ``dynamic`` and ``longrope`` frequencies still follow the row, as upstream's forward sets them.
- A deep copy keeps all this. A pickle holds upstream's classes only; what is unpickled is upstream's until
  ``initialize_weights()`` is called on it.

Limits:

- Apply before the model is built; one that exists already is taken on by its next ``initialize_weights()``.
- Whoever changes ``inv_freq`` by hand finds the change undone, and a warning: change the config and build the rotary
  module anew (calling its ``__init__`` again will do), or disable this patch.
- Under ``torch.compile`` the forward is upstream's and reads the buffers, so FSDP1's ``buffer_dtype`` around a model
  compiled whole, and writes through raw memory, still reach it.
- ``model.double()`` gives fp64 buffers of the same values.
- Persistent buffers (ESM, Wav2Vec2-Conformer) belong to the checkpoint and are upstream's.
"""

from __future__ import annotations

from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from fsdp_sink_patches import Measurement, Patch, Target

if TYPE_CHECKING:
    from collections.abc import Callable


_constructing: ContextVar[bool] = ContextVar("constructing", default=False)


def post_init(original: Callable[..., Any], self: Any, *a: Any, **k: Any) -> Any:
    """The end of every model's constructor: its rotary modules are as they should stay."""
    from . import _rotary_buffers

    token = _constructing.set(True)
    try:
        result = original(self, *a, **k)
    finally:
        _constructing.reset(token)
    _rotary_buffers.hold(self, fresh=True)
    return result


def initialize_weights(original: Callable[..., Any], self: Any, *a: Any, **k: Any) -> Any:
    """The call that is documented to follow ``to_empty``; before 5.0 it leaves rotary modules out."""
    from . import _rotary_buffers

    result = original(self, *a, **k)
    if not _constructing.get():  # upstream's post_init calls this; the values are then the constructor's
        _rotary_buffers.hold(self, fresh=False)
    return result


PATCH = Patch(
    id="transformers.rotary-buffers",
    gives="rotary frequencies that nothing corrupts",
    distribution="transformers",
    requires=">=4.57",
    fixed_in=None,
    link="https://github.com/huggingface/transformers/issues/45902",
    remove_when="rotary frequencies are no longer module buffers, or survive a model-wide cast and to_empty",
    targets=(
        Target("transformers.modeling_utils:PreTrainedModel.post_init", post_init),
        Target("transformers.modeling_utils:PreTrainedModel.initialize_weights", initialize_weights),
    ),
    relies_on=(
        "transformers.modeling_rope_utils:dynamic_rope_update",
        "transformers.models.gpt_oss.modeling_gpt_oss:GptOssRotaryEmbedding.__init__",
        "transformers.models.deepseek_v4.modeling_deepseek_v4:DeepseekV4RotaryEmbedding.__init__?",
    ),
)


def validate(device: str) -> Measurement:
    """Phase error of gpt-oss and DeepSeek-V4 against fp64 after a cast and after ``to_empty``."""
    from . import _rotary_validation

    return _rotary_validation.rotary_buffers(device)
