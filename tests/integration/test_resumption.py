"""A request is interrupted at every token and resumes on another engine: the result equals an uninterrupted run."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock_common.types.outputs import EngineCoreOutput, FinishReason, Logprobs
from penstock_common.types.request import EngineCoreRequest, ReasoningTokens
from penstock_common.types.sampling import RepetitionDetection, SamplingParams, StructuredOutput
from penstock_enginecore.core.engine_core import EngineCore
from tests.fakes.engines.in_process import CLIENT, build_engine

MODEL = Path(__file__).parents[2] / "examples" / "demo_model" / "penstock-tiny"
PROMPT = [5, 17, 42, 99, 7, 3, 250, 11, 64]
SEEDED: dict[str, Any] = {"temperature": 1.0, "seed": 1234}
SCHEMA = (
    '{"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "boolean"}}, "required": ["a", "b"]}'
)

SHAPES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "seeded": SEEDED,
    "top_p and top_k": {**SEEDED, "top_p": 0.8, "top_k": 40, "min_p": 0.01},
    "presence and frequency": {**SEEDED, "presence_penalty": 1.2, "frequency_penalty": 0.7},
    "repetition": {"temperature": 0.0, "repetition_penalty": 1.4},
    "min_tokens": {**SEEDED, "ignore_eos": False, "min_tokens": 10, "logit_bias": {1: 5.0, 2: 5.0}},
    "stop tokens": {**SEEDED, "stop_token_ids": tuple(range(40, 90)), "min_tokens": 6},
    "bad words": {"temperature": 0.0, "bad_word_token_ids": ((5,), (17, 42))},
    "allowed tokens": {**SEEDED, "allowed_token_ids": tuple(range(20, 60))},
    "repetition detection": {
        "temperature": 0.0,
        "allowed_token_ids": (30, 31),
        "repetition_detection": RepetitionDetection(max_pattern_size=3, min_pattern_size=1, min_count=4),
    },
    "schema": {**SEEDED, "structured_output": StructuredOutput(json_schema=SCHEMA), "max_tokens": 48},
    "schema behind reasoning": {
        **SEEDED,
        "seed": 6,  # with this seed, the reasoning ends after seven tokens
        "structured_output": StructuredOutput(json_schema=SCHEMA),
        "max_tokens": 64,
        "reasoning": ReasoningTokens(300, 301),
        "logit_bias": {301: 8.0},
    },
    "regex": {**SEEDED, "structured_output": StructuredOutput(regex="[a-d]{3,9}(xy|z)+"), "max_tokens": 48},
}


@pytest.fixture(scope="module")
def engine() -> Iterator[EngineCore]:
    engine = build_engine(MODEL)
    yield engine
    engine.shutdown()


def run(
    engine: EngineCore, prior: list[int], reasoning: ReasoningTokens | None = None, **params: Any
) -> tuple[list[int], list[Logprobs], EngineCoreOutput]:
    """Return the tokens after ``prior``, their log-probabilities, and the last output."""
    request = EngineCoreRequest(
        request_id="r",
        prompt_token_ids=PROMPT,
        sampling_params=SamplingParams(**{"max_tokens": 24, "ignore_eos": True, **params}),
        attempt=1 if prior else 0,
        prior_output_token_ids=prior,
        reasoning_parser_kwargs=reasoning,
        reasoning_ended=False,
    )
    engine.add(engine.preprocess(CLIENT, request))
    tokens: list[int] = []
    logprobs: list[Logprobs] = []
    last: EngineCoreOutput | None = None
    while engine.has_work:
        for frame in engine.step(lambda: None).values():
            for output in frame.outputs:
                assert output.error is None, output.error
                assert output.offset == len(prior) + len(tokens)
                tokens += output.new_token_ids
                if output.new_logprobs is not None:
                    logprobs.append(output.new_logprobs)
                last = output
        if engine.stalled and engine.has_requests:  # the engine is compiling a constraint
            assert engine.queues.get(block=True, timeout=60)
    assert last is not None
    return tokens, logprobs, last


@pytest.mark.quick("seeded", "min_tokens", "stop tokens", "schema behind reasoning")
@pytest.mark.parametrize("shape", SHAPES)
def test_a_request_cut_anywhere_goes_on_as_it_would_have(engine: EngineCore, shape: str) -> None:
    params = SHAPES[shape]
    whole, _, end = run(engine, [], **params)
    assert len(whole) > 3
    for cut in range(1, len(whole)):
        rest, _, cut_end = run(engine, whole[:cut], **params)
        assert whole[:cut] + rest == whole, cut
        assert (cut_end.finish_reason, cut_end.stop_reason) == (end.finish_reason, end.stop_reason)


def test_log_probabilities_go_on_at_the_token_that_is_new(engine: EngineCore) -> None:
    params: dict[str, Any] = {**SEEDED, "logprobs": 3, "prompt_logprobs": 2}
    whole, logprobs, _ = run(engine, [], **params)
    for cut in (1, 7, len(whole) - 1):
        rest, rest_logprobs, _ = run(engine, whole[:cut], **params)
        assert whole[:cut] + rest == whole
        for again, before in zip(rest_logprobs, logprobs[cut:], strict=True):
            assert (again.token_ids, again.ranks) == (before.token_ids, before.ranks)
            # the engine recomputes the prompt and the earlier tokens
            assert again.logprobs == pytest.approx(before.logprobs, abs=1e-3)


def test_a_request_that_was_cut_behind_its_last_token_ends_at_once(engine: EngineCore) -> None:
    whole, _, end = run(engine, [], temperature=0.0, max_tokens=6)
    rest, _, cut_end = run(engine, whole, temperature=0.0, max_tokens=6)
    assert (rest, cut_end.finish_reason) == ([], end.finish_reason) == ([], FinishReason.LENGTH)
