"""Engines whose fused decoder has adapters in slots, on a CPU with recorded graphs.

Mixed steps that are replayed from graphs give PEFT's tokens.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock_common.lora_registry import LoraAdapter
from penstock_common.types.request import EngineCoreRequest
from penstock_common.types.sampling import SamplingParams
from penstock_enginecore.core.control import EngineControl
from penstock_enginecore.core.engine_core import EngineCore
from penstock_enginecore.lora.device_slots import SlotLimits
from tests.fakes.engines.in_process import answer, build_engine
from tests.fakes.models.adapters import save_adapter
from tests.fakes.models.fused_models import offer_fused, save_varied_model
from tests.fakes.models.tiny_models import VOCAB_SIZE
from tests.fakes.models.transformers_greedy import greedy_tokens

NEW_TOKENS = 10
PROMPT_LENGTHS = (1, 3, 7, 16, 34, 9, 5, 12)
RANKS = (3, 8, 16)


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(1, VOCAB_SIZE, (n,), generator=generator).tolist() for n in PROMPT_LENGTHS]


class Adapted:
    """A saved model with adapters, and the expected tokens for prompts that use the base model and the adapters in
    turn.
    """

    def __init__(self, directory: Path) -> None:
        self.path = directory / "model"
        model = save_varied_model("llama", self.path)
        names = [str(directory / f"rank-{rank}") for rank in RANKS]
        adapted = [save_adapter(model, Path(name), seed=rank, r=rank) for name, rank in zip(names, RANKS, strict=True)]
        self.adapters = [None, *(LoraAdapter(name, name, b"") for name in names)]
        models = [model, *adapted]
        self.expected = [greedy_tokens(models[i % 4], prompt, NEW_TOKENS) for i, prompt in enumerate(prompts())]

    def tokens(self, engine: EngineCore, name: str, which: Sequence[int] = range(8), **params: Any) -> list[list[int]]:
        wanted = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True, **params)
        requests = [
            EngineCoreRequest(
                request_id=f"{name}{i}",
                prompt_token_ids=prompts()[i],
                sampling_params=wanted,
                lora=self.adapters[i % 4],
            )
            for i in which
        ]
        run = answer(engine, requests)
        return [run.tokens[request.request_id] for request in requests]


@pytest.fixture(scope="module")
def adapted(tmp_path_factory: pytest.TempPathFactory) -> Adapted:
    torch.set_num_threads(1)
    found = Adapted(tmp_path_factory.mktemp("lora"))
    plain = [found.expected[i] for i in range(8)]
    assert len({tuple(each) for each in plain}) == 8
    return found


def engine_of(adapted: Adapted, monkeypatch: pytest.MonkeyPatch, max_loras: int = 3, **sections: Any) -> EngineCore:
    offer_fused(monkeypatch, SlotLimits(max_loras, 16))
    engine = build_engine(
        adapted.path,
        lora={"max_loras": max_loras, "max_lora_rank": 16, "max_wait": 0.0},
        **{"scheduler": {"max_num_batched_tokens": 24}, "cache": {"block_size": 16}} | sections,
    )
    [info] = engine.executor.collective_rpc("worker_info")
    assert "fused decoder" in info["computing"]
    return engine


def test_replayed_steps_with_several_adapters_and_none_give_pefts_tokens(
    adapted: Adapted, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_of(adapted, monkeypatch)
    assert adapted.tokens(engine, "first") == adapted.expected
    assert adapted.tokens(engine, "again") == adapted.expected
    assert engine.executor.worker_stats()[0].graphs.replays > 10
    for i in (0, 1, 2, 3):
        assert adapted.tokens(engine, "alone", [i]) == [adapted.expected[i]]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("max_loras", "sections"),
    [
        (1, {}),
        (2, {"scheduler": {"max_num_batched_tokens": 24, "async_scheduling": True}}),
        (3, {"kernels": {"capture_at_start": True, "graph_sizes": (1, 8)}}),
        (3, {"cache": {"block_size": 16, "num_blocks": 14}}),
        (3, {"kernels": {"batch_invariant": True}}),
    ],
    ids=["one slot", "two slots, a step ahead", "captured at the start", "preempted", "batch invariant"],
)
def test_other_engines_do_so_too(
    max_loras: int, sections: dict[str, Any], adapted: Adapted, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_of(adapted, monkeypatch, max_loras, **sections)
    if "kernels" in sections and "graph_sizes" in sections["kernels"]:
        assert engine.executor.worker_stats()[0].graphs.captured == 4
    assert adapted.tokens(engine, "first") == adapted.expected
    assert adapted.tokens(engine, "again") == adapted.expected


@pytest.mark.slow
@pytest.mark.parametrize("level", [1, 2])
def test_adapters_are_there_behind_a_sleep(level: int, adapted: Adapted, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of(adapted, monkeypatch)
    assert adapted.tokens(engine, "before") == adapted.expected
    control = EngineControl(engine)
    control.sleep(level)
    control.wake_up([])
    assert adapted.tokens(engine, "after") == adapted.expected
