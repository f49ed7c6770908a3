"""Scenarios of transformers.deepseek-v4-packing; run as ``scenarios.py`` is.

Two truths: each document alone through the same weights in fp64, and, to the bit, what a process without the patch
gives for plain documents.
"""

from __future__ import annotations

import copy
import gc
import hashlib
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from scenarios import main, scenario
from torch import Tensor

import fsdp_sink_patches
from fsdp_sink_patches.ops.sink_attention.oracle import relative_error

ID = "transformers.deepseek-v4-packing"
PAD = 7  # a token like any other
TOP_K = 16

if "--after" in sys.argv:
    from transformers.models.deepseek_v4 import modeling_deepseek_v4  # noqa: F401


def _kinds() -> dict[str, tuple[tuple[str, ...], dict[str, Any]]]:
    from fsdp_sink_patches.patches.transformers._deepseek_v4_models import CSA, HCA, SLIDING

    return {
        "sliding": ((SLIDING,) * 3, {}),
        "CSA, all entries": ((CSA,) * 3, {}),
        "CSA, top-k": ((CSA,) * 3, {"index_topk": TOP_K}),
        "HCA": ((HCA,) * 3, {}),
        "mixed": ((SLIDING, CSA, HCA), {"index_topk": TOP_K}),
    }


def _build(kind: str = "mixed", **changes: Any) -> Any:
    from fsdp_sink_patches.patches.transformers._deepseek_v4_models import build

    layers, settings = _kinds()[kind]
    return build(layers, **{**settings, **changes})


def _exact(model: Any) -> Any:
    exact = copy.deepcopy(model).double()
    exact.set_experts_implementation("eager")  # the one that multiplies fp64 matrices
    return exact


def _ids(*shape: int, seed: int = 3) -> Tensor:
    return torch.randint(PAD + 1, 512, shape, generator=torch.Generator().manual_seed(seed))


def _restarting(*rows: Sequence[int]) -> Tensor:
    return torch.stack([torch.cat([torch.arange(n) for n in lengths]) for lengths in rows])


def _alone(model: Any, documents: Sequence[Tensor]) -> list[Tensor]:
    with torch.no_grad():
        return [model(input_ids=document, use_cache=False).logits for document in documents]


def _logits(model: Any, ids: Tensor | None, **batch: Any) -> Tensor:
    with torch.no_grad():
        found: Tensor = model(input_ids=ids, **batch).logits
    return found


def _cache(model: Any) -> Any:
    """An empty cache to pass: to 5.13 the model returns none that it made itself."""
    from transformers import DynamicCache

    return DynamicCache(config=model.config)


