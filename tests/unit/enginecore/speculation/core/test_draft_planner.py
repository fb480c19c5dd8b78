"""Drafts in the scheduler: they save steps, and keep no other request from running."""

from typing import Any

import pytest

from penstock_common.types.outputs import FinishReason
from penstock_common.types.sampling import StructuredOutput
from penstock_enginecore.config import SpeculativeConfig
from tests.fakes.engines.engine_harness import make_engine, make_request
from tests.fakes.engines.fake_executor import Drafts, FakeExecutor, oracle_token, oracle_tokens
from tests.fakes.engines.fake_grammars import FakeGrammar, FakeGrammars

VOCAB = 50


def right(seed: int, index: int, count: int) -> list[int]:
    return [oracle_token(seed, i, VOCAB) for i in range(index, index + count)]


def wrong(seed: int, index: int, count: int) -> list[int]:
    return [(token + 1) % VOCAB for token in right(seed, index, count)]


def engine_with(drafter: Drafts, *, num_drafts: int = 4, grammars: FakeGrammars | None = None, **config: Any) -> Any:
    executor = FakeExecutor(vocab_size=VOCAB, block_size=config.get("block_size", 4), drafter=drafter)
    speculative = SpeculativeConfig(method="ngram", num_speculative_tokens=num_drafts, adaptive=False)
    return make_engine(executor, None, grammars, speculative=speculative, **config)


def add(engine: Any, request: Any) -> None:
    engine.add(engine.preprocess("client", request))


def num_steps(engine: Any) -> int:
    return sum(bool(step.num_scheduled_tokens) for step in engine.executor.steps)


def outputs_of(engine: Any) -> dict[str, Any]:
    """Run the engine to the end. Returns the tokens and the last output of each request."""
    tokens: dict[str, list[int]] = {}
    last = {}
    while engine.has_work:
        for outputs in engine.step(lambda: None).values():
            for output in outputs.outputs:
                tokens.setdefault(output.request_id, []).extend(output.new_token_ids)
                last[output.request_id] = output
    return {key: (tokens[key], last[key]) for key in tokens}


def test_right_drafts_bring_several_tokens_to_a_step_and_are_counted() -> None:
    engine = engine_with(right)
    add(engine, make_request(5, request_id="r", seed=3, max_tokens=12))
    tokens, last = outputs_of(engine)["r"]
    assert tokens == oracle_tokens(3, 12, VOCAB)
    assert last.finish_reason is FinishReason.LENGTH
    # Four steps: the prompt gives one token, two steps give five each, and the last one has no drafts.
    assert num_steps(engine) == 4
    counts = last.spec_decoding_stats
    assert (counts.num_drafts, counts.num_draft_tokens, counts.num_accepted_tokens) == (2, 8, 8)
    assert counts.num_accepted_tokens_per_pos == [2, 2, 2, 2]
    assert engine.scheduler.stats().spec_decoding_stats == counts


def test_wrong_drafts_bring_a_token_to_a_step_as_none_do() -> None:
    engine = engine_with(wrong)
    add(engine, make_request(5, request_id="r", seed=3, max_tokens=12))
    tokens, last = outputs_of(engine)["r"]
    assert tokens == oracle_tokens(3, 12, VOCAB)
    assert num_steps(engine) == 12
    assert last.spec_decoding_stats.num_accepted_tokens == 0


def test_a_request_without_drafts_says_nothing_of_them() -> None:
    engine = engine_with(right)
    add(engine, make_request(5, request_id="r", max_tokens=12, num_speculative_tokens=0))
    assert outputs_of(engine)["r"][1].spec_decoding_stats is None


def test_drafts_after_a_stop_are_dropped() -> None:
    expected = oracle_tokens(3, 12, VOCAB)
    engine = engine_with(right)
    add(engine, make_request(5, request_id="r", seed=3, max_tokens=12, stop_token_ids=(expected[3],)))
    tokens, last = outputs_of(engine)["r"]
    end = expected.index(expected[3]) + 1
    assert (tokens, last.finish_reason, last.stop_reason) == (expected[:end], FinishReason.STOP, expected[3])
    assert engine.scheduler.kv_cache.pool.usage == 0


