"""4-D masks on flex attention, measured in a process of its own; prints one line of JSON.

python additive_mask_scenarios.py [--apply ID] [--after] NAME...

``--after`` imports the model class before the patch is applied. What a scenario raises is its result.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
from collections.abc import Callable
from typing import Any

import torch
import transformers
from packaging.version import Version
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

import fsdp_sink_patches
from fsdp_sink_patches import _fingerprint, _registry
from fsdp_sink_patches.ops import block_masks

SCENARIOS: dict[str, Callable[[], Any]] = {}
ID = "transformers.additive-mask-to-block-mask"
LENGTH = 40


def scenario(function: Callable[[], Any]) -> Callable[[], Any]:
    SCENARIOS[function.__name__] = function
    return function


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--apply", default="")
    parser.add_argument("--after", action="store_true")
    parser.add_argument("names", nargs="+")
    arguments = parser.parse_args()
    if arguments.after:
        from transformers.models.gemma3 import modeling_gemma3  # noqa: F401
        from transformers.models.qwen3 import modeling_qwen3  # noqa: F401
    if arguments.apply:
        # A release whose source is recorded must be recognised; one that is not is tried all the same.
        unknown = [id for id in arguments.apply.split(",") if not _fingerprint.match(_registry.get(id)).known]
        fsdp_sink_patches.apply(*arguments.apply.split(","), allow_drift=unknown)
    results: dict[str, Any] = {}
    for name in arguments.names:
        try:
            results[name] = SCENARIOS[name]()
        except Exception as error:
            results[name] = {"raises": f"{type(error).__name__}: {error}"}
    if arguments.apply:
        fsdp_sink_patches.assert_applied(*arguments.apply.split(","))
    print(json.dumps(results))


def helper() -> Any:
    """The patch's own helper module: its model and its masks. It imports no patch and needs none applied."""
    import importlib

    return importlib.import_module("fsdp_sink_patches.patches.transformers._given_masks")


def error(mask: Tensor, rows: int = 2, exact_mask: Tensor | None = None, model: Any = None) -> float:
    """Relative error of the logits against the model in fp64, in eager attention with the mask added."""
    given = helper()
    model = given.build(torch.float32, "cpu") if model is None else model
    ids = given.tokens(rows, LENGTH, "cpu")
    with given.uncompiled():
        if exact_mask is None:
            return float(given.logits_error(model, ids, mask))
        exact = copy.deepcopy(model).double()
        exact.set_attn_implementation("eager")
        with torch.no_grad():
            expected = exact(input_ids=ids, attention_mask=exact_mask.double(), use_cache=False).logits
            actual = model(input_ids=ids, attention_mask=mask, use_cache=False).logits
        return float((actual.double() - expected).norm() / expected.norm())


def visible(batch: int = 2, heads: int = 1) -> Tensor:
    return helper().blocks(batch, heads, LENGTH, "cpu")  # type: ignore[no-any-return]


def added(mask: Tensor, never: float = torch.finfo(torch.float32).min) -> Tensor:
    return torch.zeros(mask.shape).masked_fill(~mask, never)


@scenario
def boolean() -> Any:
    return error(visible())


@scenario
def boolean_per_head() -> Any:
    return error(visible(heads=4))


@scenario
def additive() -> Any:
    return error(added(visible()))


@scenario
def additive_per_head() -> Any:
    return error(added(visible(heads=4)))


@scenario
def infinite() -> Any:
    return error(added(visible(), -math.inf))


@scenario
def integers() -> Any:
    return error(visible().long(), exact_mask=added(visible()))


@scenario
def integers_that_are_added() -> Any:
    return error((~visible()).long() * -(10**9), exact_mask=added(visible()))


@scenario
def heads_of_another_number() -> Any:
    """Upstream reads the first of two heads for all four."""
    return error(added(visible()).repeat(1, 2, 1, 1), exact_mask=added(visible()))


@scenario
def doge() -> Any:
    """How far the last token moves earlier logits; the model adds up masks that are tensors, and drops BlockMasks."""
    torch.manual_seed(0)
    config = transformers.DogeConfig(
        vocab_size=256, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=1,
        num_key_value_heads=1,
    )  # fmt: skip
    given = helper()
    model = transformers.DogeForCausalLM._from_config(config, attn_implementation="flex_attention").eval()
    ids, mask = given.tokens(1, LENGTH, "cpu"), added(torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool).tril())
    other = ids.clone()
    other[:, -1] = (other[:, -1] + 7) % 256
    with given.uncompiled(), torch.no_grad():
        a, b = (model(input_ids=i, attention_mask=mask, use_cache=False).logits for i in (ids, other))
    return {"earlier": float((a - b)[:, :-1].abs().max()), "last": float((a - b)[:, -1].abs().max())}


@scenario
def one_mask_for_the_batch() -> Any:
    return error(visible(batch=1))


@scenario
def expanded_over_the_batch() -> Any:
    return error(visible(batch=1).expand(2, 1, LENGTH, LENGTH))


