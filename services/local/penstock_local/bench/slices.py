"""A run cut into slices of the same length: what came in each, and how much ran in its middle."""

import math
from collections.abc import Sequence

import msgspec

from penstock_local.bench.record import Record


class Slices(msgspec.Struct, frozen=True):
    """``width`` in seconds; the others have a value for each slice, ``middles`` in seconds since the load began."""

    width: float
    middles: Sequence[float]
    tokens_per_s: Sequence[float]
    running: Sequence[int]


def cut(records: Sequence[Record], seconds: float, count: int) -> Slices:
    """``count`` slices of a run that took ``seconds``."""
    width = seconds / count
    tokens, changes = [0] * count, [0] * (count + 1)
    for record in records:
        for time, size in zip(record.times, record.sizes, strict=True):
            tokens[min(int(time / width), count - 1)] += size
        changes[_next_middle(record.start, width, count)] += 1
        changes[_next_middle(record.end, width, count)] -= 1
    running, now = [], 0
    for change in changes[:count]:
        now += change
        running.append(now)
    return Slices(width, [(index + 0.5) * width for index in range(count)], [each / width for each in tokens], running)


def _next_middle(time: float, width: float, count: int) -> int:
    """The first slice whose middle is not before ``time``; ``count`` where there is none."""
    return min(max(math.ceil(time / width - 0.5), 0), count)
