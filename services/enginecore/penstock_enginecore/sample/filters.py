"""min_p, top_k and top_p, and the draw from what they leave.

A row is seen as distances: how far each logit is below the row's peak, over temperature; a token's weight is exp(-distance).
Each filter lowers a limit on the distance, so tokens that tie with the last one kept are kept too, and the outcome depends
neither on how a sort breaks ties nor on the rest of the batch.

Filters mostly leave few tokens. So rows are looked at in stages: the 128 likeliest tokens, the 1024 likeliest, then all. A row is
done at the first stage that is sure to hold every token its filters keep, which stage that is depends on the row alone.
"""

from dataclasses import dataclass

import torch

from penstock_enginecore.sample.blocks import block_sums, largest, row_slices
from penstock_enginecore.sample.draw import draw, draw_among

_STAGES = (128, 1024)
_MASS_BLOCK = 256
_KEY_SHIFT = 16
_KEYS = (0x7F800000 >> _KEY_SHIFT) + 1
"""Float32 numbers that are not negative, infinity included, by their upper 16 bits: these are in order of size."""


@dataclass(frozen=True, slots=True)
class FilterInputs:
    """Columns ``[rows, 1]`` beside ``logits`` ``[rows, vocab]``, whose maxima ``peaks`` are finite.

    ``peaks`` and ``temperature`` float32, ``max_distance`` float32 (min_p as a limit on the distance, infinity is off),
    ``top_k`` int64 (the vocabulary's size is off), ``top_p`` and ``uniforms`` float64.
    """

    logits: torch.Tensor
    peaks: torch.Tensor
    temperature: torch.Tensor
    max_distance: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    uniforms: torch.Tensor

    def rows(self, rows: torch.Tensor | slice) -> "FilterInputs":
        """The rows ``rows``, an int64 index or a slice."""
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
        """Distances of ``logits`` ``[rows, n]``, float32, none negative."""
        return (self.peaks - logits.float()).div_(self.temperature)


def draw_filtered(inputs: FilterInputs) -> torch.Tensor:
    """Token ids int64 ``[rows]``."""
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
    """What a draw from the likeliest tokens gave, per row. ``token_ids`` mean nothing where the filters may keep tokens that
    were not looked at: ``few``, if the last stage may do, or ``many``. ``mass`` ``[rows, 1]``: weight of all tokens that
    pass min_p and top_k, NaN where nobody asked.
    """

    token_ids: torch.Tensor
    few: torch.Tensor
    many: torch.Tensor
    mass: torch.Tensor


def _among_likeliest(inputs: FilterInputs, mass: torch.Tensor, count: int) -> _Drawn:
    """Draw from the ``count`` likeliest tokens."""
    values, token_ids = largest(inputs.logits, count)
    distances = inputs.distances(values)
    weights = distances.neg().exp_()
    limit = inputs.max_distance
    has_top_k = inputs.top_k < inputs.logits.shape[1]
    kth = distances.gather(1, (inputs.top_k - 1).clamp(max=count - 1))
    limit = torch.where(has_top_k, torch.minimum(limit, kth), limit)
    has_top_p = inputs.top_p < 1
    # What is not among the likeliest is no closer than the last of them, and weighs no more.
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
    """Weight of all tokens within ``limit`` ``[rows, 1]``, float64 ``[rows, 1]``."""
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
    """Draw from rows whose filters keep many tokens."""
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
    """The least distance within which the weights of a row ``[vocab]`` sum to ``wanted`` ``[1]``, ``limit`` at most; ``[1]``.

    A histogram of the distances says between which two of its boundaries that is; only what lies there is sorted. Elsewhere
    than on a CPU, where sorting is fast and a histogram's sums depend on the order of its threads, the row is sorted.
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
