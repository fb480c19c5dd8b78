"""Admission of requests: limits on the requests in flight, and readiness of the frontend."""

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
"""Maximum bytes per number of an embedding in an engine."""
_ROOM = 0.9
"""Fraction of the limits to which the load must fall before a full frontend counts as having room again. The gap keeps
readiness from changing with every request.
"""
_UNMEASURED = 1.0
"""Retry delay before any request has ended, in seconds, while the rate is unknown."""


class Demand(NamedTuple):
    """Resources that a request takes up."""

    tenant: str = ""
    length: int = 0
    """Size of its prompt and prediction: characters, token ids, bytes of embeddings as engines store them, and bytes of
    media as the client sent them.
    """
    sequences: int = 1
    """Number of sequences on engines: n for one prompt, or one for each input."""


class InFlight:
    """Counts requests in flight and the lengths of their prompts, and measures the rate at which they end."""

    __slots__ = ("_clock", "_rate", "count", "length")

    def __init__(self, clock: Clock = time.monotonic) -> None:
        self._clock = clock
        self._rate = DrainRate()
        self.count = 0
        self.length = 0

    def enter(self, length: int = 0, count: int = 1) -> None:
        """Add ``count`` requests with prompts of ``length`` in total."""
        if not self.count:
            self._rate.begin(self._clock())
        self.count += count
        self.length += length

    def leave(self, length: int = 0, count: int = 1, *, served: bool = True) -> None:
        """Remove ``count`` requests. Requests that were not ``served`` do not count for the rate."""
        self.count -= count
        self.length -= length
        if served:
            self._rate.left(self._clock(), length, count)

    def retry_after(self, requests: int, length: int = 0) -> float:
        """Return the retry delay in seconds until this many requests with this total length have ended, within fixed
        bounds.
        """
        seconds = self._rate.time_for(self._clock(), requests, length)
        return retry_after(_UNMEASURED if seconds is None else seconds)


class Admission:
    """Limits the number of requests in flight and the lengths of their prompts, in total and per tenant.

    A single request is always admitted if there are no others. Requests without a tenant belong to one nameless tenant.
    A tenant is forgotten once it has no requests. At the total limits, tenants above their fair share are refused; see
    ``TenantRoom``.

    Args:
        limits: the limits.
        clock: monotonic seconds.
        fairness: weights of the tenants.
        on_full: called whenever ``full`` has changed.
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
        """True if a total limit has been reached and the load has not fallen far enough below it since."""
        self._clock = clock
        self._all = InFlight(clock)
        self._tenants: dict[str, InFlight] = {}

    def check(self, demands: Sequence[Demand]) -> None:
        """Check that these requests of one tenant may be admitted. Raises ResourceExhausted with a retry delay if not."""
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
        """Admit a request. Raises ResourceExhausted."""
        self.check([demand])
        self._all.enter(demand.length)
        self._room.enter(demand.tenant, self._fairness.now.weight_of(demand.tenant), demand.length)
        if (there := self._tenants.get(demand.tenant)) is None:
            there = self._tenants[demand.tenant] = InFlight(self._clock)
        there.enter(demand.length, demand.sequences)
        self.look()

    def leave(self, demand: Demand, *, served: bool) -> None:
        """Release an admitted request. ``served``: it was started."""
        self._all.leave(demand.length, served=served)
        self._room.leave(demand.tenant, demand.length)
        if (there := self._tenants.get(demand.tenant)) is not None:
            there.leave(demand.length, demand.sequences, served=served)
            if not there.count:
                del self._tenants[demand.tenant]
        self.look()

    def look(self) -> None:
        """Update ``full``. Called after changes of the load or of the limits; requests in flight continue.

        While several tenants have requests, part of the limits is reserved for other tenants. The frontend counts as
        full once the rest is used up, so that one tenant cannot take the frontend away from the others.
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
        """Number of tenants with requests in flight."""
        return len(self._tenants)

    def _of(self, tenant: str) -> str:
        """Return the part of a refusal that says how many requests a tenant has; empty if there are no other tenants."""
        if len(self._room) <= (tenant in self._room):
            return ""
        whose = f"of tenant {tenant!r}" if tenant else "without a tenant"
        return f", and {self._room.count_of(tenant)} requests are {whose}"

    def _check_tenant(self, demands: Sequence[Demand]) -> None:
        limit, tenant = self._limits.now.max_tenant_requests, demands[0].tenant
        whose = f"of tenant {tenant!r}" if tenant else "without a tenant"
        if (most := max(demand.sequences for demand in demands)) > limit:  # can never be admitted
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
    """Return the resources that a request takes up, without tokenizing its text."""
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
    """Check that a request's deadline has not passed. Raises DeadlineExceeded. ``deadline``: seconds since the Unix
    epoch.
    """
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
    """Return the length of a part. Embeddings count with the bytes that engines compute with, plus one token per
    position.

    Media count with the bytes that the client sent, because a request keeps them until it ends.
    """
    if isinstance(part, MediaPart):
        return part.num_bytes
    return part.num_tokens * (part.hidden_size * _COMPUTED_BYTES + 1) if isinstance(part, PromptEmbeds) else len(part)


# Readiness: whether requests should be sent to a frontend.

SEEN = "no engine has been seen yet"
FULL = "as many requests are in flight or held as may be"
DRAINING = "draining"


class Readiness:
    """Readiness of a frontend for requests.

    A frontend becomes ready once an engine has accepted requests or, with ``without_engines``, once the cluster's state
    is known. From then on it stays ready while engines come and go, because it holds requests. A full or draining
    frontend is not ready.
    """

    def __init__(self, *, without_engines: bool) -> None:
        self._without_engines = without_engines
        self._seen = False
        self._full = False
        self._draining = False
        self._left = False

    @property
    def ready(self) -> bool:
        """True if requests should be sent to this frontend."""
        return not self.why

    @property
    def answers(self) -> bool:
        """True if clients that choose among known frontends may start calls here.

        The value stays true while the frontend is full, because a refusal has a retry delay. The value also stays true
        while the frontend drains and moves its clients. A client that has no usable frontend left would not look for
        new ones, and its calls would fail.
        """
        return self._seen and not self._left

    @property
    def why(self) -> str:
        """Reason for not being ready; empty if it is ready."""
        if self._draining:
            return DRAINING
        if not self._seen:
            return SEEN
        return FULL if self._full else ""

    def update(self, *, engine: bool, view: bool, full: bool) -> bool:
        """Update the state: an engine accepts requests, the cluster's state is known, no more requests can be admitted.

        Return True if ``ready`` or ``answers`` changed.
        """
        before = self.ready, self.answers
        self._seen = self._seen or engine or (view and self._without_engines)
        self._full = full
        return (self.ready, self.answers) != before

    def drain(self, *, moves_clients: bool) -> None:
        """Start a drain. ``moves_clients``: clients are asked to reconnect, and then look up the other frontends."""
        self._draining = True
        self._left = not moves_clients

    def close(self) -> None:
        """End the drain. From now on calls are refused."""
        self._left = True
