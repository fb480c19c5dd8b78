"""Interfaces through which the packages of the frontend use each other.

The package ``calls`` sends requests to the engines. The package ``processing`` receives the engines' outputs. Every
package may read the engines' state.
"""

from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from typing import Any, NamedTuple, Protocol

import msgspec

from penstock_common.errors import RequestFailed
from penstock_common.types.cluster import EngineStatus
from penstock_common.types.data_parallel import PoolGroup
from penstock_common.types.media import MediaLimits
from penstock_common.types.outputs import Drafts, EngineCoreOutput, NewTokens
from penstock_common.types.request import EngineCoreRequest


class ModelLimits(NamedTuple):
    """Limits that every connected engine supports.

    Attributes:
        max_model_len: maximum number of tokens of prompt and output together.
        vocab_size: number of token ids.
        hidden_size: number of elements of an embedding in a prompt. 0 means that prompts may not have embeddings. None
            means unknown.
        embedding_size: number of elements of an embedding that engines compute. 0 means that engines compute no
            embeddings, or that the number is unknown.
        media: limits on media, with one item for each modality.
    """

    max_model_len: int
    vocab_size: int
    hidden_size: int | None = None
    embedding_size: int = 0
    media: tuple[MediaLimits, ...] = ()


class LossCause(StrEnum):
    """Cause of the loss of an engine: the label ``cause`` of ``penstock:engines_lost_total``."""

    UNRESPONSIVE = "unresponsive"
    """The engine did not answer a probe."""
    WEDGED = "wedged"
    """The engine answered a probe, but had work and completed no step."""
    DISCONNECTED = "disconnected"
    """The connection broke: the engine's process ended, or the network failed."""
    FAILED = "failed"
    """The engine reported a failure, ended the session, or sent wrong messages."""


class RankLoad(msgspec.Struct, frozen=True, kw_only=True):
    """Load of a connected engine that has a rank, by which requests may name the engine."""

    rank: int
    """Unique number by which requests name the engine."""
    num_running_reqs: int
    num_waiting_reqs: int
    kv_cache_usage: float
    """Fraction of the engine's KV cache that is in use, from 0 to 1."""
    capacity: int
    """Number of tokens for which the engine's KV cache has room."""
    max_running: int
    """Maximum number of requests that the engine runs at once. 0 if the number is unknown."""
    cache_hit_rate: float
    """Fraction of the prompt tokens that the engine found in its prefix cache, of all prompt tokens that it looked up
    since its start. From 0 to 1.
    """


class Variant(msgspec.Struct, frozen=True, kw_only=True):
    """Group of engines whose settings that affect the output are equal."""

    config_hash: str
    """Hash of the settings that affect the output. Empty if the engines report no hash."""
    engine_ids: tuple[str, ...]
    differs: Mapping[str, str]
    """Settings that affect the output and are not the same for all variants, by name."""


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
        """Process the outputs of one step of an engine.

        Return the ids of requests that the engine can stop, because the frontend has found that they are finished.

        Args:
            outputs: outputs of the step, except those in ``tokens``.
            engine: the engine's id.
            timestamp: time at which the step ended, on the engine's clock.
            tokens: outputs of the step that consist only of new tokens. These outputs are processed before ``outputs``.
            drafts: draft statistics (speculative decoding) of some requests in ``tokens``.
        """

    def fail(self, request_ids: Iterable[str], error: RequestFailed) -> None:
        """End the given requests with an error."""

    def fail_all(self, error: RequestFailed) -> Sequence[str]:
        """End all requests with an error. Return the ids of these requests."""

    def moved(self, request_ids: Iterable[str]) -> None:
        """Reset the timing of requests that resume on another engine, because the other engine has a different clock."""


class EngineView(Protocol):
    """Current state of the engines, as the frontend knows it."""

    @property
    def limits(self) -> ModelLimits | None:
        """Limits that every connected engine supports. None if no engine is connected."""

    @property
    def capabilities(self) -> Sequence[str]:
        """Capabilities that at least one connected engine has."""

    @property
    def num_engines(self) -> int:
        """Number of engines that accept requests now."""

    def serving(self, capability: str) -> Sequence[str]:
        """Return the ids of the connected engines that have this capability, sorted."""

    def cluster(self) -> Sequence[EngineStatus]:
        """Return the status of all engines that this frontend knows, including engines that are not connected."""

    def variants(self) -> Sequence[Variant]:
        """Return the variants of the connected engines, sorted by configuration hash."""

    def groups(self) -> Sequence[PoolGroup]:
        """Return the data-parallel groups in the coordinator's latest view."""

    def rank_loads(self) -> Sequence[RankLoad]:
        """Return the load of every connected engine that requests may name, sorted by rank."""


class EngineClient(Protocol):
    """Sends requests to engines. An ``OutputHandler`` receives the engines' outputs."""

    @property
    def view(self) -> EngineView:
        """Current state of the engines, as the frontend knows it."""

    @property
    def usable(self) -> bool:
        """True if at least one engine accepts requests now."""

    async def wait_until_usable(self, deadline: float | None = None, *, tenant: str = "") -> ModelLimits:
        """Wait until an engine accepts requests, at most until ``deadline`` (Unix seconds).

        Return the limits that all engines support.

        Raises Unavailable, DeadlineExceeded, and ResourceExhausted if too many requests of ``tenant`` already wait.
        """

    def add(self, *requests: EngineCoreRequest) -> None:
        """Start the requests of one call, all on the same engine. Raises InvalidArgument if the requests name a rank
        that no engine has.
        """

    def abort(self, request_ids: Iterable[str], reason: str) -> None:
        """Abort requests that have not ended yet, both on engines and while they wait for an engine. Aborted requests
        produce no further output.
        """

    async def call_utility(self, method: str, arguments: Sequence[object] = (), *, engine: str = "") -> dict[str, Any]:
        """Call a registered method on every connected engine, or only on ``engine``.

        Return, by engine id, the result of the call, or the RequestFailed error with which the call ended.
        """

    def refuse(self) -> None:
        """Stop accepting requests, because the frontend is shutting down. Requests that wait for an engine fail."""
