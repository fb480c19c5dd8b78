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
"""Methods of workers that may wait for something other than a worker, so a long time without computation does not mean
that the workers hang.
"""
_CONSEQUENCE = 0.1
"""Seconds to wait, after an error of a worker, for the exit of another worker. The exit of the other worker may have
caused the error.
"""


class MultiprocExecutor:
    """An ``Executor`` that starts its workers as processes.

    So forward passes and the scheduler use different Python interpreters. The executor sends calls to all workers over
    one ring, and receives answers over one ring per worker. If a worker exits, hangs in a step, or samples different
    tokens than the first worker, the executor ends all workers. Pending and later calls then raise WorkersGone.
    """

    def __init__(
        self, config: EngineCoreConfig, *, module: str = MODULE, size_adapter: SizeAdapter = peft_size
    ) -> None:
        """Start the worker processes, without waiting until they have imported their modules. ``module`` is the program
        of the worker processes.
        """
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
            # Resolve a generated engine name here, because each process would generate a different name.
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
        """Always None, because experts can be distributed only among ranks that have a single worker each."""

    def watch(self, failed: Callable[[Exception], None]) -> None:
        self._on_failure = failed
        try:
            self._calls.check()
        except WorkersGone as error:  # the workers failed before ``watch`` was called
            failed(error)

    def load_model(self, progress: Progress) -> ModelInfo:
        """Wait for the workers to load the weights.

        Raises the first ModelLoadError or ConfigError that a worker reports. Raises WorkersGone if the workers loaded
        different models.
        """
        self._progress = progress
        self._workers.wait(progress)
        models: list[ModelInfo] = self._invoke("load_model", ModelInfo)
        states = largest_states(agreed("the model", of_stage, first).states for first, of_stage in self._stages(models))
        return agreed("the model", [msgspec.structs.replace(model, states=states) for model in models])

    def _stages(self, answers: list[T]) -> list[tuple[int, list[T]]]:
        """Return the answers of the workers of each pipeline stage, with the rank of the stage's first worker."""
        size = self._num_of_stage
        return [(first, answers[first : first + size]) for first in range(0, self._num_workers, size)]

    def kv_cache_specs(self) -> dict[str, KVCacheSpec]:
        """Return the KV cache spec of each attention layer, by layer name in execution order.

        For a model in pipeline stages, the result has as many layers of each kind as the stage with the most layers of
        this kind.
        """
        specs: list[dict[str, KVCacheSpec]] = self._invoke("kv_cache_specs", dict[str, KVCacheSpec])
        stages = [agreed("the KV cache", of_stage, first) for first, of_stage in self._stages(specs)]
        return largest_stage(stages) if len(stages) > 1 else stages[0]

    def available_kv_cache_memory(self) -> int:
        """Return the size in bytes of the memory available for the KV cache: the minimum over all workers. Waits for
        the profiling step.
        """
        available: list[int] = self._invoke("available_kv_cache_memory", int)
        return min(available)

    def initialize_kv_cache(self, config: KVCacheConfig) -> None:
        """Wait for the workers to allocate the KV cache."""
        self._invoke("initialize_kv_cache", None, encode(config))

    def execute_model(self, scheduler_output: SchedulerOutput) -> None:
        """Send the step to the workers, which run the step after all earlier steps."""
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
        """Draft tokens in every worker after the step is sampled.

        Returns the drafts of the first worker, or no drafts if the workers have exited.
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
        """Time forward passes in the workers. Returns the duration of a pass on the slowest worker in seconds."""
        timed: list[float] = self._invoke("step_seconds", float, encode((num_tokens, passes)))
        return max(timed)

    def execute_dummy_batch(self) -> None:
        """Wait for the workers to compute a dummy token."""
        self._invoke("execute_dummy_batch", None)

    def load_lora(self, lora: LoraRequest, make_room: MakeRoom) -> "Future[LoadedLora]":
        """Load a LoRA adapter in every worker, after ``make_room`` has freed memory for the adapter. Steps continue
        while the adapter loads.
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
        """Send the command to load a LoRA adapter to the workers, after the commands that free memory for this adapter."""
        try:
            made.result()
            self._send(LoadLora(number, lora))
        except Exception as e:
            self._loads.refused(number, e)

    def block_copier(self) -> BlockCopier:
        """Return an object that copies KV blocks between the workers and the host. Every worker copies its part of a
        block while its steps run.

        A copied block is the concatenation of the parts of all workers.
        """
        return self._copier("block_facts", of_states=False)

    def state_copier(self) -> BlockCopier:
        """Return an object that copies the states of recurrent layers, in the same way as ``block_copier``."""
        return self._copier("state_facts", of_states=True)

    def _copier(self, method: Method, *, of_states: bool) -> BlockCopier:
        facts: list[BlockFacts] = self._invoke(method, BlockFacts)
        order = ", ".join(dict.fromkeys(each.order for each in facts))
        numerics = ", ".join(dict.fromkeys(each.numerics for each in facts))
        num_bytes = [each.num_bytes for each in facts]
        self._invoke(method, None, encode(num_bytes))
        return Copier(partial(self._copies.call, of_states), BlockFacts(sum(num_bytes), order, numerics))

    def unload_lora(self, digest: bytes) -> None:
        """Remove a LoRA adapter from every worker, after all earlier steps."""
        self._send(UnloadLora(digest))

    def roll_back(self) -> None:
        """Do nothing. The workers are in no data-parallel group, so a step cannot fail because another rank is lost."""

    def recover(self) -> None:
        """Wait until the workers have forgotten every request and have tested their devices by computing a token.
        Raises the error if the test fails.
        """
        self._executing = False
        self._invoke("recover", None)

    def collective_rpc(self, method: str, arguments: Sequence[Any] = ()) -> list[Any]:
        """Call a method of every worker after all earlier steps, and wait for the results."""
        return self._invoke("collective_rpc", Any, encode((method, list(arguments))))

    def worker_stats(self) -> list[WorkerStats]:
        """Return the last report of each worker's statistics.

        While steps run, a report is at most about one second old. After one worker has failed, all workers are reported
        as down.
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
        """Call a method of every worker.

        Returns the result of each worker, decoded as ``kind``. ``limit`` is a timeout in seconds. If ``limit`` is None,
        the call fails only if a worker fails.
        """
        computes = self._one_node and method not in _WAITING
        number, answers = self._calls.begin(timed=False, limit=limit, computes=computes)
        self._workers.look_again()
        self._send(Invoke(number, method, argument))
        values = answers.result()
        return [] if kind is None else [msgspec.msgpack.decode(value, type=kind) for value in values]

    def _send(self, call: Call) -> None:
        """Send a call to all workers. Raises WorkersGone if the workers no longer read calls."""
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

    # Methods that run on the threads that receive the workers' answers.

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
                    return  # the exit of another worker caused this error, and that exit is reported separately
                worker = f"worker {rank}" if self._num_workers > 1 else ""
                self._calls.answered(rank, number, failure.error(worker))

    def _fail(self, error: WorkersGone) -> None:
        self._calls.fail(error)
        self._loads.fail(error)
        self._copies.fail(error)
        self._on_failure(error)

    def _finish(self, step: "Future[ModelRunnerOutput]", answers: "Future[list[Any]]") -> None:
        """Complete a step with the output of the first worker of the last stage, if all workers of the last stage
        sampled the same tokens.
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
