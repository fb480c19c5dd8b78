"""Log-probabilities of consecutive positions as flat arrays."""

import msgspec


class Logprobs(msgspec.Struct):
    """Field for field ``penstock.common.v1.Logprobs``, as far as engines fill it.

    Entries of position i are ``offsets[i]`` to ``offsets[i + 1]`` of the three arrays; the first of them is the chosen
    token, the likeliest follow. ``logprobs``: natural logarithms of the raw distribution, before penalties and temperature.
    ``ranks``: 1 is the likeliest of the vocabulary. ``tokens``: the text of each entry, empty until the frontend fills it.
    """

    offsets: list[int] = msgspec.field(default_factory=lambda: [0])
    token_ids: list[int] = []
    logprobs: list[float] = []
    ranks: list[int] = []
    tokens: list[str] = []

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def add(self, token_ids: list[int], logprobs: list[float], ranks: list[int]) -> None:
        """Append one position."""
        self.token_ids += token_ids
        self.logprobs += logprobs
        self.ranks += ranks
        self.offsets.append(len(self.token_ids))

    def extend(self, other: "Logprobs") -> None:
        """Append the positions of ``other``."""
        base = len(self.token_ids)
        self.token_ids += other.token_ids
        self.logprobs += other.logprobs
        self.ranks += other.ranks
        self.tokens += other.tokens
        self.offsets += [base + offset for offset in other.offsets[1:]]

    def slice(self, start: int, stop: int) -> "Logprobs":
        """A copy of positions ``start`` to ``stop``."""
        first, last = self.offsets[start], self.offsets[stop]
        return Logprobs(
            offsets=[offset - first for offset in self.offsets[start : stop + 1]],
            token_ids=self.token_ids[first:last],
            logprobs=self.logprobs[first:last],
            ranks=self.ranks[first:last],
            tokens=self.tokens[first:last],
        )
