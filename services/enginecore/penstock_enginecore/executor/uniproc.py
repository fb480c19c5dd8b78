"""The executor of one device: its worker lives in a thread of this process."""

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
from penstock_enginecore.kv_transfer.kv_copy import Copier
from penstock_enginecore.lora.core.request import LoadedLora, LoraRequest, MakeRoom
from penstock_enginecore.lora.store import MakeReader, SizeAdapter, peft_reader, peft_size, telling_of
from penstock_enginecore.worker.device_thread import DeviceThread, Late
from penstock_enginecore.worker.messages import WorkerConfig

T = TypeVar("T")


class UniprocExecutor:
    """An ``Executor`` of one worker. Everything that touches the device runs on one thread, in the order of the calls; where
    tokens are late, another waits for them, and the next step is launched meanwhile.
    """

    def __init__(
        self,
        config: EngineCoreConfig,
        make_reader: MakeReader | None = peft_reader,
        size_adapter: SizeAdapter = peft_size,
    ) -> None:
        """``make_reader``: of LoRA adapters; None: none are read."""
        self._thread = DeviceThread()
        self._loader, self._sizes = DeviceThread("lora loader"), DeviceThread("lora sizes")
        self._size_adapter, self._lora_config = size_adapter, config.lora
        self._worker = self._thread.call(partial(Worker, WorkerConfig(engine=config), make_reader))
        self._utilities = extend(UtilityRegistry(self._worker), "worker")
        self._forward: Future[None] | None = None
        self._unloaded: Future[None] | None = None
        """The last adapter's that workers were told to let go of."""
        self._num_steps = 0
        self._failed: int | None = None
        """Number of the first step that has failed, since the executor recovered."""
        self._shut_down = False

    @property
    def experts(self) -> SharedExperts | None:
        """Those of the worker's runner."""
        return self._worker.runner.experts

    def watch(self, failed: Callable[[Exception], None]) -> None:
        """Its worker ends with this process."""

    def load_model(self, progress: Progress) -> ModelInfo:
        """Waits for the worker to load the weights. Raises ModelLoadError."""
        return self._thread.call(partial(self._worker.load_model, progress))

    def kv_cache_specs(self) -> dict[str, KVCacheSpec]:
        """Demand of every attention layer, by layer name in execution order."""
        return self._thread.call(self._worker.kv_cache_specs)

    def available_kv_cache_memory(self) -> int:
        """Bytes that may become KV cache. Waits for the profiling step."""
        return self._thread.call(self._worker.available_kv_cache_memory)

    def initialize_kv_cache(self, config: KVCacheConfig) -> None:
        """Waits for the worker to allocate the KV cache."""
        self._thread.call(partial(self._worker.initialize_kv_cache, config))

    def execute_model(self, scheduler_output: SchedulerOutput) -> None:
        """Queues the forward pass behind the steps before."""
        self._num_steps += 1
        run = partial(self._worker.runner.execute, scheduler_output)
        self._forward = self._thread.submit(partial(self._compute, self._num_steps, run))

    def sample_tokens(self, grammar: GrammarBitmask | None = None) -> "Future[ModelRunnerOutput]":
        """Queues the sampling behind the forward pass. RuntimeError without one; the future raises what went wrong in either."""
        forward, self._forward = self._forward, None
        if forward is None:
            raise RuntimeError("execute_model must come before sample_tokens")
        return self._thread.submit(partial(self._sample, self._num_steps, forward, grammar))

    def _sample(
        self, step: int, forward: Future[None], grammar: GrammarBitmask | None
    ) -> ModelRunnerOutput | Late[ModelRunnerOutput]:
        try:
            forward.result()  # done: it ran before this on the same thread
        finally:
            del forward
        output = self._compute(step, partial(self._worker.runner.sample, grammar))
        # A late step may fail behind the launch of the next.
        return Late(partial(self._compute, step, output.wait)) if isinstance(output, Late) else output

    def _compute(self, step: int, call: Callable[[], T]) -> T:
        """A part of a step. None follows a failed one: the requests' rows may be half written, and their blocks another's. Steps
        before it are not concerned.
        """
        if self._failed is not None and self._failed < step:
            raise RuntimeError("a step before this one failed")
        try:
            return call()
        except BaseException:
            self._failed = step if self._failed is None else min(self._failed, step)
            del call  # the error knows this frame, and the call may know the error
            raise

    def take_draft_token_ids(self) -> "Future[DraftTokenIds]":
        """Queues the drafting behind the sampling."""
        return self._thread.submit(partial(self._draft, self._num_steps))

    def _draft(self, step: int) -> DraftTokenIds:
        if self._failed is not None and self._failed <= step:
            return DraftTokenIds()
        return self._worker.runner.draft()

    def step_seconds(self, num_tokens: int, passes: int) -> float:
        """Waits for the worker to time them."""
        return self._thread.call(partial(self._worker.runner.step_seconds, num_tokens, passes))

    def execute_dummy_batch(self) -> None:
        """Waits for the worker to compute a token that nobody asked for."""
        self._thread.call(lambda: self._worker.runner.execute_dummy_batch())

    def load_lora(self, lora: LoraRequest, make_room: MakeRoom) -> "Future[LoadedLora]":
        """Queues the reading behind that of others, on a thread of its own. It is taken behind the step that runs, and room is
        made meanwhile.
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
                wait([unloaded])  # or there is more than there should be, and it could be this one that goes
            ready = loras.prepare(lora, adapter)
        except BaseException as e:  # the future's reader decides what it means
            loaded.set_exception(e)
            del loaded
            return
        self._thread.submit_next(partial(loras.add, ready)).add_done_callback(partial(_pass_on, loaded))

    def block_copier(self) -> BlockCopier:
        """Behind the steps before, on a thread of the worker's own."""
        return Copier(self._copy, self._thread.call(self._worker.block_facts))

    def _copy(self, method: str, *arguments: Any) -> "Future[Any]":
        if method == "read":  # of blocks that no step writes any more: waits for none
            return self._worker.copies.begin(method, *arguments)
        copied: Future[Any] = Future()

        def begin() -> None:
            self._worker.copies.begin(method, *arguments).add_done_callback(partial(_pass_on, copied))

        def begun(done: "Future[None]") -> None:
            if (error := done.exception()) is not None:
                copied.set_exception(error)

        self._thread.submit(begin).add_done_callback(begun)
        return copied

    def unload_lora(self, digest: bytes) -> None:
        """Queues it behind the steps before."""
        self._unloaded = self._thread.submit(partial(self._worker.loras.remove, digest))

    def roll_back(self) -> None:
        """Waits for what is left of the step."""

        def roll_back() -> None:
            self._failed = None

        self._forward = None
        self._thread.call(roll_back)

    def recover(self) -> None:
        """Waits for the worker to forget every request and compute a token. Raises what is wrong when that does not work."""

        def recover() -> None:
            self._worker.recover()
            self._failed = None

        self._forward = None
        self._thread.call(recover)

    def collective_rpc(self, method: str, arguments: Sequence[Any] = ()) -> list[Any]:
        """Waits for the method of the one worker, behind the steps that were started."""
        return [self._thread.call(lambda: self._utilities.invoke(method, list(arguments)))]

    def worker_stats(self) -> list[WorkerStats]:
        """Of the one worker, now."""
        return [self._worker.stats()]

    def shutdown(self) -> None:
        """Waits for the step that runs, and releases the device. Idempotent."""
        if not self._shut_down:
            self._shut_down = True
            self._loader.stop()
            self._sizes.stop()
            self._thread.call(self._worker.shutdown)
            self._thread.stop()


def _pass_on(to: "Future[T]", done: "Future[T]") -> None:
    """What has become of ``done`` becomes of ``to``."""
    error = done.exception()
    if error is None:
        to.set_result(done.result())
    else:
        to.set_exception(error)
