"""Which block sizes, warps and stages make the Triton forward fastest on this card: ``python
benchmarks/forward_tiles.py``."""

from __future__ import annotations

import functools
import itertools
import sys
from pathlib import Path

import torch
from triton.testing import do_bench

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from fsdp_sink_patches.ops.sink_attention import _forward_kernel


def main() -> None:
    for head_dim, heads, kv_heads, window in (
        (64, 64, 8, (-1, 0)), (64, 64, 8, (127, 0)), (128, 32, 8, (-1, 0)), (128, 32, 8, (127, 0)), (256, 16, 4, (-1,
    0)), ):  # fmt: skip
        torch.manual_seed(0)
        q, k, v = (
            torch.randn(1, 8192, h, head_dim, device="cuda", dtype=torch.bfloat16) for h in (heads, kv_heads, kv_heads)
        )
        sinks = torch.randn(heads, device="cuda")
        found = []
        for m, n, warps, stages in itertools.product((64, 128), (32, 64, 128), (4, 8), (2, 3, 4)):
            if (m == 128 and warps == 4 and head_dim > 64) or (head_dim == 256 and (n > 64 or stages > 2)):
                continue
            options = {"BLOCK_M": m, "BLOCK_N": n, "num_warps": warps, "num_stages": stages}

            run = functools.partial(
                _forward_kernel.forward, q, k, v, sinks, cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=8192,
                scale=head_dim**-0.5, window=window, **options,
            )  # fmt: skip
            if run() is not None:  # they fit
                found.append((do_bench(run, warmup=10, rep=40, return_mode="median"), options))
        found.sort(key=lambda pair: pair[0])
        print(f"head_dim {head_dim}, {heads}/{kv_heads} heads, window {window}: tokens 8192")
        for milliseconds, options in found[:5]:
            print(f"  {milliseconds:.3f} ms  {options}", flush=True)


if __name__ == "__main__":
    main()
