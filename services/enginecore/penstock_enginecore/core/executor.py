"""Protocol of executors: the interface through which the engine core runs steps on the workers."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, Protocol

from penstock_enginecore.core.kv_cache.spec import KVCacheConfig, KVCacheSpec
from penstock_enginecore.core.model_info import ModelInfo
from penstock_enginecore.core.scheduler.output import DraftTokenIds, GrammarBitmask, ModelRunnerOutput, SchedulerOutput
from penstock_enginecore.core.worker_stats import WorkerStats
from penstock_enginecore.data_parallel.core.group_channels import SharedExperts
from penstock_enginecore.kv_transfer.core.base import BlockCopier
from penstock_enginecore.lora.core.request import LoadedLora, LoraRequest, MakeRoom

Progress = Callable[[str], None]
"""Callback to which slow operations, such as loading weights, pass progress messages for the operator."""


class Executor(Protocol):
    """Runs the model on its device or devices. All methods are called from the busy loop's thread.

    Call order: ``load_model``, ``kv_cache_specs``, ``available_kv_cache_memory``, ``initialize_kv_cache``, then steps.
    A step has two calls. ``execute_model`` starts the forward pass and may return before the pass is done.
    ``sample_tokens`` returns a future with the step's tokens. Between the two calls, the caller may do work on the CPU,
    such as computing grammar bitmasks. The caller may start the next step before this future is done, because the
    executor runs steps in order.
    """

    @property
    def experts(self) -> SharedExperts | None:
        """Mixture-of-experts weights that are distributed over the ranks of a data-parallel group, or None if each rank
        has the complete model.
        """

    def watch(self, failed: Callable[[Exception], None]) -> None:
        """Register a callback for a fatal failure of the executor. The failure may happen while no step runs. The
        executor may call ``failed`` on any thread. Pending calls of the executor's methods raise the same error.
        """

    def load_model(self, progress: Progress) -> ModelInfo:
        """Load the weights. Raises ``ModelLoadError`` with a message for the operator."""

    def kv_cache_specs(self) -> dict[str, KVCacheSpec]:
        """Return the KV cache needs of every attention layer, by layer name, in execution order. The result is empty
        for encoder models, because they have no KV cache.
        """

    def available_kv_cache_memory(self) -> int:
        """Run a profiling step with the largest input shapes. Return the number of bytes of device memory that are left
        for the KV cache.
        """

    def initialize_kv_cache(self, config: KVCacheConfig) -> None:
        """Allocate the KV cache."""

    def execute_model(self, scheduler_output: SchedulerOutput) -> None:
        """Start the forward pass of a step."""

    def sample_tokens(self, grammar: GrammarBitmask | None = None) -> "Future[ModelRunnerOutput]":
        """Sample tokens for the step that ``execute_model`` started. ``grammar`` has the masks of allowed tokens of
        constrained requests.

        The returned future raises errors of the forward pass and of sampling. After an error, no step runs until
        ``recover`` is called. Later steps that were already started raise an error as well.
        """

    def take_draft_token_ids(self) -> "Future[DraftTokenIds]":
        """Return the draft tokens that the last sampled step requested from the drafter. If drafting fails, the
        executor switches the drafter off, but no step fails.
        """

    def step_seconds(self, num_tokens: int, passes: int) -> float:
        """Run ``passes`` forward passes of one request with ``num_tokens`` tokens on every worker. Return the duration
        of the fastest pass in seconds.
        """

    def execute_dummy_batch(self) -> None:
        """Run a forward pass of one dummy token after the steps in flight, and wait until the pass is done.

        Other ranks of the data-parallel group compute their steps at the same time. If experts are distributed over the
        ranks, this rank only applies its experts to the other ranks' tokens. Raises errors of the forward pass.
        """

    def block_copier(self) -> BlockCopier:
        """Return a copier for KV cache blocks. The KV cache must be allocated. The copier's methods return futures,
        which complete when the copies are done.
        """

    def state_copier(self) -> BlockCopier:
        """Return a copier for states of recurrent layers. The copier's block ids are slot numbers of the state pool.
        Apart from that, the copier works as the copier of ``block_copier``.
        """

    def load_lora(self, lora: LoraRequest, make_room: MakeRoom) -> "Future[LoadedLora]":
        """Load an adapter in every worker while steps run, and activate the adapter between two steps. If the adapter
        is already loaded, the adapter stays loaded, and the workers read the adapter's files again.

        The executor calls ``make_room`` first, because loading needs the memory of evicted adapters.

        The future raises:
            Unavailable: The adapter cannot be read.
            FailedPrecondition: The adapter's files do not match ``lora``, or the adapter is not supported.
            PartlyLoadedError: Some workers have loaded the adapter, and other workers failed with one of the two errors
                above.
        """

    def unload_lora(self, digest: bytes) -> None:
        """Unload an adapter from the workers, after the steps in flight. An adapter that is not loaded is ignored."""

    def roll_back(self) -> None:
        """Undo a step during which the connection to the other ranks was lost. The step's changes to requests and
        blocks stay, but the step's results are dropped.
        """

    def recover(self) -> None:
        """Drop the failed step, the steps in flight and all requests. Then compute one token to check that the workers
        still compute.

        All requests in the next step must be new to the workers. If this method raises an error, the executor no longer
        works.
        """

    def collective_rpc(self, method: str, arguments: Sequence[Any] = ()) -> list[Any]:
        """Call a registered method of every worker, after the steps in flight. Return one result per worker, in rank
        order.

        Raises:
            Unimplemented: The name is not registered.
            InvalidArgument: The method does not accept the arguments.
        """

    def worker_stats(self) -> list[WorkerStats]:
        """Return the workers' latest statistics, in rank order. Thread-safe. The call never waits for a worker."""

    def shutdown(self) -> None:
        """Release the device. Idempotent."""
