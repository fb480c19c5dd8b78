"""Executor of one device, whose worker runs in a thread of this process."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from functools import partial
from typing import Any, TypeVar

from penstock_enginecore.config import EngineCoreConfig
from penstock_enginecore.core.executor import Progress
from penstock_enginecore.core.kv_cache.spec import KVCacheConfig, KVCacheSpec
from penstock_enginecore.core.model_info import ModelInfo
from penstock_enginecore.core.scheduler.output import DraftTokenIds, GrammarBitmask, ModelRunnerOutput, SchedulerOutput
from penstock_enginecore.core.utility import UtilityRegistry, extend
from penstock_enginecore.core.worker_stats import WorkerStats
from penstock_enginecore.data_parallel.core.group_channels import SharedExperts
from penstock_enginecore.executor.worker import Worker
from penstock_enginecore.kv_transfer.core.base import BlockCopier
from penstock_enginecore.kv_transfer.kv_copy import Copier, WorkerCopies
from penstock_enginecore.lora.core.request import LoadedLora, LoraRequest, MakeRoom
from penstock_enginecore.lora.store import MakeReader, SizeAdapter, peft_reader, peft_size, telling_of
from penstock_enginecore.worker.device_thread import DeviceThread, Late
from penstock_enginecore.worker.messages import WorkerConfig

T = TypeVar("T")


class UniprocExecutor:
    """``Executor`` with one worker. All work on the device runs on one thread, in the order of the calls.

    If the host has not received the tokens of a step yet, another thread waits for the tokens while the next step is
    launched.
    """

    def __init__(
        self,
        config: EngineCoreConfig,
        make_reader: MakeReader | None = peft_reader,
        size_adapter: SizeAdapter = peft_size,
    ) -> None:
        """Create the worker. ``make_reader`` creates the reader of LoRA adapters. If ``make_reader`` is None, adapters
        are disabled.
        """
        self._thread = DeviceThread()
        self._loader, self._sizes = DeviceThread("lora loader"), DeviceThread("lora sizes")
        self._size_adapter, self._lora_config = size_adapter, config.lora
        self._worker = self._thread.call(partial(Worker, WorkerConfig(engine=config), make_reader))
        self._utilities = extend(UtilityRegistry(self._worker), "worker")
        self._forward: Future[None] | None = None
        self._unloaded: Future[None] | None = None
        """Future of the last queued removal of a LoRA adapter from the device."""
        self._num_steps = 0
        self._failed: int | None = None
        """Number of the first step that has failed since the last recovery, or None if no step has failed."""
        self._shut_down = False

    @property
    def experts(self) -> SharedExperts | None:
        """Experts of the worker's model that are distributed among data-parallel ranks, or None."""
        return self._worker.runner.experts

    def watch(self, failed: Callable[[Exception], None]) -> None:
        """Do nothing, because the worker runs in this process."""

    def load_model(self, progress: Progress) -> ModelInfo:
        """Wait for the worker to load the weights. Raises ModelLoadError if the checkpoint cannot be served."""
        return self._thread.call(partial(self._worker.load_model, progress))

    def kv_cache_specs(self) -> dict[str, KVCacheSpec]:
        """Return the KV cache spec of each attention layer, by layer name in execution order."""
        return self._thread.call(self._worker.kv_cache_specs)

    def available_kv_cache_memory(self) -> int:
        """Return the size in bytes of the memory available for the KV cache. Waits for the profiling step."""
        return self._thread.call(self._worker.available_kv_cache_memory)

    def initialize_kv_cache(self, config: KVCacheConfig) -> None:
        """Wait for the worker to allocate the KV cache."""
        self._thread.call(partial(self._worker.initialize_kv_cache, config))

    def execute_model(self, scheduler_output: SchedulerOutput) -> None:
        """Queue the forward pass of a step after all earlier steps."""
        self._num_steps += 1
        run = partial(self._worker.runner.execute, scheduler_output)
        self._forward = self._thread.submit(partial(self._compute, self._num_steps, run))

    def sample_tokens(self, grammar: GrammarBitmask | None = None) -> "Future[ModelRunnerOutput]":
        """Queue the sampling of the step that ``execute_model`` has queued.

        The future raises the errors of the forward pass and of the sampling. Raises RuntimeError if no step is queued.
        """
        forward, self._forward = self._forward, None
        if forward is None:
            raise RuntimeError("execute_model must be called before sample_tokens")
        return self._thread.submit(partial(self._sample, self._num_steps, forward, grammar))

    def _sample(
        self, step: int, forward: Future[None], grammar: GrammarBitmask | None
    ) -> ModelRunnerOutput | Late[ModelRunnerOutput]:
        try:
            forward.result()  # this call does not wait, because the forward pass ran earlier on the same thread
        finally:
            del forward
        output = self._compute(step, partial(self._worker.runner.sample, grammar))
        # A step whose output arrives late may fail after the next step was launched.
        return Late(partial(self._compute, step, output.wait)) if isinstance(output, Late) else output

    def _compute(self, step: int, call: Callable[[], T]) -> T:
        """Run the forward pass or the sampling of a step.

        After a step fails, later steps are refused: the batch's rows for their requests may be incomplete, and their KV
        blocks may belong to other requests. Steps before the failed step may still complete.
        """
        if self._failed is not None and self._failed < step:
            raise RuntimeError("an earlier step failed, so the worker computes no more steps")
        try:
            return call()
        except BaseException:
            self._failed = step if self._failed is None else min(self._failed, step)
            del call  # without this line, the error, this frame and the call would form a reference cycle
            raise

    def take_draft_token_ids(self) -> "Future[DraftTokenIds]":
        """Queue the drafting of tokens after the sampling of the last queued step."""
        return self._thread.submit(partial(self._draft, self._num_steps))

    def _draft(self, step: int) -> DraftTokenIds:
        if self._failed is not None and self._failed <= step:
            return DraftTokenIds()
        return self._worker.runner.draft()

    def step_seconds(self, num_tokens: int, passes: int) -> float:
        """Wait while the worker measures the duration of several forward passes. Returns the duration of the fastest
        pass in seconds.
        """
        return self._thread.call(partial(self._worker.runner.step_seconds, num_tokens, passes))

    def execute_dummy_batch(self) -> None:
        """Wait for the worker to compute a dummy token."""
        self._thread.call(lambda: self._worker.runner.execute_dummy_batch())

    def load_lora(self, lora: LoraRequest, make_room: MakeRoom) -> "Future[LoadedLora]":
        """Start to read a LoRA adapter on a separate thread. Returns a future of the loaded adapter.

        ``make_room`` frees memory for the adapter while the adapter's files are read. The device thread adds the
        adapter to the model after the step that is running.
        """
        room: Future[None] = Future()
        loaded: Future[LoadedLora] = Future()
        self._sizes.submit(partial(self._size_lora, lora, make_room, room))
        self._loader.submit(partial(self._load_lora, lora, room, loaded))
        return loaded

    def _size_lora(self, lora: LoraRequest, make_room: MakeRoom, room: "Future[None]") -> None:
        try:
            with telling_of(lora):
                size = self._size_adapter(lora.path, self._lora_config)
        except Exception as e:
            room.set_exception(e)
        else:
            make_room(size, room)

    def _load_lora(self, lora: LoraRequest, room: "Future[None]", loaded: "Future[LoadedLora]") -> None:
        loras = self._worker.loras
        try:
            adapter = loras.read(lora)
            room.result()
            if (unloaded := self._unloaded) is not None:
                wait(
                    [unloaded]
                )  # Otherwise memory could exceed its limit, or the pending removal could remove the new adapter.
            ready = loras.prepare(lora, adapter)
        except BaseException as e:  # the caller that reads the future handles the error
            loaded.set_exception(e)
            del loaded
            return
        self._thread.submit_next(partial(loras.add, ready)).add_done_callback(partial(_pass_on, loaded))

    def block_copier(self) -> BlockCopier:
        """Return an object that copies KV blocks between the device and the host. All methods of this object except
        ``read`` wait for the steps that were queued earlier.
        """
        return Copier(partial(self._copy, self._worker.copies), self._thread.call(self._worker.block_facts))

    def state_copier(self) -> BlockCopier:
        """Return an object that copies the states of recurrent layers, in the same way as ``block_copier``."""
        return Copier(partial(self._copy, self._worker.state_copies), self._thread.call(self._worker.state_facts))

    def _copy(self, copies: WorkerCopies, method: str, *arguments: Any) -> "Future[Any]":
        if method == "read":  # No queued step writes the copied blocks, so this call need not wait for a step.
            return copies.begin(method, *arguments)
        copied: Future[Any] = Future()

        def begin() -> None:
            copies.begin(method, *arguments).add_done_callback(partial(_pass_on, copied))

        def begun(done: "Future[None]") -> None:
            if (error := done.exception()) is not None:
                copied.set_exception(error)

        self._thread.submit(begin).add_done_callback(begun)
        return copied

    def unload_lora(self, digest: bytes) -> None:
        """Queue the removal of a LoRA adapter after all earlier steps."""
        self._unloaded = self._thread.submit(partial(self._worker.loras.remove, digest))

    def roll_back(self) -> None:
        """Wait until the device thread has finished the step that failed, then accept steps again."""

        def roll_back() -> None:
            self._failed = None

        self._forward = None
        self._thread.call(roll_back)

    def recover(self) -> None:
        """Wait until the worker has forgotten every request and has tested the device by computing a token. Raises the
        error if the test fails.
        """

        def recover() -> None:
            self._worker.recover()
            self._failed = None

        self._forward = None
        self._thread.call(recover)

    def collective_rpc(self, method: str, arguments: Sequence[Any] = ()) -> list[Any]:
        """Call a method of the worker after all queued steps, and wait for the result."""
        return [self._thread.call(lambda: self._utilities.invoke(method, list(arguments)))]

    def worker_stats(self) -> list[WorkerStats]:
        """Return the current statistics of the worker."""
        return [self._worker.stats()]

    def shutdown(self) -> None:
        """Wait for the running step, and free the device. Idempotent."""
        if not self._shut_down:
            self._shut_down = True
            self._loader.stop()
            self._sizes.stop()
            self._thread.call(self._worker.shutdown)
            self._thread.stop()


def _pass_on(to: "Future[T]", done: "Future[T]") -> None:
    """Copy the result or the error of the future ``done`` to the future ``to``."""
    error = done.exception()
    if error is None:
        to.set_result(done.result())
    else:
        to.set_exception(error)
