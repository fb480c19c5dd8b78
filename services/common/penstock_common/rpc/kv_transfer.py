"""Messages of ``penstock.common.v1`` that say who has keys and values, and what an engine is preferred for."""

from penstock.common.v1 import kv_pb2
from penstock.enginecore.v1 import messages_pb2 as pb
from penstock_common.types.kv_transfer import EngineRole, KvMedium, KvSource
from penstock_common.types.outputs import EngineCoreOutput

_ROLES = {role.value: role for role in EngineRole}
_MEDIA = {medium.value: medium for medium in KvMedium}


def role_from_proto(value: int) -> EngineRole:
    """The role; one that is not said, or that this version does not know, is BOTH."""
    return _ROLES.get(value, EngineRole.BOTH)


def role_to_proto(role: EngineRole) -> "kv_pb2.EngineRole.ValueType":
    """The message's value."""
    return kv_pb2.EngineRole.ValueType(role.value)


def medium_from_proto(value: int) -> KvMedium | None:
    """The medium; one that is not said is the device, None stands for one that this version does not know."""
    return _MEDIA.get(value) if value else KvMedium.DEVICE


def medium_to_proto(medium: KvMedium) -> "kv_pb2.KvMedium.ValueType":
    """The message's value; the device goes unsaid, as before there were others."""
    return kv_pb2.KvMedium.ValueType(0 if medium is KvMedium.DEVICE else medium.value)


def source_from_proto(message: kv_pb2.KvSource) -> KvSource:
    """Who keeps the blocks."""
    return KvSource(
        engine_id=message.engine_id,
        incarnation=message.incarnation,
        address=message.address,
        lease_id=message.lease_id,
        num_tokens=message.num_tokens,
        fingerprint=message.fingerprint,
    )


def source_to_proto(source: KvSource) -> kv_pb2.KvSource:
    """The message for it."""
    return kv_pb2.KvSource(
        engine_id=source.engine_id,
        incarnation=source.incarnation,
        address=source.address,
        lease_id=source.lease_id,
        num_tokens=source.num_tokens,
        fingerprint=source.fingerprint,
    )


def fill_kv(message: pb.EngineCoreOutput, output: EngineCoreOutput) -> None:
    """Write who keeps the request's keys and values, and what a plugin's connector says of them."""
    if output.kv_source is not None:
        message.kv_source.CopyFrom(source_to_proto(output.kv_source))
    message.kv_transfer_params = output.kv_params


def read_kv(message: pb.EngineCoreOutput, output: EngineCoreOutput) -> None:
    """The reverse of ``fill_kv``."""
    if message.HasField("kv_source"):
        output.kv_source = source_from_proto(message.kv_source)
    if message.kv_transfer_params:
        output.kv_params = message.kv_transfer_params
