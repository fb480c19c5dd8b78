"""The executor protocol: how the busy loop drives the workers."""

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
"""Called with a progress message for the operator during slow operations."""


class Executor(Protocol):
    """Runs the model on its device or devices. All methods are called from the busy loop's thread.

    Call order: ``load_model``, ``kv_cache_specs``, ``available_kv_cache_memory``, ``initialize_kv_cache``, then steps.
    A step is ``execute_model``, which starts the forward pass and may return before it is done, followed by
    ``sample_tokens``, whose future completes with the step's tokens. The caller may do host work in between, such as
    grammar bitmasks. The next step may be started before this future is done, because steps run in order.
    """

    @property
    def experts(self) -> SharedExperts | None:
        """Experts that the ranks of a data-parallel group share, or None if each rank has the whole model."""

    def watch(self, failed: Callable[[Exception], None]) -> None:
        """Register a callback for a fatal failure of the executor, also while no step runs. The executor calls it on
        any thread. Pending calls raise the same error.
        """

    def load_model(self, progress: Progress) -> ModelInfo:
        """Load the weights. Raises ``ModelLoadError`` with a message for the operator."""

    def kv_cache_specs(self) -> dict[str, KVCacheSpec]:
        """Return the needs of every attention layer, by layer name in execution order. Empty for encoders, which have
        no KV cache.
        """

    def available_kv_cache_memory(self) -> int:
        """Return the bytes that may become KV cache. This runs a profiling step with the largest shapes."""

    def initialize_kv_cache(self, config: KVCacheConfig) -> None:
        """Allocate the KV cache."""

    def execute_model(self, scheduler_output: SchedulerOutput) -> None:
        """Start the forward pass of a step."""

    def sample_tokens(self, grammar: GrammarBitmask | None = None) -> "Future[ModelRunnerOutput]":
        """Sample tokens for the step that ``execute_model`` started. ``grammar`` has the tokens allowed for constrained
        requests.

        The future raises errors from either half of the step. After an error, no step runs before ``recover``: later
        steps that were already started raise as well.
        """

    def take_draft_token_ids(self) -> "Future[DraftTokenIds]":
        """Draft tokens after the last sampled step, as the step requested. An error switches the drafter off, and fails
        no step.
        """

    def step_seconds(self, num_tokens: int, passes: int) -> float:
        """Time forward passes of one request with ``num_tokens`` tokens, ``passes`` times on every worker. Return the
        seconds of the fastest pass.
        """

    def execute_dummy_batch(self) -> None:
        """Run a forward pass of one dummy token after the steps in flight, and wait for it.

        Other ranks of the data-parallel group compute their steps at the same time. If the ranks share experts, this
        rank computes only the experts for the other ranks' tokens. Errors of the pass are raised.
        """

    def block_copier(self) -> BlockCopier:
        """Return a copier for KV cache blocks, which must be allocated. Its methods wait for the copies."""

    def load_lora(self, lora: LoraRequest, make_room: MakeRoom) -> "Future[LoadedLora]":
        """Load an adapter in every worker while steps run, and activate it between two steps. A loaded adapter is read
        again and stays.

        ``make_room`` is called first: workers need the memory of evicted adapters.

        The future raises:
            Unavailable: The adapter cannot be read.
            FailedPrecondition: The adapter does not match ``lora``, or is not supported.
            PartlyLoadedError: Some workers have loaded the adapter, and others failed with one of these errors.
        """

    def unload_lora(self, digest: bytes) -> None:
        """Unload an adapter from the workers, after the steps in flight. An adapter that is not loaded is ignored."""

    def roll_back(self) -> None:
        """Undo a step that lost its peers. Its changes to requests and blocks stay, but its results are dropped."""

    def recover(self) -> None:
        """Drop all requests after a failed step and the steps in flight, and compute one token as a check.

        All requests in the next step must be new. An error means that the executor no longer works.
        """

    def collective_rpc(self, method: str, arguments: Sequence[Any] = ()) -> list[Any]:
        """Call a registered method of every worker, after the steps in flight. Return the results by worker.

        Raises:
            Unimplemented: The name is not registered.
            InvalidArgument: The arguments are wrong.
        """

    def worker_stats(self) -> list[WorkerStats]:
        """Return the workers' latest statistics, by rank. Thread-safe, and never waits."""

    def shutdown(self) -> None:
        """Release the device. Idempotent."""
