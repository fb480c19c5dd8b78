"""Choice of an engine for a request, by load, cached prefix, variant and LoRA adapter."""

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
"""Score per unit of KV cache usage above ``_KV_PRESSURE_FROM``. A full KV cache adds as much as 32 running requests."""
_TOKENS_OF_A_RUNNING_REQUEST = 128
"""Number of cached prompt tokens whose score equals one running request. Four times as many equal a waiting request.
Computing this number of tokens delays the next request about as long as one running request does. ``make
bench-routing`` compares other numbers.
"""
_MOST_COMPARED = 64
_NUM_SAMPLED = 16
"""Number of randomly sampled engines, if there are more than ``_MOST_COMPARED`` engines. The router also compares the
same number of engines with the longest cached prefix.
"""


class Candidate(msgspec.Struct, frozen=True):
    """An engine to which a request may be sent."""

    key: str
    """Address of the engine."""
    rank: int | None
    """Rank by which requests may name the engine, or None."""
    accepting: bool = True
    """True if the engine is connected, and neither drains nor is wedged."""
    variant: str = ""
    """Hash of the engine's configuration, the field ``config_hash``."""
    applies_lora: bool = True
    """True if the engine accepts requests with LoRA adapters."""
    modalities: tuple[Modality, ...] = ()
    """Kinds of media that the engine accepts in requests."""
    role: EngineRole = EngineRole.BOTH
    """Role in disaggregated prefill for which the engine is preferred."""
    fingerprint: bytes = b""
    """Fingerprint of the engine's KV blocks, or empty if the engine hands no blocks over. Engines with the same
    fingerprint can exchange blocks.
    """


def takers(candidates: Sequence[Candidate], request: EngineCoreRequest) -> Sequence[Candidate]:
    """Return the engines that can serve this kind of request."""
    if request.lora is not None:
        candidates = [c for c in candidates if c.applies_lora]
    if modalities := {feature.modality for feature in request.mm_features}:
        candidates = [c for c in candidates if modalities.issubset(c.modalities)]
    return candidates


class Load(msgspec.Struct):
    """The router's counts for one engine. Requests sent since the engine's last report count as waiting."""

    waiting: int = 0
    running: int = 0
    kv_cache_usage: float = 0.0
    pending_embeds: int = 0
    """Number of media embeddings still to be computed."""

    @property
    def score(self) -> float:
        """Load as one number: the sum of waiting requests times 4, running requests, pending embeddings, and a term for
        KV cache usage above one half.
        """
        count = _WAITING_WEIGHT * self.waiting + self.running + self.pending_embeds / _TOKENS_OF_A_RUNNING_REQUEST
        pressure = self.kv_cache_usage - _KV_PRESSURE_FROM
        return count + _KV_PRESSURE_WEIGHT * pressure if pressure > 0.0 else count


class Router:
    """Picks the engine with the lowest score. Does no I/O.

    The score is the engine's load, minus a term for the prompt tokens that the engine has cached. Engines with equal
    scores take turns. Frontends should start at different engines, so that they do not all send their first request to
    the same engine. If there are many engines, the router compares only a random sample and the engines with the
    longest cached prefix. A request with a LoRA adapter is sent to an engine that has loaded the adapter, or to the
    adapter's home engine. If that engine has a high load, the score prefers to load the adapter on another engine.
    """

    def __init__(self, start: int = 0, policy: RoutingPolicy = "prefix_aware") -> None:
        self._policy = policy
        self._turn = start
        self._random = random.Random(start)
        self._loads: dict[str, Load] = {}
        self._scores: dict[str, float] = {}
        """Cached scores of the loads in ``_loads``, by engine."""
        self.loras = LoraPlaces()
        self._sent: dict[str, set[str]] = {}
        """Requests sent since the last report, by engine."""

    def report(
        self, key: str, *, waiting: int, running: int, kv_cache_usage: float, pending_embeds: int | None = None
    ) -> None:
        """Record an engine's new counts. ``pending_embeds`` is None if the report does not contain it."""
        if pending_embeds is None:
            pending_embeds = self.load(key).pending_embeds
        load = self._loads[key] = Load(waiting, running, kv_cache_usage, pending_embeds)
        self._scores[key] = load.score
        self._sent.pop(key, None)

    def sent(self, key: str, request_id: str, lora: bytes = b"") -> None:
        """Count a request as waiting on an engine until the engine's next report, or until the request leaves the
        engine.

        ``lora`` is the digest of the request's adapter, or empty without an adapter.
        """
        if lora:
            self.loras.sent(key, lora)
        self._sent.setdefault(key, set()).add(request_id)
        self._count_waiting(key, 1)

    def left(self, key: str, request_id: str) -> None:
        """Stop counting a request that has ended or moved.

        Do nothing if a report since the request was sent has set the counts.
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
        """Forget a lost engine."""
        self.loras.forget(key)
        self._loads.pop(key, None)
        self._scores.pop(key, None)
        self._sent.pop(key, None)

    def keep_only(self, keys: Iterable[str]) -> None:
        """Forget all engines except these."""
        for key in self._loads.keys() - set(keys):
            self.forget(key)

    def load(self, key: str) -> Load:
        """Return the router's counts for an engine."""
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
            rank: the rank that the client named, or None.
            variant: the variant on which the request started, or None. Another variant is used only if no engine of
                this variant accepts requests.
            cached: number of cached prompt tokens, by engine key.
            lora: digest of the request's adapter; empty: none.

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
        """Return the candidate with the lowest score, without counting a request as sent.

        There must be at least one candidate.
        """
        key = self._lowest([c.key for c in candidates], cached, lora)
        return next(c for c in candidates if c.key == key)

    def _some(self, usable: Sequence[Candidate], cached: Mapping[str, int]) -> list[str]:
        """Return a random sample of engines, and the engines with the longest cached prefix."""
        sampled = [c.key for c in self._random.sample(usable, _NUM_SAMPLED)]
        if not cached:
            return sampled
        holders = [c.key for c in usable if c.key in cached]
        return [*sampled, *heapq.nlargest(_NUM_SAMPLED, holders, key=cached.__getitem__)]

    def _lowest(self, keys: Iterable[str], cached: Mapping[str, int], lora: bytes = b"") -> str:
        """Return the first key with the lowest score."""
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
            f"routing.data_parallel_rank is {rank}; ranks now: {', '.join(map(str, known))}",
            field="routing.data_parallel_rank",
        )
    whose = "no engine accepts requests now" if rank is None else f"the engine of rank {rank} accepts no requests now"
    return Unavailable(whose, retry_after=1.0)


class Engines(Protocol):
    """All engines, by key, as dispatch uses them."""

    def candidates(self) -> Sequence[Candidate]:
        """Return all engines, connected or not."""

    def send(self, engine: str, request: EngineCoreRequest, *, first: bool) -> None:
        """Start a request on an engine with a session.

        ``first`` is True if the engine had no requests of this frontend before.
        """

    def abort_on(self, engine: str, request_ids: Sequence[str], reason: str) -> None:
        """Abort requests on an engine. Do nothing if the engine has no session."""

    def hand_over(self, engine: str, request_ids: Sequence[str]) -> None:
        """Ask an engine to hand requests over. Do nothing if the engine has no session."""

    def holding(self, features: Sequence[MultiModalFeature]) -> Mapping[str, Sequence[MultiModalFeature]]:
        """Return, by engine, which of the features the engine has cached. Leave out engines without cached features."""
