"""Time of the scheduler and the block manager per step, without a model."""

import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

from penstock_common.types.request import EngineCoreRequest
from penstock_common.types.sampling import SamplingParams
from penstock_enginecore.config import CacheConfig, EngineCoreConfig, ModelConfig, SchedulerConfig
from penstock_enginecore.core.engine_core import EngineCore
from penstock_enginecore.core.executor import Progress
from penstock_enginecore.core.kv_cache.spec import KVCacheConfig, KVCacheSpec
from penstock_enginecore.core.model_info import ModelInfo
from penstock_enginecore.core.scheduler.output import DraftTokenIds, GrammarBitmask, ModelRunnerOutput, SchedulerOutput
from penstock_enginecore.core.worker_stats import WorkerStats
from penstock_enginecore.kv_transfer.core.base import BlockCopier
from penstock_enginecore.lora.core.request import LoadedLora, LoraRequest, MakeRoom


class NullExecutor:
    """Executor that returns token 7 in every step. It keeps only the lengths that tell whether a prompt is complete."""

    experts = None

    def __init__(self) -> None:
        self._lengths: dict[str, int] = {}
        self.seconds = 0.0

    def watch(self, failed: Callable[[Exception], None]) -> None:
        """Do nothing; this executor does not fail."""

    def worker_stats(self) -> list[WorkerStats]:
        """Return an empty list, because there are no workers."""
        return []

    def load_model(self, progress: Progress) -> ModelInfo:
        """Do nothing; there are no weights."""
        return ModelInfo(max_len=4096, vocab_size=32_000)

    def kv_cache_specs(self) -> dict[str, KVCacheSpec]:
        """Return the specification of one small layer."""
        return {"layer": KVCacheSpec(block_size=16, num_kv_heads=1, head_size=8, head_size_v=8, dtype_size=4)}

    def available_kv_cache_memory(self) -> int:
        """Return 1 GiB. The engine does not use this value if the size of the pool is configured."""
        return 2**30

    def initialize_kv_cache(self, config: KVCacheConfig) -> None:
        """Do nothing; there is no KV cache."""

    def block_copier(self) -> BlockCopier:
        raise NotImplementedError("no tier is configured")

    def state_copier(self) -> BlockCopier:
        """Raise NotImplementedError, because there are no states."""
        raise NotImplementedError

    def load_lora(self, lora: LoraRequest, make_room: MakeRoom) -> "Future[LoadedLora]":
        """Raise NotImplementedError, because requests have no adapters."""
        raise NotImplementedError

    def unload_lora(self, digest: bytes) -> None:
        """Do nothing; there are no adapters."""

    def recover(self) -> None:
        """Do nothing; steps do not fail."""

    def roll_back(self) -> None:
        """Do nothing; there are no peers."""

    def execute_dummy_batch(self) -> None:
        """Do nothing; results are ready at once."""

    def execute_model(self, scheduler_output: SchedulerOutput) -> None:
        """Record the answers. The executor's own time is excluded from the scheduler's."""
        began = time.perf_counter()
        for request_id in scheduler_output.finished_request_ids:
            self._lengths.pop(request_id, None)
        for new in scheduler_output.new_requests:
            self._lengths[new.request_id] = len(new.token_ids) - new.num_computed_tokens
        ids = list(scheduler_output.num_scheduled_tokens)
        tokens: list[list[int]] = []
        for request_id, count in scheduler_output.num_scheduled_tokens.items():
            self._lengths[request_id] -= count
            done = self._lengths[request_id] <= 0
            self._lengths[request_id] += done
            tokens.append([7] if done else [])
        self._output = ModelRunnerOutput(request_ids=ids, sampled_token_ids=tokens)
        self.seconds += time.perf_counter() - began

    def sample_tokens(self, grammar: GrammarBitmask | None = None) -> "Future[ModelRunnerOutput]":
        """Return the answers immediately."""
        future: Future[ModelRunnerOutput] = Future()
        future.set_result(self._output)
        return future

    def take_draft_token_ids(self) -> "Future[DraftTokenIds]":
        """Return an empty set of drafts."""
        future: Future[DraftTokenIds] = Future()
        future.set_result(DraftTokenIds())
        return future

    def step_seconds(self, num_tokens: int, passes: int) -> float:
        """Return 0, because steps cost nothing."""
        return 0.0

    def collective_rpc(self, method: str, arguments: Sequence[Any] = ()) -> list[Any]:
        """See ``Executor``; there are no workers."""
        return []

    def shutdown(self) -> None:
        """Do nothing; there are no resources."""


def measure(*, running: int, waiting: int = 0, steps: int = 200) -> float:
    """Return the median milliseconds per decode step of ``running`` requests, with ``waiting`` queued requests."""
    executor = NullExecutor()
    config = EngineCoreConfig(
        model=ModelConfig(path="null"),
        cache=CacheConfig(num_blocks=max(running * 64, 256) + 2),
        scheduler=SchedulerConfig(
            max_num_seqs=running, max_num_batched_tokens=8192, max_waiting_requests=running + waiting + 1
        ),
    )
    engine = EngineCore(config, executor, progress=lambda line: None)
    params = SamplingParams(temperature=0.0, max_tokens=steps * 4)
    for number in range(running + waiting):
        request = EngineCoreRequest(
            request_id=str(number), prompt_token_ids=[number % 1000] * 64, sampling_params=params
        )
        engine.add(engine.preprocess("bench", request))
    while engine.scheduler.stats().num_running_reqs < running:
        engine.step(lambda: None)
    for _ in range(20):
        engine.step(lambda: None)
    times = []
    for _ in range(steps):
        executor.seconds = 0.0
        began = time.perf_counter()
        engine.step(lambda: None)
        times.append(time.perf_counter() - began - executor.seconds)
    return statistics.median(times) * 1e3
