"""What is told of blocks that were brought, or were not, and how long that takes beside computing tokens."""

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


# Seconds as measured; 0 while nothing was measured.

_LATEST = 0.25
"""Weight of the latest measurement."""
_TRY_AGAIN = 16
"""Of so many loads that do not seem to pay, one is made: what they take may have changed."""


class LoadRates:
    """What blocks take to come, by where they come from."""

    def __init__(self) -> None:
        self._per_block: dict[KvMedium, float] = {}

    def loaded(self, medium: KvMedium, num_blocks: int, seconds: float) -> None:
        """So many blocks came together."""
        if num_blocks:
            self._per_block[medium] = _mixed(self._per_block.get(medium, 0.0), seconds / num_blocks)

    def seconds(self, medium: KvMedium, num_blocks: int) -> float:
        """What so many blocks are likely to take."""
        return self._per_block.get(medium, 0.0) * num_blocks


class ComputeRate:
    """What tokens take to be computed, and whether it pays to load them."""

    def __init__(self) -> None:
        self._per_token = 0.0
        self._num_refused = 0

    def computed(self, num_tokens: int, seconds: float) -> None:
        """A step has computed so many tokens."""
        if num_tokens:
            self._per_token = _mixed(self._per_token, seconds / num_tokens)

    def pays(self, seconds: float, num_tokens: int) -> bool:
        """Whether to spend so long on loading so many tokens, and not compute them. A load that does not pay is tried all the
        same now and then.
        """
        if not self._per_token or seconds < self._per_token * num_tokens:
            return True
        self._num_refused += 1
        return self._num_refused % _TRY_AGAIN == 0


def _mixed(known: float, measured: float) -> float:
    return known + (measured - known) * (_LATEST if known else 1.0)
