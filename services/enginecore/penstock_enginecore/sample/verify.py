"""Which drafted tokens hold: those that are what their rows sampled, up to the first that is not.

A row samples what it would sample without drafts, by its own logits, rules and random number, so that what comes out depends
neither on the drafts nor on their number (drafter-invariant speculative decoding; Daliri, Musco and Suresh, 2024).
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]


def count_final(token_ids: IntArray, num_rows: Sequence[int], drafts: Sequence[Sequence[int]]) -> list[int]:
    """How many of each request's sampled tokens are its next ones: as many as its drafts that hold, and one more.

    ``token_ids`` int64 ``[rows]``: sampled, the rows of a request one behind the other, the first behind its final tokens and row
    j behind ``drafts[i][:j]``; each request has one more than drafts. ``num_rows``: how many of them can be reached, 1 at least.
    """
    counts, start = [], 0
    for rows, drafted in zip(num_rows, drafts, strict=True):
        count = 1
        if rows > 1:
            sampled = token_ids[start : start + rows].tolist()
            while count < rows and sampled[count - 1] == drafted[count - 1]:
                count += 1
        counts.append(count)
        start += len(drafted) + 1
    return counts
