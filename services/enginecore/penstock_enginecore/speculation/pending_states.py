"""Hidden states of a request's positions that a head has not computed with yet."""

import torch


class PendingStates:
    """Those of positions ``start`` to ``end``, one behind the other."""

    def __init__(self, start: int) -> None:
        self.start = self.end = start
        self._parts: list[torch.Tensor] = []

    def __len__(self) -> int:
        return self.end - self.start

    def add(self, position: int, states: torch.Tensor) -> None:
        """``states`` ``[tokens, width]`` from ``position`` on. What was there from then on was of tokens that did not hold; where
        positions before it are missing, all that is there is of no use.
        """
        if not self.start <= position <= self.end:
            self._parts, self.start, self.end = [], position, position
        self._cut(position - self.start)
        shared = states.untyped_storage().nbytes() > 2 * states.nbytes  # a whole step would stay for a few rows of it
        self._parts.append(states.clone() if shared else states)
        self.end = position + len(states)

    def take(self, count: int) -> torch.Tensor:
        """The first ``count``, which are gone then: ``[count, width]``."""
        whole = self._parts[0] if len(self._parts) == 1 else torch.cat(self._parts)
        self._parts = [whole[count:]] if count < len(self) else []
        self.start += count
        return whole[:count]

    def _cut(self, count: int) -> None:
        """Keep the first ``count``."""
        kept: list[torch.Tensor] = []
        for part in self._parts:
            if count <= 0:
                break
            kept.append(part[:count])
            count -= len(kept[-1])
        self._parts = kept
        self.end = self.start + sum(map(len, kept))
