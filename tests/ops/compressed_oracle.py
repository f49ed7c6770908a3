"""DeepSeek-V4's attention in fp64 from masks over all keys and entries, differentiated by autograd; and cases of it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fsdp_sink_patches.ops.compressed_layout import compressed_layout, window_starts

KINDS = ("sliding", "csa", "hca")
SINKS = ("4", "8", "20", "random")


def compressed_oracle(
    q: Tensor, kv: Tensor, entries: Tensor, sinks: Tensor, *, window_starts: Tensor,
    entry_ranges: Tensor | None = None, topk_indices: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """``out`` ``[tokens, heads, head_dim]`` and ``lse`` ``[heads, tokens]`` in fp64."""
    tokens, _, dim = q.shape
    place = torch.arange(tokens, device=q.device)
    window = (place >= window_starts[:, None]) & (place <= place[:, None])
    slots = torch.arange(entries.shape[0], device=q.device)
    chosen = torch.zeros(tokens, entries.shape[0], dtype=torch.bool, device=q.device)
    if entry_ranges is not None:
        chosen = (slots >= entry_ranges[:, :1]) & (slots < entry_ranges[:, 1:])
    if topk_indices is not None:
        for column in topk_indices.unbind(1):
            chosen = chosen | (slots == column[:, None])
    keys = torch.cat((kv, entries)).double()
    seen = torch.cat((window, chosen), 1)
    scores = torch.einsum("thd,kd->htk", q.double(), keys) * dim**-0.5
    scores = scores.masked_fill(~seen, float("-inf"))
    logits = torch.cat((scores, sinks.double()[:, None, None].expand(-1, tokens, 1)), -1)
    out = torch.einsum("htk,kd->thd", logits.softmax(-1)[..., :-1], keys)
    return out, logits.logsumexp(-1)


def sinks_of(kind: str, heads: int, device: Any = "cpu") -> Tensor:
    if kind == "random":
        return 3 * torch.randn(heads, device=device, generator=torch.Generator(device).manual_seed(9))
    return torch.full((heads,), float(kind), device=device)


def case(
    kind: str, lengths: list[int], heads: int, dim: int, dtype: torch.dtype, *, window: int = 16, rate: int = 4,
    picks: int = 8, device: Any = "cpu",
) -> tuple[list[Tensor], dict[str, Tensor], Tensor]:  # fmt: skip
    """``[q, kv, entries]``, who sees what, and a gradient of ``out``, of packed documents on random data."""
    torch.manual_seed(sum(lengths) + heads + dim)
    positions = torch.cat([torch.arange(n, device=device) for n in lengths])[None]
    layout = compressed_layout(positions, rate)
    tokens, count = sum(lengths), layout.starts.shape[1] if kind != "sliding" else 0
    q, dout = (torch.randn(tokens, heads, dim, device=device).to(dtype) for _ in range(2))
    kv, entries = (torch.randn(n, dim, device=device).to(dtype) for n in (tokens, count))
    sees = {"window_starts": window_starts(positions, window)[0]}
    ranges = layout.ranges[0]
    if kind == "hca":
        sees["entry_ranges"] = ranges
    if kind == "csa":
        slots = torch.arange(count, device=device)
        allowed = (slots >= ranges[:, :1]) & (slots < ranges[:, 1:])
        scores = torch.rand(tokens, count, device=device).masked_fill(~allowed, -1.0)
        best = scores.topk(min(picks, count), dim=1)
        sees["topk_indices"] = torch.where(best.values >= 0, best.indices, -1)
    return [q, kv, entries], sees, dout
