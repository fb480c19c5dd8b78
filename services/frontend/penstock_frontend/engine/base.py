"""What the rest of the frontend and the engines' client know of each other."""

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import msgspec

from penstock_common.types.cluster import EngineStatus
from penstock_common.types.request import EngineCoreRequest
from penstock_frontend.engine.variants import Variant
from penstock_frontend.ports import ModelLimits


class RankLoad(msgspec.Struct, frozen=True, kw_only=True):
    """What a connected engine has to do. ``rank``: no two engines have the same; ``capacity``: tokens its KV cache holds;
    ``max_running``: requests it runs at once, 0 where it does not say; ``cache_hit_rate``: of the prompt tokens looked up in its
    prefix cache since it started, the part that was there, 0 to 1.
    """

    rank: int
    num_running_reqs: int
    num_waiting_reqs: int
    kv_cache_usage: float
    capacity: int
    max_running: int
    cache_hit_rate: float


class EngineClient(Protocol):
    """Takes requests to engines. Outputs come through an OutputHandler."""

    @property
    def usable(self) -> bool:
        """Whether an engine takes requests now."""

    @property
    def limits(self) -> ModelLimits | None:
        """What every connected engine can take; None while there is none."""

    @property
    def capabilities(self) -> Sequence[str]:
        """What at least one connected engine serves."""

    @property
    def num_engines(self) -> int:
        """Engines that take requests now."""

    async def wait_until_usable(self, deadline: float | None = None) -> ModelLimits:
        """Wait for an engine, until ``deadline`` (Unix seconds) at most. Raises Unavailable or DeadlineExceeded."""

    def add(self, *requests: EngineCoreRequest) -> None:
        """Start requests that belong together on one engine. Raises InvalidArgument when they name one that is not there."""

    def abort(self, request_ids: Iterable[str], reason: str) -> None:
        """End those of the requests that have not ended, wherever they are; nothing more comes of them."""

    async def call_utility(self, method: str, arguments: Sequence[object] = (), *, engine: str = "") -> dict[str, Any]:
        """Call a registered method on every connected engine, or that with the id ``engine``. Results, or the RequestFailed it
        ended with, by engine id.
        """

    def refuse(self) -> None:
        """Take no more requests; those that wait for an engine fail."""

    def cluster(self) -> Sequence[EngineStatus]:
        """The engines as this frontend sees them."""

    def variants(self) -> Sequence[Variant]:
        """The variants among the connected engines, by their hashes."""

    def rank_loads(self) -> Sequence[RankLoad]:
        """The load of every connected engine that requests may name, by rank."""
