"""Workers in separate processes: the tokens of one process, and an engine that ends when a worker ends."""

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock_common.errors import ConfigError, InvalidArgument, Unimplemented
from penstock_common.types.sampling import SamplingParams
from penstock_enginecore.core.busy_loop import BusyLoop
from penstock_enginecore.core.control import EngineControl
from penstock_enginecore.core.engine_core import EngineCore
from penstock_enginecore.core.scheduler.output import CachedRequestData, SchedulerOutput
from penstock_enginecore.core.steps_in_flight import EngineDeadError
from penstock_enginecore.executor.multiproc.executor import MultiprocExecutor
from penstock_enginecore.worker.failures import WorkerError
from tests.fakes.engines.in_process import Run, build_engine, generate
from tests.fakes.models.tiny_models import VOCAB_SIZE, save_tiny_model
from tests.fakes.patience import PATIENCE
from tests.fakes.processes import children

pytestmark = pytest.mark.slow

PROMPT_LENGTHS = (1, 3, 7, 16, 34)
GREEDY = SamplingParams(temperature=0.0, max_tokens=12)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    directory = tmp_path_factory.mktemp("llama")
    save_tiny_model("llama", directory)
    return directory


@contextlib.contextmanager
def engine_of(path: Path, kind: str = "multiproc", **sections: Any) -> Iterator[EngineCore]:
    executor = {"kind": kind, **sections.pop("executor", {})}
    engine = build_engine(path, executor=executor, **sections)
    try:
        yield engine
    finally:
        engine.shutdown()


SECTIONS: dict[str, Any] = {
    # Chunked prompts, preempted requests, and two steps in flight.
    "scheduler": {"max_num_batched_tokens": 7, "async_scheduling": True},
    "cache": {"num_blocks": 26},
}


@pytest.fixture(scope="module")
def engine(path: Path) -> Iterator[EngineCore]:
    """Yield one engine for all tests, because a worker takes seconds to start."""
    with engine_of(path, **SECTIONS) as engine:
        yield engine


def workers_of(engine: EngineCore) -> MultiprocExecutor:
    assert isinstance(engine.executor, MultiprocExecutor)
    return engine.executor


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(1, VOCAB_SIZE, (n,), generator=generator).tolist() for n in PROMPT_LENGTHS]


def every_kind() -> list[SamplingParams]:
    return [
        GREEDY,
        SamplingParams(temperature=0.8, seed=3, max_tokens=12, top_p=0.9),
        SamplingParams(temperature=0.0, max_tokens=12, logprobs=3, prompt_logprobs=2),
        SamplingParams(temperature=0.9, seed=4, max_tokens=12, repetition_penalty=1.2, logit_bias={5: 2.0}),
        SamplingParams(temperature=0.7, seed=5, max_tokens=12, top_k=20),
    ]


def run(engine: EngineCore, prefix: str = "r") -> Run:
    return generate(
        engine,
        [
            (f"{prefix}{i}", prompt, params)
            for i, (prompt, params) in enumerate(zip(prompts(), every_kind(), strict=True))
        ],
    )


def test_mixed_batches_give_the_tokens_of_one_process(path: Path, engine: EngineCore) -> None:
    with engine_of(path, "uniproc", **SECTIONS) as one:
        expected = run(one).tokens
    assert run(engine).tokens == expected
    assert list(run(engine, "again").tokens.values()) == list(expected.values())  # with hits in the prefix cache


def test_a_step_that_fails_in_the_worker_raises_its_error_and_is_recovered_from(engine: EngineCore) -> None:
    expected = run(engine, "before").tokens
    executor = workers_of(engine)
    unknown = SchedulerOutput(
        cached_requests=CachedRequestData(request_ids=["nobody"], num_computed_tokens=[1], new_block_ids=[None]),
        num_scheduled_tokens={"nobody": 1},
        total_num_scheduled_tokens=1,
    )
    steps = []
    for _ in range(2):
        executor.execute_model(unknown)
        steps.append(executor.sample_tokens())
    with pytest.raises(WorkerError, match=r"^KeyError: 'nobody'"):
        steps[0].result(PATIENCE)
    with pytest.raises(WorkerError, match="an earlier step failed, so "):
        steps[1].result(PATIENCE)
    executor.recover()
    assert list(run(engine, "after").tokens.values()) == list(expected.values())


def test_sampling_without_a_forward_pass_is_an_error(engine: EngineCore) -> None:
    with pytest.raises(RuntimeError, match="execute_model must be called before sample_tokens"):
        engine.executor.sample_tokens()


def test_operators_reach_the_worker(engine: EngineCore) -> None:
    expected = run(engine, "awake").tokens
    [info] = engine.executor.collective_rpc("worker_info")
    assert info["rank"] == 0
    assert info["device"] == "cpu"
    assert info["weight_bytes"] > 0
    with pytest.raises(Unimplemented, match="no utility method 'worker_inf'; did you mean 'worker_info'"):
        engine.executor.collective_rpc("worker_inf")
    with pytest.raises(InvalidArgument, match="profiler.directory is not set"):
        engine.executor.collective_rpc("start_profile")
    for level in (1, 2):
        engine.executor.collective_rpc("sleep", [level])
        engine.executor.collective_rpc("wake_up", [["weights", "kv_cache"]])
        assert engine.scheduler.reset_prefix_cache()
        assert list(run(engine, f"woken{level}-").tokens.values()) == list(expected.values())


def test_a_workers_start_error_is_raised_in_the_engine_and_leaves_no_process(path: Path) -> None:
    before = children()
    with pytest.raises(ConfigError, match="'nothing'"):
        build_engine(path, model={"attention_backend": "nothing"}, executor={"kind": "multiproc"})
    assert children() == before


class DeadSink:
    def __init__(self) -> None:
        self.dead: list[str] = []

    def emit(self, client_id: str, outputs: Any) -> None: ...

    def broadcast(self, outputs: Any, to: Any = None) -> None: ...

    def draining(self, timeout: float) -> None: ...

    def engine_dead(self, reason: str) -> None:
        self.dead.append(reason)


def test_the_engine_ends_with_its_worker_while_nothing_runs(engine: EngineCore) -> None:
    """Kills the shared engine's worker, so this is the last test that uses the engine."""
    executor, sink = workers_of(engine), DeadSink()
    loop = BusyLoop(engine, EngineControl(engine), sink)
    errors: list[BaseException] = []

    def serve() -> None:
        try:
            loop.run()
        except EngineDeadError as e:
            errors.append(e)

    thread = threading.Thread(target=serve)
    thread.start()
    os.kill(executor.pids[0], signal.SIGKILL)
    thread.join(PATIENCE)
    [reason] = sink.dead
    assert f"worker 0 (pid {executor.pids[0]}) was killed by SIGKILL" in reason
    assert len(errors) == 1
