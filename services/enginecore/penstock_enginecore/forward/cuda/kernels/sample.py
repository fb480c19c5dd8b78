"""Sampling on the device, with the same results as ``sample.sampler`` on the CPU. A sampled token depends only on its
row of logits, its sampling parameters, its seed and its index in the output.

Three values are bit-identical to the values on a CPU: the token of a greedy row, the random number, and the distances
of logits. A distance is the peak (the largest logit of the row) minus the logit, divided by the temperature. A greedy
row gets the first token with the largest logit, and NaN counts as largest. Distances are rounded to float32 in the same
two places. Therefore min_p and top_k keep the same tokens as on a CPU, including ties.

Other values are equal up to rounding. To draw a token, its weight is exp(-distance) in float64, rounded to float32. For
top_p, its weight is a multiple of a power of two, with about the precision of float32. The result of exp on a CPU may
differ in the last digit. Sums of weights are float64 or integers, and a CPU adds in another order. If a boundary of the
cumulative distribution is within about 1e-7 of the target, top_p may keep one token more or less, and the sampled token
may differ. Tokens of weight 0 are never sampled. Sums of float64 have a fixed order, so the same inputs always give the
same token.
"""

import torch
import triton
import triton.language as tl

from penstock_enginecore.forward.cuda.kernel_api import Draws
from penstock_enginecore.forward.cuda.kernels.filters import RowFilters, clear, distances, is_drawn

_PART = 4096
"""Maximum number of logits that one program reads when it finds peaks or sums weights."""
_SUMMED = 256
"""Number of tokens in a block. Sampling first finds the block by the blocks' sums of weights, then the token in the
block.
"""


class TokenSampler:
    """Samples tokens from logits on the device, for up to ``max_rows`` rows of ``vocab`` logits. The memory never
    moves.
    """

    def __init__(self, max_rows: int, vocab: int, device: torch.device) -> None:
        self._vocab = vocab
        self._part = min(_PART, max(_SUMMED, triton.next_power_of_2(vocab)))
        self._parts = triton.cdiv(vocab, self._part)
        self._blocks = triton.cdiv(vocab, _SUMMED)
        self._part_peaks = torch.empty(max_rows, self._parts, dtype=torch.float32, device=device)
        self._part_columns = torch.empty(max_rows, self._parts, dtype=torch.int32, device=device)
        self._part_nans = torch.empty(max_rows, self._parts, dtype=torch.int32, device=device)
        self._filters = RowFilters(max_rows, vocab, self._part, device)
        self._sums = torch.empty(max_rows, self._blocks, dtype=torch.float64, device=device)

    def sample(
        self,
        logits: torch.Tensor,
        draws: Draws | None,
        token_ids: torch.Tensor,
        peaks: torch.Tensor,
        num_nans: torch.Tensor,
        *,
        filtered: bool,
    ) -> None:
        """Sample a token from each row of ``logits``. Greedy sampling needs two kernel launches, random sampling four,
        and random sampling with filters eight.

        Args:
            logits: ``[rows, vocab]``, contiguous, of any float dtype.
            draws: Sampling parameters, or None if all rows are greedy. Rows with a non-finite peak are always greedy.
            token_ids: int32 ``[rows]``, receives the tokens.
            peaks: float32 ``[rows]``, receives the largest logit of each row.
            num_nans: int32 ``[rows]``, receives the number of logits in each row that are NaN or infinity. A peak of
                -infinity also counts as one.
            filtered: Whether some rows have min_p, top_k or top_p. If false, these settings are ignored.

        Raises:
            ValueError: Shapes are not supported, or there are more than ``max_rows`` rows.
        """
        rows = len(logits)
        if logits.shape[1:] != (self._vocab,) or rows > len(self._part_peaks) or not logits.is_contiguous():
            room = f"{len(self._part_peaks)} contiguous rows of {self._vocab}"
            raise ValueError(f"logits have shape {list(logits.shape)}; there is memory for {room}")
        if not token_ids.shape == peaks.shape == num_nans.shape == (rows,):
            shapes = f"{list(token_ids.shape)} tokens, {list(peaks.shape)} peaks and {list(num_nans.shape)} counts"
            raise ValueError(f"the logits have {rows} rows, which does not match {shapes}")
        if not rows:
            return
        of_parts = (self._part_peaks, self._part_columns, self._part_nans)
        _peaks[(rows, self._parts)](logits, *of_parts, self._vocab, PART=self._part, num_warps=8)
        _settle[(rows,)](
            *of_parts, peaks, token_ids, num_nans, self._filters.tallies, self._parts,
            PARTS=triton.next_power_of_2(self._parts),
        )  # fmt: skip
        if draws is not None:
            self._draw(logits, draws, token_ids, peaks, filtered=filtered)

    def _draw(
        self, logits: torch.Tensor, draws: Draws, token_ids: torch.Tensor, peaks: torch.Tensor, *, filtered: bool
    ) -> None:
        """Sample the tokens of rows whose temperature is not 0, and overwrite the greedy tokens of these rows."""
        rows = len(logits)
        if filtered:
            self._filters.launch(logits, peaks, draws)
        of_row = (peaks, draws.temperature, self._filters.limits)
        _sum[(rows, self._parts)](
            logits, *of_row, self._sums, self._vocab, self._blocks,
            FILTERED=filtered, PART=self._part, SUMMED=_SUMMED, num_warps=8,
        )  # fmt: skip
        _draw[(rows,)](
            logits, *of_row, self._sums, draws.seeds, draws.output_indices, token_ids, self._vocab, self._blocks,
            FILTERED=filtered, BLOCKS=triton.next_power_of_2(self._blocks), SUMMED=_SUMMED,
        )  # fmt: skip