def test_drafts_never_preempt_and_go_first_when_blocks_are_short() -> None:
    # Two requests fill all blocks exactly: seven blocks of four tokens are 28, of which each has 14.
    engine = engine_with(right, num_blocks=9, prefix_caching=False, max_num_batched_tokens=32)
    for name in "ab":
        add(engine, make_request(5, request_id=name, seed=ord(name), max_tokens=11))
    found = outputs_of(engine)
    assert {key: tokens for key, (tokens, _) in found.items()} == {n: oracle_tokens(ord(n), 11, VOCAB) for n in "ab"}
    assert engine.scheduler.stats().num_preemptions == 0


def test_a_waiting_request_begins_as_soon_as_it_would_without_drafts() -> None:
    def steps_until_begun(drafter: Drafts) -> int:
        engine = engine_with(drafter, num_blocks=8, prefix_caching=False)
        add(engine, make_request(8, request_id="first", seed=1, max_tokens=12, num_speculative_tokens=4))
        for _ in range(3):
            engine.step(lambda: None)
        add(engine, make_request(8, request_id="second", seed=2, max_tokens=2))
        steps = 0
        while len(engine.scheduler._waiting):
            engine.step(lambda: None)
            steps += 1
        return steps

    assert steps_until_begun(wrong) <= steps_until_begun(lambda *_: [])


def test_beside_prompts_drafts_take_an_eighth_of_a_step_at_most() -> None:
    engine = engine_with(right, num_drafts=8, num_blocks=200, max_num_batched_tokens=32, max_num_seqs=8)
    for number in range(6):
        add(engine, make_request(3, request_id=f"r{number}", seed=number, max_tokens=40))
    for _ in range(3):
        engine.step(lambda: None)
    add(engine, make_request([1] * 150, request_id="long", seed=9, max_tokens=1))
    while engine.has_requests:
        before = len(engine.executor.steps)
        engine.step(lambda: None)
        for step in engine.executor.steps[before:]:
            drafts = sum(map(len, step.scheduled_spec_decode_tokens.values()))
            long = sum(count for key, count in step.num_scheduled_tokens.items() if key.startswith("long"))
            assert not long or drafts <= 32 // 8
            assert step.total_num_scheduled_tokens <= 32


def test_masks_behind_no_drafts_let_none_hold() -> None:
    grammars = FakeGrammars(VOCAB, 7)
    engine = engine_with(lambda seed, index, count: [2] * count, grammars=grammars)
    constraint = StructuredOutput(regex="even:6")
    add(engine, make_request(5, request_id="r", seed=1, max_tokens=20, structured_output=constraint))
    tokens, last = outputs_of(engine)["r"]
    assert last.finish_reason is FinishReason.STOP
    assert len(tokens) == 7
    assert all(token % 2 == 0 for token in tokens[:6])


@pytest.mark.parametrize("drafter", [right, wrong])
def test_a_request_that_outlives_an_engine_goes_on_with_the_same_tokens(drafter: Drafts) -> None:
    expected = oracle_tokens(4, 16, VOCAB)
    engine = engine_with(drafter)
    request = make_request(5, request_id="r", seed=4, max_tokens=16, prior=expected[:7], attempt=1)
    add(engine, request)
    tokens, last = outputs_of(engine)["r"]
    assert tokens == expected[7:]
    assert last.finish_reason is FinishReason.LENGTH


class TalkativeGrammar(FakeGrammar):
    """Forces a long text."""

    @property
    def forced(self) -> list[int]:
        return [0] * 32


def test_forced_text_that_is_longer_than_the_limit_is_verified_in_parts() -> None:
    grammars = FakeGrammars(VOCAB)
    grammars.make = TalkativeGrammar
    engine = engine_with(right, num_drafts=4, grammars=grammars)
    add(engine, make_request(5, max_tokens=20, structured_output=StructuredOutput(regex="even"), ignore_eos=True))
    outputs_of(engine)
    drafted = [len(each) for step in engine.executor.steps for each in step.scheduled_spec_decode_tokens.values()]
    assert max(drafted) == 4
