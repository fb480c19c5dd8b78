"""The executor over processes without a model that work correctly, or end, stop, hang, raise and differ."""

import contextlib
import gc
import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from penstock_common.errors import FailedPrecondition, RequestFailed, ResourceExhausted, Unavailable
from penstock_enginecore.config import EngineCoreConfig, ExecutorConfig, ModelConfig
from penstock_enginecore.core.kv_cache.spec import KVCacheConfig
from penstock_enginecore.core.scheduler.output import SchedulerOutput
from penstock_enginecore.executor.multiproc import calls as overdue
from penstock_enginecore.executor.multiproc.executor import MultiprocExecutor
from penstock_enginecore.lora.core.request import LoadedLora, LoraRequest, PartlyLoadedError
from penstock_enginecore.worker.failures import WorkerError, WorkersGone
from tests.fakes.engines.worker_process import MODULE, Misdeed
from tests.fakes.patience import PATIENCE
from tests.fakes.processes import children

ADAPTER_BYTES = 100
QUIET = Misdeed()
KV_CACHE = KVCacheConfig(num_blocks=9, block_size=4, groups=(), max_model_len=32)


def room(num_bytes: int, made: "Future[None]") -> None:
    assert num_bytes == ADAPTER_BYTES
    made.set_result(None)


def step(number: int) -> SchedulerOutput:
    return SchedulerOutput(step=number, num_scheduled_tokens={"a": 1, "b": 1}, total_num_scheduled_tokens=2)


@contextlib.contextmanager
def executor_of(
    misdeed: Misdeed = QUIET, *, workers: int = 2, step_timeout: float = PATIENCE
) -> Iterator[MultiprocExecutor]:
    config = EngineCoreConfig(
        model=ModelConfig(path=misdeed.path),
        executor=ExecutorConfig(kind="multiproc", tensor_parallel_size=workers, step_timeout=step_timeout),
    )
    executor = MultiprocExecutor(config, module=MODULE, size_adapter=lambda path, config: ADAPTER_BYTES)
    try:
        yield executor
    finally:
        executor.shutdown()
        assert not any(Path(f"/proc/{pid}").exists() for pid in executor.pids)


def test_all_workers_do_what_they_are_told_and_leave_nothing_behind() -> None:
    gc.collect()  # close descriptors that other tests left behind, which would be missing below
    before, descriptors = children(), len(list(Path("/proc/self/fd").iterdir()))
    lines: list[str] = []
    with executor_of(workers=3) as executor:
        assert executor.load_model(lines.append).vocab_size == 1000
        assert list(executor.kv_cache_specs()) == ["layer.0"]
        # The memory of the last worker, which has the least memory.
        assert executor.available_kv_cache_memory() == 2**20 * 6
        executor.initialize_kv_cache(KV_CACHE)
        for number in range(1, 200):
            executor.execute_model(step(number))
            result = executor.sample_tokens().result(PATIENCE)
            assert result.request_ids == ["a", "b"]
            assert result.sampled_token_ids == [[number], [number]]
        assert executor.collective_rpc("anything", [1, "x"]) == [[rank, "anything", [1, "x"]] for rank in range(3)]
        assert set(executor.pids) <= children()
    assert lines == [
        f"{method} of worker 0"
        for method in (
            "load_model",
            "kv_cache_specs",
            "available_kv_cache_memory",
            "initialize_kv_cache",
            "collective_rpc",
            "shutdown",
        )
    ]
    assert children() == before
    executor.shutdown()
    del executor
    gc.collect()
    assert len(list(Path("/proc/self/fd").iterdir())) <= descriptors


def test_workers_that_have_stopped_wait_for_those_that_still_do() -> None:
    lines: list[str] = []
    failures: list[WorkersGone] = []
    with executor_of(Misdeed(rank=0, when="shutdown", does="dawdle"), workers=3) as executor:
        executor.watch(failures.append)
        executor.load_model(lines.append)
    assert lines[-1] == "shutdown of worker 0"
    assert failures == []


def test_steps_are_in_flight_at_once_and_end_in_their_order() -> None:
    with executor_of() as executor:
        futures = []
        for number in range(1, 50):
            executor.execute_model(step(number))
            futures.append(executor.sample_tokens())
        assert executor.collective_rpc("behind them") == [[0, "behind them", []], [1, "behind them", []]]
        assert all(future.done() for future in futures)
        assert [future.result().sampled_token_ids[0] for future in futures] == [[number] for number in range(1, 50)]


