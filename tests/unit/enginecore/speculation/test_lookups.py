"""Drafts that are looked up: the index against a scan, predictions that are nearly right, outputs that are kept apart."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock_common.types.request import RequestContext
from penstock_common.types.sampling import SamplingParams
from penstock_enginecore.core.scheduler.output import NewRequestData
from penstock_enginecore.speculation.base import DraftRequest
from penstock_enginecore.speculation.ngram import Ngram, TokenIndex
from penstock_enginecore.speculation.prediction import Predicted
from penstock_enginecore.speculation.suffix import PastOutputs, Suffix

TOKENS = st.lists(st.integers(0, 3), max_size=40)


def new(request_id: str, tokens: list[int], num_prompt: int, *, salt: str = "", prediction: list[int] | None = None):
    return NewRequestData(
        request_id=request_id,
        token_ids=tokens,
        num_prompt_tokens=num_prompt,
        num_computed_tokens=0,
        block_ids=([],),
        sampling_params=SamplingParams(),
        prediction_token_ids=prediction or [],
        context=RequestContext(cache_salt=salt),
    )


def propose(drafter: Any, tokens: list[int], num_prompt: int = 1, count: int = 4, request_id: str = "r") -> list[int]:
    request = DraftRequest(request_id, np.array(tokens, dtype=np.int32), num_prompt, count)
    return drafter.propose(SimpleNamespace(requests=[request]))[0]


def accepted(drafter: Any, prompt: list[int], output: list[int], count: int = 5) -> float:
    """Return the number of tokens per step when the drafter's drafts are verified against the output."""
    known, steps = 1, 0
    while known < len(output):
        drafts = propose(drafter, prompt + output[:known], len(prompt), min(count, len(output) - known))
        held = 0
        while held < len(drafts) and drafts[held] == output[known + held]:
            held += 1
        known, steps = known + held + 1, steps + 1
    return (len(output) - 1) / steps


@given(TOKENS, st.lists(st.integers(1, 9), max_size=8), st.integers(1, 4))
def test_the_index_finds_what_a_scan_finds_however_the_tokens_came(
    tokens: list[int], cuts: list[int], width: int
) -> None:
    index, start = TokenIndex(width), 0
    for length in [*cuts, len(tokens)]:
        index.extend(tokens[start : start + length])
        start += length
    many = TokenIndex(width)
    many._extend_many(np.array(tokens, dtype=np.int32))
    expected = [
        end
        for end in range(len(tokens) - 1, width - 1, -1)
        if len(tokens) >= width and tokens[end - width : end] == tokens[-width:]
    ]
    for built in (index, many):
        assert built.tokens == tokens
        assert list(built.ending_like(tokens, 100)) == expected


@given(TOKENS, TOKENS)
def test_many_tokens_behind_few_are_indexed_alike(first: list[int], second: list[int]) -> None:
    one, other = TokenIndex(2, first), TokenIndex(2, first)
    one.extend(second)
    other._extend_many(np.array(second, dtype=np.int32))
    assert list(one.ending_like(one.tokens, 100)) == list(other.ending_like(other.tokens, 100))


def test_ngram_drafts_what_followed_the_longest_run_that_is_alike() -> None:
    drafter = Ngram(2, 5)
    drafter.begin(new("r", [], 1))
    assert propose(drafter, [1, 2, 3, 4, 9, 9, 2, 3, 7, 8, 5, 1, 2, 3]) == [4, 9, 9, 2]


def test_ngram_goes_on_with_what_repeats() -> None:
    drafter = Ngram(2, 5)
    drafter.begin(new("r", [], 1))
    assert propose(drafter, [5, 1, 2, 3, 1, 2, 3], count=6) == [1, 2, 3, 1, 2, 3]


def test_ngram_drafts_nothing_behind_what_is_new() -> None:
    drafter = Ngram(2, 5)
    drafter.begin(new("r", [], 1))
    assert propose(drafter, [1, 2, 3, 4]) == []


