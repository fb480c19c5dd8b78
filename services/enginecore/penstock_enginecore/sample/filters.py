"""Filters of sampling (min_p, top_k, top_p), sampling from the remaining tokens, and a fast search for the largest
logits of wide rows.

A row of logits is represented by distances: how far each logit is below the largest logit of the row (the peak),
divided by the temperature. A token's weight is exp(-distance). A filter keeps the tokens up to a maximum distance, so
tokens with the same logit as the last kept token are kept too. The result depends neither on the order in which a sort
puts equal logits nor on other rows.

Filters usually keep few tokens. So rows are processed in stages: first with the 128 likeliest tokens, then with the
1024 likeliest, then with all tokens. A row's token is sampled at the first stage that certainly contains every token
that the row's filters keep. This stage depends only on the row.
"""

from dataclasses import dataclass

import torch

# Search for the largest values of wide rows in two steps: first the maxima of blocks of columns, then the values in the
# best blocks. On a CPU, this search is several times faster than torch's argmax and topk.

_PEAK_BLOCK = 256
_FEW = 256
_CPU_SLICE, _DEVICE_SLICE = 2**21, 2**27


def row_slices(rows: torch.Tensor) -> list[slice]:
    """Divide ``rows`` ``[rows, width]`` into slices that should be processed one after the other, and return the
    slices.

    On a CPU, slices are small, because temporary tensors of few rows fit into the CPU's caches and into memory that the
    process already has. On other devices, the size of a slice is limited only to prevent running out of memory.
    """
    size = _CPU_SLICE if rows.device.type == "cpu" else _DEVICE_SLICE
    step = max(1, size // max(1, rows.shape[1]))
    return [slice(start, start + step) for start in range(0, max(1, len(rows)), step)]


def peak(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the largest value of each row, ``[rows]``, and the first column with this value, int64 ``[rows]``. NaN
    counts as the largest value.
    """
    maxima = block_maxima(rows, _PEAK_BLOCK)
    columns = block_columns(maxima.argmax(dim=-1, keepdim=True), _PEAK_BLOCK, rows.shape[1])
    block = rows.gather(1, columns)
    first = block.argmax(dim=-1, keepdim=True)
    return block.gather(1, first).squeeze(1), columns.gather(1, first).squeeze(1)


def largest(rows: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the ``count`` largest values of each row in descending order, and their columns, ``[rows, count]`` each.

    The function searches only the ``count`` blocks with the largest maxima, which contain these values.
    """
    block = 64 if count <= _FEW else 32
    width = rows.shape[1]
    if count * block * 2 > width:
        values, columns = rows.topk(count, dim=-1)
        return values, columns
    maxima, whole = _blocks(rows, block).amax(dim=-1), width - width % block
    blocks = maxima.topk(count, dim=-1, sorted=False).indices
    columns = block_columns(blocks, block, width)
    if whole < width:
        rest = torch.arange(whole, width, device=rows.device).expand(len(rows), -1)
        columns = torch.cat([columns, rest], dim=1)
    values, chosen = rows.gather(1, columns).topk(count, dim=-1)
    return values, columns.gather(1, chosen)


def block_maxima(rows: torch.Tensor, size: int) -> torch.Tensor:
    """Return the maxima of consecutive blocks of ``size`` columns, ``[rows, ceil(width / size)]``. The last block may
    be shorter.
    """
    maxima = _blocks(rows, size).amax(dim=-1)
    rest = rows[:, maxima.shape[1] * size :]
    return torch.cat([maxima, rest.amax(dim=-1, keepdim=True)], dim=1) if rest.shape[1] else maxima


def block_sums(rows: torch.Tensor, size: int) -> torch.Tensor:
    """Return the sums of the same blocks as in ``block_maxima``, in float64."""
    sums = _blocks(rows, size).sum(dim=-1, dtype=torch.float64)
    rest = rows[:, sums.shape[1] * size :]
    return torch.cat([sums, rest.sum(dim=-1, keepdim=True, dtype=torch.float64)], dim=1) if rest.shape[1] else sums


def _blocks(rows: torch.Tensor, size: int) -> torch.Tensor:
    """Return a view ``[rows, blocks, size]`` of all blocks that have ``size`` columns."""
    count = rows.shape[1] // size
    return rows[:, : count * size].view(len(rows), count, size)


def block_columns(blocks: torch.Tensor, size: int, width: int) -> torch.Tensor:
    """Return the column numbers ``[rows, n * size]`` of the blocks with numbers ``blocks`` ``[rows, n]``. If the last
    block is shorter, its last column is repeated.
    """
    columns = blocks[:, :, None] * size + torch.arange(size, device=blocks.device)
    return columns.flatten(1).clamp_(max=width - 1)


# Sampling of one token per row from the tokens' weights and a uniform random number, by inverting the cumulative
# distribution in the order of token ids.
#
# In this order, a small error of a logit changes only few boundaries of the distribution, and only slightly.

_BLOCK = 256


def draw(weights: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """Return one sampled token id for each row, int64 ``[rows]``. ``weights`` ``[rows, vocab]`` must not be negative,
    and ``uniforms`` has random numbers in [0, 1), float64 ``[rows, 1]``.

    The weights of blocks are summed first, so that cumulative float64 sums are needed only for a part of the
    vocabulary.
    """
    before = block_sums(weights, _BLOCK).cumsum(dim=-1)
    target = _target(before[:, -1:], uniforms)
    block = torch.searchsorted(before, target, right=True).clamp_(max=before.shape[1] - 1)
    columns = block_columns(block, _BLOCK, weights.shape[1])
    inside = weights.gather(1, columns)
    inside[:, 1:].masked_fill_(columns[:, 1:] == columns[:, :-1], 0.0)
    skipped = torch.where(block > 0, before.gather(1, (block - 1).clamp_(min=0)), 0.0)
    chosen = _invert(inside, target - skipped)
    return columns.gather(1, chosen).squeeze(1)


def draw_among(token_ids: torch.Tensor, weights: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """Return the same token ids as ``draw``. All tokens with a positive weight must be among ``token_ids`` ``[rows,
    n]``, in any order.
    """
    token_ids, order = token_ids.sort(dim=-1)
    weights = weights.gather(1, order)
    total = weights.cumsum(dim=-1, dtype=torch.float64)[:, -1:]
    return token_ids.gather(1, _invert(weights, _target(total, uniforms))).squeeze(1)


def _target(total: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """Return ``uniforms`` times ``total``, limited to less than ``total``. A target that rounds up to the total would
    be after the last token with a positive weight.
    """
    return torch.minimum(uniforms * total, torch.nextafter(total, torch.zeros_like(total)))


def _invert(weights: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Return the first column whose cumulative weight exceeds ``target`` ``[rows, 1]``.

    If rounding keeps every cumulative weight below the target, return the last column with a positive weight.
    """
    cumulative = weights.cumsum(dim=-1, dtype=torch.float64)
    last = torch.searchsorted(cumulative, cumulative[:, -1:].contiguous())
    return torch.minimum(torch.searchsorted(cumulative, target, right=True), last)


_STAGES = (128, 1024)
_MASS_BLOCK = 256
_KEY_SHIFT = 16
_KEYS = (0x7F800000 >> _KEY_SHIFT) + 1
"""Number of different values of the upper 16 bits of non-negative float32 numbers, including infinity. As integers,
these bits have the same order as the numbers.
"""


@dataclass(frozen=True, slots=True)
class FilterInputs:
    """Inputs of sampling with filters. Parameters have the shape ``[rows, 1]``.

    Attributes:
        logits: ``[rows, vocab]``.
        peaks: float32, largest logit of each row, which must be finite.
        temperature: float32.
        max_distance: float32, maximum distance to the peak that min_p allows, or infinity for no limit.
        top_k: int64, or the vocabulary's size for no limit.
        top_p: float64.
        uniforms: float64, random numbers in [0, 1).
    """

    logits: torch.Tensor
    peaks: torch.Tensor
    temperature: torch.Tensor
    max_distance: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    uniforms: torch.Tensor

    def rows(self, rows: torch.Tensor | slice) -> "FilterInputs":
        """Return the inputs of the rows ``rows``, given by int64 indices or a slice."""
        return FilterInputs(
            self.logits[rows],
            self.peaks[rows],
            self.temperature[rows],
            self.max_distance[rows],
            self.top_k[rows],
            self.top_p[rows],
            self.uniforms[rows],
        )

    def distances(self, logits: torch.Tensor) -> torch.Tensor:
        """Return the distances of ``logits`` ``[rows, n]`` from the peaks, float32. Distances are never negative."""
        return (self.peaks - logits.float()).div_(self.temperature)


def draw_filtered(inputs: FilterInputs) -> torch.Tensor:
    """Return one sampled token id for each row, int64 ``[rows]``, after applying the filters."""
    parts = row_slices(inputs.logits)
    if len(parts) == 1:
        return _draw_rows(inputs)
    return torch.cat([_draw_rows(inputs.rows(part)) for part in parts])


def _draw_rows(inputs: FilterInputs) -> torch.Tensor:
    vocab = inputs.logits.shape[1]
    tokens = inputs.top_k.new_empty(len(inputs.logits))
    has_top_k = (inputs.top_k < vocab).squeeze(1)
    left = has_top_k | ((inputs.top_p < 1) | inputs.max_distance.isfinite()).squeeze(1)
    plain, many = ~left, torch.zeros_like(left)
    mass = torch.full_like(inputs.top_p, torch.nan)
    for count in _STAGES:
        now = _numbers(left & (~has_top_k | (inputs.top_k < count).squeeze(1)))
        if len(now) and count < vocab:
            drawn = _among_likeliest(_select(inputs, now), mass[now], count)
            tokens[now], mass[now] = drawn.token_ids, drawn.mass
            left[now], many[now] = drawn.few, drawn.many
    for rows, draw_rows in ((_numbers(plain), _from_all), (_numbers(left | many), _from_kept)):
        if len(rows):
            tokens[rows] = draw_rows(_select(inputs, rows))
    return tokens


def _numbers(rows: torch.Tensor) -> torch.Tensor:
    return rows.nonzero().squeeze(1)


def _select(inputs: FilterInputs, rows: torch.Tensor) -> FilterInputs:
    return inputs if len(rows) == len(inputs.logits) else inputs.rows(rows)


@dataclass(frozen=True, slots=True)
class _Drawn:
    """Result of sampling each row from its likeliest tokens.

    Attributes:
        token_ids: Sampled tokens. The token of a row is invalid if ``few`` or ``many`` is true, because the filters may
            keep other tokens.
        few: Whether the row is not complete, but the next stage may contain all tokens that the filters keep.
        many: Whether the row must be sampled from all tokens.
        mass: ``[rows, 1]``, total weight of all tokens that pass min_p and top_k, or NaN if it was not computed.
    """

    token_ids: torch.Tensor
    few: torch.Tensor
    many: torch.Tensor
    mass: torch.Tensor


def _among_likeliest(inputs: FilterInputs, mass: torch.Tensor, count: int) -> _Drawn:
    """Sample one token for each row from the ``count`` likeliest tokens of the row."""
    values, token_ids = largest(inputs.logits, count)
    distances = inputs.distances(values)
    weights = distances.neg().exp_()
    limit = inputs.max_distance
    has_top_k = inputs.top_k < inputs.logits.shape[1]
    kth = distances.gather(1, (inputs.top_k - 1).clamp(max=count - 1))
    limit = torch.where(has_top_k, torch.minimum(limit, kth), limit)
    has_top_p = inputs.top_p < 1
    # Each token that is not among the likeliest has at least the distance of the last of the likeliest tokens, and at
    # most its weight.
    last, weightless = distances[:, -1:], weights[:, -1:] == 0
    may_reach = torch.zeros_like(has_top_p)
    if bool(has_top_p.any()):
        inside = (limit < last) | weightless
        unknown = _numbers((has_top_p & ~inside & mass.isnan()).squeeze(1))
        if len(unknown):
            mass = mass.index_put((unknown,), _mass(_select(inputs, unknown), limit[unknown]))
        covered = weights.cumsum(dim=-1, dtype=torch.float64)
        passed = (weights * (distances <= limit)).sum(dim=-1, keepdim=True, dtype=torch.float64)
        wanted = torch.where(inside, passed, mass) * inputs.top_p
        position = (covered < wanted).sum(dim=-1, keepdim=True)
        reached = torch.minimum(limit, distances.gather(1, position.clamp(max=count - 1)))
        limit = torch.where(has_top_p & (position < count), reached, limit)
        may_reach = has_top_p & (covered[:, -1:] + (_STAGES[-1] - count) * weights[:, -1:] >= wanted)
    drawn = draw_among(token_ids, weights * (distances <= limit), inputs.uniforms)
    unsure = ~((limit < last) | weightless)
    few, many = unsure & may_reach, unsure & ~may_reach
    return _Drawn(drawn, few.squeeze(1), many.squeeze(1), mass)


def _mass(inputs: FilterInputs, limit: torch.Tensor) -> torch.Tensor:
    """Return the total weight, float64 ``[rows, 1]``, of all tokens up to the distance ``limit`` ``[rows, 1]``."""
    distances = inputs.distances(inputs.logits)
    return _kept_weights(distances, limit)[1]


def _kept_weights(distances: torch.Tensor, limit: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    weights = distances.neg().exp_()
    if bool(limit.isfinite().any()):
        weights.mul_(distances <= limit)
    return weights, block_sums(weights, _MASS_BLOCK).sum(dim=-1, keepdim=True)


def _from_all(inputs: FilterInputs) -> torch.Tensor:
    return draw(inputs.distances(inputs.logits).neg_().exp_(), inputs.uniforms)


def _from_kept(inputs: FilterInputs) -> torch.Tensor:
    """Sample one token for each row from all tokens that the filters keep. The function is used for rows whose filters
    keep many tokens.
    """
    vocab = inputs.logits.shape[1]
    distances = inputs.distances(inputs.logits)
    limit = inputs.max_distance.clone()
    for row in _numbers((inputs.top_k < vocab).squeeze(1)).tolist():
        kth = distances[row].topk(int(inputs.top_k[row]), largest=False).values[-1]
        limit[row] = torch.minimum(limit[row], kth)
    weights, mass = _kept_weights(distances, limit)
    with_top_p = _numbers((inputs.top_p < 1).squeeze(1)).tolist()
    for row in with_top_p:
        limit[row] = _nucleus_limit(distances[row], weights[row], limit[row], inputs.top_p[row] * mass[row])
    if with_top_p:
        weights.mul_(distances <= limit)
    return draw(weights, inputs.uniforms)


def _nucleus_limit(
    distances: torch.Tensor, weights: torch.Tensor, limit: torch.Tensor, wanted: torch.Tensor
) -> torch.Tensor:
    """Return the smallest distance ``[1]`` up to which the weights of the tokens in a row ``[vocab]`` sum to at least
    ``wanted`` ``[1]``.

    The result is at most ``limit``.

    On a CPU, a histogram of the distances finds the interval that contains the result, and only the tokens in this
    interval are sorted. On other devices, the complete row is sorted, because sorting is fast there, and sums in a
    histogram would depend on the order of threads.
    """
    if distances.device.type != "cpu":
        distances, order = distances.sort()
        covered = weights[order].cumsum(0, dtype=torch.float64)
        return torch.minimum(limit, distances[torch.searchsorted(covered, wanted).clamp_(max=len(distances) - 1)])
    keys = distances.view(torch.int32) >> _KEY_SHIFT
    covered = torch.bincount(keys, weights=weights.double(), minlength=_KEYS).cumsum(0)
    key = torch.searchsorted(covered, wanted).clamp_(max=_KEYS - 1)
    before = torch.where(key > 0, covered[(key - 1).clamp_(min=0)], 0.0)
    same = _numbers(keys == key)
    if not len(same):
        return limit
    inside, order = distances[same].sort()
    covered = before + weights[same[order]].cumsum(0, dtype=torch.float64)
    position = torch.searchsorted(covered, wanted).clamp_(max=len(inside) - 1)
    return torch.minimum(limit, inside[position])
