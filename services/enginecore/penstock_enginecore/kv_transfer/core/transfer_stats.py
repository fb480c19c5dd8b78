"""Outcomes of block transfers, and measured durations that decide whether an engine loads or computes blocks."""

from collections.abc import Callable
from typing import NamedTuple

from penstock_common.observability.tracing import Headers
from penstock_common.types.kv_transfer import KvMedium

WHOLE = "whole"
PART = "part"
"""Outcome of a transfer in which some blocks arrived and other blocks did not arrive, without a known failure."""
NOTHING = "nothing"
ABANDONED = "abandoned"
"""Outcome of a transfer that was ended early, because its remaining blocks were not needed any more."""
OUTCOMES = (WHOLE, PART, NOTHING, ABANDONED)


class Transfer(NamedTuple):
    """A finished transfer of one request's blocks from one medium.

    Attributes:
        headers: The request's trace context, as headers.
        medium: The medium from which the blocks came.
        transport: Name of the transport between the engines. Empty for host memory and disk, and if the engines agreed
            on no transport.
        began: Start time in monotonic seconds.
        ended: End time in monotonic seconds.
        num_wanted: Number of requested blocks.
        num_blocks: Number of blocks that arrived.
        num_bytes: Number of bytes that arrived.
        outcome: An element of ``OUTCOMES``, or the reason why blocks did not arrive.
    """

    headers: Headers
    medium: KvMedium
    transport: str
    began: float
    ended: float
    num_wanted: int
    num_blocks: int
    num_bytes: int
    outcome: str

    @property
    def way(self) -> str:
        """Label for metrics: the transport, or the medium if there is no transport."""
        return self.transport or self.medium.name.lower()

    @property
    def failed(self) -> bool:
        """Whether the transfer failed. A partial transfer from host memory or disk is a failure, because the missing
        blocks are damaged.
        """
        return self.outcome not in (WHOLE, ABANDONED)


Observe = Callable[[Transfer], None]
"""Callback that gets each finished transfer. It may be called on any thread."""


def outcome_of(num_wanted: int, num_blocks: int) -> str:
    """Return the outcome of a transfer, from the number of requested blocks and the number of blocks that arrived."""
    return WHOLE if num_blocks >= num_wanted else PART if num_blocks else NOTHING


# Measured durations in seconds. A duration is 0 if there is no measurement.

_LATEST = 0.25
"""Weight of the latest measurement in the moving average."""
_TRY_AGAIN = 16
"""Interval at which slow loads are tried: one of this many loads that would be slower than computing is made anyway,
because loads may have become faster.
"""


class LoadRates:
    """Measured time to load one block, for each medium."""

    def __init__(self) -> None:
        self._per_block: dict[KvMedium, float] = {}

    def loaded(self, medium: KvMedium, num_blocks: int, seconds: float) -> None:
        """Record that ``num_blocks`` blocks arrived together from a medium after ``seconds``."""
        if num_blocks:
            self._per_block[medium] = _mixed(self._per_block.get(medium, 0.0), seconds / num_blocks)

    def seconds(self, medium: KvMedium, num_blocks: int) -> float:
        """Return an estimate of the time in seconds to load ``num_blocks`` blocks from a medium."""
        return self._per_block.get(medium, 0.0) * num_blocks


class ComputeRate:
    """Measured time to compute one token, and the decision whether a load is faster than computing."""

    def __init__(self) -> None:
        self._per_token = 0.0
        self._num_refused = 0

    def computed(self, num_tokens: int, seconds: float) -> None:
        """Record that a step took ``seconds`` to compute ``num_tokens`` tokens."""
        if num_tokens:
            self._per_token = _mixed(self._per_token, seconds / num_tokens)

    def pays(self, seconds: float, num_tokens: int) -> bool:
        """Return whether to load the blocks of ``num_tokens`` tokens instead of computing them, if the load takes an
        estimated ``seconds``. Some loads that are slower than computing are tried anyway.
        """
        if not self._per_token or seconds < self._per_token * num_tokens:
            return True
        self._num_refused += 1
        return self._num_refused % _TRY_AGAIN == 0


def _mixed(known: float, measured: float) -> float:
    return known + (measured - known) * (_LATEST if known else 1.0)
