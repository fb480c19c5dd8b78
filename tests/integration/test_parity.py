"""Greedy tokens equal transformers' tokens, for any batch, chunks, prefix hits and preemptions."""

from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from penstock_common.types.outputs import FinishReason
from penstock_common.types.sampling import SamplingParams
from penstock_enginecore.core.engine_core import EngineCore
from tests.fakes.engines.in_process import Run, build_engine, generate
from tests.fakes.models.quick_architectures import KINDS, QUICK_ARCHITECTURES
from tests.fakes.models.tiny_models import CHUNK, SLIDING_WINDOW, VOCAB_SIZE, save_tiny_model
from tests.fakes.models.transformers_greedy import greedy_tokens

NEW_TOKENS = 12
PROMPT_LENGTHS = (1, 3, 7, 16, 34)
assert max(PROMPT_LENGTHS) > max(SLIDING_WINDOW + NEW_TOKENS, 2 * CHUNK)


class Case(NamedTuple):
    path: Path
    prompts: list[list[int]]
    expected: list[list[int]]


@pytest.fixture(scope="module", params=QUICK_ARCHITECTURES)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    torch.set_num_threads(1)
    path = tmp_path_factory.mktemp(request.param)
    model = save_tiny_model(request.param, path)
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(1, VOCAB_SIZE, (n,), generator=generator).tolist() for n in PROMPT_LENGTHS]
    expected = [greedy_tokens(model, prompt, NEW_TOKENS) for prompt in prompts]
    assert len({token for tokens in expected for token in tokens}) > 20
    assert len({tuple(tokens) for tokens in expected}) == len(expected)
    return Case(path, prompts, expected)


def _greedy(engine: EngineCore, prompts: list[list[int]], prefix: str = "r") -> tuple[list[list[int]], Run]:
    params = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS)
    run = generate(engine, [(f"{prefix}{i}", prompt, params) for i, prompt in enumerate(prompts)])
    assert set(run.finish_reasons.values()) == {FinishReason.LENGTH}
    return [run.tokens[f"{prefix}{i}"] for i in range(len(prompts))], run


def _tight(case: Case, *, enable_prefix_caching: bool) -> EngineCore:
    """Return an engine with just enough blocks for the longest request (46 tokens).

    With windows, fewer blocks suffice.
    """
    scheduler = {"max_num_batched_tokens": 12}
    roomy = build_engine(case.path, model={"max_model_len": 46}, scheduler=scheduler)
    cache = {
        "num_blocks": roomy.scheduler.kv_cache.num_blocks_for(46) + 2,
        "enable_prefix_caching": enable_prefix_caching,
    }
    return build_engine(case.path, model={"max_model_len": 46}, cache=cache, scheduler=scheduler)


def test_chunks_prefix_hits_and_preemptions_at_once_give_the_same_tokens(case: Case) -> None:
    engine = _tight(case, enable_prefix_caching=True)
    preemptions = hits = 0
    for turn in range(3):
        tokens, run = _greedy(engine, case.prompts[:: -1 if turn % 2 else 1], prefix=f"{turn} ")
        assert tokens[:: -1 if turn % 2 else 1] == case.expected, f"turn {turn}"
        preemptions, hits = run.stats.num_preemptions, run.stats.prefix_cache_hits
    assert preemptions > 0
    assert hits > 0


each_kind = pytest.mark.parametrize("case", KINDS, indirect=True)


@each_kind
def test_a_ragged_batch_gives_the_same_tokens(case: Case) -> None:
    assert _greedy(build_engine(case.path), case.prompts)[0] == case.expected


@each_kind
def test_the_reference_backend_gives_the_same_tokens(case: Case) -> None:
    engine = build_engine(case.path, model={"attention_backend": "reference"})
    assert _greedy(engine, case.prompts)[0] == case.expected


@each_kind
def test_chunked_prefill_gives_the_same_tokens(case: Case) -> None:
    engine = build_engine(case.path, scheduler={"max_num_batched_tokens": 7})
    assert _greedy(engine, case.prompts)[0] == case.expected


@each_kind
def test_prefix_hits_give_the_same_tokens(case: Case) -> None:
    engine = build_engine(case.path)
    _greedy(engine, case.prompts, prefix="first")
    tokens, run = _greedy(engine, case.prompts, prefix="second")
    assert tokens == case.expected
    assert run.stats.prefix_cache_hits > 0


@each_kind
def test_preempted_requests_give_the_same_tokens(case: Case) -> None:
    engine = _tight(case, enable_prefix_caching=False)
    tokens, run = _greedy(engine, case.prompts)
    assert tokens == case.expected
    assert run.stats.num_preemptions > 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_gpu_gives_the_same_tokens(case: Case) -> None:
    engine = build_engine(case.path, model={"device": "cuda"}, scheduler={"max_num_batched_tokens": 24})
    assert _greedy(engine, case.prompts)[0] == case.expected
