"""DeepSeek-V4-Flash's rotation of its queries against upstream's formula and against copies of the same bytes:
``python benchmarks/rope.py --json benchmarks/results/<date>-h200-rope.json``.

One sequence, 64 heads of 512 channels, the last 64 rotary, bf16, in memory as ``[1, tokens, heads, dim]`` and seen
transposed, as the layers hand it over. Prints medians and their ratios to two floors: the bytes that must move over the
rate at which this card copied in the same run. In place that is the rotary slice, read and written; out of place the
whole tensor. ``--check`` compares each variant with fp64 first.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from _timing import peak_bytes, side_by_side

from fsdp_sink_patches.ops.rope import apply_rotary, cos_sin
from fsdp_sink_patches.ops.sink_attention.oracle import relative_error

HEADS, DIM, ROTARY = 64, 512, 64
COPIED = 2**30  # bytes of the tensor by whose copy the card's rate is measured


def upstream(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The formula of transformers' DeepSeek-V4, written out: widened tables, fp32 products, a new tensor."""
    cos, sin = (table.repeat_interleave(2, dim=-1)[:, None] for table in (cos, sin))
    kept, part = x[..., :-ROTARY], x[..., -ROTARY:]
    turned = torch.stack((-part[..., 1::2], part[..., 0::2]), dim=-1).flatten(-2)
    return torch.cat([kept, (part.float() * cos + turned.float() * sin).to(x.dtype)], dim=-1)


def floors(tokens: int) -> dict[str, int]:
    """Bytes that must move: every input read once, every output written once."""
    table, element = 2 * tokens * ROTARY // 2 * 4, 2
    return {
        "in place": 2 * tokens * HEADS * ROTARY * element + table,
        "out of place": 2 * tokens * HEADS * DIM * element + table,
    }


