"""What the rooms of the frontend know of each other.

Requests go from the calls to the engines, outputs come back from the engines to processing, and everybody may look at what is
known of the engines.
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

# What the rooms of the frontend know of each other.
#
# Requests go from the calls to the engines, outputs come back from the engines to processing, and everybody may look at what is
# known of the engines.


class ModelLimits(NamedTuple):
    """What engines can take: tokens of prompt and output together, and the number of token ids. ``hidden_size``: numbers in a
    vector that stands for a token; 0 where none are taken, None where an engine does not say.
    ``embedding_size``: numbers in a vector that engines compute; 0 where they compute none, or do not say. ``media``: what they
    take of each modality.
    """

    max_model_len: int
    vocab_size: int
    hidden_size: int | None = None
    embedding_size: int = 0
    media: tuple[MediaLimits, ...] = ()


class RankLoad(msgspec.Struct, frozen=True, kw_only=True):
    """How busy a connected engine is that requests may name."""

    rank: int
    """No two engines have the same."""
    num_running_reqs: int
    num_waiting_reqs: int
    kv_cache_usage: float
    """Used share of the KV cache, 0 to 1."""
    capacity: int
    """Tokens that its KV cache holds."""
    max_running: int
    """Requests that it runs at once, 0 where it does not say."""
    cache_hit_rate: float
    """Share of the prompt tokens looked up since its start that its prefix cache had, 0 to 1."""


class Variant(msgspec.Struct, frozen=True, kw_only=True):
    """Engines whose tokens depend on the same configuration."""

    config_hash: str
    """Empty where the engines do not say."""
    engine_ids: tuple[str, ...]
    differs: Mapping[str, str]
    """Of what tokens depend on, by name, that which is not the same in all variants."""


class OutputHandler(Protocol):
    """Who gets what engines produce."""

    def process(
        self,
        outputs: Sequence[EngineCoreOutput],
        engine: str,
        timestamp: float,
        tokens: Sequence[NewTokens] = (),
        drafts: Sequence[Drafts] = (),
    ) -> Sequence[str]:
        """Take a step's outputs; returns the ids of requests that the engine need not go on with.

        ``engine``: the engine's id; ``timestamp``: when the step ended, on the engine's clock; ``tokens``: outputs that are new
        tokens and nothing else, which come before the others; ``drafts``: what is known of the drafts of some of these.
        """

    def fail(self, request_ids: Iterable[str], error: RequestFailed) -> None:
        """End these requests."""

    def fail_all(self, error: RequestFailed) -> Sequence[str]:
        """End every request; returns their ids."""

    def moved(self, request_ids: Iterable[str]) -> None:
        """These requests have lost their engine and go on elsewhere: the clock of their outputs is another one."""


class EngineView(Protocol):
    """What is known of the engines now."""

    @property
    def limits(self) -> ModelLimits | None:
        """What every connected engine can take; None while there is none."""

    @property
    def capabilities(self) -> Sequence[str]:
        """What at least one connected engine serves."""

    @property
    def num_engines(self) -> int:
        """Engines that take requests now."""

    def serving(self, capability: str) -> Sequence[str]:
        """Ids of the connected engines that serve it, in order."""

    def cluster(self) -> Sequence[EngineStatus]:
        """The engines as this frontend sees them, connected or not."""

    def variants(self) -> Sequence[Variant]:
        """The variants among the connected engines, by their hashes."""

    def groups(self) -> Sequence[PoolGroup]:
        """The data-parallel groups that engines are ranks of, as the coordinator last told."""

    def rank_loads(self) -> Sequence[RankLoad]:
        """The load of every connected engine that requests may name, by rank."""


class EngineClient(Protocol):
    """Takes requests to engines. Their outputs come through an OutputHandler."""

    @property
    def view(self) -> EngineView:
        """What is known of the engines."""

    @property
    def usable(self) -> bool:
        """Whether an engine takes requests now."""

    async def wait_until_usable(self, deadline: float | None = None, *, tenant: str = "") -> ModelLimits:
        """Wait for an engine, until ``deadline`` (Unix seconds) at most. Returns what all of them can take.

        Raises Unavailable, DeadlineExceeded, and ResourceExhausted where too many requests of ``tenant`` wait already.
        """

    def add(self, *requests: EngineCoreRequest) -> None:
        """Start requests that belong together on one engine. Raises InvalidArgument when they name one that is not there."""

    def abort(self, request_ids: Iterable[str], reason: str) -> None:
        """End those of the requests that have not ended, wherever they are; nothing more comes of them."""

    async def call_utility(self, method: str, arguments: Sequence[object] = (), *, engine: str = "") -> dict[str, Any]:
        """Call a registered method on every connected engine, or on that with the id ``engine``. Returns by engine id what it
        answered, or the RequestFailed that the call ended with.
        """

    def refuse(self) -> None:
        """Take no more requests; those that wait for an engine fail."""
