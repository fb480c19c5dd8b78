"""Membership of engines, as a state machine of leases. Also computes the entry of each engine in views."""

import enum
import itertools
from collections.abc import Iterator, Sequence

import msgspec

from penstock_common.lora_registry import LoraHeld
from penstock_common.types.cluster import EngineRegistration, EngineState, EngineStatus
from penstock_common.types.outputs import SchedulerStats

MAX_REMEMBERED_INCARNATIONS = 16
"""Number of replaced incarnations to remember per engine. If a remembered incarnation registers again, the registration
is refused.
"""


class Change(enum.Enum):
    """Kind of change of a member."""

    JOINED = "joined"
    REPLACED = "restarted under a new incarnation"
    RECONNECTED = "reconnected"
    DRAINING = "draining"
    WEDGED = "wedged"
    UNWEDGED = "no longer wedged"
    LEFT = "left"
    EXPIRED = "lost: its lease expired"


class MemberChanged(msgspec.Struct, frozen=True):
    """Effect that the members have changed, so that frontends need a new view."""

    engine_id: str
    index: int
    """Index of the member."""
    change: Change


class SessionEnded(msgspec.Struct, frozen=True):
    """Effect that the session of the event must end, because the session does not belong to a member."""

    reason: str


class IdTaken(msgspec.Struct, frozen=True):
    """Effect that a registration is refused, because another engine with a valid lease has the same id."""

    reason: str


Effect = MemberChanged | SessionEnded | IdTaken


class Member(msgspec.Struct):
    """An engine that is a member."""

    registration: EngineRegistration
    """Latest registration of the engine."""
    index: int
    """Index of the engine, which is the lowest number that was free when the engine joined. The index stays the same if
    the engine reconnects or restarts.
    """
    session: int
    """Number of the engine's latest stream."""
    expires_at: float
    """End of the lease, in seconds of the caller's clock."""
    draining: bool
    """Whether the engine refuses new requests."""
    stats: SchedulerStats = SchedulerStats()
    """Statistics of the latest reported step."""
    loras: LoraHeld | None = None
    """Latest report of the LoRA adapters that the engine has loaded."""
    former_incarnations: tuple[str, ...] = ()
    """Replaced incarnations of the engine. The latest is the last item."""


class Membership:
    """Members of the cluster, by engine id.

    An engine is a member from its registration until it reports SHUTDOWN_COMPLETE, or sends nothing for one lease. If
    only its stream ends, the engine stays a member. The engine may reconnect before its lease expires, and its requests
    keep running. Each stream is a session with a separate number. Only reports in an engine's latest session count.
    Reports in older sessions and registrations of replaced incarnations are refused.

    A restarted engine has a new incarnation at the same address, or registers after its old lease has expired. A new
    incarnation at another address is a different engine with the same id. This engine is refused while the lease of the
    first engine is valid. Otherwise the two engines would replace each other endlessly.

    Callers pass the time as seconds of a monotonic clock. ``tick`` should run several times per lease. If a call is
    late by more than half a lease, the coordinator was suspended or had no CPU time. In that time, the coordinator has
    received no messages, so all leases are renewed.
    """

    def __init__(self, *, lease_seconds: float, now: float) -> None:
        self.lease_seconds = lease_seconds
        self._members: dict[str, Member] = {}
        self._engine_of_session: dict[int, str] = {}
        self._ticked_at = now

    @property
    def members(self) -> list[Member]:
        """Members in order of their index."""
        return sorted(self._members.values(), key=lambda member: member.index)

    def pools(self) -> Iterator[tuple[str, str]]:
        """Return model and pool of each member."""
        return ((member.registration.model, member.registration.pool) for member in self._members.values())

    def index_of(self, engine_id: str) -> int:
        """Return the index of a member."""
        return self._members[engine_id].index

    def register(self, session: int, registration: EngineRegistration, now: float) -> list[Effect]:
        """Register an engine on a new session."""
        member = self._members.get(registration.engine_id)
        if member is None:
            return [self._join(session, registration, now)]
        if registration.incarnation in member.former_incarnations:
            current = member.registration.incarnation
            return [SessionEnded(f"incarnation {registration.incarnation!r} has been replaced by {current!r}")]
        if _is_another(registration, member.registration) and member.expires_at > now:
            return [
                IdTaken(
                    f"engine_id {registration.engine_id!r} is taken by the engine at {member.registration.address}, whose lease "
                    f"is valid; give the engine at {registration.address} another engine_id"
                )
            ]
        if registration.incarnation == member.registration.incarnation:
            change = Change.RECONNECTED
            member.draining |= registration.draining
        else:
            change = Change.REPLACED
            former = (*member.former_incarnations, member.registration.incarnation)
            member.former_incarnations = former[-MAX_REMEMBERED_INCARNATIONS:]
            member.draining = registration.draining
            member.stats, member.loras = SchedulerStats(), None
        del self._engine_of_session[member.session]
        member.registration = registration
        self._attach(member, session, now)
        return [self._changed(member, change)]

    def report(self, session: int, stats: SchedulerStats | None, now: float) -> list[Effect]:
        """Renew an engine's lease, and record its statistics.

        Ignore statistics that are older than the recorded statistics.
        """
        member = self._member_of(session)
        if member is None:
            return [_not_a_member()]
        member.expires_at = now + self.lease_seconds
        if stats is not None and stats.lora is not None and stats.lora.held is not None:
            member.loras = stats.lora.held
        if stats is None or stats.step_counter < member.stats.step_counter:
            return []
        wedged, member.stats = member.stats.wedged, stats
        if stats.wedged == wedged:
            return []
        return [self._changed(member, Change.WEDGED if stats.wedged else Change.UNWEDGED)]

    def drain(self, session: int, now: float) -> list[Effect]:
        """Renew an engine's lease, and record that the engine is draining."""
        member = self._member_of(session)
        if member is None:
            return [_not_a_member()]
        member.expires_at = now + self.lease_seconds
        if member.draining:
            return []
        member.draining = True
        return [self._changed(member, Change.DRAINING)]

    def leave(self, session: int) -> list[Effect]:
        """Remove an engine that has shut down."""
        member = self._member_of(session)
        return [_not_a_member()] if member is None else [self._remove(member, Change.LEFT)]

    def tick(self, now: float) -> list[Effect]:
        """Remove all members whose lease has expired."""
        stalled = now - self._ticked_at > self.lease_seconds / 2
        self._ticked_at = now
        if stalled:
            for member in self._members.values():
                member.expires_at = now + self.lease_seconds
        expired = [member for member in self._members.values() if member.expires_at <= now]
        expired.sort(key=lambda member: member.index)
        return [self._remove(member, Change.EXPIRED) for member in expired]

    def _join(self, session: int, registration: EngineRegistration, now: float) -> MemberChanged:
        taken = {member.index for member in self._members.values()}
        index = next(i for i in itertools.count() if i not in taken)
        member = Member(registration, index, session, now, registration.draining)
        self._members[registration.engine_id] = member
        self._attach(member, session, now)
        return self._changed(member, Change.JOINED)

    def _attach(self, member: Member, session: int, now: float) -> None:
        self._engine_of_session[session] = member.registration.engine_id
        member.session = session
        member.expires_at = now + self.lease_seconds

    def _remove(self, member: Member, change: Change) -> MemberChanged:
        del self._members[member.registration.engine_id]
        del self._engine_of_session[member.session]
        return self._changed(member, change)

    def _member_of(self, session: int) -> Member | None:
        engine_id = self._engine_of_session.get(session)
        return None if engine_id is None else self._members[engine_id]

    def _changed(self, member: Member, change: Change) -> MemberChanged:
        return MemberChanged(member.registration.engine_id, member.index, change)


