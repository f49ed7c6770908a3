"""Logits tile by tile: the statistics of each row, and the gradients that need only those statistics.

A row of logits ``z`` enters a loss through four numbers: the log-probability of its label, its log-sum-exp, its mean
and its entropy. Over blocks of the vocabulary they join like the parts of an attention softmax, so a row is never
needed whole. And whatever the loss does with them, the gradient of a logit is

    dz_j = p_j * (a + e * (z_j - peak)) + c + [j is the label] * b,      p_j = exp(z_j - peak - log_sum)

with four coefficients a row (:func:`coefficients`), so the backward is one elementwise pass over a recomputed tile.

``z`` is ``softcap * tanh(raw / softcap) / temperature`` of the raw logits ``hidden @ weight.T + bias``; the cap belongs
to the model and comes first, the temperature to the sampler.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

LOG_PROB, LSE, MEAN, ENTROPY, PEAK, LOG_SUM = range(6)
"""Rows of the statistics ``[6, tokens]``; the last two are ``lse`` in two parts, of which differences keep their
digits."""

LOGITS_AT_ONCE = 2**24
"""64 MiB in fp32: at large vocabularies a hundredth of what a batch has, and enough work for every launch."""

ROWS_AT_ONCE = 512
"""Rows a tile has at least where it holds whole rows, so that the product with the weight has enough of them."""

VOCAB_BLOCK = 4096
"""Vocabulary rows a tile has at least (where there are as many): wide enough for a matmul to run at full rate, and the
fewer the blocks, the less often the gradient of ``hidden`` is read and written."""


@dataclass(frozen=True)
class Options:
    """What shapes the logits, and how many of them may be there at once: ``chunk`` rows of the whole vocabulary."""

    chunk: int
    softcap: float  # 0 is off
    entropy: bool


def default_chunk(vocab: int, whole_rows: bool) -> int:
    """Rows of the whole vocabulary whose logits may be there at once, for who does not say."""
    return max(ROWS_AT_ONCE if whole_rows else 1, -(-LOGITS_AT_ONCE // vocab))


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """The dtype of logits, statistics and sums: fp32, or fp64 for fp64."""
    return torch.promote_types(dtype, torch.float32)


def statistics(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, coolness: Tensor | None, options: Options
) -> Tensor:
    """``[6, tokens]`` for ``hidden`` ``[tokens, h]``, ``weight`` ``[vocab, h]``, ``bias`` ``[vocab]``, ``labels``
    int64 ``[tokens]`` and ``coolness``, the inverse temperatures in the accumulator's dtype ``[tokens]``. A label
    outside the vocabulary has the log-probability NaN. One matmul in all."""
    state = hidden.new_empty(5, hidden.shape[0], dtype=accumulator(hidden.dtype))
    blocks, rows = _grid(hidden, weight, options)
    logits = _Logits(hidden, weight, bias, coolness, rows, blocks.step, options)
    for first in blocks:
        for tile in _slices(hidden.shape[0], rows):
            _update(state[:, tile], logits.tile(tile, first), labels[tile], _of(coolness, tile), first, options)
    return _finish(state, labels, weight.shape[0])


def gradients(
    dstatistics: Tensor,
    found: Tensor,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    coolness: Tensor | None,
    options: Options,
    needs: tuple[bool, bool, bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of ``hidden``, ``weight`` and ``bias`` (None where not needed), in their dtypes, from those of the
    statistics.

    The logits are computed again. The vocabulary is the outer loop: a block of the weight's gradient is complete when
    its tokens are through, so there is no fp32 copy of the whole of it.
    """
    need_hidden, need_weight, need_bias = needs
    total, vocab = accumulator(hidden.dtype), weight.shape[0]
    blocks, rows = _grid(hidden, weight, options)
    row_terms = coefficients(dstatistics, found, labels, vocab, coolness)
    dhidden = hidden.new_zeros(hidden.shape, dtype=total) if need_hidden else None
    dweight = torch.empty_like(weight, memory_format=torch.contiguous_format) if need_weight else None
    dbias = bias.new_zeros(bias.shape, dtype=total) if need_bias and bias is not None else None
    logits = _Logits(hidden, weight, bias, coolness, rows, blocks.step, options)

    def add_block(first: int) -> None:
        block = slice(first, min(first + blocks.step, vocab))
        dblock = hidden.new_zeros(block.stop - first, hidden.shape[1], dtype=total) if need_weight else None
        for tile in _slices(hidden.shape[0], rows):
            z = logits.tile(tile, first)
            dz = _differentiate(
                z, labels[tile], _of(coolness, tile), first, found[:, tile], row_terms[:, tile], options, hidden.dtype
            )
            if dhidden is not None:
                add_product(dhidden[tile], dz, logits.weight_of(first))
            if dblock is not None:
                add_product(dblock, dz.t(), hidden[tile])
            if dbias is not None:
                dbias[block] += dz.sum(0, dtype=total)
            del dz  # before the next one is made
        if dweight is not None and dblock is not None:
            dweight[block] = dblock

    for first in blocks:
        add_block(first)
    logits.release()  # before the copies below: a tile is as large as a gradient
    return (
        None if dhidden is None else dhidden.to(hidden.dtype),
        dweight,
        None if dbias is None or bias is None else dbias.to(bias.dtype),
    )