def _digest(*tensors: Tensor) -> str:
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(tensor.detach().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


def _loss(logits: Tensor) -> Tensor:
    weights = torch.linspace(-3, 3, logits.numel(), dtype=logits.dtype).view_as(logits).cos()
    return ((logits + weights) ** 2).sum() / 1000


def _gradients(model: Any, *logits: Tensor) -> dict[str, Tensor]:
    model.zero_grad(set_to_none=True)
    _loss(torch.cat([part.flatten(0, 1) for part in logits])).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def _modelling() -> Any:
    from transformers.models.deepseek_v4 import modeling_deepseek_v4

    return modeling_deepseek_v4


def _raised(function: Callable[[], Any]) -> str:
    try:
        function()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


# --- packed rows ---------------------------------------------------------------------------------------------------


@scenario
def table() -> Any:
    """Packed against alone, by lengths and layers: of each document the errors, and how far it moves with the first."""
    found: dict[str, Any] = {}
    for lengths in ((37, 150, 69), (128, 192, 96)):
        positions = _restarting(lengths)
        ids = _ids(1, sum(lengths))
        other = torch.cat((_ids(1, lengths[0], seed=4), ids[:, lengths[0] :]), 1)
        for kind in _kinds():
            model = _build(kind)
            documents = ids.split(lengths, 1)
            alone = _alone(model, documents)
            row = _logits(model, ids, position_ids=positions, use_cache=False).split(lengths, 1)
            moved = _logits(model, other, position_ids=positions, use_cache=False).split(lengths, 1)
            found[f"{kind}, {lengths}"] = {
                "rel": [relative_error(a, b) for a, b in zip(row, alone, strict=True)],
                "leak": [(a - b).abs().max().item() for a, b in zip(row[1:], moved[1:], strict=True)],
            }
    return found


@scenario
def cached_by_default() -> Any:
    """What switches upstream's own detection off: the cache of the config's default, a cache object, a mask of ones."""
    model = _build()
    lengths = (37, 150, 69)
    ids, positions = _ids(1, sum(lengths)), _restarting(lengths)
    exact = torch.cat(_alone(_exact(model), ids.split(lengths, 1)), 1)
    ways = {
        "default": {},
        "asked": {"use_cache": True},
        "object": {"past_key_values": _cache(model)},
        "object, not asked": {"past_key_values": _cache(model), "use_cache": False},
        "ones": {"attention_mask": torch.ones_like(ids), "use_cache": False},
        "ones, cached": {"attention_mask": torch.ones_like(ids)},
    }
    return {
        way: relative_error(model(input_ids=ids, position_ids=positions, **arguments).logits, exact)
        for way, arguments in ways.items()
    }


@scenario
def gradients() -> Any:
    """A packed step in fp64 against the sum over its documents: everything, and the worst parameter."""
    found = {}
    lengths = (37, 150, 69)
    model = _exact(_build())
    ids, positions = _ids(1, sum(lengths)), _restarting(lengths)
    expected = _gradients(model, *(model(input_ids=d, use_cache=False).logits for d in ids.split(lengths, 1)))
    for use_cache in (False, True):
        actual = _gradients(model, model(input_ids=ids, position_ids=positions, use_cache=use_cache).logits)
        assert actual.keys() == expected.keys()
        off = sum(float((actual[n] - e).norm()) ** 2 for n, e in expected.items())
        size = sum(float(e.norm()) ** 2 for e in expected.values())
        worst = max(relative_error(actual[n], e) for n, e in expected.items())
        found["cached" if use_cache else "not cached"] = {"all": (off / size) ** 0.5, "worst": worst}
    return found


@scenario
def six_and_ten() -> Any:
    """Documents of 6 and 10 tokens at rate 4, through one layer."""
    from fsdp_sink_patches.patches.transformers._deepseek_v4_models import CSA, HCA, build

    found = {}
    ids, positions = _ids(1, 16), _restarting((6, 10))
    for name, layer in (("CSA", CSA), ("HCA", HCA)):
        model = build((layer,), compress_rates={CSA: 4, HCA: 4})
        exact = torch.cat(_alone(_exact(model), ids.split((6, 10), 1)), 1)
        found[name] = relative_error(_logits(model, ids, position_ids=positions, use_cache=False), exact)
    return found


@scenario
def bias_zeroed() -> Any:
    """The bias of the compressed entries carries the isolation: without it the row must be wrong."""
    modelling = _modelling()
    found = {}
    ids, positions = _ids(1, 16 * 6), _restarting((36, 60))
    for kind in ("CSA, all entries", "CSA, top-k", "HCA"):
        model = _build(kind)
        exact = torch.cat(_alone(_exact(model), ids.split((36, 60), 1)), 1)
        for module in model.modules():
            if isinstance(module, (modelling.DeepseekV4CSACompressor, modelling.DeepseekV4HCACompressor)):
                module.register_forward_hook(lambda _, __, out: (out[0], torch.zeros_like(out[1])))
        found[kind] = relative_error(_logits(model, ids, position_ids=positions, use_cache=False), exact)
    return found


@scenario
def forms() -> Any:
    """The same packed rows, said in other ways."""
    model = _build()
    rows = ((37, 59), (8, 88))
    ids, positions = _ids(2, 96), _restarting(*rows)
    exact = _exact(model)

    def expected(*each: Sequence[int]) -> Tensor:
        return torch.cat([torch.cat(_alone(exact, ids[i : i + 1].split(n, 1)), 1) for i, n in enumerate(each)])

    embeds = model.model.embed_tokens(ids)
    once = {"position_ids": positions[:1], "use_cache": False}
    found = {
        "two rows": (_logits(model, ids, position_ids=positions, use_cache=False), rows),
        "int32": (_logits(model, ids, position_ids=positions.int(), use_cache=False), rows),
        "one row of positions": (_logits(model, ids, **once), (rows[0], rows[0])),
        "no batch dimension": (_logits(model, ids, position_ids=positions[0], use_cache=False), (rows[0], rows[0])),
        "embeddings": (_logits(model, None, inputs_embeds=embeds, position_ids=positions, use_cache=False), rows),
        "bool mask": (
            _logits(model, ids, position_ids=positions, attention_mask=torch.ones(2, 96, dtype=torch.bool)),
            rows,
        ),
        "one row of mask": (_logits(model, ids, position_ids=positions, attention_mask=torch.ones(1, 96)), rows),
    }
    with torch.inference_mode():
        found["inference mode"] = (model(input_ids=ids, position_ids=positions).logits, rows)
    with torch.no_grad():
        placed = model.model(ids, None, positions, None, None, False).last_hidden_state
        found["placed"] = (model.lm_head(placed), rows)
    short, places = ids[:, :6], _restarting((3, 3), (2, 4))
    parts = [torch.cat(_alone(exact, short[i : i + 1].split(n, 1)), 1) for i, n in enumerate(((3, 3), (2, 4)))]
    tiny = relative_error(_logits(model, short, position_ids=places, use_cache=False), torch.cat(parts))
    return {
        "shorter than a window": tiny,
        **{name: relative_error(actual, expected(*each)) for name, (actual, each) in found.items()},
    }


@scenario
def hash_routers() -> Any:
    """Hash routers look experts up by input_ids, which have to arrive."""
    model = _build(mlp_layer_types=["hash_moe", "moe", "moe"])
    lengths = (37, 59)
    ids, positions = _ids(1, 96), _restarting(lengths)
    exact = torch.cat(_alone(_exact(model), ids.split(lengths, 1)), 1)
    return relative_error(_logits(model, ids, position_ids=positions), exact)


@scenario
def cut_rows() -> Any:
    """Rows that start in the middle of a document."""
    found: dict[str, Any] = {}
    # RoPE is relative, so a document that starts at a multiple of every rate is worth as much as one that starts at 0.
    model = _build()
    ids = _ids(1, 120)
    positions = torch.cat((torch.arange(32, 32 + 70), torch.arange(50)))[None]
    exact = torch.cat(_alone(_exact(model), ids.split((70, 50), 1)), 1)
    found["at a window's border"] = relative_error(_logits(model, ids, position_ids=positions, use_cache=False), exact)
    # Elsewhere the document that follows is as if alone, whatever stands before it.
    positions = torch.cat((torch.arange(5, 5 + 70), torch.arange(50)))[None]
    row = _logits(model, ids, position_ids=positions, use_cache=False)
    found["document after"] = relative_error(row[:, 70:], exact[:, 70:])
    found["leak"] = [
        (_logits(model, torch.cat((_ids(1, 70, seed=5), ids[:, 70:]), 1), position_ids=positions) - row)[:, 70:]
        .abs()
        .max()
        .item(),
        (_logits(model, torch.cat((ids[:, :70], _ids(1, 50, seed=5)), 1), position_ids=positions) - row)[:, :70]
        .abs()
        .max()
        .item(),
    ]
    for kind, rate in (("CSA, all entries", 4), ("HCA", 16)):
        found[kind] = _cut_entries(_build(kind).model.layers[0].self_attn, rate)
    return found


def _cut_entries(attention: Any, rate: int) -> dict[str, Any]:
    """Entries of positions 5 to 59 against those of the tokens from the first whole window on, turned by its place."""
    modelling, compressor = _modelling(), attention.compressor
    generator = torch.Generator().manual_seed(6)
    hidden = torch.randn(1, 55, 128, generator=generator)
    residual = torch.randn(1, 55, 64, generator=generator)
    skipped = -5 % rate
    with torch.no_grad():
        entries, bias = compressor(hidden, residual, torch.arange(5, 60)[None], None, 0)
        late = hidden[:, skipped:]
        expected, _ = compressor(late, residual[:, skipped:], torch.arange(late.shape[1])[None], None, 0)
        place = torch.full((1, expected.shape[2]), 5 + skipped)
        cos, sin = compressor.rotary_emb(expected, position_ids=place, layer_type="compress")
        expected = modelling.apply_rotary_pos_emb(expected, cos, sin)
    whole = expected.shape[2]
    seen = [[(5 + skipped) // rate + slot < (p + 1) // rate for slot in range(whole)] for p in range(5, 60)]
    return {
        "entries": relative_error(entries[:, :, :whole], expected),
        "seen": (bias[0, 0, :, :whole] == 0).tolist() == seen,
        "left over": bool((bias[..., whole:] == float("-inf")).all()),
    }


# --- padding -------------------------------------------------------------------------------------------------------


@scenario
def padded() -> Any:
    """One document of 150 tokens beside padding, on its real tokens."""
    found = {}
    document = _ids(1, 150)
    for kind in ("CSA, all entries", "CSA, top-k", "HCA", "mixed"):
        model = _build(kind)
        exact = _alone(_exact(model), [document])[0]
        for left, right in ((1, 0), (7, 0), (100, 0), (0, 1), (0, 100), (7, 9)):
            ids = F.pad(document, (left, right), value=PAD)
            mask = F.pad(torch.ones_like(document), (left, right))
            counted = mask.cumsum(1) - 1
            ways: dict[str, dict[str, Any]] = {"derived": {}}
            if (left, right) == (7, 0):
                ways["generate, 1"] = {"position_ids": counted.masked_fill(mask == 0, 1)}
                ways["generate, 0"] = {"position_ids": counted.masked_fill(mask == 0, 0)}
                ways["negative"] = {"position_ids": counted.masked_fill(mask == 0, -1), "attention_mask": None}
            for way, batch in ways.items():
                logits = _logits(model, ids, **{"attention_mask": mask, **batch}, use_cache=False)
                found[f"{kind}, {left} left, {right} right, {way}"] = relative_error(
                    logits[:, left : left + 150], exact
                )
    return found


@scenario
def padded_and_packed() -> Any:
    """Rows of different documents, padded on both sides, with padding at positions that would close a window."""
    model = _build()
    rows = (((0, 5), (1, 37), (1, 50), (0, 4)), ((1, 20), (1, 71), (0, 5)), ((0, 90), (1, 6)))
    ids = _ids(3, 96)
    mask = torch.tensor([[real for real, n in row for _ in range(n)] for row in rows])
    positions = torch.tensor([[i if real else 3 for real, n in row for i in range(n)] for row in rows])
    exact, parts, places = _exact(model), [], []
    for r, row in enumerate(rows):
        start = 0
        for real, n in row:
            if real:
                parts.append(_alone(exact, [ids[r : r + 1, start : start + n]])[0][0])
                places.append((r, slice(start, start + n)))
            start += n
    found = {}
    for use_cache in (False, True):
        logits = _logits(model, ids, position_ids=positions, attention_mask=mask, use_cache=use_cache)
        actual = torch.cat([logits[r, columns] for r, columns in places])
        found["cached" if use_cache else "not cached"] = relative_error(actual, torch.cat(parts))
    return found


@scenario
def masked_inside() -> Any:
    """Tokens masked inside documents (end-of-turn tokens that are the padding token too): the row without them.

    Two rows of a document that goes on over single masked tokens, runs of them and padding on both sides; then the same
    with a second document, by positions that count masked tokens and by ones that don't.
    """
    ids = _ids(2, 150)
    mask = torch.ones_like(ids)
    for row, masked in enumerate(((0, 1, 40, 77, 78, 79, 80, 147, 148, 149), (3, 50, 59, 60, 61, 100))):
        mask[row, list(masked)] = 0
    real = mask.bool()
    one, two = torch.arange(150).expand(2, -1), _restarting((90, 60), (64, 86))
    second = two != one
    counted = torch.where(second, (mask * second).cumsum(1), (mask * ~second).cumsum(1)) - 1
    # Row 0 has padding before its token, which positions that count columns would make the middle of a document.
    two = torch.where((torch.arange(2) == 0)[:, None] & ~second, two - 2, two)
    ways: dict[str, tuple[dict[str, Any], bool]] = {
        "mask": ({"attention_mask": mask}, False),
        "bool": ({"attention_mask": real}, False),
        "negative": ({"position_ids": (mask.cumsum(1) - 1).masked_fill(~real, -1)}, False),
        "packed": ({"attention_mask": mask, "position_ids": counted}, True),
        "packed, columns counted": ({"attention_mask": mask, "position_ids": two}, True),
        "packed, negative": ({"position_ids": two.masked_fill(~real, -1)}, True),
    }
    found: dict[str, Any] = {}
    for kind in _kinds():
        model = _build(kind)
        exact, errors = _exact(model), {}
        rows = [(r, [real[r]]) for r in range(2)], [(r, [real[r] & ~second[r], real[r] & second[r]]) for r in range(2)]
        expected = [
            torch.cat([_alone(exact, [ids[r : r + 1, keep]])[0][0] for r, documents in each for keep in documents])
            for each in rows
        ]
        for way, (batch, packed) in ways.items():
            logits = _logits(model, ids, use_cache=False, **batch)
            errors[way] = relative_error(logits[real], expected[packed])
        if kind in ("sliding", "mixed"):
            whole = [exact(input_ids=ids[r : r + 1, real[r]], use_cache=False).logits for r in range(2)]
            wanted = _gradients(exact, *whole)
            actual = _gradients(exact, exact(input_ids=ids, attention_mask=mask, use_cache=False).logits[real][None])
            assert actual.keys() == wanted.keys()
            errors["gradient"] = max(relative_error(actual[name], e) for name, e in wanted.items())
        found[kind] = errors
    return found


@scenario
def padding_trains() -> Any:
    """Gradients of a left-padded row, and none that is not a number."""
    model = _exact(_build())
    document = _ids(1, 100)
    expected = _gradients(model, model(input_ids=document, use_cache=False).logits)
    mask = F.pad(torch.ones_like(document), (13, 0))
    logits = model(input_ids=F.pad(document, (13, 0), value=PAD), attention_mask=mask).logits
    actual = _gradients(model, logits[:, 13:])
    assert actual.keys() == expected.keys()
    return max(relative_error(actual[name], e) for name, e in expected.items())


# --- plain documents -----------------------------------------------------------------------------------------------


@scenario
def plain() -> Any:
    """Digests of logits and of every gradient, to compare between processes."""
    found = {}
    for kind in _kinds():
        for shape in ((1, 150), (2, 67), (1, 3), (1, 1)):
            model = _build(kind)
            ids = _ids(*shape)
            ways: dict[str, dict[str, Any]] = {"not cached": {"use_cache": False}}
            if kind == "mixed":
                ones, count = torch.ones_like(ids), torch.arange(shape[1]).expand(shape)
                ways["cached"] = {}
                ways["positions"] = {"position_ids": count, "use_cache": False}
                ways["ones"] = {"attention_mask": ones, "use_cache": False}
                ways["all"] = {"attention_mask": ones, "position_ids": count}
            for way, batch in ways.items():
                logits = model(input_ids=ids, **batch).logits
                gradients = _gradients(model, logits)
                found[f"{kind}, {shape}, {way}"] = [
                    _digest(logits),
                    _digest(*gradients.values()),
                    len(gradients),
                ]
    model = _build()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = model(input_ids=_ids(2, 67), use_cache=False).logits.float()
    found["autocast"] = [_digest(logits), _digest(*_gradients(model, logits).values())]
    return found


@scenario
def unpadded_cache() -> Any:
    """Digests of prefill, a chunk and single tokens of unpadded prompts."""
    found = {}
    for kind in ("CSA, top-k", "HCA"):
        model = _build(kind).eval()
        for rows, given in ((1, False), (2, True)):
            ids = _ids(rows, 80)
            cache, start, outputs = _cache(model), 0, []
            for size in (37, 9, *(1,) * 20, 3, 11):
                batch: dict[str, Any] = {}
                if given:
                    batch["attention_mask"] = torch.ones(rows, start + size, dtype=torch.long)
                    batch["position_ids"] = torch.arange(start, start + size).expand(rows, -1)
                with torch.no_grad():
                    out = model(input_ids=ids[:, start : start + size], past_key_values=cache, use_cache=True, **batch)
                start += size
                outputs.append(out.logits)
            found[f"{kind}, {rows}, {given}"] = _digest(*outputs)
            with torch.no_grad():
                tokens = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, do_sample=False)
            found[f"{kind}, {rows}, generated"] = tokens.tolist()
    return found


# --- caches --------------------------------------------------------------------------------------------------------


@scenario
def continued() -> Any:
    """Left-padded prompts, then a chunk and single tokens, against each whole document alone in fp64."""
    found = {}
    lengths, steps = (3, 37, 50), (1,) * 18 + (5, 40, 1, 2)
    for kind in ("CSA, top-k", "HCA", "mixed"):
        model = _build(kind).eval()
        longest = max(lengths)
        documents = [_ids(1, n + sum(steps), seed=n) for n in lengths]
        exact = _alone(_exact(model), documents)
        for way in ("mask", "mask and positions", "first chunk of padding")[: None if kind == "mixed" else 1]:
            whole = torch.cat([F.pad(d, (longest - n, 0), value=PAD) for d, n in zip(documents, lengths, strict=True)])
            mask = torch.cat(
                [F.pad(torch.ones_like(d), (longest - n, 0)) for d, n in zip(documents, lengths, strict=True)]
            )
            positions = (mask.cumsum(1) - 1).masked_fill(mask == 0, 1)
            cache, start, outputs = _cache(model), 0, []
            for size in (*((20, longest - 20) if "chunk" in way else (longest,)), *steps):
                here = slice(start, start + size)
                places = {"position_ids": positions[:, here]} if "positions" in way else {}
                with torch.no_grad():
                    out = model(
                        input_ids=whole[:, here], attention_mask=mask[:, : start + size], past_key_values=cache,
                        use_cache=True, **places,
                    )  # fmt: skip
                start += size
                outputs.append(out.logits)
            logits = torch.cat(outputs, 1)
            found[f"{kind}, {way}"] = max(
                relative_error(logits[i : i + 1, longest - n :], exact[i]) for i, n in enumerate(lengths)
            )
    return found


@scenario
def generated() -> Any:
    """Greedy tokens of left-padded prompts together, and of each prompt alone."""
    model = _build().eval()
    prompts = [_ids(1, n, seed=n) for n in (3, 37, 50)]
    together = torch.cat([F.pad(p, (50 - p.shape[1], 0), value=PAD) for p in prompts])
    mask = torch.cat([F.pad(torch.ones_like(p), (50 - p.shape[1], 0)) for p in prompts])
    how = {"max_new_tokens": 40, "do_sample": False, "pad_token_id": PAD, "eos_token_id": None}
    with torch.no_grad():
        alone = [model.generate(p, **how)[0, p.shape[1] :].tolist() for p in prompts]
        row = model.generate(together, attention_mask=mask, **how)[:, 50:].tolist()
        copied = _continue_a_copy(model, together, mask)
        beams = {**how, "num_beams": 2, "max_new_tokens": 20}
        searched = [model.generate(p, **beams)[0, p.shape[1] :].tolist() for p in prompts]
        searched_together = model.generate(together, attention_mask=mask, **beams)[:, 50:].tolist()
    # Before 5.23 upstream leaves the entries of the beams where they were.
    reorders = "reorder_cache" in vars(_modelling().DeepseekV4HCACache)
    return {
        "together": row,
        "alone": alone,
        "copied": copied,
        "beams": searched_together == searched if reorders else "upstream",
    }


def _continue_a_copy(model: Any, ids: Tensor, mask: Tensor) -> float:
    """A cache that is copied goes on like the cache itself."""
    cache = _cache(model)
    model(input_ids=ids, attention_mask=mask, past_key_values=cache, use_cache=True)
    mask = F.pad(mask, (0, 1), value=1)
    next_one = {"input_ids": ids[:, -1:], "attention_mask": mask, "use_cache": True}
    second = model(past_key_values=copy.deepcopy(cache), **next_one).logits
    return float((second - model(past_key_values=cache, **next_one).logits).abs().max())


@scenario
def reused_cache() -> Any:
    """A cache that is reset starts afresh, whatever went through it: padded, then plain, then packed, then padded."""
    model = _build().eval()
    cache = _cache(model)
    found = {}
    padded = F.pad(_ids(2, 40), (5, 0), value=PAD), F.pad(torch.ones(2, 40, dtype=torch.long), (5, 0))
    for name in ("padded", "plain", "packed", "padded again"):
        ids, mask = padded if "padded" in name else (_ids(2, 45, seed=9), torch.ones(2, 45, dtype=torch.long))
        places = {"position_ids": _restarting((30, 15), (20, 25))} if name == "packed" else {}
        fresh = _cache(model)
        step = {"input_ids": ids[:, -4:], "attention_mask": F.pad(mask, (0, 4), value=1)}
        results = []
        for held in (cache, fresh):
            with torch.no_grad():
                out = model(input_ids=ids, attention_mask=mask, past_key_values=held, **places).logits
                more = out if name == "packed" else model(past_key_values=held, **step).logits
            results.append((out, more))
        found[name] = all(torch.equal(a, b) for a, b in zip(*results, strict=True))
        _empty(cache)
    return found


def _empty(cache: Any) -> None:
    cache.reset()
    for layer in cache.layers:  # some releases zero the keys, or leave what was pooled
        layer.cumulative_length = 0
        if layer.keys is not None:
            layer.keys, layer.values = layer.keys[:, :, :0], layer.values[:, :, :0]
        for name in getattr(layer, "compressed_kv", {}):
            layer.buffer_kv[name] = layer.buffer_gate[name] = layer.compressed_kv[name] = None
            layer.entry_count[name] = 0
        for name in getattr(layer, "overlap_kv", {}):
            layer.overlap_kv[name] = layer.overlap_gate[name] = None


@scenario
def refused() -> Any:
    """What can't be computed, and what is said."""
    model = _build().eval()
    ids = _ids(2, 40)
    ones = torch.ones_like(ids)

    def after(**batch: Any) -> Callable[[], Any]:
        cache = _cache(model)
        model(input_ids=ids, past_key_values=cache, use_cache=True, **batch)
        return lambda: model(input_ids=ids[:, :1], past_key_values=cache, use_cache=True)

    left, right = ones.clone(), ones.clone()
    left[0, :9], right[0, 30:] = 0, 0
    gapped = ones.clone()
    gapped[0, 9:12] = 0
    compressor = model.model.layers[2].self_attn.compressor
    hidden = torch.zeros(1, 20, 128)
    turn = torch.ones_like(ids[:, :12])
    right_turn, left_turn, apart = turn.clone(), turn.clone(), turn.clone()
    right_turn[0, 9:], left_turn[0, :3], apart[0, 4:6] = 0, 0, 0

    def turns(first: Tensor, then: Tensor | None, **batch: Any) -> Callable[[], Any]:
        """A second turn of 12 tokens after a first of 40."""
        cache = _cache(model)
        padded = {} if first is ones else {"attention_mask": first}
        model(input_ids=ids, past_key_values=cache, use_cache=True, **padded)
        if then is not None:
            batch["attention_mask"] = torch.cat((first, then), 1)
        return lambda: model(input_ids=ids[:, :12], past_key_values=cache, use_cache=True, **batch)

    count = torch.arange(12).expand(2, -1)
    on = count + left.sum(1, keepdim=True)

    def forced(name: str) -> Callable[[], Any]:
        def call() -> None:
            other = copy.deepcopy(model)
            for module in other.modules():
                if hasattr(module, "config"):
                    module.config._attn_implementation_internal = name
            other(input_ids=ids)

        return call

    with torch.no_grad():
        return {
            "packed": _raised(after(position_ids=_restarting((10, 30), (20, 20)))),
            "right padded": _raised(after(attention_mask=right)),
            "gapped": _raised(after(attention_mask=gapped)),
            "split": _raised(lambda: compressor(hidden, hidden, torch.arange(40)[None], None, 2)),
            "cut": _raised(after(position_ids=torch.arange(5, 45).expand(2, -1))),
            "left padded, no mask": _raised(after(attention_mask=left)),
            "flex": _raised(forced("flex_attention")),
            "flash": _raised(forced("flash_attention_2")),
            "block mask": _raised(lambda: model(input_ids=ids, attention_mask=object(), use_cache=False)),
            "positions": _raised(lambda: model(input_ids=ids, position_ids=torch.zeros(3, 40).long())),
            "mask": _raised(lambda: model(input_ids=ids, attention_mask=torch.ones(2, 39))),
            "nothing": _raised(lambda: model()),
            "turn padded right": _raised(turns(left, right_turn)),
            "turn padded left": _raised(turns(left, left_turn)),
            "turn with a gap": _raised(turns(left, apart)),
            "turn restarts": _raised(turns(left, turn, position_ids=count)),
            "turn restarts, no mask": _raised(turns(left, None, position_ids=count)),
            "turn jumps, no mask": _raised(turns(left, None, position_ids=on + (count > 5))),
            "turn": _raised(turns(left, turn, position_ids=on)),
            "turn, no mask": _raised(turns(left, None, position_ids=on)),
            "upstream's turn padded left": _raised(turns(ones, left_turn)),
            "upstream's turn with a gap": _raised(turns(ones, apart)),
            "upstream's turn": _raised(turns(ones, turn)),
            "cache stayed empty": _raised(
                lambda: model(input_ids=ids[:, :1], attention_mask=ones, past_key_values=_cache(model), use_cache=True)
            ),
        }


# --- masks ---------------------------------------------------------------------------------------------------------


@scenario
def unregistered() -> Any:
    """An attention function without a mask function gets no mask from transformers, and with it no bias."""
    modelling = _modelling()
    modelling.ALL_ATTENTION_FUNCTIONS.register("like_eager", modelling.eager_attention_forward)
    lengths = (37, 59)
    ids, positions = _ids(1, 96), _restarting(lengths)
    model = _build()
    exact = _exact(model)
    packed, plain = torch.cat(_alone(exact, ids.split(lengths, 1)), 1), _alone(exact, [ids])[0]
    for module in model.modules():
        if hasattr(module, "config"):
            module.config._attn_implementation_internal = "like_eager"
    model.eval()
    with torch.no_grad():
        cache = _cache(model)
        out = model(input_ids=ids[:, :50], past_key_values=cache, use_cache=True)
        more = model(input_ids=ids[:, 50:], past_key_values=cache, use_cache=True).logits
    return {
        "packed": relative_error(_logits(model, ids, position_ids=positions, use_cache=False), packed),
        "plain": relative_error(_logits(model, ids, use_cache=False), plain),
        "cached": relative_error(torch.cat((out.logits, more), 1), plain),
    }


@scenario
def prepared_masks() -> Any:
    """A mask that the caller made is used as it is, and windows follow positions."""
    model = _build()
    lengths = (37, 59)
    ids, positions = _ids(1, 96), _restarting(lengths)
    exact = torch.cat(_alone(_exact(model), ids.split(lengths, 1)), 1)
    document = torch.arange(2).repeat_interleave(torch.tensor(lengths))
    columns = torch.arange(96)
    distance = columns[:, None] - columns
    seen = (document[:, None] == document) & (distance >= 0) & (distance < 16)
    mask = torch.where(seen, 0.0, torch.finfo(torch.float32).min)[None, None]
    ways = {"tensor": mask, "dict": {"sliding_attention": mask}, "dict of None": {"sliding_attention": None}}
    return {
        way: relative_error(_logits(model, ids, position_ids=positions, attention_mask=m, use_cache=False), exact)
        for way, m in ways.items()
    }


@scenario
def mask_dtype() -> Any:
    """The mask's dtype where embeddings come in another than their weight's, as from an FSDP unit that casts them."""
    exact = _exact(_build())
    exact.model.embed_tokens.float()
    exact.model.embed_tokens.register_forward_hook(lambda _, __, embeds: embeds.double())
    seen = set()
    for layer in exact.model.layers:
        layer.self_attn.register_forward_pre_hook(
            lambda _, __, named: seen.add(str(named["attention_mask"].dtype)), with_kwargs=True
        )
    exact(input_ids=_ids(1, 96), position_ids=_restarting((37, 59)), use_cache=False)
    return sorted(seen)


# --- what jobs do with a model -------------------------------------------------------------------------------------


@scenario
def checkpointed() -> Any:
    """Activation checkpointing still happens, its recompute gives the same bits, and a rate is laid out once a step."""
    from fsdp_sink_patches.patches.transformers import _deepseek_v4_packing as packing

    found: dict[str, Any] = {}
    ids, positions = _ids(1, 96), _restarting((37, 59))
    model = _build()
    expected = _gradients(model, model(input_ids=ids, position_ids=positions).logits)
    attended: list[int] = []
    laid: list[int] = []
    lay_out = packing.compressed_layout

    def counted(position_ids: Tensor, rate: int) -> Any:
        laid.append(rate)
        return lay_out(position_ids, rate)

    for layer in model.model.layers:
        layer.self_attn.q_a_proj.register_forward_hook(lambda *_: attended.append(1))
    for reentrant in (False, True):
        attended.clear()
        laid.clear()
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        model.enable_input_require_grads()
        packing.compressed_layout = counted
        try:
            actual = _gradients(model, model(input_ids=ids, position_ids=positions).logits)
        finally:
            packing.compressed_layout = lay_out
        found[f"reentrant={reentrant}"] = {
            "attention calls": len(attended),
            "layouts": sorted(laid),
            "equal": actual.keys() == expected.keys() and all(torch.equal(actual[n], e) for n, e in expected.items()),
        }
    gc.collect()
    found["remembered after"] = len(packing._remembered)
    written = torch.arange(96)[None]
    counts = [packing.windows(written, 4).layout.live.sum().item()]
    for length in (48, 24, 60):
        written.copy_(F.pad(torch.arange(length), (0, 96 - length), value=-1)[None])
        counts.append(packing.windows(written, 4).layout.live.sum().item())
        packing.windows(written, 16)
    found["written to"] = {"entries": counts, "remembered": len(packing._remembered[written][1])}
    return found


@scenario
def compiled() -> Any:
    """One graph of a compressed attention layer, forward and backward."""
    found: dict[str, Any] = {}
    positions = _restarting((37, 59))
    for kind, backend in (("CSA, top-k", "aot_eager"), ("HCA", "eager")):
        attention = _build(kind).model.layers[0].self_attn
        rotary = attention.compressor.rotary_emb
        hidden = torch.randn(1, 96, 128, generator=torch.Generator().manual_seed(8))
        tables = {label: rotary(hidden, position_ids=positions, layer_type=label) for label in ("main", "compress")}
        mask = torch.zeros(1, 1, 96, 96)
        results = []
        for function in (attention, torch.compile(attention, backend=backend, fullgraph=True)):
            x = hidden.clone().requires_grad_()
            out = function(x, position_embeddings=tables, position_ids=positions, attention_mask=mask)[0]
            out.square().sum().backward()
            results.append((out.detach(), x.grad))
        found[kind] = max(relative_error(a, b) for a, b in zip(*reversed(results), strict=True))
        torch._dynamo.reset()
    return found


@scenario
def compiled_model() -> Any:
    """The whole model without experts, whose loops are not for dynamo: one graph; with a cache, graphs that know what
    may be continued."""
    from fsdp_sink_patches.patches.transformers._deepseek_v4_models import CSA, SLIDING, build

    lengths = (37, 59)
    ids, positions = _ids(1, 96), _restarting(lengths)
    found: dict[str, Any] = {}
    with torch.no_grad():
        for layers, use_cache in (((SLIDING, CSA), False), ((CSA,), True)):
            model = build(layers)
            for layer in model.model.layers:
                layer.mlp.forward = lambda x, input_ids=None: x
            expected = torch.cat(_alone(model, ids.split(lengths, 1)), 1)
            graph = torch.compile(model.model, backend="eager", fullgraph=not use_cache)
            out = graph(input_ids=ids, position_ids=positions, use_cache=use_cache)
            found[f"use_cache={use_cache}"] = relative_error(model.lm_head(out.last_hidden_state), expected)
        cache = out["cache" if "cache" in out else "past_key_values"]
        found["continued"] = _raised(lambda: model(input_ids=ids[:, :1], past_key_values=cache))
    return found


@scenario
def no_copy_to_the_host() -> Any:
    """On meta, where nothing has a value to look at: packed and padded rows, forward and backward."""
    model = _build().to("meta")
    for layer in model.model.layers:
        layer.mlp.forward = lambda x, input_ids=None: x
    ids = torch.zeros(2, 96, dtype=torch.long, device="meta")
    for batch in ({"position_ids": ids.clone()}, {"attention_mask": ids.clone()}, {}):
        model(input_ids=ids, use_cache=False, **batch).logits.sum().backward()
    return "none"


@scenario
def pooled_in_fp32() -> Any:
    """bf16 activations through a compressor: the error of its entries against fp64, by setting; and packed logits."""
    from fsdp_sink_patches import settings

    found: dict[str, Any] = {}
    for kind in ("CSA, all entries", "HCA"):
        compressor = _build(kind).model.layers[0].self_attn.compressor
        hidden = torch.randn(1, 96, 128, generator=torch.Generator().manual_seed(8)).bfloat16()
        residual = torch.randn(1, 96, 64, generator=torch.Generator().manual_seed(9)).bfloat16()
        exact = copy.deepcopy(compressor)
        for parameter_name, parameter in compressor.named_parameters():
            if parameter_name.endswith("proj.weight"):
                parameter.data = parameter.data.bfloat16()
        for parameter, low in zip(exact.parameters(), compressor.parameters(), strict=True):
            parameter.data = low.data.double()
        positions = torch.arange(96)[None]
        errors = {}
        with torch.no_grad():
            expected = exact(hidden.double(), residual.double(), positions, None, 0)[0]
            for value in ("activation", "fp32"):
                with settings.using(pooling_dtype=value):
                    entries = compressor(hidden, residual, positions, None, 0)[0]
                errors[value] = relative_error(entries, expected)
                errors[f"{value} dtype"] = str(entries.dtype)
        found[kind] = errors
    model = _build().eval()
    prompts = F.pad(_ids(2, 45), (5, 0), value=PAD)
    mask = F.pad(torch.ones(2, 45, dtype=torch.long), (5, 0))
    exact_logits = _alone(_exact(model), [_ids(2, 45)])[0]
    with settings.using(pooling_dtype="fp32"), torch.no_grad():
        found["padded logits"] = relative_error(_logits(model, prompts, attention_mask=mask)[:, 5:], exact_logits)
        cache = _cache(model)
        plain = model(input_ids=_ids(2, 45)[:, :30], past_key_values=cache, use_cache=True)
        more = model(input_ids=_ids(2, 45)[:, 30:], past_key_values=cache, use_cache=True).logits
        found["cached logits"] = relative_error(torch.cat((plain.logits, more), 1), exact_logits)
        compressor = model.model.layers[1].self_attn.compressor
        compressor.kv_proj = torch.nn.Sequential(compressor.kv_proj)
        found["adapter"] = _raised(lambda: model(input_ids=prompts, use_cache=False))
    with settings.using(pooling_dtype="fp32"), torch.autocast("cpu", dtype=torch.bfloat16):
        found["autocast"] = str(_build("HCA")(input_ids=prompts, use_cache=False).logits.dtype)
    return found


@scenario
def validated() -> Any:
    from fsdp_sink_patches import _registry

    measured: Any = _registry.module(ID)
    measured = measured.validate("cpu")
    return {"right": measured.right, "errors": dict(measured.errors)}


@scenario
def timed() -> Any:
    """The model that the validation times, which a card alone builds, on a short row."""
    from fsdp_sink_patches.patches.transformers import _deepseek_v4_models as models
    from fsdp_sink_patches.patches.transformers import _deepseek_v4_packing_validation as validation

    model = models.build(validation.LAYERS, **validation.WIDE)
    ids, positions = validation.packed((130, 70), model.config.vocab_size, "cpu")
    with torch.no_grad():
        return list(model(input_ids=ids, position_ids=positions, use_cache=False).logits.shape)


@scenario
def held() -> Any:
    """That the patch is where it should be, and goes without a trace."""
    modelling = _modelling()
    owners = [modelling.DeepseekV4Model, modelling.DeepseekV4HCACompressor, modelling.DeepseekV4CSACompressor]
    owners.append(modelling.DeepseekV4Indexer)
    ours = [owner.forward for owner in owners]
    fsdp_sink_patches.unapply(ID)
    try:
        return all(owner.forward is mine.__wrapped__ for owner, mine in zip(owners, ours, strict=True))
    finally:
        fsdp_sink_patches.apply(ID, allow_drift=[ID])


if __name__ == "__main__":
    main()
