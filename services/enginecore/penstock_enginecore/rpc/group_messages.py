"""What an engine and its coordinator tell each other, as messages; most of it is about the group of a rank."""

from penstock.coordinator.v1 import messages_pb2 as pb
from penstock_common.rpc import data_parallel
from penstock_common.rpc.kv_transfer import role_to_proto
from penstock_common.types.cluster import EngineRegistration
from penstock_common.types.data_parallel import (
    GroupRegistration,
    PeerLost,
    PrepareFailed,
    Reconfigure,
    StartDpWave,
    StartWave,
    WaveComplete,
)
from penstock_enginecore.data_parallel.core.driver import ToCoordinator
from penstock_enginecore.data_parallel.core.events import Named


def report_to_proto(message: ToCoordinator) -> pb.EngineReport:
    """What the rank says."""
    match message:
        case StartWave():
            return pb.EngineReport(start_wave=data_parallel.wave_to_proto(message))
        case WaveComplete():
            return pb.EngineReport(wave_complete=data_parallel.wave_to_proto(message))
        case PeerLost():
            return pb.EngineReport(peer_lost=pb.PeerLost(epoch=message.epoch))
        case PrepareFailed():
            return pb.EngineReport(prepare_failed=pb.PrepareFailed(epoch=message.epoch))
        case _:
            return pb.EngineReport(rank_report=data_parallel.report_to_proto(message))


def register_to_proto(engine: EngineRegistration) -> pb.Register:
    """Return the message with which an engine introduces itself."""
    return pb.Register(
        engine_id=engine.engine_id,
        incarnation=engine.incarnation,
        address=engine.address,
        model=engine.model,
        draining=engine.draining,
        pool=engine.pool,
        max_num_seqs=engine.max_num_seqs,
        group=None if engine.group is None else registration_to_proto(engine.group),
        role=role_to_proto(engine.role),
        kv_address=engine.kv_address,
        kv_fingerprint=engine.kv_fingerprint,
    )


def registration_to_proto(group: GroupRegistration) -> pb.GroupRegistration:
    """What the rank brings along."""
    return pb.GroupRegistration(
        size=group.size,
        min_size=group.min_size,
        waits=group.waits,
        meeting_address=group.meeting_address,
        parallel_config=group.parallel_config,
        report=data_parallel.report_to_proto(group.report),
        target_size=group.target_size,
        max_size=group.max_size,
    )


def start_dp_wave_from_proto(message: pb.StartDpWave, rank: str) -> StartDpWave:
    """The coordinator wants ``rank`` in a wave."""
    return StartDpWave(rank, message.group_epoch, message.wave, data_parallel.pauses_from_proto(message.pauses))


def named_from_proto(message: pb.Reconfigure, rank: str) -> Named:
    """The coordinator wants ``rank`` in a group."""
    command = Reconfigure(
        engine=rank,
        group=data_parallel.group_from_proto(message.group),
        wave=message.wave,
        pauses=data_parallel.pauses_from_proto(message.pauses),
        base=message.base_epoch,
        target_size=message.target_size,
    )
    return Named(command, data_parallel.meetings_from_proto(message.group))
