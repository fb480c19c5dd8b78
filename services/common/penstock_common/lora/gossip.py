"""What two ends of a stream tell each other of registrations: each what the other does not know. Does no I/O."""

from collections.abc import Iterable

from penstock_common.lora.registration import LoraRegistration
from penstock_common.lora.registry import LoraRegistry

MAX_REGISTRATIONS = 256
"""In one message."""


class Gossip:
    """One end of one stream. What was heard is not told back, and what was told is not told again."""

    def __init__(self, registry: LoraRegistry) -> None:
        self._registry = registry
        self._known: dict[str, LoraRegistration] = {}
        """By name, what the other end has told of the changes that it was not told yet."""
        self._place = 0
        """Of the last change that was told, or need not be."""

    def hear(self, registrations: Iterable[LoraRegistration]) -> list[LoraRegistration]:
        """Take what the other end tells. Returns what counts here from now on."""
        heard = list(registrations)
        changed = self._registry.merge(heard)
        self._known.update((each.name, each) for each in heard if self._registry.is_news(each, self._place))
        return changed

    def tell(self) -> list[LoraRegistration]:
        """What the other end is to be told next, at most MAX_REGISTRATIONS; empty: it knows everything."""
        news: list[LoraRegistration] = []
        for place, each in self._registry.changes_since(self._place):
            if len(news) == MAX_REGISTRATIONS:
                break
            self._place = place
            if self._known.pop(each.name, None) != each:
                news.append(each)
        return news
