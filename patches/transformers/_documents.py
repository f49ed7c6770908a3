"""Where documents start in packed rows."""

from __future__ import annotations

import torch
from torch import Tensor


def document_starts(position_ids: Tensor, real: Tensor | None = None) -> Tensor:
    """Which tokens begin a document, bool ``[batch, seqlen]``; the first token of a row always does.

    Without padding a document starts where positions don't go up by one: the rule of transformers'
    ``find_packed_sequence_indices``, so that every implementation agrees. A row that begins in the middle of a document
    (``[5, 6, 7, 0, 1]``) has its first document too.

    Args:
        position_ids: ``[batch, seqlen]``.
        real: bool ``[batch, seqlen]``, False for padding; or None. With padding, positions of real tokens may have
            gaps, so there a document starts where they don't go up at all. Padding never starts a document.
    """
    if real is None:
        starts = torch.ones_like(position_ids, dtype=torch.bool)
        starts[:, 1:] = position_ids.diff(dim=1) != 1
        return starts
    column = torch.arange(real.shape[1], device=real.device).expand(real.shape)
    latest = torch.where(real, column, -1).cummax(dim=1).values
    before = torch.cat([torch.full_like(latest[:, :1], -1), latest[:, :-1]], dim=1)
    return real & ((before < 0) | (position_ids <= position_ids.gather(1, before.clamp(min=0))))
