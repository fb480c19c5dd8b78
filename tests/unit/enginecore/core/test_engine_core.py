"""Whole steps of the engine, and steps that fail."""

import logging
import re

import pytest

from penstock_common.errors import ConfigError
from penstock_common.types.outputs import FinishReason
from penstock_common.types.sampling import StructuredOutput
from penstock_enginecore.core.control import EngineControl
from penstock_enginecore.core.engine_core import EngineCore
from penstock_enginecore.core.scheduler.output import GrammarBitmask, ModelRunnerOutput, SchedulerOutput
from penstock_enginecore.core.steps_in_flight import EngineDeadError
from tests.fakes.engines.engine_harness import (
    CLIENT,
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
from tests.fakes.engines.fake_executor import FakeExecutor, oracle_tokens
from tests.fakes.engines.fake_grammars import FakeGrammars


def test_start_up_says_what_it_does():
    lines = []
    EngineCore(make_config(num_blocks=20), FakeExecutor(), progress=lines.append)
    assert lines[0].startswith("loading")
    assert "20 blocks of 4 tokens, 76 tokens in total, 32 bytes per token; sequences of up to 76 tokens" in lines[-1]


def test_a_length_that_does_not_fit_stops_the_start():
    with pytest.raises(ConfigError, match="max_model_len is 200"):
        make_engine(num_blocks=10, max_model_len=200)


@pytest.mark.parametrize("num_blocks", [64, 16])
@pytest.mark.parametrize("prefix_caching", [True, False])
@pytest.mark.parametrize("budget", [7, 64])
def test_a_mixed_load_gives_every_request_its_own_tokens(num_blocks, prefix_caching, budget):
    engine = make_engine(num_blocks=num_blocks, prefix_caching=prefix_caching, max_num_batched_tokens=budget)
    requests = [make_request(2 + 3 * (i % 6), seed=i % 5, max_tokens=1 + (7 * i) % 23) for i in range(30)]
    transcript = run_to_end(engine, *requests)
    assert_as_expected(engine, transcript, *requests)
    assert_nothing_left(engine)


def test_outputs_under_preemption_equal_undisturbed_ones():
    requests = [make_request(10, seed=i, max_tokens=25) for i in range(8)]
    roomy, tight = make_engine(num_blocks=200), make_engine(num_blocks=12)
    a, b = run_to_end(roomy, *requests), run_to_end(tight, *requests)
    assert roomy.scheduler.stats().num_preemptions == 0
    assert tight.scheduler.stats().num_preemptions > 10
    assert a.tokens == b.tokens


def test_an_abort_during_the_forward_pass_takes_effect_in_that_step():
    engine = make_engine()
    request, other = make_request(max_tokens=20), make_request(max_tokens=20, seed=1)
    transcript = Transcript()
    add(engine, request, other)
    step(engine, transcript)
    step(engine, transcript, lambda: engine.scheduler.abort_requests(CLIENT, [request.request_id]))
    assert transcript.reason(request.request_id) is FinishReason.ABORT
    assert len(transcript.tokens[request.request_id]) == 1
    run_to_end(engine, transcript=transcript)
    assert_as_expected(engine, transcript, other)
    assert_nothing_left(engine)


def test_a_request_id_may_be_used_again_in_the_very_next_step():
    engine = make_engine()
    transcript = run_to_end(engine, make_request(request_id="again"))
    assert len(transcript.tokens["again"]) == 8
    add(engine, make_request(request_id="x", max_tokens=50))
    engine.step(lambda: None)
    engine.scheduler.abort_requests(CLIENT, ["x"])
    add(engine, make_request(request_id="x", seed=3, attempt=1))
    seen = []
    while engine.has_work:
        for frame in engine.step(lambda: None).values():
            seen += [t for o in frame.outputs if o.attempt == 1 for t in o.new_token_ids]
    assert seen == oracle_tokens(3, 8, 1000)


def test_a_failed_step_kills_the_engine_and_logs_its_input_once_without_tokens(caplog):
    engine = make_engine(FakeExecutor(fail_at_step=1, vocab_size=10**6))
    add(engine, make_request([777777, 888888], request_id="victim"))
    engine.step(lambda: None)
    with (
        caplog.at_level(logging.ERROR),
        pytest.raises(EngineDeadError, match="a step failed: RuntimeError: the fake device is gone"),
    ):
        engine.step(lambda: None)
    [record] = [r for r in caplog.records if r.levelno == logging.ERROR]
    assert "victim" in record.getMessage()
    assert "'num_computed_tokens': 2" in record.getMessage()
    first = str(oracle_tokens(0, 1, 10**6)[0])
    assert not any(token in caplog.text for token in ("777777", "888888", first))


def test_a_failed_prefill_is_logged_without_the_prompt(caplog):
    engine = make_engine(FakeExecutor(fail_at_step=0, vocab_size=10**6))
    add(engine, make_request([777777, 888888]))
    with pytest.raises(EngineDeadError):
        engine.step(lambda: None)
    assert "'num_tokens': 2, 'num_prompt_tokens': 2, 'num_computed_tokens': 0" in caplog.text
    assert "777777" not in caplog.text


def test_outputs_go_to_the_client_that_asked():
    engine = make_engine()
    add(engine, make_request(request_id="r", seed=1), client_id="a")
    add(engine, make_request(request_id="r", seed=2), client_id="b")
    got = {"a": [], "b": []}
    while engine.has_work:
        for client, frame in engine.step(lambda: None).items():
            got[client] += [t for output in frame.outputs for t in output.new_token_ids]
    assert got == {"a": oracle_tokens(1, 8, 1000), "b": oracle_tokens(2, 8, 1000)}


def test_a_step_without_work_says_it_is_stalled():
    engine = make_engine(scheduler="tests.fakes.engines.engine_harness:StuckScheduler")
    add(engine, make_request())
    assert engine.step(lambda: None) == {}
    assert engine.stalled
    assert engine.has_work


def test_the_prefix_cache_is_not_reset_under_a_running_request_that_holds_no_block():
    """All blocks of the request have left its layers' windows."""
    engine = make_engine(FakeExecutor(windows=(1, 1)))
    add(engine, make_request(8))
    engine.step(lambda: None)
    assert engine.scheduler.stats().num_running_reqs == 1
    assert engine.scheduler.stats().kv_cache_usage == 0.0
    assert EngineControl(engine).reset_prefix_cache() is False
    assert EngineControl(engine).reset_prefix_cache(preempt_running=True) is True


# NaN or infinite logits end only their own request.

VOCAB, EOS = 1000, frozenset({2})


MODES = [{}, {"async_scheduling": True}, {"max_concurrent_batches": 3}, {"prefix_caching": False}]


class NanExecutor(FakeExecutor):
    """Reports five NaN logits for token number ``at`` (from 1) of each request whose id begins with nan."""

    at = 1

    def _sample(self, step: SchedulerOutput, grammar: GrammarBitmask | None) -> ModelRunnerOutput:
        output = super()._sample(step, grammar)
        output.num_nans_in_logits = {
            key: 5
            for key, tokens in zip(output.request_ids, output.sampled_token_ids, strict=True)
            if tokens and key.startswith("nan") and step.num_tokens_after[key] >= 4 + self.at - 1
        }
        return output


@pytest.mark.parametrize("config", MODES, ids=str)
@pytest.mark.parametrize("at", [1, 4])
@pytest.mark.parametrize("constrained", [False, True])
def test_a_request_with_nan_logits_ends_by_an_incident(
    config: dict[str, object], at: int, constrained: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.ERROR)
    executor = NanExecutor(vocab_size=VOCAB)
    executor.at = at
    engine = make_engine(executor, grammars=FakeGrammars(VOCAB, EOS), **config)
    good = [make_request(3 + 4 * i, seed=i, max_tokens=4 + 5 * i) for i in range(3)]
    rules = {"structured_output": StructuredOutput(regex="even")} if constrained else {}
    transcript = run_to_end(engine, *good, make_request(4, request_id="nan", max_tokens=30, **rules))
    assert_as_expected(engine, transcript, *good)
    assert_nothing_left(engine)
    end = transcript.ends["nan"]
    assert end.finish_reason is FinishReason.ERROR
    assert end.num_nans_in_logits == 5
    assert (end.error.code, end.error.reason) == ("INTERNAL", "STEP_FAILED")
    number = re.search(r"whose logits are NaN or infinite, failed .* incident ([0-9a-f]{8})", end.error.message)
    assert number is not None
    assert len(transcript.tokens["nan"]) == at - 1
    assert sum(number[1] in record.getMessage() for record in caplog.records) == 1
