"""Flash attention with attention sinks, forward and backward, on every backend."""
