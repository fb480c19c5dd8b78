"""System in a test's process: a coordinator, two engines with fake executors, and a frontend, with all their gauges."""

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec
from prometheus_client import CollectorRegistry

from penstock.inference.v1 import messages_pb2 as pb
from penstock_enginecore.config import CoordinatorClientConfig, LoraConfig, SpeculativeConfig
from penstock_enginecore.lora.core.request import LoadedLora
from penstock_enginecore.metrics import EngineCollector
from penstock_frontend.config import CoordinatorClientConfig as FrontendCoordinatorConfig
from penstock_frontend.config import LoraConfig as FrontendLoraConfig
from penstock_frontend.config import ModelConfig
from tests.fakes.engines.engine_harness import make_config
from tests.fakes.engines.engine_server import EngineServer
from tests.fakes.engines.fake_executor import FakeExecutor
from tests.fakes.frontends.frontend_server import FrontendServer, eventually
from tests.fakes.models.small_tokenizers import byte_level
from tests.fakes.systems.cluster_members import address_of, running

VOCAB = byte_level().get_vocab_size()
OF_THE_PROCESS = ("process_", "python_", "penstock:threads", "penstock:asyncio_tasks")
"""Prefixes of metrics about the process, which the test and all its services share."""
ADAPTERS = {"pirate": "/adapters/pirate"}
"""LoRA adapters that a test can enable."""
PROMPT = pb.TokenIds(ids=range(5))
POISON = 7
"""Prompt length in tokens with which every step fails."""
MAX_RUNNING = 2
MAX_WAITING = 4
"""Maximum number of running requests of an engine, and maximum number of requests in its queue."""

Gauges = dict[tuple[str, str], float]


def gauges(registries: Iterable[tuple[str, CollectorRegistry]]) -> Gauges:
    """Return all gauges by service, name and labels."""
    return {
        (service, f"{sample.name}{sorted(sample.labels.items())}"): sample.value
        for service, registry in registries
        for metric in registry.collect()
        if metric.type == "gauge" and not metric.name.startswith(OF_THE_PROCESS)
        for sample in metric.samples
    }


class Engine(EngineServer):
    """Engine that computes only while ``open`` is set. A prompt of ``POISON`` tokens fails. ``adapters``: enables
    ADAPTERS. ``allowed`` is the number of steps that it finishes although ``open`` is not set.
    """

    def __init__(self, engine_id: str, coordinator: str, *, adapters: bool = False) -> None:
        self.open = threading.Event()
        self.open.set()
        self.allowed = 0
        executor = FakeExecutor(
            vocab_size=VOCAB, fails=lambda step: any(new.num_prompt_tokens == POISON for new in step.new_requests)
        )
        executor.adapters = {path: LoadedLora(path.encode()[-16:], 8, ("q_proj",), 1024) for path in ADAPTERS.values()}
        executor.on_execute = self._wait
        config = msgspec.structs.replace(
            make_config(
                num_blocks=64,
                max_num_seqs=MAX_RUNNING,
                max_waiting_requests=MAX_WAITING,
                speculative=SpeculativeConfig(method="ngram"),
                lora=LoraConfig(max_loras=len(ADAPTERS) if adapters else 0),
            ),
            engine_id=engine_id,
            coordinator=CoordinatorClientConfig(address=coordinator, stats_interval=0.02, reconnect_max=0.05),
        )
        super().__init__(config, executor)

    def _wait(self) -> None:
        if not self.open.is_set() and self.allowed > 0:
            self.allowed -= 1
            return
        self.open.wait()

    def load(self) -> "Engine":
        super().load()
        loop, ready = self.busy_loop, self.io._servicer._ready
        assert ready is not None
        self.io.registry.register(
            EngineCollector(
                loop.stats, self.control.state, self.engine.counts.tokens, ready, self.engine.executor.worker_stats
            )
        )
        return self

    @property
    def num_calls(self) -> int:
        """Number of received messages that wait for the end of the step."""
        return self.busy_loop._queues._input.qsize()

    def break_sessions(self) -> None:
        """Break the sessions of all frontends, which may reconnect."""
        self.io._thread.loop.call_soon_threadsafe(self.io.sessions.close_all)


class System:
    """Coordinator, two engines with fake executors, and frontend, with all their gauges."""

    def __init__(self, frontend: FrontendServer, engines: list[Engine], coordinator: CollectorRegistry) -> None:
        self.frontend = frontend
        self.engines = engines
        self._registries = [
            ("frontend", frontend.frontend._models[0].assembly.metrics.registry),
            ("coordinator", coordinator),
            *((engine.config.engine_id, engine.io.registry) for engine in engines),
        ]

    @property
    def gauges(self) -> Gauges:
        return gauges(self._registries)

    @property
    def busy(self) -> int:
        """Number of running requests on all engines."""
        return sum(engine.busy_loop.stats().num_running_reqs for engine in self.engines)

    @property
    def waiting(self) -> int:
        """Number of requests in the queues of all engines."""
        return sum(engine.busy_loop.stats().num_waiting_reqs for engine in self.engines)

    def generate(self, **fields: Any) -> Any:
        return self.frontend.generate(**({"token_ids": PROMPT, "max_tokens": 8, "ignore_eos": True} | fields))

    @contextlib.asynccontextmanager
    async def paused(self) -> AsyncIterator[None]:
        """Pause the engines during the block: they accept requests, but start none."""
        engines = self.frontend.frontend._models[0].assembly.engines
        await engines.call_utility("pause", ["keep", False])
        try:
            yield
        finally:
            await engines.call_utility("resume")

    @contextlib.contextmanager
    def held(self, *, after: int = 0) -> Iterator[None]:
        """Hold the engines during the block: each finishes at most ``after`` steps."""
        for engine in self.engines:
            engine.allowed = after
            engine.open.clear()
        try:
            yield
        finally:
            for engine in self.engines:
                engine.open.set()


@contextlib.asynccontextmanager
async def started(model: Path, *, adapters: bool = False) -> AsyncIterator[System]:
    """Start the system. ``adapters``: whether requests may use ADAPTERS."""
    async with running() as coordinator, contextlib.AsyncExitStack() as stack:
        engines = [Engine(f"engine-{number}", address_of(coordinator), adapters=adapters) for number in range(2)]
        for engine in engines:
            await asyncio.to_thread(lambda engine=engine: engine.start().load())  # type: ignore[misc]
            stack.push_async_callback(asyncio.to_thread, engine.stop)
            stack.callback(engine.open.set)
        frontend = await stack.enter_async_context(
            FrontendServer(
                model,
                model=ModelConfig(path=str(model), served_model_name="fake"),
                coordinator=FrontendCoordinatorConfig(address=address_of(coordinator), reconnect_max=0.05),
                lora=FrontendLoraConfig(adapters=ADAPTERS if adapters else {}),
            )
        )
        await eventually(lambda: frontend.frontend._models[0].assembly.engines.view.num_engines == len(engines))
        known = coordinator.registry.get_sample_value
        await eventually(lambda: known("penstock_coordinator_engines", {"state": "serving"}) == len(engines))
        await eventually(lambda: known("penstock_coordinator_frontends") == 1)
        yield System(frontend, engines, coordinator.registry)
