"""Flash attention with attention sinks, forward and backward, on every backend.

Softmax attention over a union of key sets is a log-sum-exp merge of the parts, and a sink is a part with no value. The
backward of a part needs only the merged ``out`` and ``lse``, so every flash kernel that returns its log-sum-exp
supports sinks.
"""

from fsdp_sink_patches.ops.sink_attention._backends import backends
from fsdp_sink_patches.ops.sink_attention.interface import (
    flash_attn_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_qkvpacked_func,
)

__all__ = [
    "backends",
    "flash_attn_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_qkvpacked_func",
]
