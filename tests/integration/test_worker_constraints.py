"""Constraints on engines with worker processes: the tokens of one process without drafts, and no refused request."""

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from penstock_common.types.request import EngineCoreRequest, ReasoningTokens
from penstock_common.types.sampling import SamplingParams, StructuredOutput
from tests.fakes.engines.in_process import Run, answer, build_engine

DEMO = Path(__file__).resolve().parents[2] / "examples/demo_model/penstock-tiny"
TOKENIZER = Tokenizer.from_file(str(DEMO / "tokenizer.json"))
SCHEMA = {
    "type": "object",
    "properties": {"age": {"type": "integer"}, "kind": {"enum": ["dog", "cat"]}},
    "required": ["age", "kind"],
    "additionalProperties": False,
}
CONSTRAINTS: dict[str, dict[str, Any]] = {
    "schema": {"json_schema": json.dumps(SCHEMA)},
    "choice": {"choice": ("yes, there is a dog", "yes, there is a cat", "no")},
    "regex": {"regex": "([a-z]{2,5} ){3,6}[0-9]{3}"},
}
GREEDY: dict[str, Any] = {"temperature": 0.0}
SEEDED: dict[str, Any] = {"temperature": 0.9, "seed": 4, "logprobs": 2}
REQUESTS = {
    "schema": ("schema", GREEDY),
    "schema, seeded": ("schema", SEEDED),
    "choice": ("choice", GREEDY),
    "choice, seeded": ("choice", SEEDED),
    "regex": ("regex", GREEDY),
    "regex, min_tokens": ("regex", {**GREEDY, "min_tokens": 4, "repetition_penalty": 1.1}),
    "schema behind reasoning": ("schema", GREEDY),
}
REASONING = ReasoningTokens(TOKENIZER.token_to_id("<|user|>"), TOKENIZER.token_to_id("<|assistant|>"))
SUFFIX = {"method": "suffix", "num_speculative_tokens": 4, "adaptive": False}
DRAFTER = {**SUFFIX, "method": "draft_model", "model": str(DEMO.with_name("penstock-tiny-draft"))}
HEAD = {**SUFFIX, "method": "eagle3", "model": str(DEMO.with_name("penstock-tiny-eagle3"))}
ENGINES: dict[str, dict[str, Any]] = {
    "tensor parallel, suffix": {"executor": {"tensor_parallel_size": 2}, "speculative": SUFFIX},
    "tensor parallel, eagle3": {"executor": {"tensor_parallel_size": 2}, "speculative": HEAD},
    "process, draft model": {"executor": {"kind": "multiproc"}, "speculative": DRAFTER},
    "pipeline parallel": {"executor": {"pipeline_parallel_size": 2}},  # engines with drafts support only one stage
}


def run(**sections: Any) -> Run:
    """Run all requests at once, so that steps contain rows of several requests with different numbers of drafts."""
    prompt = TOKENIZER.encode("Once upon a time there was a little dog", add_special_tokens=False).ids
    requests = [
        EngineCoreRequest(
            request_id=name,
            prompt_token_ids=prompt,
            sampling_params=SamplingParams(
                max_tokens=24, structured_output=StructuredOutput(**CONSTRAINTS[constraint]), **sampling
            ),
            reasoning_parser_kwargs=REASONING if "reasoning" in name else None,
            reasoning_ended=False if "reasoning" in name else None,
        )
        for name, (constraint, sampling) in REQUESTS.items()
    ]
    engine = build_engine(DEMO, cache={"block_size": 16, "num_blocks": 512}, **sections)
    try:
        return answer(engine, requests)
    finally:
        engine.shutdown()


@pytest.fixture(scope="module")
def expected() -> Run:
    return run()


@pytest.mark.slow
@pytest.mark.parametrize(
    "engine",
    [name if name == "tensor parallel, suffix" else pytest.param(name, marks=pytest.mark.slow) for name in ENGINES],
)
def test_a_constrained_request_gives_the_tokens_of_one_process_without_drafts(expected: Run, engine: str) -> None:
    found = run(**ENGINES[engine])
    assert found.tokens == expected.tokens
    assert found.finish_reasons == expected.finish_reasons
    drafts = found.stats.spec_decoding_stats
    assert (drafts is not None and drafts.num_accepted_tokens > 0) == ("speculative" in ENGINES[engine])


def test_what_is_expected_is_what_was_asked_for(expected: Run) -> None:
    texts = {request: TOKENIZER.decode(tokens, skip_special_tokens=True) for request, tokens in expected.tokens.items()}
    assert set(json.loads(texts["schema"])) == {"age", "kind"}
    assert texts["choice, seeded"] in CONSTRAINTS["choice"]["choice"]
