"""Admission of requests according to the limits on all requests in flight, and readiness of the frontend for requests."""

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
"""Maximum number of bytes that an engine uses for one element of an embedding vector."""
_ROOM = 0.9
"""Fraction of the limits on requests in flight below which a full frontend stops being full.

The fraction is less than 1, because readiness would otherwise change with every request.
"""
_UNMEASURED = 1.0
"""Retry delay in seconds before any request has ended, while the frontend cannot measure how fast requests end."""


class Demand(NamedTuple):
    """Part of the limits on requests in flight that one request uses."""

    tenant: str = ""
    length: int = 0
    """Size of the request's prompt and prediction. The size is the number of characters, token ids, bytes of embeddings
    as engines store them, and bytes of media as the client sent them.
    """
    sequences: int = 1
    """Number of sequences that the request has on engines. The number is ``n`` for one prompt, or the number of inputs
    of a pooling request.
    """


class InFlight:
    """Counts requests in flight and the lengths of their prompts, and measures how many requests end per second."""

    __slots__ = ("_clock", "_rate", "count", "length")

    def __init__(self, clock: Clock = time.monotonic) -> None:
        self._clock = clock
        self._rate = DrainRate()
        self.count = 0
        self.length = 0

    def enter(self, length: int = 0, count: int = 1) -> None:
        """Add ``count`` requests. ``length`` is the sum of the lengths of their prompts."""
        if not self.count:
            self._rate.begin(self._clock())
        self.count += count
        self.length += length

    def leave(self, length: int = 0, count: int = 1, *, served: bool = True) -> None:
        """Remove ``count`` requests. If ``served`` is False, they do not change the measured number of requests that
        end per second.
        """
        self.count -= count
        self.length -= length
        if served:
            self._rate.left(self._clock(), length, count)

    def retry_after(self, requests: int, length: int = 0) -> float:
        """Return a retry delay in seconds, within fixed bounds.

        The delay is the estimated time until as many requests have ended as ``requests`` and ``length`` require.
        ``requests`` is a number of requests, and ``length`` is the sum of their prompt lengths.
        """
        seconds = self._rate.time_for(self._clock(), requests, length)
        return retry_after(_UNMEASURED if seconds is None else seconds)


class Admission:
    """Limits the number of requests in flight and the lengths of their prompts, in total and per tenant.

    If no request is in flight, any single request is admitted. All requests without a tenant count as requests of one
    nameless tenant. A tenant is forgotten once it has no requests in flight. When a limit on all requests is reached,
    requests of tenants that use more than their fair share are refused (see ``TenantRoom``).

    Args:
        limits: the limits on requests in flight, which can be reloaded.
        clock: returns monotonic seconds.
        fairness: weights by which tenants share the limits.
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
        """True from the time at which a limit on all requests is reached, until the load is below the fraction
        ``_ROOM`` of the limits.
        """
        self._clock = clock
        self._all = InFlight(clock)
        self._tenants: dict[str, InFlight] = {}

    def check(self, demands: Sequence[Demand]) -> None:
        """Check that new requests of one tenant may be admitted now.

        If a limit would be exceeded, this method raises ResourceExhausted with a retry delay.
        """
        limits, here, tenant = self._limits.now, self._all, demands[0].tenant if demands else ""
        weight = self._fairness.now.weight_of(tenant)
        count = here.count + len(demands)
        if not self._room.takes_count(tenant, weight, len(demands), limits.max_requests):
            raise ResourceExhausted(
                f"{here.count} requests are in flight; the limit limits.max_requests is {limits.max_requests}"
                f"{self._of(tenant)}",
                retry_after=here.retry_after(max(count - limits.max_requests, 1)),
            )
        added = sum(demand.length for demand in demands)
        length, most = here.length + added, limits.max_prompt_length_in_flight
        if count > 1 and not self._room.takes_size(tenant, weight, added, most):
            raise ResourceExhausted(
                f"with this request, {length} characters and token ids of prompts would be in flight; "
                f"the limit limits.max_prompt_length_in_flight is {most}{self._of(tenant)}",
                retry_after=here.retry_after(0, length - most),
            )
        if limits.max_tenant_requests and demands:
            self._check_tenant(demands)

    def enter(self, demand: Demand) -> None:
        """Admit a request, and count it as in flight. Raises ResourceExhausted if a limit would be exceeded."""
        self.check([demand])
        self._all.enter(demand.length)
        self._room.enter(demand.tenant, self._fairness.now.weight_of(demand.tenant), demand.length)
        if (there := self._tenants.get(demand.tenant)) is None:
            there = self._tenants[demand.tenant] = InFlight(self._clock)
        there.enter(demand.length, demand.sequences)
        self.look()

    def leave(self, demand: Demand, *, served: bool) -> None:
        """Stop counting an admitted request as in flight. ``served`` is True if the request was started."""
        self._all.leave(demand.length, served=served)
        self._room.leave(demand.tenant, demand.length)
        if (there := self._tenants.get(demand.tenant)) is not None:
            there.leave(demand.length, demand.sequences, served=served)
            if not there.count:
                del self._tenants[demand.tenant]
        self.look()

    def look(self) -> None:
        """Update ``full`` after a change of the load or of the limits. Requests in flight continue.

        If any request in flight names a tenant, the frontend counts as full only when the limits and an additional
        reserve are used up. One tenant can use only part of the reserve, so one tenant alone cannot make the frontend
        full.
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
        """Number of tenants that have requests in flight."""
        return len(self._tenants)

    def _of(self, tenant: str) -> str:
        """Return text for an error message that states how many of the requests in flight belong to the tenant.

        The text is empty if no other tenant has requests in flight.
        """
        if len(self._room) <= (tenant in self._room):
            return ""
        whose = f"of tenant {tenant!r}" if tenant else "without a tenant"
        return f", and {self._room.count_of(tenant)} requests are {whose}"

    def _check_tenant(self, demands: Sequence[Demand]) -> None:
        limit, tenant = self._limits.now.max_tenant_requests, demands[0].tenant
        whose = f"of tenant {tenant!r}" if tenant else "without a tenant"
        if (most := max(demand.sequences for demand in demands)) > limit:
            # a request with more sequences than the limit can never be admitted
            raise InvalidArgument(
                f"the request {whose} has {most} sequences (sampling_params.n, or number of inputs); "
                f"the limit limits.max_tenant_requests is {limit}",
                field="sampling_params.n",
                reason="TENANT_QUOTA",
            )
        there = self._tenants.get(tenant)
        running, count = there.count if there is not None else 0, sum(demand.sequences for demand in demands)
        if running + count <= limit:
            return
        raise ResourceExhausted(
            f"{running} sequences {whose} are running; the limit limits.max_tenant_requests is {limit}",
            reason="TENANT_QUOTA",
            quota_subject=f"tenant:{tenant}",
            retry_after=(there or InFlight(self._clock)).retry_after(running + count - limit),
        )


