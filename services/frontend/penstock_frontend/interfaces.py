"""Interfaces between the parts of the frontend.

Requests go from the calls to the engines. Outputs come back from the engines to processing. Every part may read the
engines' state.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import msgspec

from penstock_common.errors import RequestFailed
from penstock_common.types.cluster import EngineStatus
from penstock_common.types.data_parallel import PoolGroup
from penstock_common.types.media import MediaLimits
from penstock_common.types.outputs import Drafts, EngineCoreOutput, NewTokens
from penstock_common.types.request import EngineCoreRequest


class ModelLimits(NamedTuple):
    """Limits of the engines.

    Attributes:
        max_model_len: maximum tokens of prompt and output together.
        vocab_size: number of token ids.
        hidden_size: length of an embedding in a prompt; 0: not accepted; None: unknown.
        embedding_size: length of an embedding that engines compute; 0: none, or unknown.
        media: limits per modality.
    """

    max_model_len: int
    vocab_size: int
    hidden_size: int | None = None
    embedding_size: int = 0
    media: tuple[MediaLimits, ...] = ()


class RankLoad(msgspec.Struct, frozen=True, kw_only=True):
    """Load of a connected engine that requests may name."""

    rank: int
    """Unique number of the engine."""
    num_running_reqs: int
    num_waiting_reqs: int
    kv_cache_usage: float
    """Used fraction of the KV cache, 0 to 1."""
    capacity: int
    """Number of tokens that its KV cache holds."""
    max_running: int
    """Maximum number of running requests; 0 if unknown."""
    cache_hit_rate: float
    """Fraction of looked-up prompt tokens found in its prefix cache since its start, 0 to 1."""


class Variant(msgspec.Struct, frozen=True, kw_only=True):
    """Engines whose output depends on the same configuration."""

    config_hash: str
    """Hash of that configuration; empty if the engines do not report one."""
    engine_ids: tuple[str, ...]
    differs: Mapping[str, str]
    """Settings that affect the output and differ between variants, by name."""


class OutputHandler(Protocol):
    """Receives the outputs of engines."""

    def process(
        self,
        outputs: Sequence[EngineCoreOutput],
        engine: str,
        timestamp: float,
        tokens: Sequence[NewTokens] = (),
        drafts: Sequence[Drafts] = (),
    ) -> Sequence[str]:
        """Process the outputs of a step. Return the ids of requests that the engine need not continue.

        Args:
            outputs: outputs of the step.
            engine: the engine's id.
            timestamp: end of the step on the engine's clock.
            tokens: outputs that are only new tokens; they come before ``outputs``.
            drafts: statistics of speculative decoding for some of these.
        """

    def fail(self, request_ids: Iterable[str], error: RequestFailed) -> None:
        """End these requests with an error."""

    def fail_all(self, error: RequestFailed) -> Sequence[str]:
        """End all requests with an error. Return their ids."""

    def moved(self, request_ids: Iterable[str]) -> None:
        """Reset the timing of requests that resume on another engine, whose clock differs."""


class EngineView(Protocol):
    """The current state of the engines."""

    @property
    def limits(self) -> ModelLimits | None:
        """Limits that every connected engine supports, or None without engines."""

    @property
    def capabilities(self) -> Sequence[str]:
        """Capabilities of at least one connected engine."""

    @property
    def num_engines(self) -> int:
        """Number of engines that accept requests now."""

    def serving(self, capability: str) -> Sequence[str]:
        """Return the ids of the connected engines with this capability, sorted."""

    def cluster(self) -> Sequence[EngineStatus]:
        """Return the engines as this frontend sees them, connected or not."""

    def variants(self) -> Sequence[Variant]:
        """Return the variants among the connected engines, sorted by hash."""

    def groups(self) -> Sequence[PoolGroup]:
        """Return the data-parallel groups in the coordinator's latest view."""

    def rank_loads(self) -> Sequence[RankLoad]:
        """Return the load of every connected engine that requests may name, sorted by rank."""


class EngineClient(Protocol):
    """Sends requests to engines. Their outputs arrive at an OutputHandler."""

    @property
    def view(self) -> EngineView:
        """The state of the engines."""

    @property
    def usable(self) -> bool:
        """True if an engine accepts requests now."""

    async def wait_until_usable(self, deadline: float | None = None, *, tenant: str = "") -> ModelLimits:
        """Wait for an engine, at most until ``deadline`` (Unix seconds). Return the limits that all engines support.

        Raises Unavailable, DeadlineExceeded, and ResourceExhausted if too many requests of ``tenant`` already wait.
        """

    def add(self, *requests: EngineCoreRequest) -> None:
        """Start requests that belong together on one engine. Raises InvalidArgument if they name an unknown engine."""

    def abort(self, request_ids: Iterable[str], reason: str) -> None:
        """Abort requests that have not ended, wherever they are. They produce no more output."""

    async def call_utility(self, method: str, arguments: Sequence[object] = (), *, engine: str = "") -> dict[str, Any]:
        """Call a registered method on every connected engine, or only on ``engine``.

        Return, by engine id, its result or the RequestFailed with which the call ended.
        """

    def refuse(self) -> None:
        """Stop accepting requests. Requests that wait for an engine fail."""
