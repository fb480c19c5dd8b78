"""The demo model with 200 JSON schemas: every draft method gives the same tokens and log-probabilities as no drafts."""

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from penstock_common.types.request import EngineCoreRequest
from penstock_common.types.sampling import SamplingParams, StructuredOutput
from penstock_enginecore.core.engine_core import EngineCore
from tests.benchmarks import speculation
from tests.fakes.engines.in_process import Run, answer, build_engine
from tests.fakes.models.random_schemas import random_schema

DEMO = Path(__file__).resolve().parents[2] / "examples/demo_model/penstock-tiny"
DRAFTER = DEMO.with_name("penstock-tiny-draft")
TOKENIZER = Tokenizer.from_file(str(DEMO / "tokenizer.json"))
METHODS: dict[str, dict[str, Any]] = {
    "prediction": {"method": "prediction"},
    "ngram": {"method": "ngram"},
    "draft_model": {"method": "draft_model", "model": str(DRAFTER)},
}
GREEDY, SEEDED = 0.0, 0.9
MAX_TOKENS = 64


def schema(number: int) -> str:
    """Return a record schema with words as names.

    Every second schema also uses any keywords that the engine supports.
    """
    made = random_schema(random.Random(number)) if number % 2 else speculation.schema(number)
    return json.dumps(made)


def requests(numbers: range, temperature: float, predicted: dict[str, list[int]]) -> list[EngineCoreRequest]:
    """Return one request for each schema. ``predicted`` maps a request's id to its predicted output."""
    made = []
    for number in numbers:
        question = f"<|user|>{speculation.story(number)}<|end|><|assistant|>"
        params = SamplingParams(
            temperature=temperature,
            seed=number,
            max_tokens=MAX_TOKENS,
            logprobs=2,
            structured_output=StructuredOutput(json_schema=schema(number)),
        )
        request_id = f"schema {number}"
        made.append(
            EngineCoreRequest(
                request_id=request_id,
                prompt_token_ids=TOKENIZER.encode(question, add_special_tokens=False).ids,
                sampling_params=params,
                prediction_token_ids=predicted.get(request_id, []),
            )
        )
    return made


def mostly(tokens: list[int]) -> list[int]:
    """Return ``tokens`` with every seventh token changed."""
    return [token if place % 7 != 6 else 40 + place for place, token in enumerate(tokens)]


@pytest.fixture(scope="module")
def engines() -> Iterator[dict[str, EngineCore]]:
    """Yield engines by draft method; "" means no drafts. The engines always draft the maximum number of tokens."""
    made: dict[str, EngineCore] = {}
    try:
        for name, speculative in ({"": {}} | METHODS).items():
            if speculative:
                speculative = {"num_speculative_tokens": 6, "adaptive": False} | speculative
            made[name] = build_engine(DEMO, cache={"block_size": 16, "num_blocks": 2048}, speculative=speculative)
        yield made
    finally:
        for engine in made.values():
            engine.shutdown()


def without(engine: EngineCore, numbers: range, temperature: float) -> Run:
    run = answer(engine, requests(numbers, temperature, {}))
    assert run.stats.spec_decoding_stats is None
    return run


@pytest.mark.parametrize(
    "numbers", [range(3), pytest.param(range(3, 200), marks=pytest.mark.slow)], ids=["3 schemas", "197 schemas"]
)
@pytest.mark.parametrize("temperature", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_every_schema_gives_the_tokens_and_log_probabilities_that_it_gives_without(
    engines: dict[str, EngineCore], numbers: range, temperature: float
) -> None:
    expected = without(engines[""], numbers, temperature)
    assert len({tuple(tokens) for tokens in expected.tokens.values()}) > len(numbers) // 2, "the outputs vary"
    predicted = {request_id: mostly(tokens) for request_id, tokens in expected.tokens.items()}
    for method in METHODS:
        predictions = predicted if method == "prediction" else {}
        found = answer(engines[method], requests(numbers, temperature, predictions))
        for request_id, tokens in expected.tokens.items():
            assert found.tokens[request_id] == tokens, (method, request_id)
            assert found.logprobs[request_id] == expected.logprobs[request_id], (method, request_id)
            assert len(found.logprobs[request_id]) == len(tokens)
        assert found.finish_reasons == expected.finish_reasons, method
        counts = found.stats.spec_decoding_stats
        assert counts is not None
        assert counts.num_accepted_tokens > 0, method
        assert not engines[method].scheduler.drafter_failure
