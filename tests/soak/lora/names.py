"""What names mean over time, and what a request may therefore get."""

from collections import defaultdict
from dataclasses import dataclass, field
from math import inf


@dataclass
class Span:
    """From ``began`` to ``ended``, both as the clock of whoever writes it down says. ``content``: None is no adapter."""

    began: float
    content: int | None = None
    ended: float = inf

    def meets(self, first: float, last: float) -> bool:
        """Whether it has a moment in common with another."""
        return self.began <= last and first <= self.ended


@dataclass
class _Name:
    meanings: list[Span]
    exchanges: list[Span] = field(default_factory=list)


class Names:
    """What each name may mean at a time. A change may take effect from when it is begun, and has when it is acknowledged: until
    then the name may mean either. Names mean nothing at first.
    """

    def __init__(self) -> None:
        self._names: dict[str, _Name] = defaultdict(lambda: _Name([Span(-inf)]))

    def begin(self, name: str, content: int | None, now: float) -> Span:
        """Somebody is about to say that a name means ``content``."""
        span = Span(now, content)
        self._names[name].meanings.append(span)
        return span

    def done(self, name: str, span: Span, now: float) -> None:
        """That is acknowledged: nothing that it meant before holds any more."""
        for other in self._names[name].meanings:
            if other is not span:
                other.ended = min(other.ended, now)

    def failed(self, span: Span, now: float) -> None:
        """That was refused: the name means what it did, and may have meant the other for a moment."""
        span.ended = now

    def exchange(self, name: str, now: float) -> Span:
        """The files of what a name means are about to be exchanged; set ``ended`` once it means what they are."""
        span = Span(now)
        self._names[name].exchanges.append(span)
        return span

    def now(self, name: str) -> int | None:
        """What a name means, where no change is under way."""
        (current,) = (span.content for span in self._names[name].meanings if span.ended == inf)
        return current

    def possible(self, name: str, first: float, last: float) -> set[int | None]:
        """What a name may have meant at some moment between two."""
        return {span.content for span in self._names[name].meanings if span.meets(first, last)}

    def exchanged(self, name: str, first: float, last: float) -> bool:
        """Whether an engine may have found other files between two moments than it was told of."""
        return any(span.meets(first, last) for span in self._names[name].exchanges)