def variants(tokens: int) -> dict[str, tuple[str, Callable[[], Any]]]:
    """Name -> (its floor, what is timed)."""
    torch.manual_seed(tokens)
    frequencies = 160000.0 ** -(torch.arange(ROTARY // 2, device="cuda") / (ROTARY // 2))
    cos, sin = cos_sin(torch.arange(tokens, device="cuda")[None], frequencies)
    rounded = cos.bfloat16(), sin.bfloat16()
    q = torch.randn(1, tokens, HEADS, DIM, device="cuda", dtype=torch.bfloat16).transpose(1, 2)
    leaf, dout = q.detach().clone().requires_grad_(), torch.randn_like(q)
    compiled = torch.compile(upstream, dynamic=False)
    spent = q.clone()  # rotated again and again in place, which leaves its size as it is
    ours = {"interleaved": True}

    def backward_of(rotate: Callable[..., Tensor], *tables: Tensor) -> Callable[[], Any]:
        out = rotate(leaf, *tables)
        return lambda: torch.autograd.grad(out, leaf, dout, retain_graph=True)

    slice_of, slice_to = q[..., -ROTARY:], torch.empty_like(q)[..., -ROTARY:]
    return {
        "ours, in place": ("in place", lambda: apply_rotary(spent, cos, sin, inplace=True, **ours)),
        "a copy of the slice": ("in place", lambda: slice_to.copy_(slice_of)),
        "ours, out of place": ("out of place", lambda: apply_rotary(q, cos, sin, **ours)),
        "ours, conjugate": ("out of place", lambda: apply_rotary(q, cos, sin, conjugate=True, **ours)),
        "a copy of the tensor": ("out of place", lambda: q.clone()),
        "upstream": ("out of place", lambda: upstream(q, *rounded)),
        "upstream, compiled": ("out of place", lambda: compiled(q, *rounded)),
        "ours, backward": (
            "out of place",
            backward_of(lambda x, c, s: apply_rotary(x, c, s, **ours), cos, sin),
        ),
        "upstream, backward": ("out of place", backward_of(upstream, *rounded)),
    }


def check(tokens: int = 512) -> None:
    """Every rotation against fp64, on fresh data."""
    frequencies = 160000.0 ** -(torch.arange(ROTARY // 2, device="cuda") / (ROTARY // 2))
    where = torch.arange(tokens, device="cuda")[None]
    angles = (where[..., None].double() * frequencies.double())[:, None]
    q = torch.randn(1, tokens, HEADS, DIM, device="cuda", dtype=torch.bfloat16).transpose(1, 2)
    pairs = torch.view_as_complex(q[..., -ROTARY:].double().unflatten(-1, (-1, 2)).contiguous())
    expected = torch.view_as_real(pairs * torch.exp(1j * angles)).flatten(-2)
    cos, sin = cos_sin(where, frequencies)
    for name, out in (
        ("ours", apply_rotary(q, cos, sin, interleaved=True)),
        ("ours, in place", apply_rotary(q.clone(), cos, sin, interleaved=True, inplace=True)),
        ("upstream", upstream(q, cos.bfloat16(), sin.bfloat16())),
    ):
        print(f"{name:16s} error of the slice {relative_error(out[..., -ROTARY:], expected):.2e}")
        assert torch.equal(out[..., :-ROTARY], q[..., :-ROTARY])


def copy_rate(rounds: int) -> float:
    """Bytes a second of a large copy on this card, read plus written."""
    source = torch.randn(COPIED // 2, device="cuda", dtype=torch.bfloat16)
    target = torch.empty_like(source)
    return 2 * COPIED / (side_by_side({"copy": lambda: target.copy_(source)}, rounds=rounds)["copy"] / 1e3)


def replayed(tokens: int, tensors: int = 6) -> float:
    """Milliseconds of one rotation in place out of a CUDA graph of several, each of another tensor: what the card
    takes, where a call from Python takes longer than that."""
    frequencies = 160000.0 ** -(torch.arange(ROTARY // 2, device="cuda") / (ROTARY // 2))
    cos, sin = cos_sin(torch.arange(tokens, device="cuda")[None], frequencies)
    shape = (1, tokens, HEADS, DIM)
    held = [torch.randn(shape, device="cuda", dtype=torch.bfloat16).transpose(1, 2) for _ in range(tensors)]

    def rotate() -> None:
        for x in held:
            apply_rotary(x, cos, sin, interleaved=True, inplace=True)

    rotate()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        rotate()
    return side_by_side({"graph": graph.replay})["graph"] / tensors


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, nargs="+", default=[4096, 32768])
    parser.add_argument("--rounds", type=int, default=5, help="turns that each variant takes; the median counts")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    if arguments.check:
        check()
    rate = copy_rate(arguments.rounds)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}: copies {rate / 1e12:.2f} TB/s")
    rows = []
    for tokens in arguments.tokens:
        runs, must_move = variants(tokens), floors(tokens)
        times = side_by_side({name: run for name, (_, run) in runs.items()}, rounds=arguments.rounds)
        for name, (floor, run) in runs.items():
            floor_ms = must_move[floor] / rate * 1e3
            upstreams = times["upstream, backward" if "backward" in name else "upstream"]
            row = {
                "tokens": tokens,
                "variant": name,
                "ms": times[name],
                "floor": floor,
                "floor_bytes": must_move[floor],
                "of_floor": times[name] / floor_ms,
                "faster_than_upstream": upstreams / times[name],
                "peak_mib": peak_bytes(run) / 2**20,
            }
            rows.append(row)
            print(
                f"{tokens:6d} {name:22s} {row['ms']:8.4f} ms   x{row['of_floor']:.2f} of the floor {floor} "
                f"({floor_ms:.4f} ms)  upstream / this {row['faster_than_upstream']:6.2f}  {row['peak_mib']:7.1f} MiB",
                flush=True,
            )
        del runs
        torch.cuda.empty_cache()
        ms, floor_ms = replayed(tokens), must_move["in place"] / rate * 1e3
        name = "ours, in place, from a CUDA graph"
        rows.append({"tokens": tokens, "variant": name, "ms": ms, "floor": "in place", "of_floor": ms / floor_ms})
        print(f"{tokens:6d} {name} {ms:.4f} ms   x{ms / floor_ms:.2f} of the floor in place", flush=True)
    if arguments.json:
        document = {
            "card": torch.cuda.get_device_name(),
            "torch": torch.__version__,
            "copy_bytes_per_second": rate,
            "rows": rows,
        }
        arguments.json.write_text(json.dumps(document, indent=1))


if __name__ == "__main__":
    main()
