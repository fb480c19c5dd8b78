"""Executor whose workers are separate processes."""

import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, TypeVar

import msgspec

from penstock_enginecore.config import EngineCoreConfig
from penstock_enginecore.core.executor import Progress
from penstock_enginecore.core.kv_cache.spec import KVCacheConfig, KVCacheSpec
from penstock_enginecore.core.model_info import ModelInfo
from penstock_enginecore.core.scheduler.output import DraftTokenIds, GrammarBitmask, ModelRunnerOutput, SchedulerOutput
from penstock_enginecore.core.worker_stats import WorkerStats
from penstock_enginecore.executor.multiproc.calls import Calls, Overdue, agreed
from penstock_enginecore.executor.multiproc.nodes import SpreadWorkers
from penstock_enginecore.executor.multiproc.ring import RingClosed, RingTimeout
from penstock_enginecore.executor.multiproc.workers import LAST_MOMENT, MODULE, Workers
from penstock_enginecore.kv_transfer.core.base import BlockCopier, BlockFacts
from penstock_enginecore.kv_transfer.kv_copy import Copier, CopiesAwaited
from penstock_enginecore.lora.core.request import LoadedLora, LoraRequest, MakeRoom
from penstock_enginecore.lora.store import LoadsAwaited, SizeAdapter, peft_size, telling_of
from penstock_enginecore.parallel.stage_plan import largest_stage, largest_states
from penstock_enginecore.worker.device_thread import DeviceThread
from penstock_enginecore.worker.failures import Failure, WorkersGone
from penstock_enginecore.worker.messages import (
    Call,
    Copied,
    Invoke,
    Loaded,
    LoadLora,
    Method,
    Raised,
    Returned,
    Sample,
    Sampled,
    Stats,
    UnloadLora,
    decode_answer,
    encode,
    execute,
)
from penstock_enginecore.worker.messages import Progress as ProgressLine

T = TypeVar("T")
logger = logging.getLogger(__name__)

_WAITING: tuple[Method, ...] = ("collective_rpc", "shutdown")
"""Methods during which a worker may wait for something other than another worker."""
_CONSEQUENCE = 0.1
"""Seconds to wait for the exit of a worker after an error of another worker. The exit may have caused the error."""


