"""What is told of blocks that were brought, or were not."""

from collections.abc import Callable
from typing import NamedTuple

from penstock_common.observability.tracing import Headers
from penstock_common.types.kv_transfer import KvMedium

WHOLE = "whole"
PART = "part"
"""Some of the blocks came, and nothing is known to have failed."""
NOTHING = "nothing"
ABANDONED = "abandoned"
"""Nobody wanted the rest of it."""
OUTCOMES = (WHOLE, PART, NOTHING, ABANDONED)


class Transfer(NamedTuple):
    """Blocks of one request from one medium, which is over. ``headers``: the request's trace context. ``transport``: between
    engines, empty where none was agreed upon, and for the engine's own media. Times are monotonic seconds. ``outcome``: one of
    ``OUTCOMES``, or why blocks did not come.
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
        """The transport, or else the medium, as metrics call it."""
        return self.transport or self.medium.name.lower()

    @property
    def failed(self) -> bool:
        """Whether something went wrong: what came in part from an engine's own media was damaged."""
        return self.outcome not in (WHOLE, ABANDONED)


Observe = Callable[[Transfer], None]
"""Is told of each, on whichever thread."""


def outcome_of(num_wanted: int, num_blocks: int) -> str:
    """By how many came."""
    return WHOLE if num_blocks >= num_wanted else PART if num_blocks else NOTHING
