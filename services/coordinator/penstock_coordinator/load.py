"""What the frontends are sent of each engine: its state and its load."""

from penstock_common.types.cluster import EngineState, EngineStatus
from penstock_coordinator.membership import Member


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
    )


def engine_state(member: Member) -> EngineState:
    """WEDGED where the engine reports it, whether it drains or not; else DRAINING or SERVING."""
    if member.stats.wedged:
        return EngineState.WEDGED
    return EngineState.DRAINING if member.draining else EngineState.SERVING
