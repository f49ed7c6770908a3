"""``BlockMask`` for flex attention, written down from the rule instead of evaluated over every pair of tokens.

``create_block_mask`` evaluates its ``mask_mod`` on the whole ``[batch, heads, Q, KV]`` grid to find out which blocks of
128 x 128 hold anything. The builders here follow one idea: *a query sees at most two intervals of keys*. The intervals
of all queries take O(Q) memory, and which blocks are empty, partly or wholly visible follows from counting the borders
of intervals per block, in O(Q + blocks). The lists are those that ``create_block_mask`` makes of the same rule.

    causal         own document up to the query; a window and the first keys of each document (sink slots)
    dflash         draft blocks behind their context, KV = [context, drafts]
    dflash_lora    the same inside one sequence, Q_LEN == KV_LEN == seq_len
    to_block_mask  any given 4-D boolean or additive mask
    dense, plot    what a BlockMask shows, element by element

Every mask has head dimension 1 (``to_block_mask`` keeps the heads that it is given), lives on the device of its inputs,
and is built without waiting for that device. What differs from batch to batch (documents, anchors) is captured as
tensors, so it recompiles nothing; sizes and options are Python numbers. As with every BlockMask, ``mask.to(device)``
moves the lists and leaves captured tensors behind (build on the device instead), and ``pickle`` refuses the closure.

Positions are integers; a *document* is given by its first position. Documents and anchors come as ``[batch, n]``, or
``[n]`` for one row, of any integer dtype; an entry that is negative is padding. ``cu_seqlens`` is such a row as it is:
its last entry is the length, where nothing starts.
"""

from __future__ import annotations

from ._builders import causal, dflash, dflash_lora
from ._conversion import NotAMaskError, to_block_mask
from ._lists import dense
from ._plot import plot

__all__ = ["NotAMaskError", "causal", "dense", "dflash", "dflash_lora", "plot", "to_block_mask"]
