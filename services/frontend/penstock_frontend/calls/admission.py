"""Admission: how much a frontend has in flight, what is too much, and whether it is ready for requests."""

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from penstock_common.bounded_queue import DrainRate, TenantRoom, retry_after
from penstock_common.config.settings import Reread
from penstock_common.errors import DeadlineExceeded, InvalidArgument, ResourceExhausted
from penstock_common.types.prompt_embeds import PromptEmbeds
from penstock_frontend.call_types import (
    ChatRequest,
    GenerateRequest,
    MediaPart,
    MixedPrompt,
    Part,
    PoolingPrompt,
    PoolingRequest,
)
from penstock_frontend.config import FairnessConfig, LimitsConfig

Clock = Callable[[], float]

_COMPUTED_BYTES = 4
"""Of a number of a vector in an engine, at most."""
_ROOM = 0.9
"""Part of the limits to which what is in flight must have sunk before a full frontend counts as having room again: who asks for
its health is not told of every request that comes and goes."""
_UNMEASURED = 1.0
"""Seconds that clients are told to wait before any request has ended, so that there is no rate to go by."""


class Demand(NamedTuple):
    """What a request takes up."""

    tenant: str = ""
    length: int = 0
    """Of its prompt and prediction, in characters, token ids, bytes of vectors, as engines hold these, and bytes of media as the
    client sent them.
    """
    sequences: int = 1
    """What engines see of it: n of one prompt, or one for each of its inputs."""


class InFlight:
    """Counts requests in flight and the lengths of their prompts, and measures how fast they leave."""

    __slots__ = ("_clock", "_rate", "count", "length")

    def __init__(self, clock: Clock = time.monotonic) -> None:
        self._clock = clock
        self._rate = DrainRate()
        self.count = 0
        self.length = 0

    def enter(self, length: int = 0, count: int = 1) -> None:
        """One more, or ``count`` at once."""
        if not self.count:
            self._rate.begin(self._clock())
        self.count += count
        self.length += length

    def leave(self, length: int = 0, count: int = 1, *, served: bool = True) -> None:
        """One less, or ``count`` at once. What was not ``served`` says nothing about the speed."""
        self.count -= count
        self.length -= length
        if served:
            self._rate.left(self._clock(), length, count)

    def retry_after(self, requests: int, length: int = 0) -> float:
        """Seconds until so many requests of that length together have left, within the bounds of what clients are told."""
        seconds = self._rate.time_for(self._clock(), requests, length)
        return retry_after(_UNMEASURED if seconds is None else seconds)


class Admission:
    """Bounds requests and the lengths of their prompts, of all tenants and of each. Limits are those of the LimitsConfig.

    Any one request is let in where there is no other. Requests without a tenant are of one tenant, the nameless. What is
    kept of a tenant is forgotten when it has no requests. At the limits of all tenants, those above their fair share are
    refused, as ``TenantRoom`` says. ``fairness``: the tenants' weights. ``on_full``: called whenever ``full`` has changed.
    """

    def __init__(
        self,
        limits: Reread[LimitsConfig],
        clock: Clock = time.monotonic,
        *,
        fairness: Reread[FairnessConfig] | None = None,
        on_full: Callable[[], None] = lambda: None,
    ) -> None:
        self._limits = limits
        self._fairness = Reread(FairnessConfig()) if fairness is None else fairness
        self._room = TenantRoom()
        self._on_full = on_full
        self.full = False
        """Whether all requests, or the lengths of their prompts, have reached their limit, and have not left yet."""
        self._clock = clock
        self._all = InFlight(clock)
        self._tenants: dict[str, InFlight] = {}

    def check(self, demands: Sequence[Demand]) -> None:
        """Raise ResourceExhausted, with the time until there is room, unless these requests of one tenant may come in."""
        limits, here, tenant = self._limits.now, self._all, demands[0].tenant if demands else ""
        weight = self._fairness.now.weight_of(tenant)
        count = here.count + len(demands)
        if not self._room.takes_count(tenant, weight, len(demands), limits.max_requests):
            raise ResourceExhausted(
                f"{here.count} requests are running; limits.max_requests is {limits.max_requests}{self._of(tenant)}",
                retry_after=here.retry_after(max(count - limits.max_requests, 1)),
            )
        added = sum(demand.length for demand in demands)
        length, most = here.length + added, limits.max_prompt_length_in_flight
        if count > 1 and not self._room.takes_size(tenant, weight, added, most):
            raise ResourceExhausted(
                f"prompts of {length} characters and token ids would be in flight; limits.max_prompt_length_in_flight "
                f"is {most}{self._of(tenant)}",
                retry_after=here.retry_after(0, length - most),
            )
        if limits.max_tenant_requests and demands:
            self._check_tenant(demands)

    def enter(self, demand: Demand) -> None:
        """Let a request in. Raises ResourceExhausted."""
        self.check([demand])
        self._all.enter(demand.length)
        self._room.enter(demand.tenant, self._fairness.now.weight_of(demand.tenant), demand.length)
        if (there := self._tenants.get(demand.tenant)) is None:
            there = self._tenants[demand.tenant] = InFlight(self._clock)
        there.enter(demand.length, demand.sequences)
        self.look()

    def leave(self, demand: Demand, *, served: bool) -> None:
        """A request that was let in is over. ``served``: it was begun."""
        self._all.leave(demand.length, served=served)
        self._room.leave(demand.tenant, demand.length)
        if (there := self._tenants.get(demand.tenant)) is not None:
            there.leave(demand.length, demand.sequences, served=served)
            if not there.count:
                del self._tenants[demand.tenant]
        self.look()

    def look(self) -> None:
        """See whether it is full now: for when the limits have changed, which ends nothing that is in flight.

        While tenants are named, a frontend is full when its reserve is used up, too: one tenant's flood must not take the
        frontend away from the others.
        """
        limits, here = self._limits.now, self._all
        max_requests = self._room.most(limits.max_requests)
        max_length = self._room.most(limits.max_prompt_length_in_flight)
        used = max(here.count / max_requests, here.length / max_length)
        if (full := used > _ROOM if self.full else used >= 1.0) != self.full:
            self.full = full
            self._on_full()

    @property
    def num_tenants(self) -> int:
        """Tenants that something is kept of."""
        return len(self._tenants)

    def _of(self, tenant: str) -> str:
        """How many requests a tenant has, for a refusal; empty where there are no others."""
        if len(self._room) <= (tenant in self._room):
            return ""
        whose = f"of tenant {tenant!r}" if tenant else "without a tenant"
        return f", and {self._room.count_of(tenant)} requests are {whose}"

    def _check_tenant(self, demands: Sequence[Demand]) -> None:
        limit, tenant = self._limits.now.max_tenant_requests, demands[0].tenant
        whose = f"of tenant {tenant!r}" if tenant else "without a tenant"
        if (most := max(demand.sequences for demand in demands)) > limit:  # there will never be room
            raise InvalidArgument(
                f"the request {whose} has {most} sequences (sampling_params.n, or inputs); limits.max_tenant_requests is "
                f"{limit}",
                field="sampling_params.n",
                reason="TENANT_QUOTA",
            )
        there = self._tenants.get(tenant)
        running, count = there.count if there is not None else 0, sum(demand.sequences for demand in demands)
        if running + count <= limit:
            return
        raise ResourceExhausted(
            f"{running} sequences {whose} are running; limits.max_tenant_requests is {limit}",
            reason="TENANT_QUOTA",
            quota_subject=f"tenant:{tenant}",
            retry_after=(there or InFlight(self._clock)).retry_after(running + count - limit),
        )


