"""What the ranks of a group agree on in an exchange."""

from collections.abc import Sequence

import msgspec

from penstock_common.types.data_parallel import PauseMode, Pauses
from penstock_enginecore.data_parallel.core.row import Row


class Agreement(msgspec.Struct, frozen=True):
    """What follows from the rows, for every rank alike."""

    wave: int
    pauses: Pauses
    run: bool
    """Whether all compute a step; otherwise the wave is over."""
    switch_to: int
    """The epoch that all switch to now; 0: none."""


def agree(rows: Sequence[Row]) -> Agreement:
    """A pure function of the gathered rows.

    The newest pause or resume that any rank knows is that of all. A pause that waits lets a wave go on until nobody has work.
    An epoch begins when every rank is prepared for it.
    """
    pauses = max(row.pauses for row in rows)
    prepared = {row.prepared for row in rows}
    switch_to = prepared.pop() if len(prepared) == 1 else 0
    stopped = pauses.on and pauses.mode is not PauseMode.WAIT
    return Agreement(
        wave=max(row.wave for row in rows),
        pauses=pauses,
        run=not stopped and not switch_to and any(row.unfinished for row in rows),
        switch_to=switch_to,
    )
