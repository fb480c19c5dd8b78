"""Comparison of a disturbed request with an undisturbed one: lost, repeated or changed output."""

from typing import Any

import pytest

from tests.chaos.killing import Kill
from tests.chaos.outcome import Difference, Outcome, Output, difference, tokens_differ

TOKENS = [3, 1, 4, 1, 5, 9, 2, 6]


def outcome(error: str = "", **fields: Any) -> Outcome:
    output = Output(**{"token_ids": list(TOKENS), "text": "pi", "finish": "length", "usage": (4, 8)} | fields)
    return Outcome(error=error, outputs={} if error else {0: output})


@pytest.mark.parametrize(
    ("got", "found"),
    [
        (TOKENS, (0, 0, None)),
        ([3, 1, 4, 4, 1, 5, 9, 2, 6], (1, 0, None)),
        ([3, 1, 4, 1, 5, 4, 1, 5, 9, 2, 6], (3, 0, None)),
        ([3, 1, 4, 1, 5, 9, 2, 6, 2, 6], (2, 0, None)),
        ([3, 1, 5, 9, 2, 6], (0, 2, None)),
        ([3, 1, 4, 1, 5], (0, 3, None)),
        ([], (0, 8, None)),
        ([3, 1, 4, 7, 5, 9, 2, 6], (0, 0, 3)),
        ([3, 1, 4, 1, 5, 9, 2, 6, 5], (0, 0, 8)),
        ([3, 1, 4, 7, 7, 1, 5, 9, 2, 6], (0, 0, 3)),
    ],
)
def test_tokens_that_came_twice_are_told_from_lost_and_from_other_ones(
    got: list[int], found: tuple[int, int, int | None]
) -> None:
    assert tokens_differ(TOKENS, got) == found


def test_the_same_outcome_has_no_difference() -> None:
    assert not difference(outcome(), outcome())
    assert not difference(outcome(error="NOT_FOUND"), outcome(error="NOT_FOUND"))


@pytest.mark.parametrize(
    "change", [{"text": "pie"}, {"finish": "stop"}, {"stop": "."}, {"usage": (4, 9)}, {"logprobs": [-1.0]}]
)
def test_every_field_counts(change: dict[str, Any]) -> None:
    found = difference(outcome(), outcome(**change))
    assert (found.duplicated, found.lost, len(found.differing)) == (0, 0, 1)


def test_logprobs_may_differ_by_rounding_alone() -> None:
    assert not difference(outcome(logprobs=[-1.0, -2.0]), outcome(logprobs=[-1.0, -2.0 + 1e-6]))
    assert difference(outcome(logprobs=[-1.0, -2.0]), outcome(logprobs=[-1.0, -2.1])).differing == ("[0] logprobs",)


def test_an_unexpected_error_is_a_failure_and_an_unexpected_answer_a_difference() -> None:
    assert difference(outcome(), outcome(error="UNAVAILABLE")) == Difference(failed="UNAVAILABLE")
    assert difference(outcome(error="NOT_FOUND"), outcome()).differing
    assert difference(outcome(error="NOT_FOUND"), outcome(error="INTERNAL")).failed == "INTERNAL"


def test_the_wait_at_a_moment_is_the_longest_gap_within_the_next_half_second() -> None:
    output = Output(arrivals=[1.0, 2.0, 2.1, 5.0, 9.0])
    moments = (0.5, 1.2, 1.8, 2.05, 3.0, 4.8, 8.0, 9.5)
    assert [output.wait_across(m) for m in moments] == pytest.approx([0.0, 1.0, 2.9, 2.9, 2.9, 4.0, 4.0, 0.0])


def test_a_killed_engines_sequences_are_those_that_waited_longest() -> None:
    kill = Kill("engine-0", moment=3.0, at=3.0, running=2, seconds_away=1.0)
    waited = [
        Outcome(outputs={0: Output(arrivals=[2.9, 2.9 + wait])}, began=0.0, seconds=9.0) for wait in (1.5, 0.2, 1.0)
    ]
    final = Outcome(outputs={0: Output(arrivals=[8.0])}, began=0.0, seconds=9.0)
    over = Outcome(outputs={0: Output(arrivals=[1.0, 2.0])}, began=0.0, seconds=2.0)
    assert kill.waits([*waited, over]) == pytest.approx([1.5, 1.0])
    assert kill.waits([*waited, final, over]) == pytest.approx([1.5, 1.0])
    assert kill.waits([over]) == []