@triton.jit
def _first_largest(value, columns, inside, NONE: tl.constexpr):
    """Return the largest element of ``value``, and the first of ``columns`` with this element. NaN counts as largest."""
    is_nan = (value != value) & inside
    finite = tl.where(is_nan | ~inside, -float("inf"), value)
    peak = tl.max(finite, axis=0)
    column = tl.min(tl.where((finite == peak) & inside & ~is_nan, columns, NONE), axis=0)
    first_nan = tl.min(tl.where(is_nan, columns, NONE), axis=0)
    has_nan = first_nan < NONE
    return tl.where(has_nan, float("nan"), peak), tl.where(has_nan, first_nan, column)


@triton.jit
def _peaks(logits, part_peaks, part_columns, part_nans, vocab, PART: tl.constexpr):
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    columns = part * PART + tl.arange(0, PART)
    inside = columns < vocab
    value = tl.load(logits + row * vocab + columns, mask=inside, other=0.0).to(tl.float32)
    peak, column = _first_largest(value, columns, inside, 2147483647)
    at = row * tl.num_programs(1) + part
    tl.store(part_peaks + at, peak)
    tl.store(part_columns + at, column)
    wrong = (value != value) | (value == float("inf"))
    tl.store(part_nans + at, tl.sum((wrong & inside).to(tl.int32), axis=0))


@triton.jit
def _settle(part_peaks, part_columns, part_nans, peaks, token_ids, num_nans, tallies, parts, PARTS: tl.constexpr):
    """Compute the largest logit (peak) of a row from the peaks of the row's parts. The column of the peak is the greedy
    token. Set the row's tallies of filters to 0.
    """
    row = tl.program_id(0).to(tl.int64)
    index = tl.arange(0, PARTS)
    inside = index < parts
    value = tl.load(part_peaks + row * parts + index, mask=inside, other=0.0)
    peak, part = _first_largest(value, index, inside, PARTS)
    tl.store(peaks + row, peak)
    tl.store(token_ids + row, tl.load(part_columns + row * parts + part))
    nans = tl.load(part_nans + row * parts + index, mask=inside, other=0)
    tl.store(num_nans + row, tl.sum(nans, axis=0) + (peak == -float("inf")).to(tl.int32))
    clear(tallies, row)


@triton.jit
def _weights(distance):
    return tl.exp(-distance.to(tl.float64)).to(tl.float32).to(tl.float64)


