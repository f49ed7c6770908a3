"""One layer of gpt-oss-20b attention, forward and backward, every backend side by side: ``python
benchmarks/sink_attention.py``.

64 query heads, 8 kv heads, head_dim 64, bf16, causal, one sequence. Prints a table of medians and of ratios against
the same kernel without sinks; ``--json FILE`` keeps the numbers.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch._functorch.config as functorch_config
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, create_block_mask, flex_attention

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from _timing import peak_bytes, side_by_side

from fsdp_sink_patches.ops.sink_attention import backends, flash_attn_func

functorch_config.donated_buffer = False  # each backward is replayed on one saved forward
HEADS, KV_HEADS, HEAD_DIM = 64, 8, 64
EAGER_UP_TO = 8192


def aten_forward(q: Tensor, k: Tensor, v: Tensor, left: int) -> tuple[Tensor, Tensor]:
    out, lse, *_ = torch.ops.aten._flash_attention_forward(
        q, k, v, None, None, q.shape[1], k.shape[1], 0.0, left < 0, False,
        scale=HEAD_DIM**-0.5, window_size_left=left, window_size_right=0,
    )  # fmt: skip
    return out, lse


def aten_backward(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, left: int) -> Any:
    unused = torch.empty(0, dtype=torch.uint64, device=q.device)
    return torch.ops.aten._flash_attention_backward(
        dout, q, k, v, out, lse, None, None, q.shape[1], k.shape[1], 0.0, left < 0, unused, unused,
        scale=HEAD_DIM**-0.5, window_size_left=left, window_size_right=0,
    )  # fmt: skip


def eager(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, mask: Tensor) -> Tensor:
    """The formula transformers trains gpt-oss with, written out: bf16 scores, a sink column, softmax over all of it."""
    group = q.shape[2] // k.shape[2]
    k, v = k.repeat_interleave(group, 2).transpose(1, 2), v.repeat_interleave(group, 2).transpose(1, 2)
    scores = torch.matmul(q.transpose(1, 2), k.transpose(2, 3)) * HEAD_DIM**-0.5 + mask
    column = sinks.reshape(1, -1, 1, 1).expand(q.shape[0], -1, q.shape[1], -1)
    logits = torch.cat([scores, column], -1)
    probs = torch.softmax(logits - logits.amax(-1, keepdim=True), -1, dtype=logits.dtype)[..., :-1]
    return torch.matmul(probs, v).transpose(1, 2)


def variants(seqlen: int, left: int) -> dict[str, tuple[Callable[[], Any], Callable[[], Any]]]:
    """Name -> (forward, backward); each backward replays one saved forward."""
    torch.manual_seed(seqlen)
    q, k, v, dout = (
        torch.randn(1, seqlen, h, HEAD_DIM, device="cuda", dtype=torch.bfloat16)
        for h in (HEADS, KV_HEADS, KV_HEADS, HEADS)
    )
    sinks = 2 * torch.randn(HEADS, device="cuda", dtype=torch.bfloat16)
    leaves = [t.clone().requires_grad_() for t in (q, k, v, sinks)]
    found: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {}

    def add(name: str, run: Callable[..., Tensor]) -> None:
        out = run(*leaves)

        def backward() -> Any:
            return torch.autograd.grad(out, leaves, dout, retain_graph=True)

        backward()
        found[name] = ((lambda: run(*leaves)), backward)

    out, lse = aten_forward(q, k, v, left)
    found["torch FA2, no sink"] = (
        lambda: aten_forward(q, k, v, left),
        lambda: aten_backward(dout, q, k, v, out, lse, left),
    )
    window = (left, 0)
    for name, state in backends().items():
        if state == "available" and name not in ("reference", "flash-attn-2"):
            add(
                f"ours, {name}",
                lambda q, k, v, s, name=name: flash_attn_func(q, k, v, window_size=window, s_aux=s, backend=name),
            )
    if backends()["flash-attn-4"] == "available":
        from flash_attn.cute import flash_attn_func as flash_attn_4

        bound = (None if left < 0 else left, None if left < 0 else 0)
        add(
            "flash-attn-4's own call",
            lambda q, k, v, s: flash_attn_4(q, k, v, causal=left < 0, window_size=bound, learnable_sink=s)[0],
        )

    def visible(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return (j <= i) & (i - j <= left) if left >= 0 else j <= i

    block_mask = create_block_mask(visible, None, None, seqlen, seqlen, device="cuda", _compile=True)
    compiled_flex = torch.compile(flex_attention, dynamic=False)

    def flex(q: Tensor, k: Tensor, v: Tensor, s: Tensor) -> Tensor:
        out, aux = compiled_flex(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), block_mask=block_mask, enable_gqa=True,
            scale=HEAD_DIM**-0.5, return_aux=AuxRequest(lse=True),
        )  # fmt: skip
        scale = torch.sigmoid(aux.lse - s.float()[None, :, None])
        return (out * scale[..., None].to(out.dtype)).transpose(1, 2)

    add("flex + fp32 rescale", flex)
    if seqlen <= EAGER_UP_TO:
        hidden = ~torch.ones(seqlen, seqlen, dtype=torch.bool, device="cuda").tril()
        if left >= 0:
            hidden |= torch.ones_like(hidden).tril(-left - 1)
        mask = torch.zeros(seqlen, seqlen, device="cuda", dtype=torch.bfloat16).masked_fill(hidden, -torch.inf)
        add("eager", lambda q, k, v, s: eager(q, k, v, s, mask))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seqlen", type=int, nargs="+", default=[2048, 8192, 32768])
    parser.add_argument("--rounds", type=int, default=3, help="turns that each variant takes; the median counts")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    rows = []
    for seqlen in arguments.seqlen:
        for label, left in (("full", -1), ("window 128", 127)):
            runs = variants(seqlen, left)
            forward = side_by_side({name: run[0] for name, run in runs.items()}, rounds=arguments.rounds)
            backward = side_by_side({name: run[1] for name, run in runs.items()}, rounds=arguments.rounds)
            for name in runs:
                twin = "flash-attn-4's own call" if name == "ours, flash-attn-4" else "torch FA2, no sink"
                rows.append(
                    {
                        "seqlen": seqlen,
                        "window": label,
                        "variant": name,
                        "forward_ms": forward[name],
                        "backward_ms": backward[name],
                        "against": twin,
                        "forward_ratio": forward[name] / forward[twin],
                        "backward_ratio": backward[name] / backward[twin],
                        "peak_mib": peak_bytes(runs[name][0]) / 2**20,
                    }
                )
                r = rows[-1]
                print(
                    f"{seqlen:6d} {label:10s} {name:26s} {r['forward_ms']:8.3f} ms {r['backward_ms']:8.3f} ms   "
                    f"x{r['forward_ratio']:.3f} x{r['backward_ratio']:.3f} of {twin:24s} {r['peak_mib']:9.1f} MiB",
                    flush=True,
                )
            del runs
            torch.cuda.empty_cache()
            if arguments.json:
                card = torch.cuda.get_device_name()
                document = {"card": card, "torch": torch.__version__, "rows": rows}
                arguments.json.write_text(json.dumps(document, indent=1))


if __name__ == "__main__":
    main()
