"""Filters of sampling on the device: min_p, then top_k, then top_p of the remaining tokens.

For each row, the filters keep the tokens whose distance from the peak is at most a limit. Four kernels find the limit.
All kernels except the last split a row over programs.

The key of a token is the bits of its distance as an integer. Keys have the same order as distances, because distances
are not negative. ``_tally`` sums tokens in 13 coarse buckets of keys. ``_refine`` divides one bucket of the row into
512. ``_gather`` collects the keys in one of the 512, usually a few. ``_finish`` searches these keys. If they are more
than fit in memory, ``_finish`` searches the whole row instead, which is exact, but slow.

All sums are sums of integers: numbers of tokens, or weights as multiples of a power of two. Therefore sums do not
depend on the order of programs or threads, and equal inputs always give equal limits.
"""

import torch
import triton
import triton.language as tl

from penstock_enginecore.forward.cuda.kernel_api import Draws

CANDIDATES = 2048
"""Maximum number of keys that ``_gather`` collects for a row."""
WARPS = 4
"""Number of warps of a program. Fewer warps add more numbers in registers, before they add over threads."""

_BUCKETS = tl.constexpr(13)
_LAST = tl.constexpr(12)
# The coarse buckets of distances are {0}, (0, 0.5), then two for each power of two up to 16, then [16, 104). The upper
# bits of a key, without the last 22, count halves of powers of two. This value is 250 for 0.25.
_HALVES = tl.constexpr(250)
# The key of distance 104. The weight exp(-104) is 0 in float32, so no filter needs tokens from there on.
_END = tl.constexpr(0x42D00000)
_BINS = tl.constexpr(32)
_FINE = tl.constexpr(512)
# Places in the tallies of a row: cumulative counts of the coarse buckets, then their cumulative weights, the number of
# gathered keys, and the sums of the fine buckets.
_WEIGHTS_AT = tl.constexpr(16)
_GATHERED_AT = tl.constexpr(32)
_FINE_AT = tl.constexpr(64)
_TALLIES = tl.constexpr(64 + 512)
_MISSING = tl.constexpr(float("inf"))


class RowFilters:
    """Finds the limits of up to ``max_rows`` rows of ``vocab`` logits. The memory never moves.

    Attributes:
        limits: float32 ``[max_rows]``, the largest distance of a kept token. Rows that are sampled greedily keep old
            values.
        tallies: int64 ``[max_rows, n]``, sums of the kernels. They must be 0 before ``launch``.
    """

    def __init__(self, max_rows: int, vocab: int, part: int, device: torch.device) -> None:
        """Allocate the memory. A program reads ``part`` logits of a row, a power of two."""
        self._vocab, self._part = vocab, part
        # The sum of all weights of a row is at most 2**62.
        self._scale = 62 - (vocab - 1).bit_length()
        self.limits = torch.empty(max_rows, dtype=torch.float32, device=device)
        self.tallies = torch.zeros(max_rows, _TALLIES.value, dtype=torch.int64, device=device)
        self._candidates = torch.empty(max_rows, CANDIDATES, dtype=torch.int32, device=device)

    def launch(self, logits: torch.Tensor, peaks: torch.Tensor, draws: Draws) -> None:
        """Compute ``limits`` of ``logits`` ``[rows, vocab]`` in four kernel launches.

        Args:
            logits: Contiguous, of any float dtype.
            peaks: float32 ``[rows]``, the largest logit of each row.
            draws: Sampling parameters.
        """
        rows = len(logits)
        parts = triton.cdiv(self._vocab, self._part)
        of_rows = (logits, peaks, draws.temperature, draws.max_distance, draws.top_k, draws.top_p, self.tallies)
        options = {"SCALE": self._scale, "num_warps": WARPS}
        _tally[(rows, parts)](*of_rows, self._vocab, PART=self._part, **options)
        _refine[(rows, parts)](*of_rows, self._vocab, PART=self._part, **options)
        _gather[(rows, parts)](
            *of_rows, self._candidates, self._vocab, PART=self._part, ROOM=CANDIDATES, num_warps=WARPS
        )
        _finish[(rows,)](
            *of_rows, self._candidates, self.limits, self._vocab, BLOCK=CANDIDATES, SCALE=self._scale, num_warps=8
        )


