"""Constraints of models that reason: they apply after the reasoning, wherever it ends."""

from itertools import pairwise

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock_common.errors import InvalidArgument
from penstock_common.types.outputs import FinishReason
from penstock_common.types.request import ReasoningTokens
from penstock_common.types.sampling import StructuredOutput
from penstock_enginecore.config import StructuredOutputConfig
from penstock_enginecore.core.engine_core import EngineCore
from penstock_enginecore.structured_output.core.base import allows
from penstock_enginecore.structured_output.core.reasoning import At, GatedGrammar, ReasoningGate, all_but
from tests.fakes.engines.engine_harness import (
    Transcript,
    add,
    assert_as_expected,
    assert_nothing_left,
    make_config,
    make_engine,
    make_request,
    run_to_end,
    step,
)
from tests.fakes.engines.fake_executor import FakeExecutor, oracle_token
from tests.fakes.engines.fake_grammars import FakeGrammar, FakeGrammars

VOCAB, EOS, BEGIN, END = 50, 7, 10, 13
TOKENS = ReasoningTokens(BEGIN, END)
SEEDS = range(24)
ENDED = {"reasoning_ended": True}
BEGUN = {"reasoning_ended": False}


def engine_with(grammars, **config):
    executor = FakeExecutor(vocab_size=VOCAB, eos_token_ids=frozenset({EOS}))
    return make_engine(executor, grammars=grammars, **config)


def asking(regex="even:4", *, tokens=TOKENS, reasoning_ended=None, prompt=5, **fields):
    prompt = list(range(20, 20 + prompt)) if isinstance(prompt, int) else prompt
    request = make_request(prompt, **{"structured_output": StructuredOutput(regex=regex), "max_tokens": 60, **fields})
    return msgspec.structs.replace(request, reasoning_parser_kwargs=tokens, reasoning_ended=reasoning_ended)


def undisturbed(request, at):
    """Return the tokens of a request whose output begins at ``at``, and its finish reason."""
    params = request.sampling_params
    grammars = FakeGrammars(VOCAB, EOS)
    grammars.start(params.structured_output, [], lambda: None)
    (grammar,) = grammars.started
    tokens = []
    while len(tokens) < params.max_tokens:
        drawn = oracle_token(params.seed, len(tokens), VOCAB)

        def allowed(token, at=at):
            if at is At.REASONING:
                return token != EOS
            return grammar.allows(token) or (at is At.START and token == BEGIN)

        token = next(t % VOCAB for t in range(drawn, drawn + VOCAB) if allowed(t % VOCAB))
        tokens.append(token)
        if at is At.START and token == BEGIN:
            at = At.REASONING
        elif at is At.REASONING:
            at = At.ENDED if token == END else at
        else:
            at = At.ENDED
            grammar.accept(token)
        if grammar.terminated:
            return tokens, FinishReason.STOP
    return tokens, FinishReason.LENGTH


def assert_gives(engine, transcript, request, at):
    tokens, reason = undisturbed(request, at)
    assert request.prior_output_token_ids + transcript.tokens[request.request_id] == tokens
    assert transcript.reason(request.request_id) == reason


# Position at which the constrained output begins.


@pytest.mark.parametrize(
    ("prompt", "ended", "at"),
    [
        ([1, 2, 3], None, At.START),
        ([1, 2, BEGIN], None, At.REASONING),
        ([1, BEGIN, 4], None, At.REASONING),
        ([BEGIN, 4, END], None, At.ENDED),
        ([BEGIN, 4, END, 4, 4], None, At.ENDED),
        ([1, BEGIN, 4, END, 2, 3, 2, 3], None, At.START),
        ([BEGIN, 4, END], False, At.REASONING),
        ([1, 2, 3], True, At.ENDED),
        ([], None, At.START),
    ],
)
def test_an_output_begins_where_the_prompt_ends(prompt, ended, at):
    assert ReasoningGate(TOKENS, prompt, ended).at is at


@pytest.mark.parametrize(
    ("ended", "output", "passed"),
    [
        (None, [1, 2, BEGIN, END], [1, 2, BEGIN, END]),
        (None, [BEGIN, 1, END, 2, END, 3], [2, END, 3]),
        (None, [BEGIN, 1, BEGIN], []),
        (False, [1, 2, END, 3], [3]),
        (False, [END], []),
        (True, [END, 1], [END, 1]),
    ],
)
def test_the_constraints_tokens_are_those_behind_the_end(ended, output, passed):
    assert ReasoningGate(TOKENS, [1], ended).passed(output) == passed


@pytest.mark.parametrize("vocab_size", [31, 32, 33, 64])
def test_the_mask_of_reasoning_has_every_token_but_the_ends(vocab_size):
    mask = all_but(frozenset({0, 30, 99}), vocab_size)
    assert mask.dtype == np.int32
    allowed = [allows(mask, token) for token in range(32 * len(mask))]
    assert [token for token, each in enumerate(allowed) if each] == [t for t in range(vocab_size) if t not in (0, 30)]


