"""Hidden states of a prompt become what its task needs, also when a prompt is computed in several steps."""

from collections.abc import Callable
from typing import Protocol

import torch

PerToken = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Token ids ``[tokens]`` and hidden states ``[tokens, hidden size]`` to a row per token."""


class Accumulator(Protocol):
    """Takes a prompt's hidden states in order, then says what they amount to."""

    def add(self, token_ids: torch.Tensor, hidden: torch.Tensor) -> None:
        """The next tokens: ids int64 ``[tokens]``, hidden states ``[tokens, hidden size]``."""

    def rows(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Token ids and vectors ``[rows, size]``: what is left of all that was added."""


class FirstToken:
    """Keeps the first token, which BERT's family calls CLS."""

    def __init__(self) -> None:
        self._kept: tuple[torch.Tensor, torch.Tensor] | None = None

    def add(self, token_ids: torch.Tensor, hidden: torch.Tensor) -> None:
        """Takes the first token of the first call."""
        if self._kept is None:
            self._kept = token_ids[:1], hidden[:1].clone()

    def rows(self) -> tuple[torch.Tensor, torch.Tensor]:
        """One row. RuntimeError before the first token."""
        return _given(self._kept)


class LastToken:
    """Keeps the last token that is not ``padding``, or the first token where there is none: as transformers' heads do."""

    def __init__(self, padding: int | None = None) -> None:
        self._padding = padding
        self._kept: tuple[torch.Tensor, torch.Tensor] | None = None

    def add(self, token_ids: torch.Tensor, hidden: torch.Tensor) -> None:
        """Takes the last real token of each call in place of the one before."""
        last = len(token_ids) - 1
        if self._padding is not None:
            real = (token_ids != self._padding).nonzero()
            if not len(real) and self._kept is not None:
                return
            last = int(real[-1]) if len(real) else 0
        self._kept = token_ids[last : last + 1], hidden[last : last + 1].clone()

    def rows(self) -> tuple[torch.Tensor, torch.Tensor]:
        """One row. RuntimeError before the first token."""
        return _given(self._kept)


class Mean:
    """Averages all tokens, in float32."""

    def __init__(self) -> None:
        self._sum: torch.Tensor | None = None
        self._count = 0
        self._last = torch.zeros(0, dtype=torch.int64)

    def add(self, token_ids: torch.Tensor, hidden: torch.Tensor) -> None:
        """Adds to the sum."""
        total = hidden.float().sum(dim=0, keepdim=True)
        self._sum = total if self._sum is None else self._sum + total
        self._count += len(token_ids)
        self._last = token_ids[-1:]

    def rows(self) -> tuple[torch.Tensor, torch.Tensor]:
        """One row, with the id of the last token. RuntimeError before the first token."""
        _, total = _given(None if self._sum is None else (self._last, self._sum))
        return self._last, total / self._count


class EveryToken:
    """Keeps a row per token, those of each call reduced by ``transform`` at once."""

    def __init__(self, transform: PerToken) -> None:
        self._transform = transform
        self._token_ids: list[torch.Tensor] = []
        self._rows: list[torch.Tensor] = []

    def add(self, token_ids: torch.Tensor, hidden: torch.Tensor) -> None:
        """Reduces and keeps the rows."""
        self._token_ids.append(token_ids)
        self._rows.append(self._transform(token_ids, hidden))

    def rows(self) -> tuple[torch.Tensor, torch.Tensor]:
        """As many rows as tokens."""
        return torch.cat(self._token_ids), torch.cat(self._rows)


def _given(kept: tuple[torch.Tensor, torch.Tensor] | None) -> tuple[torch.Tensor, torch.Tensor]:
    if kept is None:
        raise RuntimeError("a prompt without tokens cannot be pooled")
    return kept
