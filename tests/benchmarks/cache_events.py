"""Cost per step of reporting cache events to a frontend: CPU time of the main thread, without the model.

Prompts of 256 tokens and answers of 32 to 95 tokens keep the block pool full, so every new block evicts a block.
"""

import itertools
import statistics
import time

from penstock_common.types.outputs import EngineCoreOutputs
from penstock_common.types.request import EngineCoreRequest
from penstock_common.types.sampling import SamplingParams
from penstock_enginecore.config import CacheConfig, EngineCoreConfig, ModelConfig, SchedulerConfig
from penstock_enginecore.core.engine_core import EngineCore
from tests.benchmarks.scheduler_step import NullExecutor

ROUNDS = 5


def microseconds(running: int, *, followed: bool, steps: int = 1500) -> float:
    """Return the mean CPU time of a step with ``running`` requests, in microseconds."""
    executor = NullExecutor()
    config = EngineCoreConfig(
        model=ModelConfig(path="null"),
        cache=CacheConfig(num_blocks=running * 24 + 2),
        scheduler=SchedulerConfig(max_num_seqs=running, max_num_batched_tokens=8192, max_waiting_requests=2 * running),
    )
    engine = EngineCore(config, executor, progress=lambda line: None)
    engine.scheduler.kv_cache.record_events(followed)
    numbers = itertools.count()

    def fill() -> None:
        stats = engine.scheduler.stats()
        for number in itertools.islice(numbers, running - stats.num_running_reqs - stats.num_waiting_reqs):
            params = SamplingParams(temperature=0.0, max_tokens=32 + number % 64)
            request = EngineCoreRequest(
                request_id=str(number), prompt_token_ids=[number % 30_000] * 256, sampling_params=params
            )
            engine.add(engine.preprocess("bench", request))

    seconds = 0.0
    for step in range(100 + steps):
        fill()
        executor.seconds = 0.0
        began = time.thread_time()
        engine.step(lambda: None)
        if events := engine.scheduler.kv_cache.take_events():
            EngineCoreOutputs(kv_events=events, timestamp=0.0)
        if step >= 100:
            seconds += time.thread_time() - began - executor.seconds
    return seconds / steps * 1e6


def main() -> None:
    """Print a line for each number of running requests."""
    for running in (1, 16, 64, 256):
        pairs = [(microseconds(running, followed=False), microseconds(running, followed=True)) for _ in range(ROUNDS)]
        more = statistics.median(followed - alone for alone, followed in pairs)
        alone = statistics.median(alone for alone, _ in pairs)
        print(f"{running:4} running: {alone:6.1f} us a step, {more:+5.1f} us where a frontend follows")


if __name__ == "__main__":
    main()
