"""A seeded request draws the same tokens in any batch."""

from pathlib import Path

import pytest
import torch

from penstock_common.types.request import EngineCoreRequest
from penstock_common.types.sampling import SamplingParams
from tests.fakes.engines.in_process import build_engine, generate
from tests.fakes.models.tiny_models import save_tiny_model

PROMPT = [5, 17, 250, 99, 3, 42]
FILTERS = (
    {},
    {"top_k": 20},
    {"top_p": 0.8},
    {"min_p": 0.05},
    {"temperature": 1.5, "top_k": 50, "top_p": 0.9, "min_p": 0.01},
)


def _params(i: int) -> SamplingParams:
    return SamplingParams(**{"seed": 2**63 - 1 - 977 * i, "max_tokens": 24, **FILTERS[i % len(FILTERS)]})


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    directory = tmp_path_factory.mktemp("llama")
    save_tiny_model("llama", directory)
    return directory


@pytest.fixture(scope="module")
def alone(path: Path) -> list[list[int]]:
    """Return the tokens of five requests, each of which runs alone."""
    engine = build_engine(path)
    return [generate(engine, [(f"r{i}", PROMPT, _params(i))]).tokens[f"r{i}"] for i in range(len(FILTERS))]


def test_seeds_and_filters_give_different_tokens(alone: list[list[int]]) -> None:
    assert len({tuple(tokens) for tokens in alone}) == len(alone)


def test_a_batch_of_32_draws_the_same_tokens(path: Path, alone: list[list[int]]) -> None:
    run = generate(build_engine(path), [(f"r{i}", PROMPT, _params(i)) for i in range(32)])
    assert [run.tokens[f"r{i}"] for i in range(len(alone))] == alone


def test_greedy_and_drawn_requests_share_a_batch(path: Path, alone: list[list[int]]) -> None:
    greedy = SamplingParams(temperature=0.0, max_tokens=24)
    requests = [(f"g{i}", PROMPT[: i + 1], greedy) for i in range(4)]
    requests += [(f"r{i}", PROMPT, _params(i)) for i in range(len(alone))]
    run = generate(build_engine(path), requests)
    assert [run.tokens[f"r{i}"] for i in range(len(alone))] == alone


def test_preempted_requests_draw_the_same_tokens(path: Path, alone: list[list[int]]) -> None:
    engine = build_engine(path, cache={"num_blocks": 20})
    run = generate(engine, [(f"r{i}", PROMPT, _params(i)) for i in range(len(alone))])
    assert run.stats.num_preemptions > 0
    assert [run.tokens[f"r{i}"] for i in range(len(alone))] == alone


def test_another_engine_continues_an_attempt_with_the_same_draws(path: Path, alone: list[list[int]]) -> None:
    engine = build_engine(path)
    request = EngineCoreRequest(
        request_id="again",
        prompt_token_ids=PROMPT,
        sampling_params=_params(4),
        attempt=1,
        prior_output_token_ids=alone[4][:10],
    )
    engine.add(engine.preprocess("test", request))
    tokens: list[int] = []
    while engine.has_requests:
        for outputs in engine.step(lambda: None).values():
            for output in outputs.outputs:
                tokens += output.new_token_ids
    assert alone[4][:10] + tokens == alone[4]


def test_min_tokens_keeps_a_stop_token_from_being_chosen(path: Path, alone: list[list[int]]) -> None:
    stop = alone[0][0]
    params = SamplingParams(seed=2**63 - 1, max_tokens=24, stop_token_ids=(stop,), min_tokens=10)
    tokens = generate(build_engine(path), [("r", PROMPT, params)]).tokens["r"]
    assert len(tokens) >= 10
    assert stop not in tokens[:10]