@triton.jit
def is_drawn(peak, temperature):
    """Return whether a row is sampled randomly."""
    return (temperature > 0) & (tl.abs(peak) < _MISSING)


@triton.jit
def distances(logits, columns, inside, peak, temperature):
    """Return the distances between the peak and the logits, divided by the temperature, and infinity for columns
    outside of the row. The subtraction and the division round as IEEE 754 requires, as on a CPU.
    """
    value = tl.load(logits + columns, mask=inside, other=-_MISSING).to(tl.float32)
    return tl.div_rn(peak - value, tl.zeros_like(value) + temperature)


@triton.jit
def clear(tallies, row):
    """Set the tallies of a row to 0."""
    index = tl.arange(0, 2 * _FINE)
    tl.store(tallies + row * _TALLIES + index, tl.zeros((2 * _FINE,), tl.int64), mask=index < _TALLIES)


@triton.jit
def _keys(logits, columns, inside, peak, temperature, limit):
    """Return the keys of tokens. Tokens that min_p excludes, and tokens of weight 0, have the key ``_END``."""
    distance = distances(logits, columns, inside, peak, temperature)
    return tl.where(distance <= limit, tl.minimum(distance.to(tl.int32, bitcast=True), _END), _END)


@triton.jit
def _weights(key, SCALE: tl.constexpr):
    """Return exp(-distance) as int64, in units of 2**-SCALE, rounded down. The error is about one bit of float32.

    Every operation is exact or a fused multiplication and addition, so all kernels get the same bits. The polynomial is
    that of ``expf`` in the Cephes library.
    """
    distance = key.to(tl.float32, bitcast=True)
    # The sum rounds to an integer, which is in the low bits of the sum, because the other summand is 1.5 * 2**23.
    rounded = tl.fma(distance, 1.4426950408889634, 12582912.0)
    halvings = rounded - 12582912.0
    rest = tl.fma(halvings, -2.12194440e-4, tl.fma(halvings, 0.693359375, -distance))
    value = tl.fma(rest, 1.9875691500e-4, 1.3981999507e-3)
    value = tl.fma(value, rest, 8.3334519073e-3)
    value = tl.fma(value, rest, 4.1665795894e-2)
    value = tl.fma(value, rest, 1.6666665459e-1)
    value = tl.fma(value, rest, 5.0000001201e-1)
    value = tl.fma(value, rest * rest, rest) + 1.0
    power = (((127 + SCALE) << 23) - (rounded.to(tl.int32, bitcast=True) << 23)).to(tl.float32, bitcast=True)
    return (value * power).to(tl.int64)


@triton.jit
def _share(top_p, mass):
    """Return the weight that top_p keeps of ``mass``, rounded up."""
    return tl.ceil(top_p * mass.to(tl.float64)).to(tl.int64)


@triton.jit
def _settings(peaks, temperatures, max_distances, top_ks, top_ps, row, vocab):
    """Return the settings of a row, whether the row has top_k, and whether the row needs a search."""
    peak, temperature = tl.load(peaks + row), tl.load(temperatures + row)
    limit, top_k, top_p = tl.load(max_distances + row), tl.load(top_ks + row), tl.load(top_ps + row)
    has_top_k = (top_k > 0) & (top_k < vocab)
    is_searched = is_drawn(peak, temperature) & (has_top_k | (top_p < 1))
    return peak, temperature, limit, top_k.to(tl.int64), top_p, has_top_k, is_searched


