"""Requests with a constraint: compiled aside, held meanwhile, obeyed, ended."""

import pytest

from penstock_common.errors import InvalidArgument, Unimplemented
from penstock_common.types.outputs import FinishReason
from penstock_common.types.sampling import StructuredOutput
from tests.fakes.engine_harness import (
    Transcript,
    add,
    assert_as_expected,
    assert_nothing_left,
    make_engine,
    make_request,
    run_to_end,
    step,
)
from tests.fakes.fake_executor import FakeExecutor
from tests.fakes.fake_grammars import FakeGrammars

VOCAB, EOS = 50, 7


def engine_with(grammars, **config):
    executor = FakeExecutor(vocab_size=VOCAB, eos_token_ids=frozenset({EOS}))
    return make_engine(executor, grammars=grammars, **config)


def constrained(regex, **fields):
    return make_request(structured_output=StructuredOutput(regex=regex), **fields)


def test_tokens_obey_the_constraint_to_its_end():
    engine = engine_with(FakeGrammars(VOCAB, EOS))
    request = constrained("even:5", max_tokens=20)
    transcript = run_to_end(engine, request)
    assert_as_expected(engine, transcript, request)
    tokens = transcript.tokens[request.request_id]
    assert all(token % 2 == 0 for token in tokens[:-1])
    assert tokens[-1] == EOS
    assert transcript.reason(request.request_id) is FinishReason.STOP


def test_a_constraint_that_is_fulfilled_ends_the_output_also_where_eos_is_ignored():
    engine = engine_with(FakeGrammars(VOCAB, EOS))
    request = constrained("even:5", max_tokens=20, ignore_eos=True)
    transcript = run_to_end(engine, request)
    assert len(transcript.tokens[request.request_id]) == 6
    assert transcript.reason(request.request_id) is FinishReason.STOP


def test_a_request_whose_constraint_is_compiling_holds_nobody_up():
    grammars = FakeGrammars(VOCAB, EOS, manual=True)
    engine = engine_with(grammars, max_num_seqs=1)
    woken = []
    engine.wake = lambda: woken.append(True)
    first, second = constrained("even:3"), make_request(max_tokens=3)
    add(engine, first, second)
    transcript = Transcript()
    for _ in range(5):
        step(engine, transcript)
    assert second.request_id in transcript.ends
    assert first.request_id not in transcript.tokens
    stats = engine.scheduler.stats()
    assert (stats.num_waiting_reqs, stats.num_skipped_reqs) == (1, 1)
    assert engine.stalled
    assert not woken
    grammars.compile_all()
    assert woken
    run_to_end(engine, transcript=transcript)
    assert_as_expected(engine, transcript, first)
    assert_nothing_left(engine)


def test_a_constraint_that_cannot_be_compiled_ends_its_request_alone():
    engine = engine_with(FakeGrammars(VOCAB, EOS))
    bad, good = constrained("broken"), constrained("odd:2")
    transcript = run_to_end(engine, bad, good)
    end = transcript.ends[bad.request_id]
    assert end.finish_reason is FinishReason.ERROR
    assert (end.error.code, end.error.field) == ("INVALID_ARGUMENT", "sampling_params.structured_output.regex")
    assert_as_expected(engine, transcript, good)
    assert_nothing_left(engine)


def test_a_request_may_end_while_its_constraint_is_compiling():
    grammars = FakeGrammars(VOCAB, EOS, manual=True)
    engine = engine_with(grammars)
    request = constrained("even")
    add(engine, request)
    engine.abort("client", [request.request_id])
    grammars.compile_all()
    transcript = run_to_end(engine)
    assert transcript.reason(request.request_id) is FinishReason.ABORT
    assert_nothing_left(engine)


def test_prior_output_moves_the_constraint_on():
    engine = engine_with(FakeGrammars(VOCAB, EOS))
    whole = run_to_end(engine, first := constrained("even:5", max_tokens=20, seed=3)).tokens[first.request_id]
    again = constrained("even:5", max_tokens=20, seed=3, prior=whole[:3])
    assert run_to_end(engine, again).tokens[again.request_id] == whole[3:]


def test_prior_output_that_breaks_the_constraint_is_refused():
    engine = engine_with(FakeGrammars(VOCAB, EOS))
    request = constrained("even", prior=[2, 3])
    end = run_to_end(engine, request).ends[request.request_id]
    assert end.error.field == "prior_output_token_ids"


def test_parameters_that_leave_no_token_end_the_request_with_the_reason():
    engine = engine_with(FakeGrammars(VOCAB, EOS))
    request = constrained("even")
    add(engine, request)
    sample = engine.executor._sample

    def odd(step, grammar):
        output = sample(step, grammar)
        output.sampled_token_ids = [[9] for _ in output.sampled_token_ids]
        return output

    engine.executor._sample = odd
    transcript = Transcript()
    step(engine, transcript)
    end = transcript.ends[request.request_id]
    assert end.error.reason == "CONSTRAINT_CONFLICT"
    assert end.new_token_ids == []


def test_a_constraint_that_is_refused_at_once_never_gets_in():
    engine = engine_with(FakeGrammars(VOCAB, EOS))
    with pytest.raises(InvalidArgument, match="refused at once"):
        engine.preprocess("client", constrained("refused"))


def test_an_engine_without_a_compiler_says_so():
    with pytest.raises(Unimplemented, match="structured_output is not served by this engine"):
        make_engine().preprocess("client", constrained("even"))


def test_shutting_down_ends_the_compiler():
    grammars = FakeGrammars(VOCAB, EOS)
    engine_with(grammars).shutdown()
    assert grammars.is_shut_down
