"""When a request ends by itself, and with which reason."""

import pytest

from penstock_common.types.outputs import FinishReason
from penstock_common.types.sampling import RepetitionDetection
from penstock_enginecore.core.scheduler.results import repeats_itself
from tests.fakes.engines.engine_harness import (
    assert_as_expected,
    assert_nothing_left,
    make_engine,
    make_request,
    run_to_end,
)
from tests.fakes.engines.fake_executor import FakeExecutor, oracle_tokens

TOKENS = oracle_tokens(0, 40, 1000)


def end_of(request, *, eos=frozenset(), **config):
    engine = make_engine(FakeExecutor(eos_token_ids=eos), **config)
    transcript = run_to_end(engine, request)
    assert_as_expected(engine, transcript, request)
    assert_nothing_left(engine)
    end = transcript.ends[request.request_id]
    return len(transcript.tokens[request.request_id]), end.finish_reason, end.stop_reason


def test_max_tokens_ends_with_length():
    assert end_of(make_request(max_tokens=7)) == (7, FinishReason.LENGTH, None)


def test_eos_ends_with_stop_and_no_stop_reason():
    assert end_of(make_request(max_tokens=30), eos=frozenset({TOKENS[4], 1001})) == (5, FinishReason.STOP, None)


def test_eos_is_ignored_when_asked():
    assert end_of(make_request(max_tokens=30, ignore_eos=True), eos=frozenset({TOKENS[4]}))[:2] == (
        30,
        FinishReason.LENGTH,
    )


def test_a_stop_token_is_its_own_reason():
    assert end_of(make_request(max_tokens=30, stop_token_ids=(999, TOKENS[6]))) == (7, FinishReason.STOP, TOKENS[6])


def test_a_stop_token_that_is_eos_counts_as_stop_token_when_eos_is_ignored():
    request = make_request(max_tokens=30, ignore_eos=True, stop_token_ids=(TOKENS[4],))
    assert end_of(request, eos=frozenset({TOKENS[4]})) == (5, FinishReason.STOP, TOKENS[4])


@pytest.mark.parametrize(("min_tokens", "length"), [(5, 5), (6, 8)])
def test_min_tokens_holds_back_stops(min_tokens, length):
    request = make_request(max_tokens=8, min_tokens=min_tokens, stop_token_ids=(TOKENS[4],))
    assert end_of(request)[0] == length


def test_a_stop_at_the_last_allowed_token_is_a_stop():
    assert end_of(make_request(max_tokens=5), eos=frozenset({TOKENS[4]}))[1] is FinishReason.STOP


def test_max_model_len_ends_with_length_even_below_min_tokens():
    request = make_request(10, max_tokens=None, min_tokens=100)
    assert end_of(request, max_model_len=32) == (22, FinishReason.LENGTH, None)


def test_a_prompt_one_below_max_model_len_gives_one_token():
    assert end_of(make_request(31, max_tokens=9), max_model_len=32) == (1, FinishReason.LENGTH, None)


def test_prior_output_counts_as_output():
    engine = make_engine()
    request = make_request(5, max_tokens=10, prior=TOKENS[:4], attempt=1)
    transcript = run_to_end(engine, request)
    outputs = transcript.outputs[request.request_id]
    assert transcript.tokens[request.request_id] == TOKENS[4:10]
    assert outputs[0].offset == 4
    assert {output.attempt for output in outputs} == {1}
    assert outputs[0].prefill_stats.num_prompt_tokens == 5


@pytest.mark.parametrize(
    ("sampling", "eos", "reason", "stop_reason"),
    [
        ({"max_tokens": 4}, frozenset(), FinishReason.LENGTH, None),
        ({"max_tokens": 3}, frozenset(), FinishReason.LENGTH, None),
        ({"max_tokens": 9}, frozenset({TOKENS[3]}), FinishReason.STOP, None),
        ({"max_tokens": 9, "stop_token_ids": (TOKENS[3],)}, frozenset(), FinishReason.STOP, TOKENS[3]),
    ],
)
def test_prior_output_that_reached_a_stop_ends_at_once(sampling, eos, reason, stop_reason):
    engine = make_engine(FakeExecutor(eos_token_ids=eos))
    request = make_request(5, prior=TOKENS[:4], **sampling)
    transcript = run_to_end(engine, request)
    [output] = transcript.outputs[request.request_id]
    assert (output.new_token_ids, output.offset) == ([], 4)
    assert (output.finish_reason, output.stop_reason) == (reason, stop_reason)
    assert engine.executor.num_steps == 0


def test_prior_output_up_to_max_model_len_ends_at_once():
    engine = make_engine(max_model_len=16)
    request = make_request(5, prior=TOKENS[:12], max_tokens=None)
    assert run_to_end(engine, request).reason(request.request_id) is FinishReason.LENGTH


def test_prior_output_that_ends_in_eos_below_min_tokens_goes_on():
    engine = make_engine(FakeExecutor(eos_token_ids=frozenset({TOKENS[3]})))
    request = make_request(5, prior=TOKENS[:4], max_tokens=8, min_tokens=6)
    assert run_to_end(engine, request).tokens[request.request_id] == TOKENS[4:8]


@pytest.mark.parametrize(
    ("tokens", "detection", "repeats"),
    [
        ([1, 2, 1, 2], {"max_pattern_size": 2}, True),
        ([9, 1, 2, 1, 2], {"max_pattern_size": 2}, True),
        ([1, 2, 1, 3], {"max_pattern_size": 2}, False),
        ([1, 2, 1, 2], {"max_pattern_size": 1}, False),
        ([5, 5], {"max_pattern_size": 4}, True),
        ([5, 5], {"max_pattern_size": 4, "min_pattern_size": 2}, False),
        ([5, 5, 5, 5], {"max_pattern_size": 4, "min_pattern_size": 2}, True),
        ([1, 2, 1, 2], {"max_pattern_size": 2, "min_count": 3}, False),
        ([1, 2, 1, 2, 1, 2], {"max_pattern_size": 2, "min_count": 3}, True),
        ([2, 1, 1, 2, 2, 1], {"max_pattern_size": 3}, False),
        ([], {"max_pattern_size": 3}, False),
    ],
)
def test_a_repetition_is_a_pattern_at_the_end_often_enough(tokens, detection, repeats):
    prompt = [1, 2] * 5
    assert repeats_itself(prompt + tokens, len(tokens), RepetitionDetection(**detection)) == repeats


def test_an_output_that_repeats_itself_ends_with_repetition():
    request = make_request(3, max_tokens=60, repetition_detection=RepetitionDetection(max_pattern_size=1))
    engine = make_engine(FakeExecutor(vocab_size=4))
    transcript = run_to_end(engine, request)
    assert_as_expected(engine, transcript, request)
    assert transcript.reason(request.request_id) is FinishReason.REPETITION
    assert_nothing_left(engine)