def demand_of(request: GenerateRequest | ChatRequest | PoolingRequest) -> Demand:
    """What a request takes up, without looking at its text."""
    parts: Sequence[Part]
    if isinstance(request, GenerateRequest):
        parts = _parts(request.prompt)
    elif isinstance(request, PoolingRequest):
        parts = [*(part for prompt in request.inputs for part in _parts(prompt)), *request.seconds]
    else:
        parts = _conversation(request)
    if not isinstance(request, PoolingRequest) and request.prediction is not None:
        parts = [*parts, request.prediction]
    sequences = len(request.inputs) if isinstance(request, PoolingRequest) else request.sampling.get("n", 1)
    return Demand(request.context.tenant, sum(map(_length, parts)), sequences)


def check_deadline(deadline: float | None) -> None:
    """Raise DeadlineExceeded for a request that is worth nothing any more. ``deadline``: seconds since the Unix epoch."""
    if deadline is not None and (late := time.time() - deadline) >= 0.0:
        raise DeadlineExceeded(f"the deadline passed {late:.3f} s before the request was begun")


def _parts(prompt: PoolingPrompt) -> Sequence[Part]:
    return prompt.parts if isinstance(prompt, MixedPrompt) else [prompt]


def _conversation(request: ChatRequest) -> list[Part]:
    parts: list[Part] = [message.reasoning for message in request.messages]
    for message in request.messages:
        if isinstance(message.content, str):
            parts.append(message.content)
        else:
            parts.extend(part.text if part.media is None else part.media for part in message.content or ())
        parts.extend(call.arguments for call in message.tool_calls)
    return parts


def _length(part: Part) -> int:
    """Vectors count as what engines compute with, however few bits they came with, and their places as tokens do. Of media counts
    what the client sent: a request keeps it until it ends.
    """
    if isinstance(part, MediaPart):
        return part.num_bytes
    return part.num_tokens * (part.hidden_size * _COMPUTED_BYTES + 1) if isinstance(part, PromptEmbeds) else len(part)


# Whether a frontend is to be sent requests.

SEEN = "no engine has been seen yet"
FULL = "as many requests are in flight or held as may be"
DRAINING = "draining"


class Readiness:
    """Ready once an engine has taken requests, or, ``without_engines``, once there was a view of the cluster. From then on
    engines come and go and it stays ready, because requests are held meanwhile; not while it is full, and not from when it
    drains.
    """

    def __init__(self, *, without_engines: bool) -> None:
        self._without_engines = without_engines
        self._seen = False
        self._full = False
        self._draining = False
        self._left = False

    @property
    def ready(self) -> bool:
        """Whether to send requests here."""
        return not self.why

    @property
    def answers(self) -> bool:
        """Whether to begin calls here, for clients that choose among the frontends they know: also while it is full, because a
        refusal says when to try again, and while it drains and moves its clients. Those that leave all frontends that they know
        learn of no others, and their calls fail.
        """
        return self._seen and not self._left

    @property
    def why(self) -> str:
        """Why not; empty where it is ready."""
        if self._draining:
            return DRAINING
        if not self._seen:
            return SEEN
        return FULL if self._full else ""

    def update(self, *, engine: bool, view: bool, full: bool) -> bool:
        """What is so now: an engine takes requests, the coordinator has told of the cluster, no more requests may come in.
        Returns whether that changed ``ready`` or ``answers``.
        """
        before = self.ready, self.answers
        self._seen = self._seen or engine or (view and self._without_engines)
        self._full = full
        return (self.ready, self.answers) != before

    def drain(self, *, moves_clients: bool) -> None:
        """It is to stop. ``moves_clients``: and asks them meanwhile to connect anew, for which they look up who else there is."""
        self._draining = True
        self._left = not moves_clients

    def close(self) -> None:
        """It has drained, and refuses from now on."""
        self._left = True
