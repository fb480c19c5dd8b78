"""Whether the scheduler hands out work."""

import enum


class PauseState(enum.Enum):
    """RUNNING takes and schedules requests. DRAINING schedules those it had when the pause was asked for; later ones wait
    until it is RUNNING again. PAUSED schedules nothing: what runs keeps its blocks and goes on afterwards.
    """

    RUNNING = "running"
    DRAINING = "draining"
    PAUSED = "paused"
