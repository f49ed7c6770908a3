"""Choices that change numbers, so that they are the user's: each is a default, an environment variable and an argument.

| setting | values | environment | what it changes |
|---|---|---|---|
| ``rope_dtype`` | ``"fp32"``, ``"activation"`` | ``FSDP_SINK_PATCHES_ROPE_DTYPE`` | DeepSeek-V4's cos/sin: fp32 as servers keep them, or rounded to the activations' dtype as transformers does, bit for bit |
| ``compressed_attention`` | ``"eager"``, ``"auto"``, ``"fused"`` | ``FSDP_SINK_PATCHES_COMPRESSED_ATTENTION`` | DeepSeek-V4's attention: transformers' own everywhere; fused on CUDA and transformers' own elsewhere; or fused everywhere (plain torch on the CPU) |
| ``pooling_dtype`` | ``"activation"``, ``"fp32"`` | ``FSDP_SINK_PATCHES_POOLING_DTYPE`` | DeepSeek-V4's compressors: projected and pooled in the activations' dtype as transformers does, or in fp32 as the reference implementation does |

The environment is read when this module is imported, and worker processes inherit it; :func:`use` and :func:`using`
act on this process from the next forward on. Set them alike on every rank, and before a graph is compiled. Keep the
backward under the forward's settings: activation checkpointing computes the forward again there and reads them again.
"""  # noqa: E501

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

_CHOICES = {
    "rope_dtype": ("fp32", "activation"),
    "pooling_dtype": ("activation", "fp32"),
    "compressed_attention": ("eager", "auto", "fused"),
}


def _from_environment(name: str) -> str:
    variable = f"FSDP_SINK_PATCHES_{name.upper()}"
    return _checked(name, os.environ.get(variable) or _CHOICES[name][0], f"{variable}=")


def _checked(name: str, value: str, where: str) -> str:
    if value not in _CHOICES[name]:
        raise ValueError(
            f"fsdp_sink_patches.settings: found {where}{value!r}, expected one of {_CHOICES[name]}. "
            f"Set {name} to one of them."
        )
    return value


rope_dtype: str = _from_environment("rope_dtype")
pooling_dtype: str = _from_environment("pooling_dtype")
compressed_attention: str = _from_environment("compressed_attention")


def use(
    *, rope_dtype: str | None = None, pooling_dtype: str | None = None, compressed_attention: str | None = None
) -> None:
    """Set what is given, from the next forward on.

    Raises:
        ValueError: a value that the table above does not list; nothing is changed then.
    """
    given = {
        "rope_dtype": rope_dtype,
        "pooling_dtype": pooling_dtype,
        "compressed_attention": compressed_attention,
    }
    chosen = {name: _checked(name, value, f"{name}=") for name, value in given.items() if value is not None}
    globals().update(chosen)


@contextmanager
def using(
    *, rope_dtype: str | None = None, pooling_dtype: str | None = None, compressed_attention: str | None = None
) -> Iterator[None]:
    """:func:`use` for the length of a ``with`` block.

    Keep backward inside the block: under activation checkpointing it computes the forward again, by the settings that
    hold then. Around the forward alone, reentrant checkpointing would give wrong gradients without an error.
    """
    before = {name: globals()[name] for name in _CHOICES}
    use(rope_dtype=rope_dtype, pooling_dtype=pooling_dtype, compressed_attention=compressed_attention)
    try:
        yield
    finally:
        globals().update(before)
