"""Which engine serves a request: by load, cached prefix, variant and LoRA adapter."""

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
"""At a full KV cache an engine counts as if it ran half this many more requests."""
_TOKENS_OF_A_RUNNING_REQUEST = 128
"""Prompt tokens that an engine need not compute are worth a running request, and four times as many a waiting one: they keep what
comes next waiting about as long. ``make bench-routing`` compares other numbers.
"""
_MOST_COMPARED = 64
_NUM_SAMPLED = 16
"""Engines that are compared where there are more than ``_MOST_COMPARED``, and as many that have most of the prompt."""


class Candidate(msgspec.Struct, frozen=True):
    """An engine that a request may go to."""

    key: str
    """Its address."""
    rank: int | None
    """Under which requests may name it; None: under none."""
    accepting: bool = True
    """Connected, and neither draining nor wedged."""
    variant: str = ""
    """Its ``config_hash``."""
    applies_lora: bool = True
    """Whether requests with LoRA adapters may go there."""
    modalities: tuple[Modality, ...] = ()
    """Media that requests which go there may have."""
    role: EngineRole = EngineRole.BOTH
    """What it is preferred for."""
    fingerprint: bytes = b""
    """Of its blocks: engines of one can have each other's; empty: it gives none away."""


def takers(candidates: Sequence[Candidate], request: EngineCoreRequest) -> Sequence[Candidate]:
    """Those that take requests of this kind."""
    if request.lora is not None:
        candidates = [c for c in candidates if c.applies_lora]
    if modalities := {feature.modality for feature in request.mm_features}:
        candidates = [c for c in candidates if modalities.issubset(c.modalities)]
    return candidates


class Load(msgspec.Struct):
    """The router's copy of an engine's counts; requests sent to it since the last report count as waiting."""

    waiting: int = 0
    running: int = 0
    kv_cache_usage: float = 0.0
    pending_embeds: int = 0
    """Embeddings of media that are still to be computed."""

    @property
    def score(self) -> float:
        """Grows with waiting (x4) and running requests and with embeddings to compute, further as KV usage passes one half."""
        count = _WAITING_WEIGHT * self.waiting + self.running + self.pending_embeds / _TOKENS_OF_A_RUNNING_REQUEST
        pressure = self.kv_cache_usage - _KV_PRESSURE_FROM
        return count + _KV_PRESSURE_WEIGHT * pressure if pressure > 0.0 else count


class Router:
    """Picks the engine with the lowest load, less what it has cached of the prompt; does no I/O.

    Ties rotate, from a start that should differ between frontends, so that idle engines are not all given the same first. Of many
    engines a random few are compared, and those that have most of the prompt. Requests with a LoRA adapter go where it is, or to
    its home, unless those have more to do than loading it elsewhere is worth.
    """

    def __init__(self, start: int = 0, policy: RoutingPolicy = "prefix_aware") -> None:
        self._policy = policy
        self._turn = start
        self._random = random.Random(start)
        self._loads: dict[str, Load] = {}
        self._scores: dict[str, float] = {}
        """Those of ``_loads``."""
        self.loras = LoraPlaces()
        self._sent: dict[str, set[str]] = {}
        """By engine, the requests sent to it that no report has counted yet."""

    def report(
        self, key: str, *, waiting: int, running: int, kv_cache_usage: float, pending_embeds: int | None = None
    ) -> None:
        """An engine's counts are known anew. ``pending_embeds``: None where that is not said."""
        if pending_embeds is None:
            pending_embeds = self.load(key).pending_embeds
        load = self._loads[key] = Load(waiting, running, kv_cache_usage, pending_embeds)
        self._scores[key] = load.score
        self._sent.pop(key, None)

    def sent(self, key: str, request_id: str, lora: bytes = b"") -> None:
        """A request is on its way to an engine: it counts as waiting there until the next report, or until it has left. ``lora``:
        the digest of its adapter; empty: it has none.
        """
        if lora:
            self.loras.sent(key, lora)
        self._sent.setdefault(key, set()).add(request_id)
        self._count_waiting(key, 1)

    def left(self, key: str, request_id: str) -> None:
        """A request has ended on an engine, or gone on elsewhere: unless a report has counted it, it is counted no longer."""
        sent = self._sent.get(key)
        if sent is not None and request_id in sent:
            sent.remove(request_id)
            self._count_waiting(key, -1)

    def _count_waiting(self, key: str, difference: int) -> None:
        load = self.load(key)
        load.waiting += difference
        self._scores[key] = load.score

    def forget(self, key: str) -> None:
        """An engine is gone."""
        self.loras.forget(key)
        self._loads.pop(key, None)
        self._scores.pop(key, None)
        self._sent.pop(key, None)

    def keep_only(self, keys: Iterable[str]) -> None:
        """These are all engines there are."""
        for key in self._loads.keys() - set(keys):
            self.forget(key)

    def load(self, key: str) -> Load:
        """The copy of an engine's counts."""
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
        """The key of the engine for what is to be ``sent`` next.

        ``variant``: the one they began on; an engine of another is only for where none of it takes requests. ``cached``: tokens
        of the prompt that engines have cached, by their keys. ``lora``: the digest of the request's adapter, if any. Raises
        Unavailable when no engine takes requests, InvalidArgument when there is no engine of that rank.
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
        """The one of these, of which there must be one, that has the lowest load. Nothing is to be sent to it."""
        key = self._lowest([c.key for c in candidates], cached, lora)
        return next(c for c in candidates if c.key == key)

    def _some(self, usable: Sequence[Candidate], cached: Mapping[str, int]) -> list[str]:
        """A random few of many, and those that have most of the prompt."""
        sampled = [c.key for c in self._random.sample(usable, _NUM_SAMPLED)]
        if not cached:
            return sampled
        holders = [c.key for c in usable if c.key in cached]
        return [*sampled, *heapq.nlargest(_NUM_SAMPLED, holders, key=cached.__getitem__)]

    def _lowest(self, keys: Iterable[str], cached: Mapping[str, int], lora: bytes = b"") -> str:
        """The first of those with the lowest score."""
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
    """All of them, by their keys."""

    def candidates(self) -> Sequence[Candidate]:
        """Those that there are, connected or not."""

    def send(self, engine: str, request: EngineCoreRequest, *, first: bool) -> None:
        """Start a request on an engine with a session. ``first``: it had nothing to do for this frontend."""

    def abort_on(self, engine: str, request_ids: Sequence[str], reason: str) -> None:
        """End requests of an engine, if there is a session with it."""

    def hand_over(self, engine: str, request_ids: Sequence[str]) -> None:
        """Have an engine hand requests over, if there is a session with it."""

    def holding(self, features: Sequence[MultiModalFeature]) -> Mapping[str, Sequence[MultiModalFeature]]:
        """By engine, those of the features that it keeps; engines that keep none are not in it."""
