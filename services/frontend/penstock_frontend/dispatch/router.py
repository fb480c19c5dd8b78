"""Choice of the engine for a request, by the engine's load, cached prefix, variant and LoRA adapters."""

import heapq
import math
import random
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

import msgspec

from penstock_common.errors import InvalidArgument, Unavailable
from penstock_common.types.kv_transfer import EngineRole
from penstock_common.types.media import Modality, MultiModalFeature
from penstock_common.types.request import EngineCoreRequest
from penstock_frontend.config import RoutingPolicy
from penstock_frontend.dispatch.adapters import LoraPlaces

_WAITING_WEIGHT = 4
_KV_PRESSURE_FROM = 0.5
_KV_PRESSURE_WEIGHT = 64.0
"""Score that KV cache usage above ``_KV_PRESSURE_FROM`` adds, per unit of usage. A full KV cache adds as much as 32
running requests.
"""
_TOKENS_OF_A_RUNNING_REQUEST = 128
"""Number of cached prompt tokens whose score equals the score of one running request. Four times as many tokens equal a
waiting request.

Computing this number of tokens delays the next request about as long as one running request delays it. ``make
bench-routing`` compares other numbers of tokens.
"""
_MOST_COMPARED = 64
_NUM_SAMPLED = 16
"""Number of engines in the random sample that the router compares, if there are more than ``_MOST_COMPARED`` engines.
The router also compares as many engines with the longest cached prefix.
"""


class Candidate(msgspec.Struct, frozen=True):
    """An engine to which a request may be sent."""

    key: str
    """Address of the engine."""
    rank: int | None
    """Rank by which requests may name the engine. None if the engine has no rank."""
    accepting: bool = True
    """True if the engine is connected, does not drain, and is not wedged."""
    variant: str = ""
    """Variant of the engine: the hash of its configuration, from the field ``config_hash``."""
    applies_lora: bool = True
    """True if the engine accepts requests that use LoRA adapters."""
    modalities: tuple[Modality, ...] = ()
    """Kinds of media that the engine accepts in requests."""
    role: EngineRole = EngineRole.BOTH
    """Part of a disaggregated prefill (prompt or output) for which the engine is preferred."""
    fingerprint: bytes = b""
    """Fingerprint of the engine's KV blocks. Empty if the engine cannot hand blocks over. Engines with the same
    fingerprint can exchange blocks.
    """


def takers(candidates: Sequence[Candidate], request: EngineCoreRequest) -> Sequence[Candidate]:
    """Return the engines that can serve this request: its modalities and its LoRA adapter."""
    if request.lora is not None:
        candidates = [c for c in candidates if c.applies_lora]
    if modalities := {feature.modality for feature in request.mm_features}:
        candidates = [c for c in candidates if modalities.issubset(c.modalities)]
    return candidates


class Load(msgspec.Struct):
    """The router's counts for one engine. Requests that the frontend has sent since the engine's last report count as
    waiting.
    """

    waiting: int = 0
    running: int = 0
    kv_cache_usage: float = 0.0
    pending_embeds: int = 0
    """Number of media embeddings that the engine still has to compute."""

    @property
    def score(self) -> float:
        """Load of the engine as one number. The number is the sum of four times the waiting requests, the running
        requests, and the pending embeddings divided by ``_TOKENS_OF_A_RUNNING_REQUEST``. A term for KV cache usage
        above one half is added.
        """
        count = _WAITING_WEIGHT * self.waiting + self.running + self.pending_embeds / _TOKENS_OF_A_RUNNING_REQUEST
        pressure = self.kv_cache_usage - _KV_PRESSURE_FROM
        return count + _KV_PRESSURE_WEIGHT * pressure if pressure > 0.0 else count


