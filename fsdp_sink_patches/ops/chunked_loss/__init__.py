"""Losses of a linear head over a large vocabulary, without the logits ``[tokens, vocab]``."""

from fsdp_sink_patches.ops.chunked_loss._libraries import backends
from fsdp_sink_patches.ops.chunked_loss.interface import linear_cross_entropy, linear_log_probs, shift_labels

__all__ = ["backends", "linear_cross_entropy", "linear_log_probs", "shift_labels"]
