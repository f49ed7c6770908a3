"""DeepSeek-V4's attention: a window, compressed entries and a sink, forward and backward in ``O(tokens)`` memory."""

from __future__ import annotations

from fsdp_sink_patches.ops.compressed_attention.interface import compressed_attention

__all__ = ["compressed_attention"]
