"""Messages between frontends, callers and ranks, and checks for messages that are too old to have an effect."""

from typing import Any, NamedTuple

from penstock_common.types.data_parallel import (
    FirstRequest,
    Pauses,
    PeerLost,
    PrepareFailed,
    RankReport,
    Reconfigure,
    StartDpWave,
    StartWave,
    WaveComplete,
)
from penstock_coordinator.group import GroupMachine
from penstock_enginecore.data_parallel.core.rank import Phase
from tests.modelcheck.engine import Engine


class Add(NamedTuple):
    """Message of a frontend to a rank: a new request."""

    request: int
    epoch: int
    wave: int


class PauseCall(NamedTuple):
    """Message of a caller to a rank: a pause."""

    pauses: Pauses


class ResumeCall(NamedTuple):
    pauses: Pauses


NAMES = {
    StartWave: "start_wave",
    WaveComplete: "wave_complete",
    FirstRequest: "first_request",
    RankReport: "report",
    PeerLost: "peer_lost",
    PrepareFailed: "prepare_failed",
}


def is_stale_for_engine(engine: Engine, message: Any) -> bool:
    """Return whether the message has no effect now or later."""
    rank = engine.rank
    if isinstance(message, Reconfigure):
        begun = message.group == rank.standby and rank.ready and not message.base
        return message.group.epoch <= max(rank.group.epoch, rank.standby.epoch) and not begun
    if isinstance(message, PauseCall | ResumeCall):
        return message.pauses <= rank.pauses
    if not isinstance(message, StartDpWave):
        return False
    there, here = (message.epoch, message.wave), (rank.group.epoch, rank.wave)
    within = rank.phase in (Phase.EXCHANGE, Phase.FORWARD) and not rank.opening
    return there < here or (there == here and within and message.pauses <= rank.pauses)


def is_stale_for_others(part: Any, message: Any) -> bool:
    """Return whether the message has no effect on the coordinator or a frontend, now or later.

    A coordinator still answers a rank in an older epoch.
    """
    view = part.view
    if not isinstance(message, StartWave | WaveComplete | FirstRequest):
        return False
    there, here = (message.epoch, message.wave), (view.group.epoch, view.wave)
    answered = isinstance(message, StartWave) and isinstance(part, GroupMachine) and there[0] != here[0]
    return (there < here and not answered) or (there == here and isinstance(message, FirstRequest) and view.running)