@scenario
def hybrid() -> Any:
    """Sliding and full layers: a mask that the caller prepared is for both."""
    settings = {"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 1}
    config = transformers.Qwen3Config(
        num_hidden_layers=2, hidden_size=64, intermediate_size=32, num_attention_heads=4, num_key_value_heads=2,
        head_dim=16, vocab_size=256, layer_types=["full_attention", "sliding_attention"], **settings,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.Qwen3ForCausalLM._from_config(config, attn_implementation="flex_attention")
    return error(visible(), model=model)


@scenario
def bias() -> Any:
    """Finite numbers are added to the scores, by upstream."""
    slope = -0.1 * (torch.arange(LENGTH)[:, None] - torch.arange(LENGTH)).abs()
    mask = added(visible()) + slope
    return error(mask)


@scenario
def wider_than_the_keys() -> Any:
    """Upstream reads as many columns as there are keys."""
    wide = torch.cat([visible(), torch.ones(2, 1, LENGTH, 24, dtype=torch.bool)], -1)
    return error(wide, exact_mask=added(visible()))


@scenario
def with_a_cache() -> Any:
    """A second part of the row behind keys that are cached: the mask has more columns than rows."""
    given, cut = helper(), 32  # a border of both rows' blocks
    model, ids, mask = given.build(torch.float32, "cpu").eval(), given.tokens(2, LENGTH, "cpu"), visible()
    exact = copy.deepcopy(model).double()
    exact.set_attn_implementation("eager")
    with given.uncompiled(), torch.no_grad():
        expected = exact(input_ids=ids, attention_mask=added(mask).double(), use_cache=False).logits
        cache = transformers.DynamicCache()
        name = "cache" if "cache" in model.model.forward.__code__.co_varnames[:6] else "past_key_values"
        model(input_ids=ids[:, :cut], attention_mask=mask[:, :, :cut, :cut], use_cache=True, **{name: cache})
        out = model(input_ids=ids[:, cut:], attention_mask=mask[:, :, cut:], use_cache=True, **{name: cache}).logits
    return float((out.double() - expected[:, cut:]).norm() / expected[:, cut:].norm())


@scenario
def rows_that_see_nothing() -> Any:
    """The attention's output of a padding row, as a share of the others' size; its layer in isolation."""
    import transformers.integrations.flex_attention as flex

    given, seen = helper(), {}
    original = flex.flex_attention_forward

    def record(*a: Any, **k: Any) -> Any:
        out, lse = original(*a, **k)
        seen.setdefault("out", out)
        return out, lse

    model = given.build(torch.float32, "cpu")
    transformers.modeling_utils.AttentionInterface.register("flex_attention", record)
    mask = visible().clone()
    mask[:, :, 5] = False
    with given.uncompiled(), torch.no_grad():
        logits = model(input_ids=given.tokens(2, LENGTH, "cpu"), attention_mask=mask, use_cache=False).logits
    transformers.modeling_utils.AttentionInterface.register("flex_attention", original)
    return {"row": float(seen["out"][:, 5].abs().max()), "finite": bool(logits.isfinite().all())}


@scenario
def compiled() -> Any:
    """A boolean mask inside of a compiled model."""
    given = helper()
    model = given.build(torch.float32, "cpu")
    ids, mask = given.tokens(2, LENGTH, "cpu"), visible()
    with given.uncompiled(), torch.no_grad():
        expected = model(input_ids=ids, attention_mask=mask, use_cache=False).logits
        wrong = model(input_ids=ids, use_cache=False).logits
    with torch.no_grad():
        out = torch.compile(model, backend="eager")(input_ids=ids, attention_mask=mask, use_cache=False).logits
    return {"same": float((out - expected).norm()), "other": float((out - wrong).norm())}


@scenario
def what_the_layers_get() -> Any:
    """The kind of mask in front of the attention function, for each kind that the user passes."""
    given, kinds = helper(), {}
    passed = {
        "boolean": visible(), "additive": added(visible()), "infinite": added(visible(), -math.inf),
        "half": added(visible()).bfloat16(), "bias": added(visible()) - 1.0, "two dimensions": torch.ones(2, LENGTH),
        "short": visible()[..., :-1], "block mask": block_masks.to_block_mask(visible()),
    }  # fmt: skip
    for implementation in ("flex_attention", "sdpa", "eager"):
        model = given.build(torch.float32, "cpu", implementation)
        recorder = _Recorder()
        model.model.layers = torch.nn.ModuleList([recorder])
        for name, mask in passed.items():
            if implementation != "flex_attention" and name in ("two dimensions", "block mask"):
                continue
            model(input_ids=given.tokens(2, LENGTH, "cpu"), attention_mask=mask, use_cache=False)
            found = recorder.mask
            kind = "same" if found is mask else "BlockMask" if isinstance(found, BlockMask) else type(found).__name__
            if kind == "BlockMask" and name != "two dimensions":
                kind += f" {found.kv_num_blocks.shape[1]}"
                kind += "" if torch.equal(block_masks.dense(found), visible()) else " of another mask"
            kinds[f"{implementation}, {name}"] = kind
    return kinds


class _Recorder(torch.nn.Module):
    """A layer that keeps its mask."""

    attention_type = "full_attention"

    def forward(self, hidden_states: Tensor, attention_mask: Any = None, **_: Any) -> Tensor:
        self.mask = attention_mask
        return hidden_states


@scenario
def bound_by_name() -> Any:
    """gemma3 and gemma4 import the function by name; what their modules hold is what masking_utils holds."""
    import transformers.masking_utils as masking
    from transformers.models.gemma3 import modeling_gemma3

    held = getattr(modeling_gemma3, "_preprocess_mask_arguments", None)
    return {"binds": held is not None, "same": held is None or held is masking._preprocess_mask_arguments}


@scenario
def validated() -> Any:
    measured = _registry.module(ID).validate("cpu")
    return {"right": measured.right, "errors": dict(measured.errors)}


@scenario
def release() -> Any:
    return str(Version(transformers.__version__))


if __name__ == "__main__":
    main()