@triton.jit
def _kept_weights(logits, columns, inside, peak, temperature, limit, FILTERED: tl.constexpr):
    distance = distances(logits, columns, inside, peak, temperature)
    weight = _weights(distance)
    if FILTERED:
        weight = tl.where(distance <= limit, weight, 0.0)
    return weight


@triton.jit
def _sum(
    logits, peaks, temperatures, limits, sums, vocab, blocks,
    FILTERED: tl.constexpr, PART: tl.constexpr, SUMMED: tl.constexpr,
):  # fmt: skip
    """Compute the sum of weights of each block of ``SUMMED`` tokens."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    peak, temperature = tl.load(peaks + row), tl.load(temperatures + row)
    if not is_drawn(peak, temperature):
        return
    limit = tl.load(limits + row) if FILTERED else 0.0
    columns = part * PART + tl.arange(0, PART)
    weight = _kept_weights(logits + row * vocab, columns, columns < vocab, peak, temperature, limit, FILTERED)
    per_part: tl.constexpr = PART // SUMMED
    index = part * per_part + tl.arange(0, per_part)
    of_blocks = tl.sum(tl.reshape(weight, (per_part, SUMMED)), axis=1)
    tl.store(sums + row * blocks + index, of_blocks, mask=index < blocks)


@triton.jit
def _draw(
    logits, peaks, temperatures, limits, sums, seeds, output_indices, token_ids, vocab, blocks,
    FILTERED: tl.constexpr, BLOCKS: tl.constexpr, SUMMED: tl.constexpr,
):  # fmt: skip
    """Sample a token by inverting the cumulative distribution in order of token ids, as in ``sample/filters.py``: find
    the block, then the token in the block.
    """
    row = tl.program_id(0).to(tl.int64)
    peak, temperature = tl.load(peaks + row), tl.load(temperatures + row)
    if not is_drawn(peak, temperature):
        return
    index = tl.arange(0, BLOCKS)
    of_blocks = tl.load(sums + row * blocks + index, mask=index < blocks, other=0.0)
    total = tl.sum(of_blocks, axis=0)
    # Limit the target to the float64 before the total. A target equal to the total would be past the last token whose
    # weight is not 0.
    below = (total.to(tl.int64, bitcast=True) - 1).to(tl.float64, bitcast=True)
    target = tl.minimum(_uniform(tl.load(seeds + row), tl.load(output_indices + row)) * total, below)
    block = _first_beyond(of_blocks, target, index, BLOCKS)
    skipped = tl.sum(tl.where(index < block, of_blocks, 0.0), axis=0)
    columns = block * SUMMED + tl.arange(0, SUMMED)
    limit = tl.load(limits + row) if FILTERED else 0.0
    weight = _kept_weights(logits + row * vocab, columns, columns < vocab, peak, temperature, limit, FILTERED)
    token = block * SUMMED + _first_beyond(weight, target - skipped, tl.arange(0, SUMMED), SUMMED)
    tl.store(token_ids + row, token)


@triton.jit
def _first_beyond(weight, target, index, SIZE: tl.constexpr):
    """Return the first index with a weight other than 0 whose cumulative weight exceeds ``target``.

    If rounding keeps every sum below the target, return the last index with a weight other than 0.
    """
    first = tl.min(tl.where((tl.cumsum(weight, axis=0) > target) & (weight > 0), index, SIZE), axis=0)
    last = tl.max(tl.where(weight > 0, index, 0), axis=0)
    return tl.where(first < SIZE, first, last)


@triton.jit
def _uniform(seed, output_index):
    """Return a float64 in [0, 1) with 53 random bits from Philox4x32-10, the same number as ``sample.base.uniforms``."""
    counter_low, counter_high = output_index.to(tl.uint32), (output_index >> 32).to(tl.uint32)
    key_low, key_high = seed.to(tl.uint32), (seed >> 32).to(tl.uint32)
    none = tl.zeros_like(key_low)
    first, second, _, _ = tl.philox_impl(counter_low, counter_high, none, none, key_low, key_high)
    bits = (first.to(tl.int64) << 21) | (second.to(tl.int64) >> 11)
    return bits.to(tl.float64) * 1.1102230246251565e-16
