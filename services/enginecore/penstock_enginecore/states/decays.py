"""Decays between the open rows of a request in torch: for each head, for each row of its state, or by constant rates."""

from typing import Protocol

import torch

_NEVER = float("-inf")


class Decays(Protocol):
    """Decays from the closed state and from all open rows to the new rows."""

    def pairs(self, vectors: torch.Tensor) -> torch.Tensor:
        """Return the decayed products of the new rows' vectors ``[heads, new, key size]`` with the keys of all rows,
        which are ``[heads, new, rows]``. Products with later rows are 0.
        """

    def read(self, vectors: torch.Tensor, closed: torch.Tensor) -> torch.Tensor:
        """Return the products of vectors ``[heads, new, key size]`` with the decayed closed state, ``[heads, new, value
        size]``.
        """


def between(new: torch.Tensor, rows: torch.Tensor, keys: torch.Tensor) -> Decays:
    """Return the decays from the closed state and all rows to the new rows, which are the last rows.

    Args:
        new: Sums of decays of the new rows, ``[new, heads]`` or ``[new, heads, key size]``.
        rows: Sums of decays of all rows, ``[rows, heads]`` or ``[rows, heads, key size]``.
        keys: Keys of all rows, ``[heads, rows, key size]``.
    """
    return _HeadDecays(new, rows, keys) if new.dim() == 2 else _RowDecays(new, rows, keys)


def _later(new: int, rows: int, device: torch.device) -> torch.Tensor:
    """Return which rows come after each new row, bool ``[new, rows]``."""
    return torch.ones(new, rows, dtype=torch.bool, device=device).triu(rows - new + 1)


class _HeadDecays:
    """Decays of heads. Only differences to earlier rows enter, so no exponent is greater than 0."""

    def __init__(self, new: torch.Tensor, rows: torch.Tensor, keys: torch.Tensor) -> None:
        lag = new.T[:, :, None] - rows.T[:, None, :]
        self._weights = lag.masked_fill(_later(len(new), len(rows), lag.device), _NEVER).exp()
        self._since = new.T.exp()[:, :, None]
        self._keys = keys.transpose(1, 2)

    def pairs(self, vectors: torch.Tensor) -> torch.Tensor:
        return vectors @ self._keys * self._weights

    def read(self, vectors: torch.Tensor, closed: torch.Tensor) -> torch.Tensor:
        return self._since * (vectors @ closed)


class _RowDecays:
    """Decays of the rows of a state. A product of two vectors sums over products with different decays."""

    def __init__(self, new: torch.Tensor, rows: torch.Tensor, keys: torch.Tensor) -> None:
        lag = (new[:, None] - rows[None]).permute(2, 0, 1, 3)
        later = _later(len(new), len(rows), lag.device)
        weights = lag.masked_fill(later[:, :, None], _NEVER).exp()
        self._keys = weights * keys[:, None]  # [heads, new, rows, key size]
        self._since = new.transpose(0, 1).exp()

    def pairs(self, vectors: torch.Tensor) -> torch.Tensor:
        return (self._keys @ vectors[..., None])[..., 0]

    def read(self, vectors: torch.Tensor, closed: torch.Tensor) -> torch.Tensor:
        return (vectors * self._since) @ closed


def states_after(
    state: torch.Tensor, rates: torch.Tensor, keys: torch.Tensor, updates: torch.Tensor, decays: torch.Tensor
) -> torch.Tensor:
    """Return the state of a selective scan after each token, from the state before them, one after the other.

    Args:
        state: ``[heads, key size]``.
        rates: ``[heads, key size]``.
        keys: ``[tokens, 1, key size]``.
        updates: ``[tokens, heads, 1]``.
        decays: Decays of the tokens, ``[tokens, heads]``.

    Returns:
        ``[tokens, heads, key size]``.
    """
    states = keys * updates
    factors = (decays[:, :, None] * rates).exp()
    for token in range(len(states)):
        state = states[token].addcmul_(factors[token], state)
    return states
