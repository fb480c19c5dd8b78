"""Computation in torch of how much earlier tokens have decayed at later tokens of a request. There is one decay per
head, one per row of a head's state, or decays by constant rates.
"""

from typing import Protocol

import torch

_NEVER = float("-inf")


class Decays(Protocol):
    """Interface of decays from the closed state, and from all open rows (inputs of the tokens after that state), to the
    rows of new tokens.
    """

    def pairs(self, vectors: torch.Tensor) -> torch.Tensor:
        """Return the products ``[heads, new, rows]`` of the new rows' vectors ``[heads, new, key size]`` with the
        decayed keys of all rows. Products with later rows are 0.
        """

    def read(self, vectors: torch.Tensor, closed: torch.Tensor) -> torch.Tensor:
        """Return the products ``[heads, new, value size]`` of the new rows' vectors ``[heads, new, key size]`` with the
        decayed closed state.
        """


def between(new: torch.Tensor, rows: torch.Tensor, keys: torch.Tensor) -> Decays:
    """Return the decays from the closed state and from all rows to the new rows. The new rows are the last of all rows.

    Args:
        new: Sums of the decays from the closed state to each new row, ``[new, heads]`` or ``[new, heads, key size]``.
        rows: Sums of the decays from the closed state to each row, ``[rows, heads]`` or ``[rows, heads, key size]``.
        keys: Keys of all rows, ``[heads, rows, key size]``.
    """
    return _HeadDecays(new, rows, keys) if new.dim() == 2 else _RowDecays(new, rows, keys)


def _later(new: int, rows: int, device: torch.device) -> torch.Tensor:
    """Return a mask of the rows that come after each new row, bool ``[new, rows]``."""
    return torch.ones(new, rows, dtype=torch.bool, device=device).triu(rows - new + 1)


class _HeadDecays:
    """Decays with one decay per head. The class uses only differences between a row's sum and an earlier row's sum, so
    no exponent is greater than 0.
    """

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
    """Decays with one decay per row of the state. In a product of two vectors, each of the summed products has a
    different decay.
    """

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
    """Return the state of a selective scan after each token. The states are computed one after the other, from the
    state before the first token.

    Args:
        state: State before the first token, ``[heads, key size]``.
        rates: ``[heads, key size]``.
        keys: ``[tokens, 1, key size]``.
        updates: ``[tokens, heads, 1]``.
        decays: Decays of the tokens, ``[tokens, heads]``.

    Returns:
        The states, ``[tokens, heads, key size]``.
    """
    states = keys * updates
    factors = (decays[:, :, None] * rates).exp()
    for token in range(len(states)):
        state = states[token].addcmul_(factors[token], state)
    return states
