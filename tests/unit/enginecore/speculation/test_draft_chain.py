"""Drafts of a draft model as one chained call, compared with one forward pass for each draft."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from penstock_common.types.sampling import SamplingParams
from penstock_enginecore.attention.base import IntArray
from penstock_enginecore.config import KernelsConfig, ModelConfig
from penstock_enginecore.core.kv_cache.spec import KVCacheConfig, KVCacheGroup
from penstock_enginecore.core.scheduler.output import NewRequestData
from penstock_enginecore.executor.generation.input_batch import lay_out
from penstock_enginecore.forward import native_inputs
from penstock_enginecore.forward.base import ForwardBatch
from penstock_enginecore.forward.build import ForwardConfig, build_forward
from penstock_enginecore.forward.native import NativeForward
from penstock_enginecore.models.loader import load_model
from penstock_enginecore.sample.base import DrawSettings, SamplingInputs, uniforms
from penstock_enginecore.speculation import draft_model
from penstock_enginecore.speculation.base import DraftRequest, DraftStep
from penstock_enginecore.speculation.draft_model import DraftModel
from tests.fakes.engines.instruction_sets import runnable
from tests.fakes.models.tiny_models import VOCAB_SIZE, save_narrow_model

CPU = torch.device("cpu")
BLOCK_SIZE, MAX_LEN = 16, 128
SIZES = {"hidden_size": 64, "max_position_embeddings": MAX_LEN}
LENGTHS = (3, 15, 16, 17, 31, 47, 90, 124)
"""Lengths of the requests at their start. Drafts cross block borders, and reach the drafter's maximum length."""
WANTED = (4, 0, 7, 1, 5, 7, 2, 6)
MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "gemma3": {"num_hidden_layers": 3, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    "qwen3_moe": {"num_experts": 8, "num_experts_per_tok": 3},
}
KERNELS = [(isa, False) for isa in runnable()] + [(isa, True) for isa in runnable() if isa in ("amx", "avx512_bf16")]