class MultiprocExecutor:
    """An ``Executor`` that starts its workers as processes.

    Forward passes and the scheduler then use different Python interpreters. The executor sends calls to all workers
    over one ring, and receives answers over one ring per worker. If a worker exits, hangs in a step, or samples
    different tokens than the first worker, the executor ends all workers. Pending and later calls then raise
    WorkersGone.
    """

    def __init__(
        self, config: EngineCoreConfig, *, module: str = MODULE, size_adapter: SizeAdapter = peft_size
    ) -> None:
        """Start the processes, without waiting for their imports. ``module`` is the program of the worker processes."""
        self._timeout = config.executor.step_timeout
        self._num_workers = num_workers = config.executor.num_workers
        self._num_of_stage = config.executor.tensor_parallel_size
        self._one_node = config.executor.nodes.size == 1
        self._calls = Calls(num_workers)
        self._loads = LoadsAwaited(num_workers)
        self._copies = CopiesAwaited(num_workers, self._send)
        self._sending = threading.Lock()
        self._sizes = DeviceThread("lora sizes")
        self._size_adapter, self._lora_config = size_adapter, config.lora
        self._progress: Progress = logger.info
        self._on_failure: Callable[[Exception], None] = lambda _: None
        self._stats = [WorkerStats(rank=rank) for rank in range(num_workers)]
        self._executing = False
        self._shut_down = False
        make: type[Workers] | type[SpreadWorkers] = SpreadWorkers if config.executor.nodes.size > 1 else Workers
        self._workers = make(
            # Resolve a generated name here, because each process would generate its own.
            msgspec.structs.replace(config, engine_id=config.name),
            self._hear,
            self._fail,
            Overdue(self._timeout, self._calls.oldest),
            module,
        )

    @property
    def pids(self) -> list[int]:
        """Process IDs of this node's workers, by rank."""
        return self._workers.pids

    @property
    def experts(self) -> None:
        """Always None, because only ranks with a single worker can share experts."""

    def watch(self, failed: Callable[[Exception], None]) -> None:
        self._on_failure = failed
        try:
            self._calls.check()
        except WorkersGone as error:  # failed before this call
            failed(error)

    def load_model(self, progress: Progress) -> ModelInfo:
        """Wait for the workers to load the weights.

        Raises the first ModelLoadError or ConfigError of a worker. Raises WorkersGone if workers loaded different
        models.
        """
        self._progress = progress
        self._workers.wait(progress)
        models: list[ModelInfo] = self._invoke("load_model", ModelInfo)
        states = largest_states(agreed("the model", of_stage, first).states for first, of_stage in self._stages(models))
        return agreed("the model", [msgspec.structs.replace(model, states=states) for model in models])

    def _stages(self, answers: list[T]) -> list[tuple[int, list[T]]]:
        """Return the answers of each pipeline stage, with the rank of the first."""
        size = self._num_of_stage
        return [(first, answers[first : first + size]) for first in range(0, self._num_workers, size)]

    def kv_cache_specs(self) -> dict[str, KVCacheSpec]:
        """Return the KV cache spec of each attention layer, by layer name in execution order.

        For a model in pipeline stages, return the specs of a stage with the most layers of each kind.
        """
        specs: list[dict[str, KVCacheSpec]] = self._invoke("kv_cache_specs", dict[str, KVCacheSpec])
        stages = [agreed("the KV cache", of_stage, first) for first, of_stage in self._stages(specs)]
        return largest_stage(stages) if len(stages) > 1 else stages[0]

    def available_kv_cache_memory(self) -> int:
        """Return the minimum over all workers of the bytes available for the KV cache. Waits for the profiling step."""
        available: list[int] = self._invoke("available_kv_cache_memory", int)
        return min(available)

    def initialize_kv_cache(self, config: KVCacheConfig) -> None:
        """Wait for the workers to allocate the KV cache."""
        self._invoke("initialize_kv_cache", None, encode(config))

    def execute_model(self, scheduler_output: SchedulerOutput) -> None:
        """Send the step to the workers, which run it after all earlier steps."""
        self._send(execute(scheduler_output))
        self._executing = True

    def sample_tokens(self, grammar: GrammarBitmask | None = None) -> "Future[ModelRunnerOutput]":
        """Queue the sampling of the step that ``execute_model`` has sent.

        The future raises the errors of the forward pass and of the sampling. Raises RuntimeError if no step was sent.
        """
        if not self._executing:
            raise RuntimeError("execute_model must be called before sample_tokens")
        self._executing = False
        number, answers = self._calls.begin(timed=True)
        step: Future[ModelRunnerOutput] = Future()
        answers.add_done_callback(lambda done: self._finish(step, done))
        self._send(Sample(number, grammar))
        return step

    def take_draft_token_ids(self) -> "Future[DraftTokenIds]":
        """Draft in every worker after the sampling of the step. Returns the drafts of the first worker.

        If the workers have exited, there are no drafts.
        """
        number, answers = self._calls.begin(timed=True)
        drafts: Future[DraftTokenIds] = Future()

        def finish(done: "Future[list[Any]]") -> None:
            error = done.exception()
            drafts.set_result(
                msgspec.msgpack.decode(done.result()[0], type=DraftTokenIds)
                if error is None
                else DraftTokenIds(failure=f"{type(error).__name__}: {error}")
            )

        answers.add_done_callback(finish)
        self._send(Invoke(number, "draft"))
        return drafts

    def step_seconds(self, num_tokens: int, passes: int) -> float:
        """Time forward passes in the workers. Returns the seconds of the slowest worker."""
        timed: list[float] = self._invoke("step_seconds", float, encode((num_tokens, passes)))
        return max(timed)

    def execute_dummy_batch(self) -> None:
        """Wait for the workers to compute a dummy token."""
        self._invoke("execute_dummy_batch", None)

    def load_lora(self, lora: LoraRequest, make_room: MakeRoom) -> "Future[LoadedLora]":
        """Load an adapter in every worker, after ``make_room`` has freed memory. Steps continue while the adapter
        loads.
        """
        number, loaded = self._loads.begin()
        self._sizes.submit(partial(self._load_lora, number, lora, make_room))
        return loaded

    def _load_lora(self, number: int, lora: LoraRequest, make_room: MakeRoom) -> None:
        try:
            with telling_of(lora):
                size = self._size_adapter(lora.path, self._lora_config)
        except Exception as e:
            self._loads.refused(number, e)
            return
        made: Future[None] = Future()
        made.add_done_callback(partial(self._read_lora, number, lora))
        make_room(size, made)

    def _read_lora(self, number: int, lora: LoraRequest, made: "Future[None]") -> None:
        """Send the command to load an adapter, after the commands that free memory for this adapter."""
        try:
            made.result()
            self._send(LoadLora(number, lora))
        except Exception as e:
            self._loads.refused(number, e)

    def block_copier(self) -> BlockCopier:
        """Return a copier of KV blocks. Every worker copies its part of a block while its steps run.

        A copied block is the concatenation of the parts of all workers.
        """
        return self._copier("block_facts", of_states=False)

    def state_copier(self) -> BlockCopier:
        """Return a copier of states. Otherwise as ``block_copier``."""
        return self._copier("state_facts", of_states=True)

    def _copier(self, method: Method, *, of_states: bool) -> BlockCopier:
        facts: list[BlockFacts] = self._invoke(method, BlockFacts)
        order = ", ".join(dict.fromkeys(each.order for each in facts))
        numerics = ", ".join(dict.fromkeys(each.numerics for each in facts))
        num_bytes = [each.num_bytes for each in facts]
        self._invoke(method, None, encode(num_bytes))
        return Copier(partial(self._copies.call, of_states), BlockFacts(sum(num_bytes), order, numerics))

    def unload_lora(self, digest: bytes) -> None:
        """Remove an adapter from every worker, after all earlier steps."""
        self._send(UnloadLora(digest))

    def roll_back(self) -> None:
        """Do nothing. The workers are in no data-parallel group, so no step can fail because another rank is lost."""

    def recover(self) -> None:
        """Wait for the workers to forget every request and compute a token. Raises the error if the computation fails."""
        self._executing = False
        self._invoke("recover", None)

    def collective_rpc(self, method: str, arguments: Sequence[Any] = ()) -> list[Any]:
        """Call a method of every worker after all earlier steps, and wait for the results."""
        return self._invoke("collective_rpc", Any, encode((method, list(arguments))))

    def worker_stats(self) -> list[WorkerStats]:
        """Return the last report of each worker, which is about one second old while steps run.

        After one worker has failed, all workers are reported as down.
        """
        up = not self._calls.has_failed
        return [msgspec.structs.replace(stats, up=up) for stats in self._stats]

    def shutdown(self) -> None:
        """Wait for running steps, and end the worker processes. Idempotent."""
        if self._shut_down:
            return
        self._shut_down = True
        self._sizes.stop()
        told = False
        try:
            if not self._calls.parted:
                self._workers.expect_ends()
                self._invoke("shutdown", None, limit=LAST_MOMENT)
                told = True
        except WorkersGone as e:
            logger.debug("workers did not receive the shutdown call reason=%s", e)
        finally:
            self._workers.end(told=told)
            self._calls.fail(WorkersGone("the executor is shut down"))
            self._loads.fail(WorkersGone("the executor is shut down"))
            self._copies.fail(WorkersGone("the executor is shut down"))

    def _invoke(self, method: Method, kind: Any, argument: bytes = b"", limit: float | None = None) -> list[Any]:
        """Return the results by worker, decoded as ``kind``.

        ``limit`` is a timeout in seconds. If it is None, there is no timeout, and the call fails only if a worker
        fails.
        """
        computes = self._one_node and method not in _WAITING
        number, answers = self._calls.begin(timed=False, limit=limit, computes=computes)
        self._workers.look_again()
        self._send(Invoke(number, method, argument))
        values = answers.result()
        return [] if kind is None else [msgspec.msgpack.decode(value, type=kind) for value in values]

    def _send(self, call: Call) -> None:
        """Send a call. Raises WorkersGone if the workers no longer read calls."""
        self._calls.check()
        try:
            with self._sending:
                self._workers.write(encode(call), self._timeout)
        except RingClosed:
            raise self._calls.failed() from None
        except RingTimeout as e:
            error = WorkersGone(f"the workers do not read their messages: {e}")
            self._calls.fail(error)
            raise error from e

    # Called on the workers' threads.

    def _hear(self, rank: int, message: bytes) -> None:
        match decode_answer(message):
            case ProgressLine(text):
                if rank == 0:
                    self._progress(text)
            case Loaded(number, outcome):
                self._loads.answered(rank, number, outcome.error("") if isinstance(outcome, Failure) else outcome)
            case Copied(number, copied):
                self._copies.answered(rank, number, copied.error("") if isinstance(copied, Failure) else copied)
            case Stats(stats):
                self._stats[rank] = stats
            case Returned(number, value):
                self._calls.answered(rank, number, value)
            case Sampled(number) as answer:
                self._calls.answered(rank, number, answer)
            case Raised(number, failure):
                if failure.kind == "other" and self._workers.has_ended(_CONSEQUENCE):
                    return  # caused by the exit of another worker, which is reported separately
                worker = f"worker {rank}" if self._num_workers > 1 else ""
                self._calls.answered(rank, number, failure.error(worker))

    def _fail(self, error: WorkersGone) -> None:
        self._calls.fail(error)
        self._loads.fail(error)
        self._copies.fail(error)
        self._on_failure(error)

    def _finish(self, step: "Future[ModelRunnerOutput]", answers: "Future[list[Any]]") -> None:
        """Complete a step with the output of the last stage's first worker, if all workers of that stage sampled the
        same tokens.
        """
        error = answers.exception()
        if error is not None:
            step.set_exception(error)
            return
        sampled: list[Sampled] = answers.result()
        first = self._num_workers - self._num_of_stage
        of_stage = enumerate(sampled[first:], first)
        other = next((rank for rank, each in of_stage if each.digest != sampled[first].digest), None)
        output = sampled[first].output
        if other is None and output is not None:
            for each in sampled:
                output.num_nans_in_logits.update(each.num_nans)
            step.set_result(output)
            return
        differ = WorkersGone(f"workers {first} and {other} sampled different tokens")
        self._calls.fail(differ)
        step.set_exception(differ)