class Router:
    """Picks the engine with the lowest score. Does no I/O.

    The score is the score of the engine's load, minus a term for the prompt tokens that the engine has cached. Engines
    with equal scores get requests in turn. Each frontend should pass another start value, so that not all frontends
    send their first request to the same engine. If there are many engines, the router compares only a random sample and
    the engines with the longest cached prefix. A request with a LoRA adapter is sent to an engine that has loaded the
    adapter, or to the adapter's home engine. If that engine has a much higher load than others, another engine gets the
    lowest score and loads the adapter.
    """

    def __init__(self, start: int = 0, policy: RoutingPolicy = "prefix_aware") -> None:
        self._policy = policy
        self._turn = start
        self._random = random.Random(start)
        self._loads: dict[str, Load] = {}
        self._scores: dict[str, float] = {}
        """Cached scores, computed from the loads in ``_loads``, by engine."""
        self.loras = LoraPlaces()
        self._sent: dict[str, set[str]] = {}
        """Ids of the requests that were sent to each engine since its last report, by engine."""

    def report(
        self, key: str, *, waiting: int, running: int, kv_cache_usage: float, pending_embeds: int | None = None
    ) -> None:
        """Record the counts in a new report about an engine. ``pending_embeds`` is None if the report does not contain
        this count.
        """
        if pending_embeds is None:
            pending_embeds = self.load(key).pending_embeds
        load = self._loads[key] = Load(waiting, running, kv_cache_usage, pending_embeds)
        self._scores[key] = load.score
        self._sent.pop(key, None)

    def sent(self, key: str, request_id: str, lora: bytes = b"") -> None:
        """Count a request as waiting on an engine until the engine's next report, or until the request leaves the
        engine.

        ``lora`` is the digest of the request's LoRA adapter. ``lora`` is empty if the request uses no adapter.
        """
        if lora:
            self.loras.sent(key, lora)
        self._sent.setdefault(key, set()).add(request_id)
        self._count_waiting(key, 1)

    def left(self, key: str, request_id: str) -> None:
        """Stop counting a request on an engine, because the request has ended or moved.

        Do nothing if a report about the engine has replaced the counts since the request was sent.
        """
        sent = self._sent.get(key)
        if sent is not None and request_id in sent:
            sent.remove(request_id)
            self._count_waiting(key, -1)

    def _count_waiting(self, key: str, difference: int) -> None:
        load = self.load(key)
        load.waiting += difference
        self._scores[key] = load.score

    def forget(self, key: str) -> None:
        """Forget the counts and the LoRA adapters of a lost engine."""
        self.loras.forget(key)
        self._loads.pop(key, None)
        self._scores.pop(key, None)
        self._sent.pop(key, None)

    def keep_only(self, keys: Iterable[str]) -> None:
        """Forget all engines except the given engines."""
        for key in self._loads.keys() - set(keys):
            self.forget(key)

    def load(self, key: str) -> Load:
        """Return the router's current counts for an engine."""
        return self._loads.setdefault(key, Load())

    def pick(
        self,
        candidates: Sequence[Candidate],
        *,
        rank: int | None = None,
        variant: str | None = None,
        cached: Mapping[str, int] | None = None,
        lora: bytes = b"",
    ) -> str:
        """Return the key of the engine for the next request or call.

        Args:
            candidates: the engines to choose from.
            rank: the rank that the client named in the request, or None if it named none.
            variant: the variant on which the request started, or None for a new request. Another variant is used only
                if no engine of this variant accepts requests.
            cached: number of the request's prompt tokens that each engine has cached, by engine key.
            lora: digest of the request's LoRA adapter. Empty if the request uses no adapter.

        Raises:
            Unavailable: no engine accepts requests.
            InvalidArgument: no engine has the rank ``rank``.
        """
        usable = [c for c in candidates if c.accepting]
        if rank is not None:
            usable = [c for c in usable if c.rank == rank]
        if not usable:
            raise _no_engine(candidates, rank)
        if variant is not None:
            usable = [c for c in usable if c.variant == variant] or usable
        self._turn += 1
        turn = self._turn % len(usable)
        if self._policy == "round_robin":
            return usable[turn].key
        if self._policy == "least_loaded" or not cached:
            cached = {}
        if len(usable) > _MOST_COMPARED:
            homes = self.loras.in_order((c.key for c in usable), lora)[:_NUM_SAMPLED] if lora else []
            return self._lowest([*homes, *self._some(usable, cached)], cached, lora)
        if lora:
            return self._lowest(self.loras.in_order((c.key for c in usable), lora), cached, lora)
        return self._lowest([c.key for c in usable[turn:] + usable[:turn]], cached)

    def likely(self, candidates: Sequence[Candidate], *, cached: Mapping[str, int], lora: bytes = b"") -> Candidate:
        """Return the engine that ``pick`` would probably choose: the candidate with the lowest score. Do not count a
        request as sent.

        ``candidates`` must not be empty.
        """
        key = self._lowest([c.key for c in candidates], cached, lora)
        return next(c for c in candidates if c.key == key)

    def _some(self, usable: Sequence[Candidate], cached: Mapping[str, int]) -> list[str]:
        """Return a random sample of the engines, together with the engines that have the longest cached prefix."""
        sampled = [c.key for c in self._random.sample(usable, _NUM_SAMPLED)]
        if not cached:
            return sampled
        holders = [c.key for c in usable if c.key in cached]
        return [*sampled, *heapq.nlargest(_NUM_SAMPLED, holders, key=cached.__getitem__)]

    def _lowest(self, keys: Iterable[str], cached: Mapping[str, int], lora: bytes = b"") -> str:
        """Return the engine key with the lowest score. If several scores are equal, return the first of these keys."""
        scores, best, lowest = self._scores, "", math.inf
        for key in keys:
            score = scores.get(key, 0.0)
            if num_cached := cached.get(key):
                score -= num_cached / _TOKENS_OF_A_RUNNING_REQUEST
            if lora:
                score += self.loras.term(key, lora)
            if score < lowest:
                best, lowest = key, score
        return best


def _no_engine(candidates: Sequence[Candidate], rank: int | None) -> Unavailable | InvalidArgument:
    known = sorted({c.rank for c in candidates if c.rank is not None})
    if rank is not None and known and rank not in known:
        return InvalidArgument(
            f"routing.data_parallel_rank is {rank}, but no engine has this rank; known ranks: {', '.join(map(str, known))}",
            field="routing.data_parallel_rank",
        )
    whose = "no engine accepts requests now" if rank is None else f"the engine of rank {rank} accepts no requests now"
    return Unavailable(whose, retry_after=1.0)


class Engines(Protocol):
    """Access to all engines by key, as ``Dispatch`` needs it."""

    def candidates(self) -> Sequence[Candidate]:
        """Return all engines as candidates, both connected engines and others."""

    def send(self, engine: str, request: EngineCoreRequest, *, first: bool) -> None:
        """Start a request on an engine that has a session. ``first`` is True if no other request of this frontend is on
        the engine.
        """

    def abort_on(self, engine: str, request_ids: Sequence[str], reason: str) -> None:
        """Abort requests of this frontend on an engine. Do nothing if the engine has no session."""

    def hand_over(self, engine: str, request_ids: Sequence[str]) -> None:
        """Ask an engine to hand requests over to other engines. Do nothing if the engine has no session."""

    def holding(self, features: Sequence[MultiModalFeature]) -> Mapping[str, Sequence[MultiModalFeature]]:
        """Return, by engine, the media items in ``features`` that the engine has cached. Leave out engines that have
        cached none of these items.
        """