def loss_and_gradients(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    coolness: Tensor | None,
    token_weights: Tensor,
    label_smoothing: float,
    z_loss: float,
    options: Options,
    needs: tuple[bool, bool, bool],
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """The weighted sum of the losses and, in the same pass over whole rows, its gradients in fp32 (fp64 for fp64).

    They are the gradients of the *sum*, unscaled: divided by the tokens of a batch they would fall below what fp16
    holds before they reach a matmul.
    """
    need_hidden, need_weight, need_bias = needs
    total = accumulator(hidden.dtype)
    tokens, vocab = hidden.shape[0], weight.shape[0]
    dhidden = hidden.new_empty(hidden.shape, dtype=total) if need_hidden else None
    dweight = weight.new_zeros(weight.shape, dtype=total) if need_weight else None
    dbias = bias.new_zeros(bias.shape, dtype=total) if need_bias and bias is not None else None
    loss = hidden.new_zeros((), dtype=total)
    rows = max(1, min(options.chunk, tokens))
    logits = _Logits(hidden, weight, bias, coolness, rows, vocab, options)
    state = hidden.new_empty(5, rows, dtype=total)
    for tile in _slices(tokens, rows):
        z, label, weights = logits.tile(tile, 0), labels[tile], token_weights[tile]
        of_tile = state[:, : z.shape[0]]
        cool = _of(coolness, tile)
        _update(of_tile, z, label, cool, 0, options)
        found = _finish(of_tile, label, vocab)
        terms, dfound = loss_of(found, label_smoothing, z_loss)
        loss += torch.where(weights != 0, terms * weights, 0.0).sum()  # whatever an ignored token holds, NaN too
        if not any(needs):
            continue
        row_terms = coefficients(dfound * weights, found, label, vocab, cool)
        dz = _differentiate(z, label, cool, 0, found, row_terms, options, hidden.dtype)
        if dhidden is not None:
            product(dz, logits.weight_of(0), out=dhidden[tile])
        if dweight is not None:
            add_product(dweight, dz.t(), hidden[tile])
        if dbias is not None:
            dbias += dz.sum(0, dtype=total)
        del dz  # before the next one is made
    return loss, dhidden, dweight, dbias


def loss_of(found: Tensor, label_smoothing: float, z_loss: float) -> tuple[Tensor, Tensor]:
    """The loss of each row, ``[tokens]``, and its derivatives by the statistics, ``[6, tokens]``.

    ``-(1 - s) log p_label - s mean_j(log p_j) + z_loss * lse^2``: F.cross_entropy's label smoothing, and the z-loss of
    PaLM (arXiv 2204.02311, section 5).
    """
    log_prob, lse, mean = found[LOG_PROB], found[LSE], found[MEAN]
    loss = (label_smoothing - 1) * log_prob
    dfound = torch.zeros_like(found)
    dfound[LOG_PROB] = label_smoothing - 1
    if label_smoothing:
        loss = loss + label_smoothing * (lse - mean)
        dfound[LSE] = label_smoothing
        dfound[MEAN] = -label_smoothing
    if z_loss:
        loss = loss + z_loss * lse.square()
        dfound[LSE] += 2 * z_loss * lse
    return loss, dfound


def coefficients(dstatistics: Tensor, found: Tensor, labels: Tensor, vocab: int, coolness: Tensor | None) -> Tensor:
    """``a, b, c, e`` of the gradient of a logit before its temperature, ``[4, tokens]``, from the gradients of the
    statistics.

    From ``d log p_label / dz_j = [j is the label] - p_j``, ``d lse / dz_j = p_j``, ``d mean / dz_j = 1 / vocab`` and
    ``d entropy / dz_j = -p_j (log p_j + entropy)``.
    """
    log_prob, lse, mean, entropy = dstatistics[:PEAK]
    a = lse - log_prob + entropy * (found[LOG_SUM] - found[ENTROPY])
    outside = ((labels < 0) | (labels >= vocab)) & (log_prob != 0)
    a = torch.where(outside, float("nan"), a)
    terms = torch.stack([a, log_prob, mean / vocab, -entropy])
    return terms if coolness is None else terms * coolness


class _Logits:
    """Tiles of logits in one buffer that is written again and again. For the kernels, which do it themselves in the
    same pass, cap and temperature are still to come."""

    def __init__(
        self,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        coolness: Tensor | None,
        rows: int,
        columns: int,
        options: Options,
    ) -> None:
        self._hidden, self._weight, self._coolness = hidden, weight, coolness
        self._columns, self._options = columns, options
        self._buffer = hidden.new_empty(rows * columns, dtype=accumulator(hidden.dtype))
        # -inf hides a padded vocabulary row; its probability of 0 times its logit would be NaN in an entropy
        self._bias = None if bias is None else bias.to(self._buffer.dtype).clamp(min=-1e30)
        self._block: tuple[int, Tensor] | None = None

    def release(self) -> None:
        del self._buffer
        self._block = None

    def weight_of(self, first: int) -> Tensor:
        """The block of the weight that starts at ``first``, in the dtype that matmuls take it in."""
        if self._block is None or self._block[0] != first:
            block = self._weight[first : first + self._columns]
            self._block = first, block if _direct(block) else block.to(accumulator(block.dtype))
        return self._block[1]

    def tile(self, rows: slice, first: int) -> Tensor:
        hidden, block = self._hidden[rows], self.weight_of(first)
        out = self._buffer[: hidden.shape[0] * block.shape[0]].view(hidden.shape[0], block.shape[0])
        product(hidden, block.t(), out=out)
        if self._bias is not None:
            out += self._bias[first : first + self._columns]
        if not _use_kernels(out):
            if self._options.softcap:
                out.div_(self._options.softcap).tanh_().mul_(self._options.softcap)
            if self._coolness is not None:
                out *= self._coolness[rows, None]
        return out


def _grid(hidden: Tensor, weight: Tensor, options: Options) -> tuple[range, int]:
    """Where blocks of the vocabulary start, and how many tokens a tile has: together at most ``chunk * vocab``
    logits."""
    tokens, vocab = max(1, hidden.shape[0]), weight.shape[0]
    budget = options.chunk * vocab
    columns = min(vocab, max(VOCAB_BLOCK, budget // tokens // 256 * 256))
    tiles = -(-tokens // max(1, budget // columns))
    return range(0, vocab, columns), -(-tokens // tiles)  # tiles of one size: a short last one costs as much as a full


def _of(numbers: Tensor | None, tile: slice) -> Tensor | None:
    return None if numbers is None else numbers[tile]


def _slices(length: int, step: int) -> Iterator[slice]:
    return (slice(start, min(start + step, length)) for start in range(0, length, step))


@lru_cache(maxsize=16)
def _half_in_full_out(device: torch.device) -> bool:
    """Whether a matmul of bf16 or fp16 can hand out its fp32 sums: torch 2.8 on CUDA."""
    return (
        device.type == "cuda"
        and torch.version.hip is None
        and hasattr(torch.ops.aten.mm, "dtype_out")
        and torch.cuda.get_device_capability(device) >= (8, 0)
    )


@lru_cache(maxsize=16)
def _adds_in_full(device: torch.device) -> bool:
    """Whether addmm adds such sums to an fp32 matrix. Some builds refuse (they want it in half, as the factors), and an
    ``out`` was ignored once (pytorch/pytorch #154086), so it is tried."""
    total = torch.ones(16, 16, device=device)
    ones = torch.ones(16, 16, device=device, dtype=torch.bfloat16)
    try:
        torch.addmm(total, ones, ones, out_dtype=torch.float32, out=total)
    except RuntimeError:
        return False
    return bool((total == 17).all())


def _direct(x: Tensor) -> bool:
    """Whether a matmul takes this tensor as it is and sums in the accumulator's dtype."""
    return x.dtype == accumulator(x.dtype) or _half_in_full_out(x.device)


def product(left: Tensor, right: Tensor, out: Tensor) -> Tensor:
    """``out = left @ right``, summed and handed out in the accumulator's dtype; elsewhere than on CUDA halves are
    widened before."""
    if left.dtype == right.dtype == out.dtype:
        return torch.mm(left, right, out=out)
    if left.dtype == right.dtype and _half_in_full_out(left.device):
        return torch.mm(left, right, out_dtype=out.dtype, out=out)
    return torch.mm(left.to(out.dtype), right.to(out.dtype), out=out)


def add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """``total += left @ right``; see :func:`product`."""
    if left.dtype == right.dtype == total.dtype:
        total.addmm_(left, right)
    elif left.dtype == right.dtype and _half_in_full_out(left.device):
        if _adds_in_full(left.device):
            torch.addmm(total, left, right, out_dtype=total.dtype, out=total)
        else:
            total += torch.mm(left, right, out_dtype=total.dtype)
    else:
        total.addmm_(left.to(total.dtype), right.to(total.dtype))


# What happens to a tile. On CUDA with Triton each is one kernel (`_kernels.py`); the plain torch here is what the
# kernels are tested against and what runs everywhere else.

_PEAK, _SUM, _MOMENT, _LABEL, _TOTAL = range(5)
"""Rows of the running state: the largest logit, ``sum exp(z - peak)``, ``sum exp(z - peak) (z - peak)``, the label's
logit, ``sum z``."""


def _update(state: Tensor, z: Tensor, labels: Tensor, coolness: Tensor | None, first: int, options: Options) -> None:
    """Join the block of the vocabulary that starts at ``first`` into ``state`` ``[5, rows]``, which the block at 0
    begins."""
    if _use_kernels(z):
        from fsdp_sink_patches.ops.chunked_loss import _kernels

        _kernels.update(state, z, labels, coolness, first, options.softcap)
        return
    peak, at, inside = z.amax(1), *_place(labels, first, z.shape[1])
    if first:
        peak = torch.maximum(peak, state[_PEAK])
    shifted = z - peak[:, None]
    state_label = z.gather(1, at[:, None])[:, 0]
    total = z.sum(1)
    moment = None
    if options.entropy:
        mass = shifted.exp()
        moment = shifted.mul_(mass).sum(1)
    else:
        mass = shifted.exp_()
    summed = mass.sum(1)
    if first:
        moved = state[_PEAK] - peak
        scale = moved.exp()
        summed = summed + scale * state[_SUM]
        total = total + state[_TOTAL]
        state_label = torch.where(inside, state_label, state[_LABEL])
        if moment is not None:
            moment = moment + scale * (state[_MOMENT] + moved * state[_SUM])
    state[_PEAK], state[_SUM], state[_LABEL], state[_TOTAL] = peak, summed, state_label, total
    state[_MOMENT] = 0 if moment is None else moment


def _finish(state: Tensor, labels: Tensor, vocab: int) -> Tensor:
    peak, summed, moment, label, total = state
    log_sum = summed.log()
    # Never above zero: the sum holds the peak's own 1, and no logit is above the peak, but for the last bit where a
    # compiler rounds the label's logit in another way than the row's.
    log_prob = ((label - peak) - log_sum).clamp(max=0)
    log_prob = torch.where((labels < 0) | (labels >= vocab), float("nan"), log_prob)
    return torch.stack([log_prob, peak + log_sum, total / vocab, log_sum - moment / summed, peak, log_sum])


def _differentiate(
    z: Tensor,
    labels: Tensor,
    coolness: Tensor | None,
    first: int,
    found: Tensor,
    row_terms: Tensor,
    options: Options,
    dtype: torch.dtype,
) -> Tensor:
    """The gradient of a tile of raw logits; overwrites ``z``. In ``dtype`` where matmuls of it sum in fp32."""
    if _use_kernels(z):
        from fsdp_sink_patches.ops.chunked_loss import _kernels

        out = z.new_empty(z.shape, dtype=dtype) if _half_in_full_out(z.device) else z
        _kernels.differentiate(out, z, labels, coolness, first, found, row_terms, options.softcap)
        return out
    a, b, c, e = row_terms
    slope = None
    if options.softcap:
        inner = z / options.softcap if coolness is None else z / (coolness * options.softcap)[:, None]
        slope = 1 - inner.square_()
    at, inside = _place(labels, first, z.shape[1])
    z -= found[PEAK][:, None]
    if options.entropy:
        dz = (z - found[LOG_SUM][:, None]).exp_().mul_(z.mul_(e[:, None]).add_(a[:, None]))
    else:
        dz = z.sub_(found[LOG_SUM][:, None]).exp_().mul_(a[:, None])
    dz += c[:, None]
    # one place a row, so nothing is added twice and the order does not matter
    picked = dz.gather(1, at[:, None]) + torch.where(inside, b, 0)[:, None]
    dz.scatter_(1, at[:, None], picked)
    if slope is not None:
        dz *= slope
    return dz.to(dtype) if _half_in_full_out(z.device) else dz


def _place(labels: Tensor, first: int, columns: int) -> tuple[Tensor, Tensor]:
    """Each label's column in a block, moved into it if it lies elsewhere, and whether it does lie inside."""
    column = labels - first
    return column.clamp(0, columns - 1), (column >= 0) & (column < columns)


@lru_cache(maxsize=1)
def _have_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def _use_kernels(z: Tensor) -> bool:
    return z.is_cuda and z.dtype == torch.float32 and _have_triton()
