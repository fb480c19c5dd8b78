"""Which drafted tokens hold: those that are what their rows sampled, up to the first that is not.

A row samples what it would sample without drafts, by its own logits, rules and random number, so that what comes out depends
neither on the drafts nor on their number (drafter-invariant speculative decoding; Daliri, Musco and Suresh, 2024).
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]


def final_runs(token_ids: IntArray, num_rows: Sequence[int], drafts: Sequence[Sequence[int]]) -> list[list[int]]:
    """The next tokens of each request among those that were sampled: its drafts that hold, and one more.

    ``token_ids`` int64 ``[rows]``: the rows of a request one behind the other, the first behind its final tokens and row j behind
    ``drafts[i][:j]``; each request has one more than drafts. ``num_rows``: how many of them can be reached, 1 at least.
    """
    runs, start = [], 0
    for rows, drafted in zip(num_rows, drafts, strict=True):
        sampled = token_ids[start : start + rows].tolist()
        count = 1
        while count < rows and sampled[count - 1] == drafted[count - 1]:
            count += 1
        runs.append(sampled[:count])
        start += len(drafted) + 1
    return runs
