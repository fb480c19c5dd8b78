"""History of the adapter names: which contents a name could mean at which time."""

from collections import defaultdict
from dataclasses import dataclass, field
from math import inf


@dataclass
class Span:
    """The time in which a name had one content, by the clock of the caller. ``content`` is None for no adapter."""

    began: float
    content: int | None = None
    ended: float = inf

    def meets(self, first: float, last: float) -> bool:
        """Return whether this span overlaps the time from ``first`` to ``last``."""
        return self.began <= last and first <= self.ended


@dataclass
class _Name:
    meanings: list[Span]
    exchanges: list[Span] = field(default_factory=list)


class Names:
    """Records the possible meanings of each name over time.

    A change may take effect at any time between its request and its acknowledgement. In between, the name may have the
    old or the new meaning. At first, names have no meaning.
    """

    def __init__(self) -> None:
        self._names: dict[str, _Name] = defaultdict(lambda: _Name([Span(-inf)]))

    def begin(self, name: str, content: int | None, now: float) -> Span:
        """Record a request that gives a name the meaning ``content``; None means no adapter."""
        span = Span(now, content)
        self._names[name].meanings.append(span)
        return span

    def done(self, name: str, span: Span, now: float) -> None:
        """Record that the change was acknowledged, which ends all earlier meanings of the name."""
        for other in self._names[name].meanings:
            if other is not span:
                other.ended = min(other.ended, now)

    def failed(self, span: Span, now: float) -> None:
        """Record that the change was refused. The new meaning may have been visible for a moment."""
        span.ended = now

    def exchange(self, name: str, now: float) -> Span:
        """Record that the files of a name are about to be replaced. The caller sets ``ended`` once the name means the
        new files.
        """
        span = Span(now)
        self._names[name].exchanges.append(span)
        return span

    def now(self, name: str) -> int | None:
        """Return the meaning of a name while no change is pending."""
        (current,) = (span.content for span in self._names[name].meanings if span.ended == inf)
        return current

    def possible(self, name: str, first: float, last: float) -> set[int | None]:
        """Return all meanings that the name may have had between the two times."""
        return {span.content for span in self._names[name].meanings if span.meets(first, last)}

    def exchanged(self, name: str, first: float, last: float) -> bool:
        """Return whether the files may have been replaced between the two times without the engine's knowledge."""
        return any(span.meets(first, last) for span in self._names[name].exchanges)
