"""What the frontends are sent of each engine: its state and its load."""

from collections.abc import Sequence

from penstock_common.types.cluster import EngineRegistration, EngineState, EngineStatus
from penstock_common.types.outputs import SchedulerStats
from penstock_coordinator.membership import Member


class Statuses:
    """The entries of all engines, each made anew only when what it is made of has changed: the same engine in two views is the
    same object in both, unless there is something to tell.
    """

    def __init__(self) -> None:
        self._known: dict[str, tuple[EngineRegistration, SchedulerStats, bool, EngineStatus]] = {}

    def of(self, members: Sequence[Member]) -> tuple[EngineStatus, ...]:
        """The entries of these, which are all that there are."""
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
    """The entry of one engine in the view."""
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
    """WEDGED where the engine reports it, whether it drains or not; else DRAINING or SERVING."""
    if member.stats.wedged:
        return EngineState.WEDGED
    return EngineState.DRAINING if member.draining else EngineState.SERVING