@pytest.mark.parametrize("cuts", [[], [1], [2], [3], [1, 2, 3, 4]])
def test_several_tokens_may_come_at_once(cuts):
    grammar = FakeGrammar(0, 2, EOS, VOCAB, lambda: None)
    gated = GatedGrammar(grammar, ReasoningGate(TOKENS, [], None), all_but(frozenset({EOS}), VOCAB))
    output = [BEGIN, 3, END, 2, 4, EOS]
    for begin, end in pairwise([0, *cuts, len(output)]):
        assert all(gated.accept(token) for token in output[begin:end])
    assert (grammar.taken, gated.terminated) == ([2, 4], True)


def test_the_end_of_the_output_is_not_taken_in_the_reasoning():
    grammar = FakeGrammar(0, 0, EOS, VOCAB, lambda: None)
    gated = GatedGrammar(grammar, ReasoningGate(TOKENS, [], False), all_but(frozenset({EOS}), VOCAB))
    assert not gated.accept(EOS)
    assert gated.accept(END)
    assert gated.accept(EOS)


@given(
    output=st.lists(st.sampled_from([BEGIN, END, 2, 4, 3]), max_size=6),
    drafts=st.lists(st.sampled_from([BEGIN, END, 2, 4, 3, EOS]), max_size=8),
    ended=st.sampled_from([None, False, True]),
)
def test_masks_behind_drafts_are_those_of_an_output_that_has_these_tokens(output, drafts, ended):
    def after(token_ids):
        grammar = FakeGrammar(0, 3, EOS, VOCAB, lambda: None)
        gated = GatedGrammar(grammar, ReasoningGate(TOKENS, [], ended), all_but(frozenset({EOS}), VOCAB))
        return gated if all(gated.accept(token) for token in token_ids) else None

    gated = after(output)
    if gated is None:
        return
    gated.draft(drafts)
    assert gated.drafted
    for place, mask in enumerate(gated.draft_masks):
        alone = after(output + drafts[: place + 1])
        if alone is None:  # rows after a rejected draft are not used
            break
        np.testing.assert_array_equal(mask, alone.mask)


# Tests with an engine.


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"async_scheduling": True},
        {"max_concurrent_batches": 2},
        {"num_blocks": 40},
        {"async_scheduling": True, "num_blocks": 40},
    ],
    ids=str,
)
def test_outputs_reason_freely_and_then_obey(config):
    engine = engine_with(FakeGrammars(VOCAB, EOS), **config)
    begun = [asking(seed=seed, **BEGUN) for seed in SEEDS]
    either = [asking(seed=seed) for seed in SEEDS]
    ended = [asking(seed=seed, **ENDED) for seed in SEEDS]
    free = make_request(seed=99, max_tokens=30)
    transcript = run_to_end(engine, *begun, *either, *ended, free)
    for requests, at in ((begun, At.REASONING), (either, At.START), (ended, At.ENDED)):
        for request in requests:
            assert_gives(engine, transcript, request, at)
    assert_as_expected(engine, transcript, free)
    assert_nothing_left(engine)


def test_the_seeds_reason_and_end_it():
    outputs = [undisturbed(asking(seed=seed), At.START)[0] for seed in range(200)]
    assert any(output[0] == BEGIN and output[-1] == EOS for output in outputs)
    outputs = [undisturbed(asking(seed=seed), At.REASONING) for seed in SEEDS]
    assert {reason for _, reason in outputs} == {FinishReason.STOP, FinishReason.LENGTH}
    assert any(token % 2 for output, _ in outputs for token in output if token not in (END, EOS))


def test_a_prompt_that_has_begun_the_reasoning_needs_no_word_of_the_frontend():
    engine = engine_with(FakeGrammars(VOCAB, EOS))
    begun, ended = asking(prompt=[20, BEGIN, 21], seed=3), asking(prompt=[BEGIN, 21, END, 21], seed=3)
    transcript = run_to_end(engine, begun, ended)
    assert_gives(engine, transcript, begun, At.REASONING)
    assert_gives(engine, transcript, ended, At.ENDED)


def test_an_output_that_is_cut_short_in_its_reasoning_ends_as_length():
    engine = engine_with(FakeGrammars(VOCAB, EOS))
    request = asking(seed=0, max_tokens=3, tokens=ReasoningTokens(BEGIN, 49), **BEGUN)
    transcript = run_to_end(engine, request)
    assert transcript.reason(request.request_id) is FinishReason.LENGTH
    assert len(transcript.tokens[request.request_id]) == 3


def test_a_stop_token_ends_the_reasoning_too():
    engine = engine_with(FakeGrammars(VOCAB, EOS))
    stop = oracle_token(0, 2, VOCAB)
    request = asking(seed=0, stop_token_ids=(stop,), tokens=ReasoningTokens(BEGIN, 49), **BEGUN)
    transcript = run_to_end(engine, request)
    assert transcript.reason(request.request_id) is FinishReason.STOP
    assert transcript.tokens[request.request_id][-1] == stop


