"""Answers of models with recurrent layers are interrupted at every token and resume on another engine: the result equals
an uninterrupted run.
"""

import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from penstock_common.types.request import EngineCoreRequest
from penstock_common.types.sampling import SamplingParams
from penstock_enginecore.core.engine_core import EngineCore
from tests.fakes.engines.in_process import CLIENT, Run, answer, build_engine
from tests.fakes.models.quick_architectures import RECURRENT_CASES
from tests.fakes.models.tiny_models import VOCAB_SIZE, save_tiny_model

CUTS = 48
"""Number of successive tokens after each of which an answer is interrupted: three spans of 16 tokens."""
LENGTH = CUTS + 20
PROMPT_LENGTH = 37
SHAPES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "seeded": {"temperature": 1.0, "seed": 1234, "top_p": 0.9, "frequency_penalty": 0.4},
}
OTHERS: dict[str, dict[str, Any]] = {
    "without prefix caching": {"cache": {"enable_prefix_caching": False}},
    "with kept states": {"cache": {"state_interval": 16}},
    "in chunks of 7": {"scheduler": {"max_num_batched_tokens": 7}},
    "with drafts": {"speculative": {"method": "ngram", "num_speculative_tokens": 15, "prompt_lookup_min": 1}},
}
"""Settings of the engines on which interrupted answers resume."""
Build = Callable[..., EngineCore]


@pytest.fixture(scope="module", params=RECURRENT_CASES)
def build(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Build]:
    torch.set_num_threads(1)
    path = tmp_path_factory.mktemp(request.param)
    save_tiny_model(request.param, path)
    engines = []

    def make(**sections: Any) -> EngineCore:
        cache = {"block_size": 16, **sections.pop("cache", {})}
        engines.append(build_engine(path, cache=cache, **sections))
        return engines[-1]

    yield make
    for engine in engines:
        engine.shutdown()


def prompt(number: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(number)
    return torch.randint(1, VOCAB_SIZE, (PROMPT_LENGTH,), generator=generator).tolist()


def request(name: str, prompt_token_ids: list[int], prior: list[int], **params: Any) -> EngineCoreRequest:
    return EngineCoreRequest(
        request_id=name,
        prompt_token_ids=prompt_token_ids,
        sampling_params=SamplingParams(**{"max_tokens": LENGTH, "ignore_eos": True, **params}),
        attempt=1 if prior else 0,
        prior_output_token_ids=prior,
    )


def whole_answer(engine: EngineCore, **params: Any) -> list[int]:
    whole = answer(engine, [request("whole", prompt(), [], **params)]).tokens["whole"]
    assert len(whole) == LENGTH
    assert len(set(whole)) > 8
    return whole


@pytest.mark.quick("mamba2-seeded-with kept states", "qwen3_5-greedy-with drafts")
@pytest.mark.parametrize("other", OTHERS)
@pytest.mark.parametrize("shape", SHAPES)
def test_an_answer_cut_at_any_of_48_tokens_goes_on_as_it_would_have(build: Build, shape: str, other: str) -> None:
    """Each case cuts at every fourth token. The cases of an architecture together cut at all tokens, and
    ``PENSTOCK_RECURRENT=full`` makes each case do so.
    """
    params = SHAPES[shape]
    whole = whole_answer(build(), **params)
    engine = build(**OTHERS[other])
    nth, step = (0, 1) if os.environ.get("PENSTOCK_RECURRENT") == "full" else (list(OTHERS).index(other), 4)
    for cut in range(1 + nth, CUTS + 1, step):
        rest = answer(engine, [request("r", prompt(), whole[:cut], **params)]).tokens["r"]
        assert whole[:cut] + rest == whole, cut


@pytest.mark.parametrize("shape", SHAPES)
def test_answers_cut_at_all_tokens_go_on_in_one_batch(build: Build, shape: str) -> None:
    params = SHAPES[shape]
    whole = whole_answer(build(), **params)
    cut = [request(str(n), prompt(), whole[:n], **params) for n in range(1, CUTS + 1)]
    run = answer(build(scheduler={"max_num_batched_tokens": 100}), cut)
    for n in range(1, CUTS + 1):
        assert whole[:n] + run.tokens[str(n)] == whole, n


@pytest.mark.quick(
    *("granitemoehybrid-seeded-kept states", "lfm2-greedy-kept states", "mamba2-greedy-forgotten states"),
    "qwen3_5-seeded-kept states",
)
@pytest.mark.parametrize("forgets", [False, True], ids=["kept states", "forgotten states"])
@pytest.mark.parametrize("shape", SHAPES)
def test_answers_preempted_at_each_of_48_tokens_go_on(build: Build, shape: str, *, forgets: bool) -> None:
    params = SHAPES[shape]
    engine = build()
    whole = whole_answer(engine, **params)
    run, steps = Run(), 0
    while steps < CUTS or engine.has_requests:
        if (
            steps < CUTS
        ):  # A request begins at each step, so each one has another number of tokens when all are preempted.
            engine.add(engine.preprocess(CLIENT, request(str(steps), prompt(), [], **params)))
            run.tokens[str(steps)] = []
        steps += 1
        for outputs in engine.step(lambda: None).values():
            run.stats = outputs.scheduler_stats or run.stats
            for output in outputs.outputs:
                run.tokens[output.request_id] += output.new_token_ids
        if steps == CUTS:
            engine.finish_steps()
            counts = sorted(map(len, run.tokens.values()))
            assert counts[-1] - counts[0] >= CUTS - 1
            engine.scheduler.preempt_all()
            if forgets:
                assert engine.scheduler.reset_prefix_cache()
    assert run.stats.num_preemptions >= CUTS - 1
    assert all(tokens == whole for tokens in run.tokens.values())
