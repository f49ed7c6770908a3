"""What ``transformers.gpt-oss-experts-eval`` is measured by: experts in eval mode, as on a GPU."""

from __future__ import annotations

import copy
import types
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import GptOssConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

from fsdp_sink_patches import Measurement
from fsdp_sink_patches.ops.sink_attention.oracle import relative_error

from ._validation import _time

EXPERTS, TOP_K = 16, 2


class OnAGpu(Tensor):
    """Says that it lies on a GPU, once: upstream asks, and takes the branch that a CPU never takes."""

    asked = False

    @property
    def device(self) -> Any:  # type: ignore[override]
        first, OnAGpu.asked = not OnAGpu.asked, True
        return types.SimpleNamespace(type="cuda") if first else torch.device("cpu")


class _Largest(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Elements of the largest tensor that an operator makes."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor):
            self.elements = max(self.elements, out.numel())
        return out


def experts_eval(device: str) -> Measurement:
    """The share: of all tokens' rows through all that they are routed to, in one tensor."""
    hidden, width, tokens = (64, 96, 64) if device == "cpu" else (2880, 2880, 4096)
    torch.manual_seed(0)
    config = GptOssConfig(
        hidden_size=hidden, intermediate_size=width, num_local_experts=EXPERTS, num_experts_per_tok=TOP_K
    )
    experts: Any = GptOssExperts(config)
    for parameter in experts.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    experts = experts.to(device).eval()
    x = torch.randn(1, tokens, hidden, device=device)
    top = torch.randn(tokens, EXPERTS, device=device).topk(TOP_K, dim=-1)
    routed = torch.zeros(tokens, EXPERTS, device=device).scatter_(1, top.indices, top.values.softmax(-1))

    def run() -> Tensor:
        OnAGpu.asked = False
        given = x.as_subclass(OnAGpu) if device == "cpu" else x
        with torch.no_grad():
            return experts(given, router_indices=top.indices, routing_weights=routed)  # type: ignore[no-any-return]

    exact = copy.deepcopy(experts).double().train()
    with torch.no_grad():
        expected = exact(x.double(), router_indices=top.indices, routing_weights=routed.double())
    with _Largest() as largest:  # type: ignore[no-untyped-call]
        found = run()
    errors = {
        "out": relative_error(found.as_subclass(Tensor), expected),
        "largest tensor": largest.elements / (tokens * TOP_K * 2 * width),
    }
    time_ms, peak = _time(run, device)  # type: ignore[arg-type,unused-ignore]
    details = {"experts": EXPERTS, "of which each token takes": TOP_K, "tokens": tokens}
    return Measurement(errors, {"out": 1e-5, "largest tensor": 1.0}, time_ms, peak, details)