def test_adapters_are_read_by_all_workers_beside_their_steps() -> None:
    with executor_of() as executor:
        one, other = executor.load_lora(LoraRequest("a", "1"), room), executor.load_lora(LoraRequest("b", "2"), room)
        executor.execute_model(step(1))
        assert executor.sample_tokens().result(PATIENCE).request_ids == ["a", "b"]
        assert one.result(PATIENCE) == LoadedLora(bytes([1]) * 16, 4, ("held 0",), 100)
        assert other.result(PATIENCE).modules == ("held 1",)
        executor.unload_lora(bytes([1]) * 16)
        assert executor.load_lora(LoraRequest("c", "3"), room).result(PATIENCE).modules == ("held 1",)


def test_adapters_are_read_once_there_is_room_for_them() -> None:
    wants: list[Future[None]] = []

    def full(num_bytes: int, made: "Future[None]") -> None:
        made.set_exception(ResourceExhausted("there is no room"))

    with executor_of() as executor:
        assert isinstance(executor.load_lora(LoraRequest("a", "1"), full).exception(PATIENCE), ResourceExhausted)
        later = executor.load_lora(LoraRequest("b", "2"), lambda num_bytes, made: wants.append(made))
        assert executor.load_lora(LoraRequest("c", "3"), room).result(PATIENCE).modules == ("held 0",)
        assert not later.done()
        wants[0].set_result(None)
        assert later.result(PATIENCE).modules == ("held 1",)


@pytest.mark.parametrize(
    ("does", "error", "reason", "held"),
    [
        ("raise", Unavailable, "LORA_UNAVAILABLE", {bytes([1]) * 16}),
        ("differ", FailedPrecondition, "LORA_CHANGED", {bytes([1]) * 16, bytes([2]) * 16}),
    ],
)
def test_an_adapter_that_one_worker_cannot_read_or_reads_otherwise_is_not_loaded(
    does: Any, error: type[RequestFailed], reason: str, held: set[bytes]
) -> None:
    with executor_of(Misdeed(rank=1, when="load_lora", does=does)) as executor:
        failed = executor.load_lora(LoraRequest("a", "1"), room).exception(PATIENCE)
        assert isinstance(failed, PartlyLoadedError)
        assert isinstance(failed.error, error)
        assert failed.error.reason == reason
        assert failed.digests == held
        executor.execute_model(step(1))
        assert executor.sample_tokens().result(PATIENCE).request_ids == ["a", "b"]


def test_a_worker_that_ends_while_it_reads_an_adapter_ends_the_load() -> None:
    with executor_of(Misdeed(rank=1, when="load_lora", does="exit")) as executor:
        assert isinstance(executor.load_lora(LoraRequest("a", "1"), room).exception(PATIENCE), WorkersGone)


def test_sampling_without_a_forward_pass_is_an_error() -> None:
    with executor_of(workers=1) as executor, pytest.raises(RuntimeError, match="execute_model must be called before"):
        executor.sample_tokens()


@pytest.mark.parametrize(
    ("when", "does"),
    [
        ("load_model", "exit"),
        ("initialize_kv_cache", "kill"),
        ("execute", "kill"),
        ("sample", "exit"),
        ("shutdown", "kill"),
    ],
)
def test_a_worker_that_ends_ends_all(when: str, does: Any) -> None:
    """The cases include the last worker. No call waits only for that worker's results."""
    failed = threading.Event()
    how = "ended with exit code 3" if does == "exit" else "was killed by SIGKILL"
    with executor_of(Misdeed(rank=1, when=when, does=does)) as executor:
        executor.watch(lambda error: failed.set())
        if when == "shutdown":
            return
        with pytest.raises(WorkersGone, match=rf"worker 1 \(pid {executor.pids[1]}\) {how}"):
            executor.load_model(lambda line: None)
            executor.initialize_kv_cache(KV_CACHE)
            executor.execute_model(step(1))
            executor.sample_tokens().result(PATIENCE)
        assert failed.wait(PATIENCE)
        with pytest.raises(WorkersGone, match="worker 1"):
            executor.recover()
        with pytest.raises(WorkersGone, match="worker 1"):
            executor.execute_model(step(2))


def test_a_worker_that_ends_while_nothing_runs_is_told_of() -> None:
    errors: list[Exception] = []
    failed = threading.Event()
    with executor_of() as executor:
        executor.watch(lambda error: (errors.append(error), failed.set()))
        executor.load_model(lambda line: None)
        os.kill(executor.pids[0], signal.SIGKILL)
        assert failed.wait(PATIENCE)
        assert "worker 0" in str(errors[0])
        assert "SIGKILL" in str(errors[0])
    assert len(errors) == 1


