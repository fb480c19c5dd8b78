"""How long it takes to bring blocks and to compute tokens, as measured. Seconds; 0 while nothing was measured."""

from penstock_common.types.kv_transfer import KvMedium

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
