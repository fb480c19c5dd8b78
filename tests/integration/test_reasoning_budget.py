"""Engines enforce reasoning budgets with drafts, worker processes, batches and preemption."""

from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from penstock_common.types.request import EngineCoreRequest, ReasoningTokens
from penstock_common.types.sampling import SamplingParams
from tests.fakes.engines.in_process import Run, answer, build_engine

DEMO = Path(__file__).resolve().parents[2] / "examples/demo_model/penstock-tiny"
TOKENIZER = Tokenizer.from_file(str(DEMO / "tokenizer.json"))
BEGIN, END = TOKENIZER.token_to_id("<|user|>"), TOKENIZER.token_to_id("<|end|>")
"""Tokens used as the tags of reasoning. The demo model has no such tags, and does not write these tokens so early."""
BUDGETS = (0, 1, 5, 6, 7, 20, None)
WAYS: dict[str, dict[str, Any]] = {
    "prediction": {"speculative": {"method": "prediction", "num_speculative_tokens": 6, "adaptive": False}},
    "ngram": {"speculative": {"method": "ngram", "num_speculative_tokens": 6, "adaptive": False}},
    "draft_model": {
        "speculative": {
            "method": "draft_model",
            "model": str(DEMO.with_name("penstock-tiny-draft")),
            "num_speculative_tokens": 4,
            "adaptive": False,
        }
    },
    "two workers": {"executor": {"kind": "multiproc", "tensor_parallel_size": 2}},
    "preemption": {"cache": {"block_size": 4, "num_blocks": 36}},
    "one step at a time": {"scheduler": {"async_scheduling": False}},
}


def requests(predicted: dict[str, list[int]], temperature: float) -> list[EngineCoreRequest]:
    """Return one request for each budget, to run in a batch."""
    prompt = TOKENIZER.encode("<|user|>Tell me a story about a fox.<|end|><|assistant|>", add_special_tokens=False).ids
    return [
        EngineCoreRequest(
            request_id=str(number),
            prompt_token_ids=prompt,
            sampling_params=SamplingParams(
                temperature=temperature,
                seed=number,
                max_tokens=32,
                ignore_eos=True,
                logit_bias={END: -50.0},
                thinking_token_budget=budget,
            ),
            reasoning_parser_kwargs=ReasoningTokens(BEGIN, END),
            reasoning_ended=False,
            prediction_token_ids=predicted.get(str(number), []),
        )
        for number, budget in enumerate(BUDGETS)
    ]


def run(predicted: dict[str, list[int]], temperature: float, **sections: Any) -> Run:
    engine = build_engine(DEMO, **sections)
    try:
        return answer(engine, requests(predicted, temperature))
    finally:
        engine.shutdown()


@pytest.fixture(scope="module", params=[0.0, 0.9], ids=["greedy", "seeded"])
def plain(request: pytest.FixtureRequest) -> tuple[float, Run]:
    return request.param, run({}, request.param)


def test_the_reasoning_ends_at_its_budget(plain: tuple[float, Run]) -> None:
    for number, budget in enumerate(BUDGETS):
        tokens = plain[1].tokens[str(number)]
        assert len(tokens) == 32
        assert [place for place, token in enumerate(tokens) if token == END] == ([] if budget is None else [budget])


@pytest.mark.quick("greedy-ngram", "greedy-preemption", "seeded-prediction")
@pytest.mark.parametrize("way", WAYS)
def test_every_way_to_make_tokens_gives_the_same(plain: tuple[float, Run], way: str) -> None:
    temperature, expected = plain
    # The predictions continue the reasoning past its budget: their tokens after the budget must be rejected.
    without = expected.tokens[str(len(BUDGETS) - 1)]
    predicted = {str(number): without for number in range(len(BUDGETS))} if way == "prediction" else {}
    assert run(predicted, temperature, **WAYS[way]).tokens == expected.tokens
