"""A draft model that is cast to bf16 keeps its rotary frequencies and tables in fp32.

What breaks for the user: SpecForge casts every draft, ``draft_model.to(dtype=bfloat16)``, and with it the buffers of
its EAGLE and P-EAGLE rotary modules. The frequencies lose 16 bits: at position 4096 an angle is off by radians, and a
table that grows is even computed from positions in bf16, of which there are 256 below 512. Serving engines use fp32, so
a draft is accepted less often than it was in training, the further the longer the text.

Each module keeps what its constructor computed outside its buffers, and has them again at each forward. A module that
was built on the meta device has nothing to keep and stays as upstream makes it. The DFlash family has transformers' own
rotary modules, which ``transformers.rotary-buffers`` serves.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fsdp_sink_patches import Measurement, Patch, Target

if TYPE_CHECKING:
    from collections.abc import Callable

BUFFERS = ("inv_freq", "cos_cached", "sin_cached")
KEPT = "_fsdp_sink_patches_kept"
"""Attribute of a module: its buffers as they were built, by name."""


def initialize(original: Callable[..., Any], self: Any, *a: Any, **k: Any) -> None:
    """``__init__`` of the base of all these modules; what subclasses compute, it has called."""
    original(self, *a, **k)
    kept = {name: buffer.clone() for name, buffer in self._buffers.items() if name in BUFFERS and not buffer.is_meta}
    if kept:
        setattr(self, KEPT, kept)
        self.register_forward_pre_hook(_put_back)


def _put_back(module: Any, _inputs: Any) -> None:
    kept = getattr(module, KEPT)
    for name, buffer in kept.items():
        current = module._buffers[name]
        # A table of another length was computed since, from frequencies that had been put back.
        if current.shape == buffer.shape and (current.dtype != buffer.dtype or current.device != buffer.device):
            kept[name] = buffer = buffer.to(current.device)
            module._buffers[name] = buffer.clone()


PATCH = Patch(
    id="specforge.draft-rotary-fp32",
    gives="exact rotary angles in bf16 drafts",
    distribution="specforge",
    requires=">=0.2",
    fixed_in=None,
    link="https://github.com/NVIDIA-NeMo/Automodel/pull/2549",
    remove_when="SpecForge's rotary modules survive a cast of the draft model",
    targets=(Target("specforge.modeling.draft.llama3_eagle:LlamaRotaryEmbedding.__init__", initialize),),
    relies_on=(
        "specforge.modeling.draft.llama3_eagle:LlamaRotaryEmbedding",
        "specforge.modeling.draft.llama3_eagle:LlamaMutiRotaryEmbedding.forward",
        "specforge.modeling.draft.llama3_eagle:LlamaYarnRotaryEmbedding",
    ),
)


def validate(device: str) -> Measurement:
    """Phase error against fp64 of a rotary module that was cast, and of one whose table grew after it."""
    from . import _validation

    return _validation.draft_rotary_fp32(device)
