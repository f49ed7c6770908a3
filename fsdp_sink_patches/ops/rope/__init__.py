"""Rotary position embedding: exact tables that are computed once, and one rotation for every layout."""

from fsdp_sink_patches.ops.rope._op import apply_rotary
from fsdp_sink_patches.ops.rope.tables import cos_sin

__all__ = ["apply_rotary", "cos_sin"]
