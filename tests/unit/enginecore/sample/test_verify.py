"""Drafts hold up to the first that is not what its row sampled."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock_enginecore.sample.sampler import final_runs


def counted(sampled: list[list[int]], drafts: list[list[int]], num_rows: list[int] | None = None) -> list[int]:
    flat = np.array([token for rows in sampled for token in rows], dtype=np.int64)
    runs = final_runs(flat, num_rows or [len(d) + 1 for d in drafts], drafts)
    assert all(run == rows[: len(run)] for run, rows in zip(runs, sampled, strict=True))
    return [len(run) for run in runs]


@pytest.mark.parametrize(
    ("sampled", "drafts", "count"),
    [
        ([5], [], 1),
        ([5, 6, 7], [5, 6], 3),
        ([5, 6, 7], [5, 9], 2),
        ([5, 6, 7], [9, 6], 1),
        ([5, 6, 7], [9, 9], 1),
    ],
)
def test_a_run_ends_with_the_first_token_that_differs_or_the_one_behind_the_last_draft(sampled, drafts, count) -> None:
    assert counted([sampled], [drafts]) == [count]


def test_rows_that_cannot_be_reached_end_it_too() -> None:
    assert counted([[5, 6, 7]], [[5, 6]], num_rows=[2]) == [2]
    assert counted([[5, 6, 7]], [[5, 6]], num_rows=[1]) == [1]


@given(st.lists(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2)), max_size=5), min_size=1, max_size=4))
def test_requests_do_not_concern_each_other(runs) -> None:
    drafts = [[draft for _, draft in run] for run in runs]
    sampled = [[token for token, _ in run] + [1] for run in runs]
    together = counted(sampled, drafts)
    assert together == [counted([rows], [guessed])[0] for rows, guessed in zip(sampled, drafts, strict=True)]
    for count, rows, guessed in zip(together, sampled, drafts, strict=True):
        assert rows[: count - 1] == guessed[: count - 1]
        assert count == len(rows) or rows[count - 1] != guessed[count - 1]
