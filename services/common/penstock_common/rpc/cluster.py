"""``penstock.coordinator.v1.ClusterView`` to the domain and back."""

import msgspec

from penstock.common.v1 import control_pb2
from penstock.coordinator.v1 import messages_pb2
from penstock_common.rpc.data_parallel import pool_group_from_proto, pool_group_to_proto
from penstock_common.rpc.kv_transfer import role_from_proto, role_to_proto
from penstock_common.rpc.stats import held_from_proto, held_to_proto
from penstock_common.types.cluster import DEFAULT_POOL, ClusterView, EngineLoads, EngineState, EngineStatus, ViewDelta

_STATES = {state.value: state for state in EngineState}


def view_from_proto(message: messages_pb2.ClusterView) -> ClusterView:
    """The domain's view. An engine in a state that this version does not know takes no requests: LOADING."""
    return ClusterView(
        engines=tuple(engine_from_proto(engine) for engine in message.engines),
        groups=tuple(pool_group_from_proto(group) for group in message.groups),
    )


def view_to_proto(view: ClusterView) -> messages_pb2.ClusterView:
    """The message for this view."""
    message = groups_to_proto(view)
    message.engines.extend(engine_to_proto(engine) for engine in view.engines)
    return message


def groups_to_proto(view: ClusterView) -> messages_pb2.ClusterView:
    """The message for the groups of a view alone."""
    message = messages_pb2.ClusterView(groups=[pool_group_to_proto(group) for group in view.groups])
    if len(view.groups) == 1:  # for readers of an earlier version
        only = view.groups[0].view
        message.group_epoch, message.current_wave, message.engines_running = only.group.epoch, only.wave, only.running
    return message


def delta_to_proto(delta: ViewDelta, *, base_version: int) -> messages_pb2.ViewDelta:
    """The message for what has changed since the view of ``base_version``."""
    return messages_pb2.ViewDelta(
        base_version=base_version,
        removed=delta.removed,
        changed=[engine_to_proto(engine) for engine in delta.changed],
        loads=messages_pb2.EngineLoads(**msgspec.structs.asdict(delta.loads)) if delta.loads.indices else None,
        loras=[messages_pb2.EngineLoras(index=index, loras=held_to_proto(held)) for index, held in delta.loras.items()],
    )


def delta_from_proto(message: messages_pb2.ViewDelta) -> ViewDelta:
    """What has changed since the view of ``message.base_version``."""
    loads = message.loads
    return ViewDelta(
        removed=message.removed,
        changed=[engine_from_proto(engine) for engine in message.changed],
        loads=EngineLoads(
            indices=loads.indices,
            num_waiting_reqs=loads.num_waiting_reqs,
            num_running_reqs=loads.num_running_reqs,
            kv_cache_usage=loads.kv_cache_usage,
            seconds_since_last_step=loads.seconds_since_last_step,
        ),
        loras={each.index: held_from_proto(each.loras) for each in message.loras},
    )


def engine_from_proto(message: control_pb2.EngineStatus) -> EngineStatus:
    """One engine of a view."""
    return EngineStatus(
        engine_id=message.engine_id,
        incarnation=message.incarnation,
        address=message.address,
        state=_STATES.get(message.state, EngineState.LOADING),
        num_waiting_reqs=message.num_waiting_reqs,
        num_running_reqs=message.num_running_reqs,
        kv_cache_usage=message.kv_cache_usage,
        seconds_since_last_step=message.seconds_since_last_step,
        index=message.index,
        model=message.model,
        pool=message.pool or DEFAULT_POOL,
        max_num_seqs=message.max_num_seqs,
        loras=held_from_proto(message.loras) if message.HasField("loras") else None,
        role=role_from_proto(message.role),
        kv_address=message.kv_address,
        kv_fingerprint=message.kv_fingerprint,
    )


def engine_to_proto(engine: EngineStatus) -> control_pb2.EngineStatus:
    """The message for one engine."""
    values = msgspec.structs.asdict(engine)
    if engine.loras is not None:
        values["loras"] = held_to_proto(engine.loras)
    values["role"] = role_to_proto(engine.role)
    return control_pb2.EngineStatus(**values)
