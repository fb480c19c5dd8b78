"""Requests with a constraint: they wait while it is compiled, follow it, and end."""

from concurrent.futures import Future

import pytest

from penstock_common.errors import InvalidArgument, ResourceExhausted, Unimplemented
from penstock_common.types.outputs import FinishReason
from penstock_common.types.sampling import StructuredOutput
from tests.fakes.engines.engine_harness import (
    Transcript,
    add,
    assert_as_expected,
    assert_nothing_left,
    make_engine,
    make_request,
    run_to_end,
    step,
)
from tests.fakes.engines.fake_executor import FakeExecutor
from tests.fakes.engines.fake_grammars import FakeGrammar, FakeGrammars

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


def test_a_request_with_a_compiling_constraint_delays_no_other():
    grammars = FakeGrammars(VOCAB, EOS, manual=True)
    engine = engine_with(grammars, max_num_seqs=1)
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
    assert engine.queues.get(block=False, timeout=None) is None
    grammars.compile_all()
    assert engine.queues.get(block=False, timeout=None) is not None
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
    engine.scheduler.abort_requests("client", [request.request_id])
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
    with pytest.raises(Unimplemented, match="structured_output is not supported by this engine"):
        make_engine().preprocess("client", constrained("even"))


def test_shutting_down_ends_the_compiler():
    grammars = FakeGrammars(VOCAB, EOS)
    engine_with(grammars).shutdown()
    assert grammars.is_shut_down


# Masks that are not ready in time.


def slow_beside_a_neighbour(prompt, **config):
    """Return an engine that runs a neighbour and a constrained request. The test decides when its masks arrive."""
    grammars = FakeGrammars(VOCAB, EOS)
    engine = engine_with(grammars, **config)
    slow, neighbour = constrained("even:5", max_tokens=20), make_request(max_tokens=12)
    add(engine, slow, neighbour)
    (grammar,) = grammars.started
    grammar.slow, grammar.prompt = True, prompt
    return engine, grammar, slow, neighbour


@pytest.mark.parametrize("prompt", [True, False])
@pytest.mark.parametrize("config", [{}, {"async_scheduling": True}, {"prefix_caching": False}])
def test_a_late_mask_delays_no_other_request(prompt, config):
    engine, grammar, slow, neighbour = slow_beside_a_neighbour(prompt, **config)
    transcript = Transcript()
    while neighbour.request_id not in transcript.ends:
        step(engine, transcript)
    assert len(transcript.tokens[slow.request_id]) == 1
    for _ in range(3):
        step(engine, transcript)
    assert engine.stalled
    grammar.slow = False
    grammar.arrive()
    run_to_end(engine, transcript=transcript)
    assert_as_expected(engine, transcript, slow, neighbour)
    assert_nothing_left(engine)


def test_a_late_mask_wakes_the_waiting_loop():
    engine, grammar, slow, _ = slow_beside_a_neighbour(prompt=True)
    while engine.queues.get(block=False, timeout=None) is not None:
        pass
    transcript = Transcript()
    while not engine.stalled:
        step(engine, transcript)
    assert engine.queues.get(block=False, timeout=None) is None
    grammar.arrive()
    assert engine.queues.get(block=False, timeout=None) is not None
    step(engine, transcript)
    assert len(transcript.tokens[slow.request_id]) == 2


def test_a_step_waits_once_for_a_mask_and_for_slow_ones_never():
    engine, grammar, _, neighbour = slow_beside_a_neighbour(prompt=True)
    run_to_end_of(engine, neighbour)
    assert engine_grammars(engine).waits == 1
    engine, grammar, _, neighbour = slow_beside_a_neighbour(prompt=False)
    run_to_end_of(engine, neighbour)
    assert engine_grammars(engine).waits == 0
    assert not grammar.ready


def run_to_end_of(engine, request):
    transcript = Transcript()
    while request.request_id not in transcript.ends:
        step(engine, transcript)
    return transcript


def engine_grammars(engine):
    return engine._grammars._backend


