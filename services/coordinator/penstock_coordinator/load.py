"""How loaded the engines are, and whether they get on with it."""

from penstock_common.types.cluster import EngineState, EngineStatus
from penstock_coordinator.membership import Member


def engine_status(member: Member) -> EngineStatus:
    """What the frontends are told of one engine."""
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
    )


def engine_state(member: Member) -> EngineState:
    """WEDGED when the engine says so, draining or not."""
    if member.stats.wedged:
        return EngineState.WEDGED
    return EngineState.DRAINING if member.draining else EngineState.SERVING
