"""Messages of ``penstock.coordinator.v1`` to the domain and back: views of the cluster, and registrations of LoRA adapters."""

from collections.abc import Iterable

import msgspec

from penstock.common.v1 import control_pb2
from penstock.coordinator.v1 import messages_pb2
from penstock.coordinator.v1 import messages_pb2 as pb
from penstock_common.errors import InvalidArgument
from penstock_common.lora_registry import MAX_REGISTRATIONS, LoraRefusal, LoraRegistration
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


# Registrations of LoRA adapters to ``penstock.coordinator.v1`` and back: both ends of the wire in one place.

MAX_NAME_LENGTH = 256
MAX_PATH_LENGTH = 4096
MAX_VERSION = 2**62
"""There is room for more above it: nobody can take the last one."""
_DIGEST_SIZE = 16


def registrations_to_proto(
    registrations: Iterable[LoraRegistration], refused: Iterable[LoraRefusal] = ()
) -> pb.LoraRegistrations:
    """The message of these, at most MAX_REGISTRATIONS of either."""
    return pb.LoraRegistrations(
        registrations=[
            pb.LoraRegistration(
                name=each.name,
                version=each.version,
                frontend_id=each.frontend_id,
                unloaded=each.unloaded,
                path=each.path,
                digest=each.digest,
                pinned=each.pinned,
            )
            for each in registrations
        ],
        refused=[pb.LoraRefusal(name=each.name, reason=each.reason) for each in refused],
    )


def registrations_from_proto(message: pb.LoraRegistrations) -> list[LoraRegistration]:
    """The registrations. Raises InvalidArgument for what no frontend may say."""
    count = len(message.registrations)
    if count > MAX_REGISTRATIONS:
        raise InvalidArgument(
            f"loras.registrations has {count} entries; it must have at most {MAX_REGISTRATIONS}",
            field="loras.registrations",
        )
    return [_registration(each, f"loras.registrations[{i}]") for i, each in enumerate(message.registrations)]


def _registration(message: pb.LoraRegistration, path: str) -> LoraRegistration:
    _check(f"{path}.name", len(message.name), 1, MAX_NAME_LENGTH, "characters")
    _check(f"{path}.frontend_id", len(message.frontend_id), 1, MAX_NAME_LENGTH, "characters")
    _check(f"{path}.version", message.version, 1, MAX_VERSION)
    if message.unloaded:
        return LoraRegistration(
            name=message.name, version=message.version, frontend_id=message.frontend_id, unloaded=True
        )
    _check(f"{path}.path", len(message.path), 1, MAX_PATH_LENGTH, "characters")
    _check(f"{path}.digest", len(message.digest), _DIGEST_SIZE, _DIGEST_SIZE, "bytes")
    return LoraRegistration(
        name=message.name,
        version=message.version,
        frontend_id=message.frontend_id,
        path=message.path,
        digest=message.digest,
        pinned=message.pinned,
    )


def _check(field: str, value: int, low: int, high: int, what: str = "") -> None:
    if not low <= value <= high:
        has = f"has {value} {what}; it must have" if what else f"is {value}; it must be"
        limit = f"{low}" if low == high else f"from {low} to {high}"
        raise InvalidArgument(f"{field} {has} {limit}", field=field)
