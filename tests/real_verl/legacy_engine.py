"""verl 0.5.0 has no engine for language models: its worker's functions, in the order in which the worker calls them."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy


class LegacyEngine:
    """What `engine_job` asks of verl's engine: ``module``, ``ulysses_device_mesh``, ``forward_step``."""

    def __init__(self, path: str, attention: str, dtype: torch.dtype, param_dtype: torch.dtype, ulysses: int) -> None:
        from transformers import AutoModelForCausalLM
        from verl.models.transformers.monkey_patch import apply_monkey_patch
        from verl.utils import fsdp_utils

        size = torch.distributed.get_world_size()
        mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("fsdp",))
        self.ulysses = ulysses
        self.ulysses_device_mesh = init_device_mesh("cpu", (size // ulysses, ulysses), mesh_dim_names=("dp", "sp"))
        context = fsdp_utils.get_init_weight_context_manager(use_meta_tensor=True, mesh=mesh)
        with context(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.module = AutoModelForCausalLM.from_pretrained(path, torch_dtype=dtype, attn_implementation=attention)
            apply_monkey_patch(self.module, ulysses_sp_size=ulysses, use_remove_padding=True)
            self.module.to(dtype)
        policy = MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=torch.float32, cast_forward_inputs=True)
        full_state = self.module.state_dict()
        options = {"mesh": mesh, "mp_policy": policy, "offload_policy": None, "reshard_after_forward": True}
        fsdp_utils.apply_fsdp2(self.module, options, {})
        fsdp_utils.fsdp2_load_full_state_dict(self.module, full_state, mesh, None)

    def forward_step(self, batch: Any, loss: Callable[..., Any], _: bool) -> tuple[Tensor, dict[str, Any]]:
        from verl.utils.torch_functional import logprobs_from_logits
        from verl.utils.ulysses import gather_outputs_and_unpad, ulysses_pad_and_slice_inputs

        nested = batch["input_ids"]
        ids, positions = nested.values()[None], batch["position_ids"].values()[None]
        labels, pad = ids.roll(-1, 1), 0
        if self.ulysses > 1:
            ids, positions, pad = ulysses_pad_and_slice_inputs(ids, positions, sp_size=self.ulysses)
            labels, _, _ = ulysses_pad_and_slice_inputs(labels, None, sp_size=self.ulysses)
        with torch.autocast("cpu", torch.bfloat16):
            logits = self.module(
                input_ids=ids, attention_mask=None, position_ids=positions, use_cache=False
            ).logits.squeeze(0)
            values = logprobs_from_logits(logits=logits, labels=labels.squeeze(0))
            if self.ulysses > 1:
                values = gather_outputs_and_unpad(values, gather_dim=0, unpad_dim=0, padding_size=pad)
            output = {"log_probs": torch.nested.nested_tensor_from_jagged(values, nested.offsets())}
        return loss(model_output=output)[0], {"model_output": output}