def _is_another(registration: EngineRegistration, member: EngineRegistration) -> bool:
    return registration.incarnation != member.incarnation and registration.address != member.address


def _not_a_member() -> SessionEnded:
    return SessionEnded("the lease has expired, or a later session has replaced this session; register again")


# The code below computes the entry of each engine in views, with its state and load.


class Statuses:
    """Cache for the view entry of each engine.

    If an engine has not changed, consecutive views contain the same object.
    """

    def __init__(self) -> None:
        self._known: dict[str, tuple[EngineRegistration, SchedulerStats, bool, EngineStatus]] = {}

    def of(self, members: Sequence[Member]) -> tuple[EngineStatus, ...]:
        """Return the view entries of ``members``. The caller must pass all members of the cluster."""
        known = self._known
        self._known = {}
        for member in members:
            engine_id = member.registration.engine_id
            entry = known.get(engine_id)
            if (
                entry is None
                or entry[0] is not member.registration
                or entry[1] is not member.stats
                or entry[2] is not member.draining
                or entry[3].index != member.index
            ):
                entry = (member.registration, member.stats, member.draining, engine_status(member))
            self._known[engine_id] = entry
        return tuple(entry[3] for entry in self._known.values())


def engine_status(member: Member) -> EngineStatus:
    """Return the view entry of an engine."""
    registration, stats = member.registration, member.stats
    return EngineStatus(
        engine_id=registration.engine_id,
        incarnation=registration.incarnation,
        address=registration.address,
        state=engine_state(member),
        num_waiting_reqs=stats.num_waiting_reqs,
        num_running_reqs=stats.num_running_reqs,
        kv_cache_usage=stats.kv_cache_usage,
        seconds_since_last_step=stats.seconds_since_last_step,
        index=member.index,
        model=registration.model,
        pool=registration.pool,
        max_num_seqs=registration.max_num_seqs,
        loras=member.loras,
        role=registration.role,
        kv_address=registration.kv_address,
        kv_fingerprint=registration.kv_fingerprint,
    )


def engine_state(member: Member) -> EngineState:
    """Return the state of an engine.

    If the engine reports that it is wedged, the state is WEDGED, even if the engine drains. Otherwise the state is
    DRAINING or SERVING.
    """
    if member.stats.wedged:
        return EngineState.WEDGED
    return EngineState.DRAINING if member.draining else EngineState.SERVING
