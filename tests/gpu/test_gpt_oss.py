"""The real gpt-oss class through transformers, patched, on the card: bf16 flash no worse than bf16 eager against an
fp32 model."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from fsdp_sink_patches.patches.transformers._validation import TINY, build
from torch import Tensor

import fsdp_sink_patches
from fsdp_sink_patches.ops.sink_attention.oracle import relative_error

IDS = ("transformers.flash-sinks", "transformers.packed-masks")
LENGTHS = (200, 1, 57, 254)
TOKENS = 256


@pytest.fixture(scope="module", autouse=True)
def patched():
    with fsdp_sink_patches.applied(*IDS):
        yield


@pytest.fixture(scope="module")
def models() -> dict[str, Any]:
    """One set of bf16 weights in three models: fp32 eager (exact), bf16 eager (today's workaround), bf16 flash
    (ours)."""
    flash = build(TINY, "flash_attention_2", torch.bfloat16, "cuda")
    eager = copy.deepcopy(flash)
    eager.set_attn_implementation("eager")
    exact = copy.deepcopy(eager).float()
    return {"exact": exact, "eager": eager, "flash": flash}


def batch(kind: str) -> tuple[dict[str, Tensor], Tensor]:
    """Model inputs and labels; -100 where nothing is predicted."""
    generator = torch.Generator().manual_seed(3)
    if kind == "packed":
        ids = torch.randint(0, 512, (1, sum(LENGTHS)), generator=generator).cuda()
        positions = torch.cat([torch.arange(n) for n in LENGTHS])[None].cuda()
        return {"input_ids": ids, "position_ids": positions}, ids.roll(-1)
    ids = torch.randint(0, 512, (3, TOKENS), generator=generator).cuda()
    if kind == "whole":
        return {"input_ids": ids}, ids.roll(-1)
    lengths = torch.tensor([TOKENS, 200, 3])[:, None]
    place = torch.arange(TOKENS)[None]
    mask = (place >= TOKENS - lengths if kind == "left" else place < lengths).cuda()
    positions = (mask.long().cumsum(-1) - 1).clamp(min=0)
    labels = ids.masked_fill(~mask, -100)
    return {"input_ids": ids, "attention_mask": mask.long(), "position_ids": positions}, labels


def step(model: Any, kind: str) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Loss, the logits that count, and the gradients by kind of parameter."""
    inputs, labels = batch(kind)
    model.zero_grad(set_to_none=True)
    logits = model(**inputs, use_cache=False).logits.float()
    counted = labels != -100
    loss = F.cross_entropy(logits[counted], labels[counted])
    loss.backward()
    grads: dict[str, list[Tensor]] = {}
    for name, parameter in model.named_parameters():
        grads.setdefault(".".join(name.split(".")[-2:]), []).append(parameter.grad.float().flatten())
    return loss.detach(), logits[counted].detach(), {name: torch.cat(found) for name, found in grads.items()}


@pytest.mark.parametrize("kind", ["whole", "packed", "left", "right", "checkpointed"])
def test_loss_and_every_gradient_within_bf16_noise(models, kind):
    flash = models["flash"]
    shape = "packed" if kind == "checkpointed" else kind
    if kind == "checkpointed":
        flash.gradient_checkpointing_enable({"use_reentrant": False})
    try:
        found = {"flash": step(flash, shape)}
    finally:
        flash.gradient_checkpointing_disable()
    found |= {name: step(models[name], shape) for name in ("exact", "eager")}
    loss, logits, grads = found["exact"]
    noise = relative_error(found["eager"][1], logits)
    assert relative_error(found["flash"][1], logits) <= 1.2 * noise
    assert abs(found["flash"][0] - loss) <= max(2 * abs(found["eager"][0] - loss), 1e-3)
    for name, exact in grads.items():
        ours, eager = (relative_error(found[which][2][name], exact) for which in ("flash", "eager"))
        assert ours <= 1.2 * max(eager, noise), f"{name}: flash {ours:.2e}, eager {eager:.2e}"


def test_compiled(models):
    flash = models["flash"]
    flash.config._experts_implementation = "batched_mm"
    try:
        inputs, _ = batch("whole")
        eager = flash(**inputs, use_cache=False).logits
        compiled = torch.compile(flash, fullgraph=True, backend="aot_eager")(**inputs, use_cache=False).logits
        grads = []
        for logits in (eager, compiled):
            flash.zero_grad(set_to_none=True)
            logits.float().square().mean().backward()
            grads.append(torch.cat([p.grad.float().flatten() for n, p in flash.named_parameters() if "sinks" in n]))
    finally:
        flash.config._experts_implementation = "eager"
    assert relative_error(compiled, eager) <= 5e-3
    assert relative_error(grads[1], grads[0]) <= 1e-2