@triton.jit
def _tally(
    logits, peaks, temperatures, max_distances, top_ks, top_ps, tallies, vocab,
    SCALE: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    """Add the tokens of a part of a row to the cumulative counts, for top_k, and the cumulative weights, for top_p."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    peak, temperature, limit, _top_k, top_p, has_top_k, is_searched = _settings(
        peaks, temperatures, max_distances, top_ks, top_ps, row, vocab
    )
    if not is_searched:
        return
    columns = part * PART + tl.arange(0, PART)
    key = _keys(logits + row * vocab, columns, columns < vocab, peak, temperature, limit)
    of_row = tallies + row * _TALLIES
    if has_top_k:
        # The compiler counts in bins with votes of warps. Comparing with each bucket's end would take longer.
        bucket = tl.minimum(tl.maximum((key >> 22) - _HALVES, 1), _LAST)
        bucket = tl.where(key == 0, 0, tl.where(key == _END, _BINS - 1, bucket))
        counts = tl.cumsum(tl.histogram(bucket, _BINS), axis=0).to(tl.int64)
        bins = tl.arange(0, _BINS)
        tl.atomic_add(of_row + bins, counts, mask=bins < _BUCKETS, sem="relaxed")
    if top_p < 1:
        weight = _weights(key, SCALE)
        least = tl.min(key, axis=0)
        index = tl.arange(0, _WEIGHTS_AT)
        sums = tl.zeros((_WEIGHTS_AT,), tl.int64)
        for bucket in tl.static_range(_BUCKETS):
            end = 1 if bucket == 0 else (_END if bucket == _LAST else (_HALVES + bucket + 1) << 22)
            if least < end:  # Most parts have no tokens in the first buckets.
                sums = tl.where(index == bucket, tl.sum(tl.where(key < end, weight, 0), axis=0), sums)
        tl.atomic_add(of_row + _WEIGHTS_AT + index, sums, mask=index < _BUCKETS, sem="relaxed")


@triton.jit
def _start(bucket):
    """Return the first key of a coarse bucket."""
    return tl.where(bucket < 2, bucket, (_HALVES + bucket) << 22)


@triton.jit
def _end(bucket):
    """Return the key after the last key of a coarse bucket other than 0."""
    return tl.where(bucket == _LAST, _END, (_HALVES + 1 + bucket) << 22)


@triton.jit
def _shift(bucket):
    """Return how many low bits the keys of a fine bucket differ in, for a coarse bucket other than 0."""
    return tl.where(bucket == 1, 21, tl.where(bucket == _LAST, 16, 13))


@triton.jit
def _before(of_row, bucket):
    """Return the number, or the weight, of the tokens before a coarse bucket."""
    return tl.load(of_row + tl.maximum(bucket - 1, 0)) * (bucket > 0).to(tl.int64)


@triton.jit
def _coarse(of_row, top_k, top_p, has_top_k):
    """Find the coarse buckets of the limits in the tallies ``of_row``.

    Returns:
        ``is_left``, whether the limit needs a finer search; ``is_peak``, whether only ties of the peak are kept;
        ``by_count``, whether top_k excludes tokens; the bucket to refine, which contains the limit of top_k, or else
        that of top_p; the first bucket that may contain the limit of top_p; and the weight of all tokens up to the end
        of the bucket.
    """
    index = tl.arange(0, _WEIGHTS_AT)
    inside = index < _BUCKETS
    by_count = has_top_k & (tl.load(of_row + _LAST) > top_k)
    fewer = tl.sum((inside & (tl.load(of_row + index) < top_k)).to(tl.int32), axis=0)
    last = tl.where(by_count, fewer, _LAST)
    mass = tl.load(of_row + _WEIGHTS_AT + last)
    least_mass = tl.where(by_count, _before(of_row + _WEIGHTS_AT, last), mass)
    weights = tl.load(of_row + _WEIGHTS_AT + index)
    lighter = tl.sum((inside & (weights < _share(top_p, least_mass))).to(tl.int32), axis=0)
    first = tl.where(top_p < 1, tl.minimum(lighter, _LAST), last)
    bucket = tl.where(by_count, last, first)
    is_enough = (top_p < 1) & (tl.load(of_row + _WEIGHTS_AT) >= _share(top_p, mass))
    is_peak = (bucket == 0) | is_enough
    is_left = (by_count | (top_p < 1)) & (is_peak == 0)
    return is_left, is_peak, by_count, bucket, first, mass


# If the compiler knew that rows are aligned, loads would have another layout than atomic additions, and the compiler
# would compute each key twice.
@triton.jit(do_not_specialize=["vocab"])
def _refine(
    logits, peaks, temperatures, max_distances, top_ks, top_ps, tallies, vocab,
    SCALE: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    """Add the tokens of a part of a row, in one coarse bucket, to the sums of the fine buckets."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    peak, temperature, limit, top_k, top_p, has_top_k, is_searched = _settings(
        peaks, temperatures, max_distances, top_ks, top_ps, row, vocab
    )
    if not is_searched:
        return
    of_row = tallies + row * _TALLIES
    is_left, _is_peak, by_count, bucket, _first, _mass = _coarse(of_row, top_k, top_p, has_top_k)
    if not is_left:
        return
    columns = part * PART + tl.arange(0, PART)
    key = _keys(logits + row * vocab, columns, columns < vocab, peak, temperature, limit)
    start = _start(bucket)
    inside = (key >= start) & (key < _end(bucket))
    if tl.max(inside.to(tl.int32), axis=0) > 0:  # Many parts have no such token.
        fine = tl.where(inside, (key - start) >> _shift(bucket), 0)
        value = tl.where(by_count, 1, _weights(key, SCALE))
        tl.atomic_add(of_row + _FINE_AT + fine, value, mask=inside, sem="relaxed")


