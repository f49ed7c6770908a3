"""Cross-entropy and log-probabilities of a linear head, a few rows of logits at a time."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from fsdp_sink_patches.ops.chunked_loss import _libraries, _op, _tiles


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    bias: Tensor | None = None,
    chunk_size: int | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    softcap: float | None = None,
    temperature: float | Tensor = 1.0,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    token_weights: Tensor | None = None,
    recompute: bool | None = None,
    backend: str | None = None,
) -> Tensor:
    """``F.cross_entropy(hidden @ weight.T + bias, labels)`` without the logits ``[tokens, vocab]``.

    The loss of a token is ``-(1 - label_smoothing) log p_label - label_smoothing mean_j(log p_j) + z_loss * lse^2``,
    times its weight, where ``p = softmax(softcap * tanh(logits / softcap) / temperature)`` and ``lse`` belongs to the
    same softmax. Labels are not shifted here; see :func:`shift_labels`.

    **Cost**, in matmuls of ``2 * tokens * vocab * hidden`` flops each: 1 without gradients. With them, the backward
    computes the logits again: 4 in all with a trainable weight, 3 with a frozen one, and nothing large is kept between
    forward and backward. Where the reduction is a scalar and the weight is frozen, the gradient is computed in the
    forward instead: 2 in all. ``recompute=False`` does that with a trainable weight too: 3 instead of 4, for an fp32
    copy of the weight's gradient (``4 * vocab * hidden`` bytes) that lives from forward to backward.

    Logits, softmax and sums are fp32 (fp64 for fp64) whatever the dtype of the weights; the weight's gradient is summed
    in fp32 over all tokens and rounded once.

    Args:
        hidden: ``[..., hidden]``, floating point; any strides. fp32 under autocast is cast to autocast's dtype, with
            ``weight`` and ``bias``, as a linear layer does.
        weight: ``[vocab, hidden]`` in hidden's dtype, as in ``nn.Linear``. A DTensor is gathered once and its gradient
            averaged over the ranks of its mesh and sharded again, which is what FSDP2 does for a parameter in the
            forward of its own module (there it is a plain tensor already). Each rank is taken to hold other tokens.
        labels: ``[...]``, int64 or int32. One that is neither ``ignore_index`` nor in the vocabulary raises on the
            CPU; on a GPU and under torch.compile, where looking would wait for the device, its loss and its gradients
            are NaN.
        bias: ``[vocab]``, or None.
        chunk_size: at most ``chunk_size * vocab`` logits are there at once. None is 16 Mi logits (64 MiB in fp32), and
            at least 512 rows where the gradient is computed in the forward.
        ignore_index: tokens with this label count for nothing.
        reduction: ``"mean"`` over the tokens that count, or over their weights; ``"sum"``; or ``"none"``, the loss of
            each token with 0 where it is ignored. With tokens spread over ranks, use ``"sum"`` and divide by the tokens
            of all ranks.
        softcap: caps logits, before the temperature; None is off.
        temperature: divides logits; a number, or a tensor like ``labels`` with one for each token (a batch of samples
            drawn at several). One that is not above 0 raises on the CPU and gives NaN on a GPU, as labels do.
        label_smoothing: in [0, 1], as in ``F.cross_entropy``.
        z_loss: weight of ``lse^2`` (PaLM, arXiv 2204.02311), 0 or more.
        token_weights: like ``labels``, floating point; differentiable. Weights of ignored tokens are not read. If all
            are 0, so is the mean.
        recompute: whether the backward computes the logits again; None chooses as said above.
        backend: ``"torch"``, ``"liger"``, ``"cut-cross-entropy"`` or None, which is ``"torch"``: neither library keeps
            fp32 logits and fp32 sums for half precision, so none is taken unasked. :func:`backends` says what is here.

    Returns:
        fp32 (fp64 for fp64): a scalar, or ``[...]`` with ``reduction="none"``. With nothing to count it is 0, and so
        are the gradients. A second derivative raises.

    Raises:
        ValueError: an argument does not fit, or the named backend cannot compute this exactly as asked.
    """
    if reduction not in ("mean", "sum", "none"):
        raise _refusal("reduction", repr(reduction), "'mean', 'sum' or 'none'", "name one of them")
    if not 0 <= label_smoothing <= 1:
        raise _refusal("label_smoothing", label_smoothing, "a number in [0, 1]", "0 turns it off")
    if not (0 <= z_loss < math.inf):
        raise _refusal("z_loss", z_loss, "a finite number, 0 or more", "0 turns it off")
    hidden, weight, bias, ids, counted, coolness = _prepare(
        hidden, weight, labels, bias, chunk_size, ignore_index, softcap, temperature
    )
    weights = counted.to(_tiles.accumulator(hidden.dtype))
    if token_weights is not None:
        if token_weights.shape != labels.shape or not token_weights.dtype.is_floating_point:
            raise _refusal(
                "token_weights", f"{token_weights.dtype} {list(token_weights.shape)}",
                f"floating point {list(labels.shape)}, one for each label", "pass one weight for each label",
            )  # fmt: skip
        _same_device("token_weights", token_weights, hidden)
        # not a product: the weight of an ignored token may be NaN
        weights = torch.where(counted, token_weights.reshape(-1).to(weights.dtype), 0)
    if backend not in (None, "torch"):
        return _libraries.compute(
            backend, hidden, weight, ids, counted, bias=bias, reduction=reduction, softcap=softcap,
            cooled=coolness is not None, label_smoothing=label_smoothing, z_loss=z_loss,
            weighted=token_weights is not None, shape=labels.shape,
        )  # fmt: skip
    needs = [torch.is_grad_enabled() and x is not None and x.requires_grad for x in (hidden, weight, bias)]
    if recompute is None:
        recompute = needs[1] or not any(needs) or reduction == "none" or weights.requires_grad
    elif not recompute and (reduction == "none" or weights.requires_grad):
        raise _refusal(
            "recompute", f"False with reduction {reduction!r}{' and trained token_weights' * weights.requires_grad}",
            "a scalar reduction and weights that are not trained: only then is the gradient known in the forward",
            "leave recompute at None",
        )  # fmt: skip
    chunk = _tiles.default_chunk(weight.shape[0], not recompute) if chunk_size is None else chunk_size
    shaping = (chunk, float(softcap or 0))
    if not recompute:
        summed = _op.linear_loss(
            hidden, weight, bias, ids, coolness, weights, float(label_smoothing), float(z_loss), *shaping, *needs
        )[0]
    else:
        found = _op.logit_statistics(hidden, weight, bias, ids, coolness, *shaping, False)
        losses = torch.where(counted, _tiles.loss_of(found, label_smoothing, z_loss)[0], 0) * weights
        if reduction == "none":
            return losses.view(labels.shape)
        summed = losses.sum()
    return summed if reduction == "sum" else _divide(summed, weights)


def linear_log_probs(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    bias: Tensor | None = None,
    chunk_size: int | None = None,
    ignore_index: int = -100,
    softcap: float | None = None,
    temperature: float | Tensor = 1.0,
    with_entropy: bool = True,
) -> tuple[Tensor, Tensor] | Tensor:
    """Log-probabilities of the labels and entropies of their distributions, without the logits ``[tokens, vocab]``.

    Both carry gradients; the backward computes the logits again (4 matmuls in all with a trainable weight, 3 with a
    frozen one). Arguments, dtypes and errors are those of :func:`linear_cross_entropy`.

    Returns:
        ``(log_probs, entropies)``, each ``[...]`` in fp32 (fp64 for fp64); ``log_probs`` alone without
        ``with_entropy``. A log-probability is never above 0; where the label is ``ignore_index`` it is 0, without
        gradient. Entropies, in nats, need no label: every token has one.
    """
    hidden, weight, bias, ids, counted, coolness = _prepare(
        hidden, weight, labels, bias, chunk_size, ignore_index, softcap, temperature
    )
    chunk = _tiles.default_chunk(weight.shape[0], False) if chunk_size is None else chunk_size
    found = _op.logit_statistics(hidden, weight, bias, ids, coolness, chunk, float(softcap or 0), bool(with_entropy))
    log_probs = torch.where(counted, found[_tiles.LOG_PROB], 0).view(labels.shape)
    return (log_probs, found[_tiles.ENTROPY].view(labels.shape)) if with_entropy else log_probs


def shift_labels(
    tokens: Tensor,
    position_ids: Tensor | None = None,
    *,
    group: dist.ProcessGroup | None = None,
    ignore_index: int = -100,
) -> Tensor:
    """The label of each position: the token after it, in its own document, even if another rank holds that token.

    Args:
        tokens: ``[..., seqlen]``, integers: ids, or labels that already say what is ignored.
        position_ids: like ``tokens``. Where the next position is not the present one plus 1, a document ends and the
            label is ``ignore_index``. None: each row is one document.
        group: the sequence-parallel group if each rank holds a contiguous part of every row, in rank order; the first
            token and position of each part are exchanged (one all-gather). All ranks call this with the same shape.
            Without it a rank's last label is ``ignore_index``: a loss over parts that were shifted after the split
            misses a label a rank, or worse takes one from the row's start (verl #3512, #3723). Zigzag splits need
            labels that are shifted before the split.

    Returns:
        Like ``tokens``; what follows the last position of a row is ``ignore_index``.

    Raises:
        ValueError: shapes or dtypes do not fit.
    """
    given = [tokens] if position_ids is None else [tokens, position_ids]
    for name, x in zip(("tokens", "position_ids"), given, strict=False):
        if x.dim() == 0 or x.shape != tokens.shape or x.dtype not in (torch.int64, torch.int32):
            raise ValueError(
                f"shift_labels: {name} is {x.dtype} {list(x.shape)}; expected integers {list(tokens.shape)}, at least "
                "one-dimensional: pass the ids and positions of the same tokens"
            )
        if x.shape[-1] == 0:
            raise ValueError(f"shift_labels: {name} has no token; expected at least one on every rank: pad the row")
    heads = torch.stack([x[..., 0].to(torch.int64) for x in given])
    last = group is None or dist.get_rank(group) == dist.get_world_size(group) - 1
    following = heads
    if group is not None:
        parts = [torch.empty_like(heads) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, heads.contiguous(), group=group)
        following = parts[(dist.get_rank(group) + 1) % len(parts)]
    shifted = [torch.cat([x[..., 1:], f.unsqueeze(-1).to(x.dtype)], -1) for x, f in zip(given, following, strict=True)]
    ends = torch.zeros_like(tokens, dtype=torch.bool)
    if last:
        ends[..., -1] = True
    if position_ids is not None:
        ends |= shifted[1] != position_ids + 1
    return shifted[0].masked_fill(ends, ignore_index)


def _divide(summed: Tensor, weights: Tensor) -> Tensor:
    """The mean over ``weights``; 0 where nothing counts. Weights that cancel out give an infinity, not a number that
    looks like a loss."""
    return summed / torch.where(weights.count_nonzero() > 0, weights.sum(), 1)


def _prepare(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    bias: Tensor | None,
    chunk_size: int | None,
    ignore_index: int,
    softcap: float | None,
    temperature: float | Tensor,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor, Tensor, Tensor | None]:
    """Look at every argument; then ``hidden`` ``[tokens, h]``, ``weight`` and ``bias`` as plain tensors, ids (0 where
    ignored), which tokens count, and inverse temperatures if any, each ``[tokens]``."""
    if chunk_size is not None and (
        isinstance(chunk_size, bool) or not isinstance(chunk_size, int | torch.SymInt) or chunk_size < 1
    ):
        raise _refusal("chunk_size", repr(chunk_size), "an int of at least 1", "None chooses")
    if softcap is not None and not 0 < softcap < math.inf:
        raise _refusal("softcap", softcap, "a positive number", "None turns it off")
    for name, own in (("hidden", hidden), ("labels", labels)):
        if isinstance(own, DTensor):
            raise _refusal(
                name, f"a DTensor placed {own.placements}", "this rank's own tokens", f"pass {name}.to_local()"
            )
    if hidden.dim() < 1 or weight.dim() != 2 or hidden.shape[-1] != weight.shape[1] or weight.shape[0] == 0:
        raise _refusal(
            "hidden and weight", f"{list(hidden.shape)} and {list(weight.shape)}", "[..., hidden] and [vocab, hidden]",
            "pass the last hidden states and the head's weight as nn.Linear keeps it",
        )  # fmt: skip
    if labels.shape != hidden.shape[:-1] or labels.dtype not in (torch.int64, torch.int32):
        raise _refusal(
            "labels", f"{labels.dtype} {list(labels.shape)}", f"int64 {list(hidden.shape[:-1])}",
            "pass one label for each hidden state",
        )  # fmt: skip
    if bias is not None and bias.shape != weight.shape[:1]:
        raise _refusal("bias", list(bias.shape), list(weight.shape[:1]), "pass one bias for each row of the weight")
    for name, x in (("weight", weight), ("labels", labels), ("bias", bias)):
        _same_device(name, x, hidden)
    half = None
    if torch.is_autocast_enabled(hidden.device.type):
        half = torch.get_autocast_dtype(hidden.device.type)
        if hidden.dtype != torch.float64:
            hidden = hidden.to(half)
    head: list[Tensor | None] = []
    for name, x in (("weight", weight), ("bias", bias)):
        # a DTensor is a parameter as its optimizer keeps it, and is cast before it is gathered, as FSDP2 does
        castable = isinstance(x, DTensor) or (half is not None and x is not None and x.dtype != torch.float64)
        if x is not None and x.dtype != hidden.dtype and not castable:
            raise _refusal(
                f"hidden and {name}", f"{hidden.dtype} and {x.dtype}", "one floating dtype",
                f"cast one of them; hidden.float() keeps an fp32 {name} exact",
            )  # fmt: skip
        head.append(_gather(name, x, hidden.dtype) if isinstance(x, DTensor) else x)
    if not hidden.dtype.is_floating_point or hidden.dtype.itemsize < 2:
        raise _refusal("hidden", hidden.dtype, "fp64, fp32, bf16 or fp16", "cast it")
    plain_weight, plain_bias = (None if x is None else x.to(hidden.dtype) for x in head)
    assert plain_weight is not None
    flat = labels.reshape(-1).to(torch.int64)
    counted = flat != ignore_index
    ids = torch.where(counted, flat, 0)
    if ids.device.type == "cpu" and not torch.compiler.is_compiling():
        outside = ids[(ids < 0) | (ids >= weight.shape[0])]
        if outside.numel():
            raise _refusal(
                "labels", f"{outside[0].item()} among them", f"{ignore_index} (ignored) or 0 to {weight.shape[0] - 1}",
                "look for a tokenizer with more ids than the head has rows, or another ignore_index",
            )  # fmt: skip
    coolness = _coolness(temperature, labels, hidden)
    return hidden.reshape(-1, hidden.shape[-1]), plain_weight, plain_bias, ids, counted, coolness


def _coolness(temperature: float | Tensor, labels: Tensor, hidden: Tensor) -> Tensor | None:
    """Inverse temperatures ``[tokens]`` in the accumulator's dtype; None where logits stay as they are."""
    dtype = _tiles.accumulator(hidden.dtype)
    if not isinstance(temperature, Tensor):
        if not 0 < temperature < math.inf:
            raise _refusal("temperature", temperature, "a positive number", "1.0 leaves logits as they are")
        if temperature == 1:
            return None
        return torch.full((labels.numel(),), 1 / temperature, dtype=dtype, device=hidden.device)
    if temperature.shape != labels.shape or not temperature.dtype.is_floating_point or temperature.requires_grad:
        trained = ", trained" * temperature.requires_grad
        raise _refusal(
            "temperature", f"{temperature.dtype} {list(temperature.shape)}{trained}",
            f"a number, or floating point {list(labels.shape)} that is not trained",
            "expand one temperature a sample to its tokens; detach it",
        )  # fmt: skip
    _same_device("temperature", temperature, hidden)
    flat = temperature.reshape(-1).to(dtype)
    if flat.device.type == "cpu" and not torch.compiler.is_compiling() and not bool((flat > 0).all()):
        raise _refusal("temperature", f"{flat.min().item()} among them", "positive numbers", "clamp it")
    return torch.where(flat > 0, 1 / flat, float("nan"))


