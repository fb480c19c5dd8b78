"""Logits that are NaN or infinite end the request that they are of, and no other."""

import logging
import re

import pytest

from penstock_common.types.outputs import FinishReason
from penstock_common.types.sampling import StructuredOutput
from penstock_enginecore.core.scheduler.output import GrammarBitmask, ModelRunnerOutput, SchedulerOutput
from tests.fakes.engines.engine_harness import (
    assert_as_expected,
    assert_nothing_left,
    make_engine,
    make_request,
    run_to_end,
)
from tests.fakes.engines.fake_executor import FakeExecutor
from tests.fakes.engines.fake_grammars import FakeGrammars

VOCAB, EOS = 1000, frozenset({2})
MODES = [{}, {"async_scheduling": True}, {"max_concurrent_batches": 3}, {"prefix_caching": False}]


class NanExecutor(FakeExecutor):
    """Sees five NaN logits when it samples token number ``at``, from 1 on, of a request whose id begins with nan."""

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