@pytest.mark.parametrize(
    ("when", "does", "told"),
    [("execute", "hang", "in in_a_collective"), ("sample", "stop", "the process does not answer")],
)
def test_a_step_that_takes_too_long_ends_all_and_the_log_says_where_each_worker_is(
    when: str, does: Any, told: str, caplog: pytest.LogCaptureFixture
) -> None:
    with executor_of(Misdeed(rank=1, when=when, does=does, step=2), step_timeout=1.0) as executor:
        executor.load_model(lambda line: None)
        executor.execute_model(step(1))
        executor.execute_model(step(2))
        with pytest.raises(WorkersGone, match=r"a step did not end within executor.step_timeout \(1 s\)"):
            executor.sample_tokens().result(PATIENCE)
    stacks = {record.args[0]: record.args[1] for record in caplog.records if "stack traces" in record.getMessage()}
    assert told in stacks[1]
    assert "in read" in stacks[0]  # the worker waits for the next message


@pytest.mark.parametrize("method", ["kv_cache_specs", "execute_dummy_batch"])
def test_workers_that_hang_before_the_first_step_end_all_and_are_logged(
    method: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    with executor_of(Misdeed(rank=1, when=method, does="hang"), step_timeout=1.0) as executor:
        executor.load_model(lambda line: None)
        # Set only now, because workers start slowly on a busy machine.
        monkeypatch.setattr(overdue, "_IDLE_AT_LEAST", 1.0)
        with pytest.raises(WorkersGone, match="no worker has computed anything for 1 s, while the model was loaded"):
            getattr(executor, method)()
    stacks = {record.args[0]: record.args[1] for record in caplog.records if "stack traces" in record.getMessage()}
    assert "in in_a_collective" in stacks[1]


def test_workers_that_sample_different_tokens_end_all_in_that_step() -> None:
    with executor_of(Misdeed(rank=1, when="sample", does="differ", step=2)) as executor:
        executor.execute_model(step(1))
        assert executor.sample_tokens().result(PATIENCE).sampled_token_ids == [[1], [1]]
        executor.execute_model(step(2))
        with pytest.raises(WorkersGone, match="workers 0 and 1 sampled different tokens"):
            executor.sample_tokens().result(PATIENCE)
        with pytest.raises(WorkersGone, match="different tokens"):
            executor.recover()


def test_workers_that_loaded_different_models_are_refused() -> None:
    with (
        executor_of(Misdeed(rank=1, when="load_model", does="differ")) as executor,
        pytest.raises(
            WorkersGone, match="worker 1 differs from worker 0 in the model: vocab_size is 1001 and not 1000"
        ),
    ):
        executor.load_model(lambda line: None)


@pytest.mark.parametrize("when", ["load_model", "sample"])
def test_an_error_of_one_worker_is_raised_with_its_rank(when: str) -> None:
    with executor_of(Misdeed(rank=1, when=when, does="raise")) as executor:
        with pytest.raises(WorkerError, match="worker 1: ValueError: "):
            executor.load_model(lambda line: None)
            executor.execute_model(step(1))
            executor.sample_tokens().result(PATIENCE)
        executor.recover()
        assert executor.collective_rpc("still there")[1] == [1, "still there", []]


def test_workers_that_wait_for_one_that_failed_are_not_waited_for() -> None:
    """An example is loading, in which all workers take part in a sum."""
    misdeed = Misdeed(rank=0, when="load_model", does="hang", other_raises=True)
    with executor_of(misdeed) as executor, pytest.raises(WorkerError, match="worker 1: ValueError: load_model"):
        executor.load_model(lambda line: None)


def test_a_worker_that_cannot_be_understood_ends_all() -> None:
    with executor_of(Misdeed(rank=1, when="sample", does="babble")) as executor:
        executor.execute_model(step(1))
        with pytest.raises(WorkersGone, match="answers of worker 1 cannot be read"):
            executor.sample_tokens().result(PATIENCE)


def test_workers_end_with_the_engine() -> None:
    """The engine alone holds one end of a pipe, which is closed however the engine ends."""
    errors: list[Exception] = []
    failed = threading.Event()
    with executor_of() as executor:
        executor.load_model(lambda line: None)
        executor.watch(lambda error: (errors.append(error), failed.set()))
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, executor._workers._processes[0].engine, inheritable=False)
        os.close(nothing)
        assert failed.wait(PATIENCE)
    assert "worker 0" in str(errors[0])
    assert "ended with exit code 1" in str(errors[0])
