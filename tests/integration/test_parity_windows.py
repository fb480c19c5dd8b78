"""Models that mix windowed and full attention give transformers' tokens far beyond the window, with less memory."""

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from penstock_common.types.outputs import FinishReason
from penstock_common.types.sampling import SamplingParams
from penstock_enginecore.core.engine_core import EngineCore
from tests.fakes.engines.in_process import Run, build_engine, generate
from tests.fakes.models.tiny_models import SLIDING_WINDOW, VOCAB_SIZE, save_tiny_model
from tests.fakes.models.transformers_greedy import greedy_tokens

pytestmark = pytest.mark.slow

BLOCK_SIZE = 4
NEW_TOKENS = 60
PROMPT_LENGTHS = (2, 9, 30, 41)
# Layer kinds (s: sliding window, f: full) in equal and in different numbers. The KV cache groups are one for each kind,
# or three groups of windowed layers and one group of full layers.
LAYERS = {"gemma2": "sfsf", "gemma3": "sssf", "gpt_oss": "sfsf"}
KINDS = {"s": "sliding_attention", "f": "full_attention"}


class Case(NamedTuple):
    path: Path
    num_layers: int
    prompts: list[list[int]]
    expected: list[list[int]]


@pytest.fixture(scope="module", params=LAYERS)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    torch.set_num_threads(1)
    path = tmp_path_factory.mktemp(request.param)
    kinds = [KINDS[letter] for letter in LAYERS[request.param]]
    model = save_tiny_model(request.param, path, num_hidden_layers=len(kinds), layer_types=kinds)
    generator = torch.Generator().manual_seed(2)
    prompts = [torch.randint(1, VOCAB_SIZE, (n,), generator=generator).tolist() for n in PROMPT_LENGTHS]
    return Case(path, len(kinds), prompts, [greedy_tokens(model, prompt, NEW_TOKENS) for prompt in prompts])


class Usage:
    """Maximum memory in use after any step, in blocks of one layer."""

    def __init__(self, engine: EngineCore) -> None:
        self._pool = engine.scheduler.kv_cache.pool
        self._layers_per_block = max(len(group.layer_names) for group in engine.kv_cache_config.groups)
        self.most = 0

    def note(self) -> None:
        used = (self._pool.num_usable_blocks - self._pool.num_free_blocks) * self._layers_per_block
        self.most = max(self.most, used)


def _engine(case: Case, backend: str = "cpu", **sections: Any) -> EngineCore:
    sections["cache"] = {"block_size": BLOCK_SIZE} | sections.get("cache", {})
    engine = build_engine(case.path, model={"attention_backend": backend, "max_model_len": 120}, **sections)
    assert len(engine.kv_cache_config.groups) > 1
    return engine


def _greedy(
    engine: EngineCore, prompts: list[list[int]], prefix: str = "r", num_tokens: int = NEW_TOKENS
) -> tuple[list[list[int]], Run, int]:
    usage = Usage(engine)
    params = SamplingParams(temperature=0.0, max_tokens=num_tokens)
    requests = [(f"{prefix}{i}", prompt, params) for i, prompt in enumerate(prompts)]
    run = generate(engine, requests, after_step=usage.note)
    assert set(run.finish_reasons.values()) == {FinishReason.LENGTH}
    return [run.tokens[f"{prefix}{i}"] for i in range(len(prompts))], run, usage.most


def test_the_reference_outputs_are_varied_and_go_far_beyond_the_window(case: Case) -> None:
    assert NEW_TOKENS > 4 * SLIDING_WINDOW
    assert all(len(set(tokens[-2 * SLIDING_WINDOW :])) > 4 for tokens in case.expected)


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_long_outputs_are_the_same_in_less_memory_than_full_allocation(case: Case, backend: str) -> None:
    engine = _engine(case, backend, scheduler={"max_num_batched_tokens": 16})
    tokens, _, most = _greedy(engine, case.prompts)
    assert tokens == case.expected
    # The last token of a sequence is never computed.
    full = sum(-(-(length + NEW_TOKENS - 1) // BLOCK_SIZE) for length in PROMPT_LENGTHS) * case.num_layers
    assert most < full * 0.75
    pool = engine.scheduler.kv_cache.pool
    assert pool.num_free_blocks == pool.num_usable_blocks


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_prefix_hits_far_beyond_the_window_give_the_same_tokens(case: Case, backend: str) -> None:
    engine = _engine(case, backend)
    assert _greedy(engine, case.prompts, prefix="first")[0] == case.expected
    assert _greedy(engine, case.prompts, prefix="second")[0] == case.expected
    before = engine.scheduler.stats().prefix_cache_hits
    # Continue the conversations. The cached prefix is the prompt and most of the answer.
    half = NEW_TOKENS // 2
    longer = [p + t[:half] for p, t in zip(case.prompts, case.expected, strict=True)]
    tokens, run, _ = _greedy(engine, longer, prefix="third", num_tokens=NEW_TOKENS - half)
    assert tokens == [expected[half:] for expected in case.expected]
    assert run.stats.prefix_cache_hits - before > sum(PROMPT_LENGTHS)


def test_preempted_requests_give_the_same_tokens_in_a_small_pool(case: Case) -> None:
    engine = _engine(case, scheduler={"max_num_batched_tokens": 16})
    groups = engine.kv_cache_config.groups
    longest = -(-(max(PROMPT_LENGTHS) + NEW_TOKENS) // BLOCK_SIZE)
    num_blocks = sum(group.num_blocks_for(longest) for group in groups) + 8
    assert num_blocks < longest * len(groups)
    engine = _engine(case, cache={"num_blocks": num_blocks}, scheduler={"max_num_batched_tokens": 16})
    tokens, run, _ = _greedy(engine, case.prompts)
    assert tokens == case.expected
    assert run.stats.num_preemptions > 0