@pytest.mark.parametrize("change", ["replace", "insert", "delete"])
def test_a_mostly_right_prediction_is_matched_again_after_each_difference(change: str) -> None:
    rng = np.random.default_rng(3)
    prediction = rng.integers(10, 500, 400).tolist()
    output = []
    for place, token in enumerate(prediction):
        if place % 10 != 9:
            output.append(token)
        elif change != "delete":
            output += [1] if change == "replace" else [1, token]
    drafter = Predicted(None)
    drafter.begin(new("r", [7], 1, prediction=prediction))
    assert accepted(drafter, [7], output) > 3.2


def test_a_prediction_is_drafted_from_its_beginning_and_not_behind_its_end() -> None:
    drafter = Predicted(None)
    drafter.begin(new("r", [7], 1, prediction=[1, 2, 3]))
    assert propose(drafter, [7]) == [1, 2, 3]
    assert propose(drafter, [7, 1, 2]) == [3]
    assert propose(drafter, [7, 1, 2, 3]) == []


def test_a_prediction_that_is_all_wrong_leaves_drafting_to_the_other() -> None:
    drafter = Predicted(Ngram(2, 5))
    drafter.begin(new("r", [7], 1, prediction=list(range(100, 200))))
    tokens = [7, *[1, 2, 3] * 6]
    for end in range(1, len(tokens)):
        propose(drafter, tokens[:end])
    assert propose(drafter, tokens) == [1, 2, 3, 1]


def test_a_request_that_outlives_an_engine_is_found_in_its_prediction() -> None:
    drafter = Predicted(None)
    drafter.begin(new("r", [7], 1, prediction=list(range(100, 150))))
    assert propose(drafter, [7, *range(100, 120)]) == [120, 121, 122, 123]


def suffix(max_bytes: int = 1 << 20) -> Suffix:
    return Suffix(max_depth=24, max_factor=2.0, min_probability=0.3, max_bytes=max_bytes)


def test_suffix_drafts_what_outputs_that_have_ended_went_on_with() -> None:
    drafter = suffix()
    drafter.begin(new("a", [], 2))
    drafter.end("a", np.array([9, 9, 1, 2, 3, 4, 5, 6, 7, 8]), num_prompt_tokens=2)
    drafter.begin(new("r", [], 1))
    assert propose(drafter, [50, 2, 3, 4], count=8) == [5, 6, 7, 8]


def test_suffix_draws_on_nothing_of_another_salt_nor_on_prompts() -> None:
    drafter = suffix()
    drafter.begin(new("a", [], 8, salt="mine"))
    drafter.end("a", np.array([11, 12, 13, 14, 15, 16, 17, 18, 1, 2, 3, 4, 5]), num_prompt_tokens=8)
    for salt, tokens, expected in (
        ("yours", [50, 1, 2, 3], []),
        ("", [50, 1, 2, 3], []),
        ("mine", [50, 1, 2, 3], [4, 5]),
        ("mine", [50, 11, 12, 13], []),
    ):
        drafter.begin(new("r", [], 1, salt=salt))
        assert propose(drafter, tokens) == expected
        drafter.end("r", np.array(tokens), num_prompt_tokens=4)


def test_suffix_drafts_what_followed_more_often() -> None:
    drafter = suffix()
    for name, follows in (("a", 5), ("b", 6), ("c", 5)):
        drafter.begin(new(name, [], 1))
        drafter.end(name, np.array([0, 1, 2, 3, follows, follows]), num_prompt_tokens=1)
    drafter.begin(new("r", [], 1))
    assert propose(drafter, [50, 1, 2, 3], count=1) == [5]


def test_an_output_that_is_preempted_and_goes_on_is_remembered_once() -> None:
    drafter = suffix()
    drafter.begin(new("a", [], 1))
    drafter.end("a", np.array([0, 1, 2, 3, 4, 5]), num_prompt_tokens=1)
    before = drafter.num_bytes
    drafter.begin(new("a", [], 1))
    drafter.end("a", np.array([0, 1, 2, 3, 4, 5, 6, 7]), num_prompt_tokens=1)
    assert drafter.num_bytes < before + before // 5 * 7


def test_memory_of_past_outputs_is_flat() -> None:
    past, rng = PastOutputs(3, 1 << 20), np.random.default_rng(0)
    most = []
    for number in range(3000):
        past.add(f"{number % 7}", rng.integers(0, 50_000, 60).tolist())
        most.append(past.num_bytes)
    assert max(most) <= 1 << 20
    assert min(most[500:]) > 1 << 18
