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
"""Score per unit of KV cache usage above ``_KV_PRESSURE_FROM``. A full KV cache counts like 32 more running requests.
"""
_TOKENS_OF_A_RUNNING_REQUEST = 128
"""Number of cached prompt tokens that offsets one running request; four times as many offset a waiting one. Computing
them and running the request delay the next request by about the same time. ``make bench-routing`` compares other
numbers.
"""
_MOST_COMPARED = 64
_NUM_SAMPLED = 16
"""Number of randomly sampled engines if there are more than ``_MOST_COMPARED``. As many with the longest cached prefix
are added.
"""


class Candidate(msgspec.Struct, frozen=True):
    """An engine that a request may go to."""

    key: str
    """Address of the engine."""
    rank: int | None
    """Rank by which requests may name it, or None."""
    accepting: bool = True
    """True if it is connected and neither draining nor wedged."""
    variant: str = ""
    """Hash of the engine's configuration, ``config_hash``."""
    applies_lora: bool = True
    """True if it takes requests with LoRA adapters."""
    modalities: tuple[Modality, ...] = ()
    """Media that its requests may have."""
    role: EngineRole = EngineRole.BOTH
    """Role for which the engine is preferred."""
    fingerprint: bytes = b""
    """Fingerprint of its KV blocks. Engines with the same one can exchange blocks. Empty: it hands no blocks over."""


def takers(candidates: Sequence[Candidate], request: EngineCoreRequest) -> Sequence[Candidate]:
    """Return the engines that can serve this kind of request."""
    if request.lora is not None:
        candidates = [c for c in candidates if c.applies_lora]
    if modalities := {feature.modality for feature in request.mm_features}:
        candidates = [c for c in candidates if modalities.issubset(c.modalities)]
    return candidates


class Load(msgspec.Struct):
    """The router's copy of an engine's counts. Requests sent since the last report count as waiting."""

    waiting: int = 0
    running: int = 0
    kv_cache_usage: float = 0.0
    pending_embeds: int = 0
    """Number of media embeddings still to be computed."""

    @property
    def score(self) -> float:
        """Load as a number: waiting requests (times 4), running requests, pending embeddings, and KV cache usage above
        one half.
        """
        count = _WAITING_WEIGHT * self.waiting + self.running + self.pending_embeds / _TOKENS_OF_A_RUNNING_REQUEST
        pressure = self.kv_cache_usage - _KV_PRESSURE_FROM
        return count + _KV_PRESSURE_WEIGHT * pressure if pressure > 0.0 else count


class Router:
    """Picks the engine with the lowest load, minus its cached tokens of the prompt. Does no I/O.

    Ties rotate. Frontends should start at different engines, so that they do not all send their first request to the
    same one. If there are many engines, only a random sample and the engines with the longest cached prefix are
    compared. Requests with a LoRA adapter go to an engine that holds it, or to its home engine, unless that engine's
    load outweighs loading it elsewhere.
    """

    def __init__(self, start: int = 0, policy: RoutingPolicy = "prefix_aware") -> None:
        self._policy = policy
        self._turn = start
        self._random = random.Random(start)
        self._loads: dict[str, Load] = {}
        self._scores: dict[str, float] = {}
        """Scores of ``_loads``."""
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
        """Count a request as waiting on an engine until the next report, or until it has left.

        ``lora`` is the digest of its adapter; empty: none.
        """
        if lora:
            self.loras.sent(key, lora)
        self._sent.setdefault(key, set()).add(request_id)
        self._count_waiting(key, 1)

    def left(self, key: str, request_id: str) -> None:
        """Stop counting a request that has ended or moved, unless a report has already counted it."""
        sent = self._sent.get(key)
        if sent is not None and request_id in sent:
            sent.remove(request_id)
            self._count_waiting(key, -1)

    def _count_waiting(self, key: str, difference: int) -> None:
        load = self.load(key)
        load.waiting += difference
        self._scores[key] = load.score

    def forget(self, key: str) -> None:
        """Forget an engine that is gone."""
        self.loras.forget(key)
        self._loads.pop(key, None)
        self._scores.pop(key, None)
        self._sent.pop(key, None)

    def keep_only(self, keys: Iterable[str]) -> None:
        """Forget all engines except these."""
        for key in self._loads.keys() - set(keys):
            self.forget(key)

    def load(self, key: str) -> Load:
        """Return the copy of an engine's counts."""
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
            variant: the variant on which the request started. Another one is used only if no engine of it accepts requests.
            cached: number of cached prompt tokens, by engine key.
            lora: digest of the request's adapter; empty: none.

        Raises:
            Unavailable: no engine accepts requests.
            InvalidArgument: no engine has that rank.
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
        """Return the candidate with the lowest load. There must be at least one candidate. Nothing is counted as sent."""
        key = self._lowest([c.key for c in candidates], cached, lora)
        return next(c for c in candidates if c.key == key)

    def _some(self, usable: Sequence[Candidate], cached: Mapping[str, int]) -> list[str]:
        """Return a random sample of many engines, and those with the longest cached prefix."""
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
    whose = "no engine takes requests now" if rank is None else f"the engine of rank {rank} takes no requests now"
    return Unavailable(whose, retry_after=1.0)


class Engines(Protocol):
    """All engines, by key, as dispatch uses them."""

    def candidates(self) -> Sequence[Candidate]:
        """Return all engines, connected or not."""

    def send(self, engine: str, request: EngineCoreRequest, *, first: bool) -> None:
        """Start a request on an engine with a session. ``first``: the engine had no requests of this frontend."""

    def abort_on(self, engine: str, request_ids: Sequence[str], reason: str) -> None:
        """Abort requests on an engine, if it has a session."""

    def hand_over(self, engine: str, request_ids: Sequence[str]) -> None:
        """Ask an engine to hand requests over, if it has a session."""

    def holding(self, features: Sequence[MultiModalFeature]) -> Mapping[str, Sequence[MultiModalFeature]]:
        """Return, by engine, the features that the engine has cached. Engines without any are left out."""
