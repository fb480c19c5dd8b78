"""The tokens that a device has chosen last, which it takes as inputs before the host knows them."""

import torch

from penstock_enginecore.attention.base import IntArray
from penstock_enginecore.forward.base import FedTokens
from penstock_enginecore.forward.upload import to_device

_INITIAL_ROWS = 1024
"""More than that move what steps were captured with, which are captured anew."""


class NewestTokens:
    """By row of the batch, on the device; behind them one that is nobody's."""

    def __init__(self, device: torch.device) -> None:
        self._ids = torch.zeros(_INITIAL_ROWS + 1, dtype=torch.int32, device=device)

    def room_for(self, rows: IntArray) -> torch.Tensor:
        """int32 ``[more than any of rows, and one]``: the same memory, unless it has become too small."""
        most = int(rows.max(initial=0))
        if most >= len(self._ids) - 1:
            grown = self._ids.new_zeros((1 << most.bit_length()) + 1)
            grown[: len(self._ids) - 1] = self._ids[:-1]
            self._ids = grown
        return self._ids

    def keep(self, rows: IntArray, token_ids: torch.Tensor) -> None:
        """Make ``token_ids`` int32 ``[n]`` the newest of ``rows`` int64 ``[n]``, behind the work that chooses them."""
        self.room_for(rows).index_copy_(0, to_device(rows, self._ids.device), token_ids)

    def feed(self, places: IntArray, rows: IntArray) -> FedTokens | None:
        """The newest tokens of ``rows`` for ``places`` of a flat batch; None for none."""
        return FedTokens(self._ids, places, rows) if len(places) else None