class _Gather(torch.autograd.Function):
    """All of a sharded parameter, from one all-gather in the dtype it is used in; backward, the mean over the ranks in
    fp32."""

    @staticmethod
    def forward(ctx, parameter, dtype):  # type: ignore[no-untyped-def]
        ctx.parameter_dtype, ctx.mesh, ctx.placements = parameter.dtype, parameter.device_mesh, parameter.placements
        return parameter.to(dtype).full_tensor()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        wide = grad.to(torch.promote_types(ctx.parameter_dtype, torch.float32)) / ctx.mesh.size()
        partial = DTensor.from_local(wide, ctx.mesh, [Partial()] * ctx.mesh.ndim, run_check=False)
        return partial.redistribute(placements=ctx.placements).to(ctx.parameter_dtype), None


def _gather(name: str, parameter: DTensor, dtype: torch.dtype) -> Tensor:
    sharded = [p for p in parameter.placements if not isinstance(p, Replicate)]
    if len(sharded) > 1 or not all(type(p) is Shard for p in sharded):
        raise _refusal(
            name, f"a DTensor placed {parameter.placements}",
            "one Shard, and Replicate on the other mesh dimensions (FSDP2, HSDP): on any other mesh it is not known "
            "which ranks hold the same tokens",
            f"pass {name}.full_tensor(grad_placements=...) with the reduction that is right there",
        )  # fmt: skip
    gathered: Any = _Gather.apply(parameter, dtype)  # type: ignore[no-untyped-call]
    return gathered  # type: ignore[no-any-return]


def _same_device(name: str, x: Tensor | None, hidden: Tensor) -> None:
    if x is not None and x.device != hidden.device:
        raise _refusal(name, f"on {x.device}", f"{hidden.device}, where hidden is", "move it there")


def _refusal(name: str, found: object, expected: object, advice: str) -> ValueError:
    return ValueError(f"ops.chunked_loss: {name} is {found}; expected {expected}: {advice}")
