"""More adapters than memory can store, and one adapter of many requests: the demo model, computed by the kernels."""

import itertools
import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from penstock_common.lora_registry import LoraAdapter
from penstock_common.types.outputs import EngineCoreOutput, FinishReason
from penstock_common.types.request import EngineCoreRequest
from penstock_common.types.sampling import SamplingParams
from penstock_enginecore.config import CacheConfig, EngineCoreConfig, LoraConfig, ModelConfig, SchedulerConfig
from penstock_enginecore.core.engine_core import EngineCore
from penstock_enginecore.executor.uniproc import UniprocExecutor
from penstock_enginecore.lora.peft_adapter import LoraLimits, adapter_bytes

DEMO = Path(__file__).resolve().parents[2] / "examples/demo_model"
MODEL = DEMO / "penstock-tiny"
ADAPTERS, ROOM, RANK = 60, 6, 8
CLIENT = "client"

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    sys.path.insert(0, str(DEMO))
    try:
        from make_adapters import PROJECTIONS, linear_layers, random_tensors, save_adapter
    finally:
        sys.path.remove(str(DEMO))
    folder = tmp_path_factory.mktemp("adapters")
    layers = linear_layers(AutoModelForCausalLM.from_pretrained(MODEL, dtype="auto"), PROJECTIONS)
    for number in range(ADAPTERS):
        save_adapter(folder / f"a{number:02}", random_tensors(layers, RANK, 0.5, number), RANK, PROJECTIONS, MODEL.name)
    return sorted(folder.iterdir())


class Running:
    """An engine, and the tokens of its requests. The engine's loop calls ``each_step`` after every step."""

    def __init__(self, lora: LoraConfig) -> None:
        torch.set_num_threads(1)
        config = EngineCoreConfig(
            model=ModelConfig(path=str(MODEL), device="cpu"),
            cache=CacheConfig(num_blocks=400),
            scheduler=SchedulerConfig(max_num_seqs=32),
            lora=lora,
        )
        self.executor = UniprocExecutor(config)
        self.engine = EngineCore(config, self.executor, progress=lambda line: None)
        self.ends: dict[str, EngineCoreOutput] = {}
        self.first_steps: dict[str, int] = {}
        self.num_steps = 0
        self.each_step: Callable[[], None] = lambda: None
        self._number = 0

    def add(self, adapter: Path, max_tokens: int) -> str:
        self._number += 1
        name = f"{adapter.name}-{self._number}"
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        prompt = [300 + (self._number * 31 + i) % 1000 for i in range(20)]
        lora = LoraAdapter(adapter.name, str(adapter))
        request = EngineCoreRequest(request_id=name, prompt_token_ids=prompt, sampling_params=params, lora=lora)
        self.engine.add(self.engine.preprocess(CLIENT, request))
        return name

    def step(self) -> None:
        self.num_steps += 1
        for frame in self.engine.step(lambda: None).values():
            for output in frame.outputs:
                if output.new_token_ids:
                    self.first_steps.setdefault(output.request_id, self.num_steps)
                if output.finish_reason is not None:
                    self.ends[output.request_id] = output
        self.each_step()
        if self.engine.stalled and self.engine.has_work:
            assert self.engine.queues.get(block=True, timeout=30), "nothing comes of a load"

    def run(self) -> None:
        while self.engine.has_work:
            self.step()


@pytest.fixture
def start() -> Iterator[Callable[..., Running]]:
    started: list[Running] = []

    def make(**lora: Any) -> Running:
        started.append(Running(LoraConfig(**lora)))
        return started[-1]

    yield make
    for each in started:
        each.engine.shutdown()


def test_many_adapters_drawn_by_zipfs_law_all_serve_within_the_memory_budget(
    start: Callable[..., Running], adapters: list[Path]
) -> None:
    budget = max(ROOM * adapter_bytes(adapters[0], LoraLimits(RANK)), 2**20)
    running = start(max_loras=ROOM, cpu_memory=budget)
    cache, store = running.engine.loras.cache, running.executor._worker.loras
    packed = store._forward._adapters._packed  # type: ignore[union-attr]  # what the kernels read
    most = [0]

    def within_budget() -> None:
        assert cache.num_bytes + cache.num_reserved <= budget
        most[0] = max(most[0], sum(each.num_bytes for each in list(packed.values())))

    running.each_step = within_budget
    drawn = random.Random(1).choices(adapters, [1 / rank for rank in range(1, ADAPTERS + 1)], k=240)
    waiting, names = list(drawn), []
    while waiting or running.engine.has_work:
        while waiting and len(names) - len(running.ends) < ROOM - 1:
            names.append(running.add(waiting.pop(), 4))
        running.step()
    assert {running.ends[name].finish_reason for name in names} == {FinishReason.LENGTH}
    stats = running.engine.scheduler.stats().lora
    assert stats is not None
    assert stats.num_loads > len(set(drawn)) > ROOM
    assert stats.num_cached == stats.num_loads - stats.num_evictions == len(store)
    assert 0 < most[0] <= budget * 1.02  # adapter memory may exceed the budget by padding
    assert cache.num_reserved == 0


def test_one_hot_adapter_keeps_no_other_waiting_for_longer_than_what_runs(
    start: Callable[..., Running], adapters: list[Path]
) -> None:
    longest, hot, others = 24, adapters[0], adapters[1:9]
    running = start(max_loras=2, max_wait=0.0)
    for each in (hot, *others):
        running.add(each, 1)  # loads the adapter into host memory
    running.run()
    slots = running.engine.scheduler.stats
    began, asked = {}, []
    hots = [running.add(hot, longest) for _ in range(4)]

    def at_most_two() -> None:
        lora = slots().lora
        assert lora is not None
        assert len(lora.active) <= 2

    running.each_step = at_most_two
    for other in itertools.islice(itertools.cycle(others), 24):
        asked.append(running.add(other, 3))
        began[asked[-1]] = running.num_steps
        while asked[-1] not in running.ends:
            while sum(name not in running.ends for name in hots) < 4:
                hots.append(running.add(hot, longest))
            running.step()
    waited = [running.first_steps[name] - began[name] for name in asked]
    assert max(waited) <= longest + 4  # plus the steps that were already scheduled, and the request's first step
    assert len(hots) > 8
    running.run()
    assert {running.ends[name].finish_reason for name in (*asked, *hots)} == {FinishReason.LENGTH}
