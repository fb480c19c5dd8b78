"""The executor protocol: how the busy loop drives the workers."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, Protocol

from penstock_enginecore.core.kv_cache.spec import KVCacheConfig, KVCacheSpec
from penstock_enginecore.core.pooling_validation import PoolingLimits
from penstock_enginecore.core.scheduler.output import GrammarBitmask, ModelRunnerOutput, SchedulerOutput

Progress = Callable[[str], None]
"""Called with a line for the operator while something slow goes on."""


class Executor(Protocol):
    """Runs the model on its device(s). All methods are called from the busy loop's thread.

    Order: ``load_model``, ``kv_cache_specs``, ``available_kv_cache_memory``, ``initialize_kv_cache``, then steps.
    A step is ``execute_model`` (forward pass, may return before it is done) followed by ``sample_tokens``, which completes with
    the step's tokens. Between the two the caller may do host work (grammar bitmasks). The next step may be started before this
    one's future is done: steps run in order.
    """

    def load_model(self, progress: Progress) -> None:
        """Load the weights. Raises ``ModelLoadError`` with a message for the operator."""

    @property
    def model_max_len(self) -> int:
        """Longest sequence the model itself allows, in tokens."""

    @property
    def vocab_size(self) -> int:
        """Number of rows of the model's output, in tokens."""

    @property
    def hidden_size(self) -> int:
        """Length of the vectors that may stand for prompt tokens; 0 where none are taken."""

    @property
    def dtype(self) -> str:
        """What the model's numbers are: float32, bfloat16 or float16."""

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """Token ids that end a sequence unless ``ignore_eos``."""

    @property
    def pooling(self) -> PoolingLimits | None:
        """What the model is pooled for; None when it generates."""

    @property
    def supports_chunked_prefill(self) -> bool:
        """Whether a prompt may be computed in several steps; not so for encoders, whose tokens see those after them."""

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

    def recover(self) -> None:
        """Forget every request after a failed step, behind the steps that were started, and compute a token to see whether that
        still works. What follows is a step in which all requests are new. Raises what is wrong when it does not work.
        """

    def collective_rpc(self, method: str, arguments: Sequence[Any] = ()) -> list[Any]:
        """Call a registered method of every worker, behind the steps that were started. Results by worker.

        Raises Unimplemented for a name that is not registered, InvalidArgument for wrong arguments, and what a worker raises.
        """

    def shutdown(self) -> None:
        """Release the device. Idempotent."""
