"""Which rows that were taken from a step's tokens have an adapter."""

from collections.abc import Sequence

import numpy as np

from penstock_enginecore.attention.base import IntArray
from penstock_enginecore.lora.adapter import LoraSegment


def segments_of_rows(segments: Sequence[LoraSegment], rows: IntArray) -> list[LoraSegment]:
    """Those of ``rows`` int64 ``[n]``, tokens in any order, one behind the other: ``first`` and ``end`` count rows."""
    if not segments or not len(rows):
        return []
    firsts = np.array([segment.first for segment in segments])
    ends = np.array([segment.end for segment in segments])
    of = np.minimum(np.searchsorted(ends, rows, side="right"), len(segments) - 1)
    of[(rows < firsts[of]) | (rows >= ends[of])] = -1
    starts = np.flatnonzero(np.diff(of, prepend=-2))
    return [
        LoraSegment(segments[of[first]].digest, int(first), int(end))
        for first, end in zip(starts, [*starts[1:], len(rows)], strict=True)
        if of[first] >= 0
    ]
