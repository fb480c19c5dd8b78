"""What one rank puts into an exchange."""

import msgspec

from penstock_common.types.data_parallel import Pauses


class Row(msgspec.Struct, frozen=True, cache_hash=True):
    """A rank's row of the all-gather. It cannot be taken back: what the rank learns afterwards is in its next one."""

    epoch: int
    wave: int
    step: int
    unfinished: bool
    """Whether a step would advance a request."""
    pauses: Pauses
    """The newest pause or resume that the rank knows."""
    prepared: int = 0
    """The epoch that the rank can switch to; 0: none."""