@triton.jit
def _fine(of_row, top_k, top_p, by_count, bucket, first, mass):
    """Find the fine bucket that contains the limit, in the tallies ``of_row``.

    Returns:
        The first key of the range that may contain the limit; the key after the range; and the number and the weight of
        the tokens before the range. If top_k excludes tokens and the row has top_p, both limits are in the range.
        Otherwise only one of the two sums is valid.
    """
    index = tl.arange(0, _FINE)
    sums = tl.load(of_row + _FINE_AT + index)
    before = _before(of_row + tl.where(by_count, 0, _WEIGHTS_AT), bucket)
    wanted = tl.where(by_count, top_k, _share(top_p, mass))
    is_beyond = (before + tl.cumsum(sums, axis=0) >= wanted) & (sums > 0)
    reached = tl.min(tl.where(is_beyond, index, _FINE), axis=0)
    fine = tl.where(reached < _FINE, reached, tl.max(tl.where(sums > 0, index, 0), axis=0))
    before += tl.sum(tl.where(index < fine, sums, 0), axis=0)
    shift = _shift(bucket)
    low = _start(bucket) + (fine << shift)
    high = tl.minimum(low + (1 << shift), _end(bucket))
    has_both = by_count & (top_p < 1)
    low = tl.where(has_both, _start(first), low)
    count = tl.where(has_both, _before(of_row, first), before)
    weight = tl.where(has_both, _before(of_row + _WEIGHTS_AT, first), before)
    return low, high, count, weight


@triton.jit
def _gather(
    logits, peaks, temperatures, max_distances, top_ks, top_ps, tallies, candidates, vocab,
    PART: tl.constexpr, ROOM: tl.constexpr,
):  # fmt: skip
    """Copy the keys of a part of a row in the range of ``_fine`` to ``candidates``, in any order, and count them."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    peak, temperature, limit, top_k, top_p, has_top_k, is_searched = _settings(
        peaks, temperatures, max_distances, top_ks, top_ps, row, vocab
    )
    if not is_searched:
        return
    of_row = tallies + row * _TALLIES
    is_left, _is_peak, by_count, bucket, first, mass = _coarse(of_row, top_k, top_p, has_top_k)
    if not is_left:
        return
    low, high, _count, _weight = _fine(of_row, top_k, top_p, by_count, bucket, first, mass)
    columns = part * PART + tl.arange(0, PART)
    key = _keys(logits + row * vocab, columns, columns < vocab, peak, temperature, limit)
    inside = (key >= low) & (key < high)
    if tl.max(inside.to(tl.int32), axis=0) > 0:
        one = tl.full((PART,), 1, tl.int64)
        at = tl.atomic_add(of_row + _GATHERED_AT + tl.zeros((PART,), tl.int32), one, mask=inside, sem="relaxed")
        tl.store(candidates + row * ROOM + at, key, mask=inside & (at < ROOM))


@triton.jit
def _sum_within(
    source, number, peak, temperature, limit, low, last,
    BY_COUNT: tl.constexpr, GATHERED: tl.constexpr, SCALE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Return the number, or the weight, of tokens whose key is from ``low`` to ``last``.

    ``source`` contains ``number`` keys if ``GATHERED``, and ``number`` logits otherwise.
    """
    total = tl.zeros((BLOCK,), tl.int64)
    for start in range(0, number, BLOCK):
        index = start + tl.arange(0, BLOCK)
        if GATHERED:
            key = tl.load(source + index, mask=index < number, other=_END)
        else:
            key = _keys(source, index, index < number, peak, temperature, limit)
        inside = (key >= low) & (key <= last)
        if BY_COUNT:
            total += inside.to(tl.int64)
        else:
            total += tl.where(inside, _weights(key, SCALE), 0)
    return tl.sum(total, axis=0)


