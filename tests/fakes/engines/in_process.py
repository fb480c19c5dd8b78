"""Drive a real EngineCore from a test, step by step, in the test's own thread."""

from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from penstock_common.config.sections import ServerConfig
from penstock_common.types.outputs import FinishReason, Logprobs, SchedulerStats
from penstock_common.types.request import EngineCoreRequest
from penstock_common.types.sampling import SamplingParams
from penstock_enginecore import app
from penstock_enginecore.config import (
    CacheConfig,
    CoordinatorClientConfig,
    DataParallelConfig,
    EngineCoreConfig,
    ExecutorConfig,
    ExpertParallelConfig,
    KernelsConfig,
    KvTransferConfig,
    LoraConfig,
    ModelConfig,
    MultimodalConfig,
    ProfilerConfig,
    SchedulerConfig,
    SpeculativeConfig,
)
from penstock_enginecore.core.engine_core import EngineCore
from penstock_enginecore.executor.factory import make_executor
from penstock_enginecore.structured_output.factory import make_grammar_backend
from tests.fakes.patience import PATIENCE

CLIENT = "test"
TIMEOUT = PATIENCE


def config_of(
    path: Path,
    *,
    model: Mapping[str, Any] | None = None,
    cache: Mapping[str, Any] | None = None,
    scheduler: Mapping[str, Any] | None = None,
    profiler: Mapping[str, Any] | None = None,
    kernels: Mapping[str, Any] | None = None,
    executor: Mapping[str, Any] | None = None,
    coordinator: Mapping[str, Any] | None = None,
    data_parallel: Mapping[str, Any] | None = None,
    expert_parallel: Mapping[str, Any] | None = None,
    plugins: tuple[str, ...] | None = None,
    speculative: Mapping[str, Any] | None = None,
    lora: Mapping[str, Any] | None = None,
    multimodal: Mapping[str, Any] | None = None,
    kv_transfer: Mapping[str, Any] | None = None,
    engine_id: str = "",
) -> EngineCoreConfig:
    """Return the config of an engine with the checkpoint at ``path`` and one torch thread. ``sections`` override it."""
    return EngineCoreConfig(
        model=ModelConfig(**{"path": str(path), "device": "cpu", **(model or {})}),
        cache=CacheConfig(**{"block_size": 4, "num_blocks": 512, **(cache or {})}),
        scheduler=SchedulerConfig(**(scheduler or {})),
        executor=ExecutorConfig(**{"num_threads": 1, **(executor or {})}),
        profiler=ProfilerConfig(**(profiler or {})),
        # Recorded steps are computed a second time, which would be slow on a CPU for all sizes.
        kernels=KernelsConfig(**{"capture_at_start": False, **(kernels or {})}),
        coordinator=CoordinatorClientConfig(**(coordinator or {})),
        data_parallel=DataParallelConfig(**(data_parallel or {})),
        expert_parallel=ExpertParallelConfig(**(expert_parallel or {})),
        plugins=plugins,
        speculative=SpeculativeConfig(**(speculative or {})),
        lora=LoraConfig(**(lora or {})),
        multimodal=MultimodalConfig(**(multimodal or {})),
        kv_transfer=KvTransferConfig(**(kv_transfer or {})),
        server=ServerConfig(host="127.0.0.1"),
        engine_id=engine_id,
    )


def build_engine(path: Path, **sections: Any) -> EngineCore:
    """Return an engine with the config of ``config_of``."""
    config = config_of(path, **sections)
    return app.build_engine(config, make_executor(config), make_grammar_backend, lambda line: None)


class Run(msgspec.Struct):
    """Results of requests: tokens, log-probabilities of output and prompt, ends of requests, and the last statistics."""

    tokens: dict[str, list[int]] = {}
    logprobs: dict[str, Logprobs] = {}
    prompt_logprobs: dict[str, Logprobs] = {}
    finish_reasons: dict[str, FinishReason] = {}
    stats: SchedulerStats = SchedulerStats()


def generate(
    engine: EngineCore,
    requests: Sequence[tuple[str, list[int], SamplingParams]],
    *,
    after_step: Callable[[], None] = lambda: None,
) -> Run:
    """Add all requests (id, prompt, sampling parameters), and run steps until all have ended."""
    made = [
        EngineCoreRequest(request_id=request_id, prompt_token_ids=prompt, sampling_params=params)
        for request_id, prompt, params in requests
    ]
    return answer(engine, made, after_step=after_step)


def answer(
    engine: EngineCore,
    requests: Sequence[EngineCoreRequest],
    *,
    after_step: Callable[[], None] = lambda: None,
    refused: Collection[str] = (),
) -> Run:
    """Add all requests, and run steps until all have ended. ``refused``: ids of requests that end with errors."""
    run = Run()
    for request in requests:
        engine.add(engine.preprocess(CLIENT, request))
        run.tokens[request.request_id] = []
        run.logprobs[request.request_id] = Logprobs()
        run.prompt_logprobs[request.request_id] = Logprobs()
    while engine.has_requests:
        for outputs in engine.step(lambda: None).values():
            run.stats = outputs.scheduler_stats or run.stats
            for output in outputs.outputs:
                assert (output.error is None) == (output.request_id not in refused), output.error
                run.tokens[output.request_id] += output.new_token_ids
                if output.new_logprobs is not None:
                    run.logprobs[output.request_id].extend(output.new_logprobs)
                if output.new_prompt_logprobs is not None:
                    run.prompt_logprobs[output.request_id].extend(output.new_prompt_logprobs)
                if output.finish_reason is not None:
                    run.finish_reasons[output.request_id] = output.finish_reason
        after_step()
        if engine.stalled and engine.has_requests:  # constraints are being compiled
            assert engine.queues.get(block=True, timeout=TIMEOUT), "nothing to do, and nothing comes"
    return run
