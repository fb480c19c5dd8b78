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
"""Called with a line for the operator while something slow goes on."""


class Executor(Protocol):
    """Runs the model on its device(s). All methods are called from the busy loop's thread.

    Order: ``load_model``, ``kv_cache_specs``, ``available_kv_cache_memory``, ``initialize_kv_cache``, then steps.
    A step is ``execute_model`` (forward pass, may return before it is done) followed by ``sample_tokens``, which completes with
    the step's tokens. Between the two the caller may do host work (grammar bitmasks). The next step may be started before this
    one's future is done: steps run in order.
    """

    @property
    def experts(self) -> SharedExperts | None:
        """What the ranks of a data-parallel group share of the model that was loaded; None where each has all of it."""

    def watch(self, failed: Callable[[Exception], None]) -> None:
        """Have ``failed`` called, on any thread, when the executor can compute nothing any more, also while no step runs. Calls
        that wait raise the same error.
        """

    def load_model(self, progress: Progress) -> ModelInfo:
        """Load the weights. Raises ``ModelLoadError`` with a message for the operator."""

    def kv_cache_specs(self) -> dict[str, KVCacheSpec]:
        """Demand of every attention layer, by layer name in execution order. Empty for encoders, which keep nothing."""

    def available_kv_cache_memory(self) -> int:
        """Bytes that may become KV cache, after a profiling step at the largest shapes."""

    def initialize_kv_cache(self, config: KVCacheConfig) -> None:
        """Allocate the pool."""

    def execute_model(self, scheduler_output: SchedulerOutput) -> None:
        """Start the forward pass of a step."""

    def sample_tokens(self, grammar: GrammarBitmask | None = None) -> "Future[ModelRunnerOutput]":
        """Sample for the step that ``execute_model`` started. ``grammar``: the tokens that constrained requests may get.

        The future raises what went wrong in either half of the step. From then on no step is run before ``recover``: what was
        started behind the one that failed raises as well.
        """

    def take_draft_token_ids(self) -> "Future[DraftTokenIds]":
        """Draft behind the step that was sampled last, as it asked for. What goes wrong in it switches the drafter off, and fails
        no step.
        """

    def step_seconds(self, num_tokens: int, passes: int) -> float:
        """Have every worker make ``passes`` forward passes of so many tokens of one request, and wait for them. Returns the
        seconds of the fastest.
        """

    def execute_dummy_batch(self) -> None:
        """Waits for a forward pass of a token that nobody asked for, behind the steps that were started: other ranks of a
        data-parallel group compute theirs. Where they share experts, this one computes those of their tokens alone. Raises what
        goes wrong in it.
        """

    def block_copier(self) -> BlockCopier:
        """Copies blocks of the KV cache, which is there. Waits for what it is told of it."""

    def load_lora(self, lora: LoraRequest, make_room: MakeRoom) -> "Future[LoadedLora]":
        """Read an adapter in every worker while steps go on, and take it between two of them; one that is there already is read
        again, and stays. ``make_room`` is called first: workers have what they keep of it once others have gone. The future
        raises what comes of that, Unavailable where it cannot be read, FailedPrecondition where it is not what ``lora`` says,
        or is not served; PartlyLoadedError with one of these where other workers have taken it.
        """

    def unload_lora(self, digest: bytes) -> None:
        """Have the workers let go of an adapter, behind the steps that were started. One that is not there is passed over."""

    def roll_back(self) -> None:
        """Go on behind a step that lost its peers: what it said of requests and blocks holds, what it computed is forgotten."""

    def recover(self) -> None:
        """Forget every request after a failed step, behind the steps that were started, and compute a token to see whether that
        still works. What follows is a step in which all requests are new. Raises what is wrong when it does not work.
        """

    def collective_rpc(self, method: str, arguments: Sequence[Any] = ()) -> list[Any]:
        """Call a registered method of every worker, behind the steps that were started. Results by worker.

        Raises Unimplemented for a name that is not registered, InvalidArgument for wrong arguments, and what a worker raises.
        """

    def worker_stats(self) -> list[WorkerStats]:
        """What the workers last said of themselves, by rank. Any thread may ask, and nothing is waited for."""

    def shutdown(self) -> None:
        """Release the device. Idempotent."""