@triton.jit
def _least_key(
    source, number, peak, temperature, limit, low, last, wanted,
    BY_COUNT: tl.constexpr, GATHERED: tl.constexpr, SCALE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Return the least key from ``low`` such that the tokens up to this key sum to ``wanted``, or else ``last``."""
    least, most = low, last
    while least < most:
        middle = least + ((most - least) >> 1)
        total = _sum_within(
            source, number, peak, temperature, limit, low, middle, BY_COUNT, GATHERED, SCALE, BLOCK
        )  # fmt: skip
        is_enough = total >= wanted
        least = tl.where(is_enough, least, middle + 1)
        most = tl.where(is_enough, middle, most)
    return least


@triton.jit
def _last_key(
    source, number, peak, temperature, limit, top_k, top_p, by_count, mass, low, high, count, weight,
    GATHERED: tl.constexpr, SCALE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Return the largest key that top_k, then top_p keep, or a key between it and the next token's."""
    last = high - 1
    if by_count:
        last = _least_key(
            source, number, peak, temperature, limit, low, last, top_k - count, True, GATHERED, SCALE, BLOCK
        )  # fmt: skip
        if top_p < 1:
            mass = weight + _sum_within(
                source, number, peak, temperature, limit, low, last, False, GATHERED, SCALE, BLOCK
            )  # fmt: skip
    if top_p < 1:
        wanted = _share(top_p, mass) - weight
        last = _least_key(
            source, number, peak, temperature, limit, low, last, wanted, False, GATHERED, SCALE, BLOCK
        )  # fmt: skip
    return last


@triton.jit
def _finish(
    logits, peaks, temperatures, max_distances, top_ks, top_ps, tallies, candidates, limits, vocab,
    SCALE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Store the largest distance at which the tokens of a row pass the row's filters."""
    row = tl.program_id(0).to(tl.int64)
    peak, temperature, limit, top_k, top_p, has_top_k, is_searched = _settings(
        peaks, temperatures, max_distances, top_ks, top_ps, row, vocab
    )
    found = limit
    if is_searched:
        of_row = tallies + row * _TALLIES
        is_left, is_peak, by_count, bucket, first, mass = _coarse(of_row, top_k, top_p, has_top_k)
        if is_peak:
            found = tl.zeros_like(limit)
        if is_left:
            low, high, count, weight = _fine(of_row, top_k, top_p, by_count, bucket, first, mass)
            number = tl.load(of_row + _GATHERED_AT).to(tl.int32)
            last = high - 1
            if number <= BLOCK:
                last = _last_key(
                    candidates + row * BLOCK, number, peak, temperature, limit, top_k, top_p, by_count, mass,
                    low, high, count, weight, True, SCALE, BLOCK,
                )  # fmt: skip
            else:
                last = _last_key(
                    logits + row * vocab, vocab, peak, temperature, limit, top_k, top_p, by_count, mass,
                    low, high, count, weight, False, SCALE, BLOCK,
                )  # fmt: skip
            found = tl.minimum(limit, last.to(tl.float32, bitcast=True))
    tl.store(limits + row, found)