class Step(DraftStep):
    """A step of requests that each have some of ``tokens``, and separate blocks for keys and values."""

    def __init__(
        self, tokens: Sequence[np.ndarray], wanted: Sequence[int], num_groups: int, settings: dict[str, float]
    ):
        self._settings = settings
        blocks = -(-MAX_LEN // BLOCK_SIZE)
        shape = num_groups, len(tokens), blocks
        self._tables = list(np.random.default_rng(1).permutation(np.arange(1, 1 + np.prod(shape))).reshape(shape))
        self._tables = [table.astype(np.int32) for table in self._tables]
        self.requests = [
            DraftRequest(str(i), each.astype(np.int32), 1, count)
            for i, (each, count) in enumerate(zip(tokens, wanted, strict=True))
        ]

    def lay_out(
        self, requests: Sequence[int], first: IntArray, tokens: Sequence[IntArray], *, ahead: int = 0
    ) -> ForwardBatch:
        lengths = np.array([len(each) for each in tokens])
        laid_out = lay_out(self._tables, BLOCK_SIZE, np.array(requests), first, lengths, ahead)
        return ForwardBatch(np.concatenate(tokens), laid_out.positions, laid_out.attention)

    def sampling(self, requests: Sequence[int], place: int | IntArray) -> SamplingInputs:
        count = len(requests)
        # Every third request is greedy.
        temperature = np.array([self._settings.get("temperature", 0.0) * (i % 3 > 0) for i in requests])
        seeds = np.array([7 + i for i in requests], dtype=np.uint64)
        index = np.array([len(self.requests[i].token_ids) for i in requests]) + place
        top_p = np.full(count, self._settings.get("top_p", 1.0))
        return SamplingInputs(
            DrawSettings.off(count)._replace(temperature=temperature, top_p=top_p), uniforms(seeds, index)
        )


class Counted:
    """A forward pass that counts the calls of ``chain``."""

    def __init__(self, forward: NativeForward) -> None:
        self.calls = 0
        self._chain = forward.chain
        forward.chain = self  # type: ignore[method-assign,assignment]

    def __call__(self, *arguments: Any) -> IntArray:
        self.calls += 1
        return self._chain(*arguments)


def drafter(
    path: Path, isa: str = "auto", sampling: str = "auto", *, rounded: bool = False, vocab_size: int = VOCAB_SIZE
) -> tuple[DraftModel, Counted]:
    model = load_model(ModelConfig(path=str(path)), CPU, lambda line: None, widen=True)
    config = ForwardConfig(CPU, "auto", KernelsConfig(isa=isa), 2, BLOCK_SIZE, rounded=rounded)
    built = build_forward(model, config)
    assert isinstance(built.forward, NativeForward)
    return DraftModel(model, built, vocab_size, sampling), Counted(built.forward)


def drafts(of: DraftModel, **settings: float) -> list[list[list[int]]]:
    """Return the drafts of each step, for requests that accept some of their drafts."""
    windows = list(dict.fromkeys(spec.sliding_window for spec in of.specs.values()))
    groups = tuple(
        KVCacheGroup(layer_names=tuple(name for name, spec in of.specs.items() if spec.sliding_window == window))
        for window in windows
    )
    num_blocks = 1 + len(groups) * len(LENGTHS) * -(-MAX_LEN // BLOCK_SIZE)
    of.allocate(KVCacheConfig(num_blocks=num_blocks, block_size=BLOCK_SIZE, groups=groups, max_model_len=MAX_LEN))
    generator = np.random.default_rng(0)
    tokens = [generator.integers(1, 80, length) for length in LENGTHS]
    for i in range(len(tokens)):
        of.begin(
            NewRequestData(
                request_id=str(i),
                token_ids=tokens[i].tolist(),
                num_prompt_tokens=1,
                num_computed_tokens=0,
                block_ids=([],),
                sampling_params=SamplingParams(),
            )
        )
    found = []
    for number in range(8):
        step = Step(tokens, np.roll(WANTED, number).tolist(), len(groups), settings)
        found.append(of.propose(step))
        for i, proposed in enumerate(found[-1]):
            held = proposed[: generator.integers(0, 4)]
            tokens[i] = np.concatenate([tokens[i], held, generator.integers(1, 80, 1)])[:MAX_LEN]
    of.release()
    return found


def by_the_loop(of: DraftModel, **settings: float) -> list[list[list[int]]]:
    chained, of._chained = of._chained, None
    try:
        return drafts(of, **settings)
    finally:
        of._chained = chained


@pytest.fixture(scope="module", params=MODELS)
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    directory = tmp_path_factory.mktemp(request.param)
    save_narrow_model(request.param, directory, **{**SIZES, **MODELS[request.param]})
    return directory


@pytest.fixture(autouse=True)
def few_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Limit the tokens in a pass, so that the drafter needs several steps for a prompt."""
    monkeypatch.setattr(draft_model, "_MOST_BEHIND", 100)


@pytest.mark.each_value
@pytest.mark.parametrize(("isa", "rounded"), KERNELS)
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_drafts_are_those_of_the_loop(path: Path, temperature: float, isa: str, rounded: bool) -> None:
    of, counted = drafter(path, isa, "coupled", rounded=rounded)
    expected = by_the_loop(of, temperature=temperature)
    assert counted.calls == 0
    assert drafts(of, temperature=temperature) == expected
    assert counted.calls == len(expected)
    lengths = {len(each) for proposed in expected for each in proposed}
    assert {0, 1, 2, 4, 5, 7} <= lengths


@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_a_vocabulary_that_is_larger_and_rotaries_of_a_step(
    path: Path, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native_inputs, "_MAX_TABLE_BYTES", 0)
    vocab_size = VOCAB_SIZE - 37
    of, counted = drafter(path, vocab_size=vocab_size)
    found = drafts(of, temperature=temperature)
    assert counted.calls == len(found)
    assert found == by_the_loop(of, temperature=temperature)
    assert max(token for proposed in found for each in proposed for token in each) < vocab_size


def test_requests_with_filters_are_drafted_for_by_the_loop(path: Path) -> None:
    of, counted = drafter(path, sampling="coupled")
    drafts(of, temperature=0.9, top_p=0.8)
    assert counted.calls == 0
    drafts(of, temperature=0.0, top_p=0.8)
    assert counted.calls > 0
