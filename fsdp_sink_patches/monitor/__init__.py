"""Numbers a tracker can log, read from what runs in this process.

    from fsdp_sink_patches import monitor

    before = monitor.rope_table_computations()
    model(**batch)
    tracker.log({"rope_table_computations": monitor.rope_table_computations() - before})

A difference counts one forward, or one step; :func:`reset` is for those who would rather read totals.
"""

from __future__ import annotations

from fsdp_sink_patches.ops.rope import tables as _tables

__all__ = ["reset", "rope_table_computations"]


def rope_table_computations() -> int:
    """Pairs of cos/sin tables computed in this process, in all threads, since it started or since :func:`reset`.

    What a DeepSeek-V4 forward adds tells whether tables are shared: 4 with ``transformers.deepseek-v4-rope`` and
    ``transformers.deepseek-v4-packing``, whatever the number of layers, and 0 more in the backward under activation
    checkpointing; with the first alone 2 and one for each compressor and each indexer. Compiled graphs and replayed
    CUDA graphs are not counted, and neither is a model that no patch serves.
    """
    return _tables.computations()


def reset() -> None:
    """Count from zero again; what is remembered stays remembered."""
    _tables.reset()