def test_a_request_may_end_while_its_mask_is_late():
    engine, grammar, slow, neighbour = slow_beside_a_neighbour(prompt=True)
    transcript = run_to_end_of(engine, neighbour)
    engine.scheduler.abort_requests("client", [slow.request_id])
    grammar.arrive()
    run_to_end(engine, transcript=transcript)
    assert transcript.reason(slow.request_id) is FinishReason.ABORT
    assert grammar.closed
    assert_nothing_left(engine)


@pytest.mark.parametrize("steps", [0, 1, 2, 3])
def test_a_grammar_over_its_budget_ends_its_request_alone(steps):
    engine, grammar, slow, neighbour = slow_beside_a_neighbour(prompt=True)
    transcript = Transcript()
    for _ in range(steps):
        step(engine, transcript)
    grammar.fail(
        ResourceExhausted("too costly", field="sampling_params.structured_output", reason="GRAMMAR_TOO_COSTLY")
    )
    run_to_end(engine, transcript=transcript)
    end = transcript.ends[slow.request_id]
    assert (end.finish_reason, end.error.code) == (FinishReason.ERROR, "RESOURCE_EXHAUSTED")
    assert end.error.reason == "GRAMMAR_TOO_COSTLY"
    assert_as_expected(engine, transcript, neighbour)
    assert_nothing_left(engine)


def test_a_grammar_is_given_up_with_its_request():
    grammars = FakeGrammars(VOCAB, EOS)
    run_to_end(engine_with(grammars), constrained("even:5", max_tokens=3), constrained("odd:2"))
    assert [grammar.closed for grammar in grammars.started] == [True, True]


# Failures of a grammar end one request.


class DefectError(RuntimeError):
    """An error that is a defect, not a RequestFailed."""


class BrokenAccept(FakeGrammar):
    def accept(self, token):
        if self._parity:
            raise DefectError("accept")
        return super().accept(token)


class BrokenMask(FakeGrammar):
    @property
    def mask(self):
        if self._parity:
            raise DefectError("mask")
        return super().mask


class BrokenStart(FakeGrammars):
    """Grammars that cannot start: with ``at_once`` the start raises, otherwise its future does."""

    at_once = False

    def start(self, constraint, prior_token_ids, changed):
        if constraint.regex.startswith("odd"):
            if self.at_once:
                raise DefectError("start")
            future = Future()
            future.set_exception(DefectError("start"))
            return future
        return super().start(constraint, prior_token_ids, changed)


class BrokenAtOnce(BrokenStart):
    at_once = True


def broken(backend, make=FakeGrammar):
    grammars = backend(VOCAB, EOS)
    grammars.make = make
    return grammars


@pytest.mark.parametrize(
    "grammars",
    [broken(FakeGrammars, BrokenAccept), broken(FakeGrammars, BrokenMask), broken(BrokenStart)],
    ids=["accept", "mask", "start"],
)
@pytest.mark.parametrize("config", [{}, {"async_scheduling": True}])
def test_a_defect_in_a_grammar_ends_its_request_alone_with_an_incident(grammars, config, caplog):
    engine = engine_with(grammars, **config)
    bad, good, free = constrained("odd:3", seed=1), constrained("even:3", seed=2), make_request(seed=3, max_tokens=6)
    transcript = run_to_end(engine, bad, good, free)
    error = transcript.ends[bad.request_id].error
    assert (error.code, error.reason) == ("INTERNAL", "INCIDENT")
    incidents = [record for record in caplog.records if record.getMessage().startswith("incident")]
    assert [record.exc_info[0] for record in incidents] == [DefectError]
    assert incidents[0].incident in error.message
    assert_as_expected(engine, transcript, good, free)
    assert_nothing_left(engine)


def test_a_constraint_that_cannot_be_started_leaves_no_request_behind(caplog):
    engine = engine_with(broken(BrokenAtOnce))
    bad, good = constrained("odd:3"), constrained("even:3")
    transcript = run_to_end(engine, bad, good)
    assert transcript.ends[bad.request_id].error.reason == "INCIDENT"
    assert_as_expected(engine, transcript, good)
    assert_nothing_left(engine)
