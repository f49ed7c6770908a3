"""Flex attention with attention sinks, forward and backward, on a GPU and on a CPU.

A sink is a part of the softmax with no value: ``out`` shrinks by ``sigmoid(lse - sink)``, and since flex attention's
log-sum-exp carries a gradient, so do the sinks. The rescale is computed in fp32 inside of the compiled region.
"""

from fsdp_sink_patches.ops.flex_attention._op import flex_attention

__all__ = ["flex_attention"]