def demand_of(request: GenerateRequest | ChatRequest | PoolingRequest) -> Demand:
    """Return the part of the limits that a request uses, without tokenizing the request's text."""
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
    """Check that a request's deadline has not passed. Raises DeadlineExceeded if the deadline has passed.

    ``deadline`` is in seconds since the Unix epoch.
    """
    if deadline is not None and (late := time.time() - deadline) >= 0.0:
        raise DeadlineExceeded(f"the request's deadline passed {late:.3f} s before the request started")


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
    """Return the length of a part of a prompt, in the unit of ``Demand.length``.

    The length of embeddings is their number of bytes on engines, plus one per position.

    The length of media is the number of bytes that the client sent, because a request keeps these bytes until it ends.
    """
    if isinstance(part, MediaPart):
        return part.num_bytes
    return part.num_tokens * (part.hidden_size * _COMPUTED_BYTES + 1) if isinstance(part, PromptEmbeds) else len(part)


# The class below decides whether clients should send requests to this frontend.

SEEN = "no engine has accepted requests yet"
FULL = "the maximum number of requests is in flight or held"
DRAINING = "draining"


class Readiness:
    """Readiness of a frontend to receive requests.

    A frontend becomes ready once an engine accepts requests. If ``without_engines`` is True, it already becomes ready
    once it knows the engines of the cluster from a coordinator's view. After that, the frontend stays ready even
    without engines, because it holds requests until an engine accepts them. A full or draining frontend is not ready.
    """

    def __init__(self, *, without_engines: bool) -> None:
        self._without_engines = without_engines
        self._seen = False
        self._full = False
        self._draining = False
        self._left = False

    @property
    def ready(self) -> bool:
        """True if clients should send new requests to this frontend."""
        return not self.why

    @property
    def answers(self) -> bool:
        """True if a client that chooses among known frontends may start calls on this frontend.

        The value stays True while the frontend is full, because a refused client gets a retry delay. The value also
        stays True while the frontend drains and moves its clients. If the value became False, a client that knows no
        other usable frontend would not look up new frontends, and its calls would fail.
        """
        return self._seen and not self._left

    @property
    def why(self) -> str:
        """Reason why the frontend is not ready for requests. Empty if it is ready."""
        if self._draining:
            return DRAINING
        if not self._seen:
            return SEEN
        return FULL if self._full else ""

    def update(self, *, engine: bool, view: bool, full: bool) -> bool:
        """Update whether the frontend is ready. Return True if ``ready`` or ``answers`` has changed.

        ``engine`` is True if an engine accepts requests. ``view`` is True if a coordinator's view has arrived. ``full``
        is True if no further request can be admitted.
        """
        before = self.ready, self.answers
        self._seen = self._seen or engine or (view and self._without_engines)
        self._full = full
        return (self.ready, self.answers) != before

    def drain(self, *, moves_clients: bool) -> None:
        """Start a drain of the frontend.

        If ``moves_clients`` is True, the server asks clients to reconnect. These clients then look up the other
        frontends.
        """
        self._draining = True
        self._left = not moves_clients

    def close(self) -> None:
        """End the drain. After that, the frontend refuses all calls."""
        self._left = True