@pytest.mark.parametrize("at", [At.START, At.REASONING])
@pytest.mark.parametrize("config", [{}, {"async_scheduling": True}], ids=str)
def test_a_request_that_moves_goes_on_where_it_was(at, config):
    fields = BEGUN if at is At.REASONING else {}
    seed = next(s for s in range(1000) if END in undisturbed(asking(seed=s, **fields), at)[0][2:8])
    whole, _ = undisturbed(asking(seed=seed, **fields), at)
    engine = engine_with(FakeGrammars(VOCAB, EOS), **config)
    for cut in range(1, len(whole)):
        request = asking(seed=seed, prior=whole[:cut], attempt=1, **fields)
        assert_gives(engine, run_to_end(engine, request), request, at)


class NoMask(FakeGrammar):
    """A grammar whose mask must not be used."""

    @property
    def mask(self):
        raise AssertionError("a mask was asked for")


def test_no_mask_of_the_constraint_is_asked_for_while_the_model_reasons():
    grammars = FakeGrammars(VOCAB, EOS)
    grammars.make = NoMask
    engine = engine_with(grammars)
    request = asking(seed=0, max_tokens=20, tokens=ReasoningTokens(BEGIN, EOS), **BEGUN)
    transcript = run_to_end(engine, request)
    assert transcript.reason(request.request_id) is FinishReason.LENGTH
    assert grammars.waits == 0


@pytest.mark.parametrize("config", [{}, {"async_scheduling": True}], ids=str)
def test_a_first_mask_that_is_late_holds_the_request_up_only_behind_its_reasoning(config):
    grammars = FakeGrammars(VOCAB, EOS)
    engine = engine_with(grammars, **config)
    seed = next(s for s in range(1000) if END in undisturbed(asking(seed=s), At.REASONING)[0][2:8])
    request = asking(seed=seed, **BEGUN)
    add(engine, request)
    (grammar,) = grammars.started
    grammar.slow, grammar.ready = True, False
    transcript = Transcript()
    step(engine, transcript)
    while not engine.stalled:
        step(engine, transcript)
    assert transcript.tokens[request.request_id][-1] == END
    grammar.slow = False
    grammar.arrive()
    run_to_end(engine, transcript=transcript)
    assert_gives(engine, transcript, request, At.REASONING)


def test_constraints_may_be_told_to_hold_in_the_reasoning_too():
    grammars = FakeGrammars(VOCAB, EOS)
    executor = FakeExecutor(vocab_size=VOCAB, eos_token_ids=frozenset({EOS}))
    config = msgspec.structs.replace(make_config(), structured_output=StructuredOutputConfig(enable_in_reasoning=True))
    engine = EngineCore(config, executor, progress=lambda _: None, make_grammars=lambda *_, **__: grammars)
    request = asking(seed=3, **BEGUN)
    assert_gives(engine, run_to_end(engine, request), request, At.ENDED)


def test_a_budget_beside_a_constraint_that_holds_in_the_reasoning_is_refused():
    grammars = FakeGrammars(VOCAB, EOS)
    executor = FakeExecutor(vocab_size=VOCAB, eos_token_ids=frozenset({EOS}))
    config = msgspec.structs.replace(make_config(), structured_output=StructuredOutputConfig(enable_in_reasoning=True))
    engine = EngineCore(config, executor, progress=lambda _: None, make_grammars=lambda *_, **__: grammars)
    request = asking(seed=3, **BEGUN)
    params = msgspec.structs.replace(request.sampling_params, thinking_token_budget=4)
    engine.add(engine.preprocess("client", msgspec.structs.replace(request, sampling_params=params)))
    [output] = [output for outputs in engine.step(lambda: None).values() for output in outputs.outputs]
    assert (output.error.code, output.error.field) == ("INVALID_ARGUMENT", "sampling_params.thinking_token_budget")
    assert "thinking_token_budget is 4 and structured_output is set" in output.error.message


def test_a_budget_without_the_tokens_around_the_reasoning_is_refused():
    request = asking(seed=3, tokens=None)
    params = msgspec.structs.replace(request.sampling_params, thinking_token_budget=4)
    with pytest.raises(InvalidArgument, match="thinking_token_budget is 4, but reasoning_parser_kwargs") as error:
        engine_with(FakeGrammars(VOCAB, EOS)).preprocess(
            "client", msgspec.structs.replace(request, sampling_params=params)
        )
    assert error.value.field == "sampling_params.thinking_token_budget"


@pytest.mark.parametrize("name", ["begin_token_id", "end_token_id"])
@pytest.mark.parametrize("token_id", [-1, VOCAB])
def test_a_tag_that_is_no_token_is_refused(name, token_id):
    tokens = msgspec.structs.replace(TOKENS, **{name: token_id})
    with pytest.raises(InvalidArgument) as error:
        engine_with(FakeGrammars(VOCAB, EOS)).preprocess("client", asking(tokens=tokens))
    field = f"reasoning_parser_kwargs.{name}"
    assert (error.value.field, error.value.message) == (field, f"{field} is {token_id}; token ids go from 0 to 49")
