"""The tokens that a device has chosen last, which it takes as inputs before the host knows them."""

import torch

from penstock_enginecore.attention.base import IntArray
from penstock_enginecore.forward.base import FedTokens
from penstock_enginecore.forward.upload import to_device

_INITIAL_ROWS = 16


class NewestTokens:
    """By row of the batch, on the device."""

    def __init__(self, device: torch.device) -> None:
        self._ids = torch.zeros(_INITIAL_ROWS, dtype=torch.int32, device=device)

    def keep(self, rows: IntArray, token_ids: torch.Tensor) -> None:
        """Make ``token_ids`` int32 ``[n]`` the newest of ``rows`` int64 ``[n]``, behind the work that chooses them."""
        if int(rows.max()) >= len(self._ids):
            grown = self._ids.new_zeros(1 << int(rows.max()).bit_length())
            grown[: len(self._ids)] = self._ids
            self._ids = grown
        self._ids.index_copy_(0, to_device(rows, self._ids.device), token_ids)

    def feed(self, places: IntArray, rows: IntArray) -> FedTokens | None:
        """The newest tokens of ``rows`` for ``places`` of a flat batch; None for none."""
        return FedTokens(self._ids, places, rows) if len(places) else None
