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
        """By name, the last that the other end has told or was told."""
        self._place = 0
        """Of the last change that was told, or need not be."""

    def hear(self, registrations: Iterable[LoraRegistration]) -> list[LoraRegistration]:
        """Take what the other end tells. Returns what counts here from now on."""
        heard = list(registrations)
        self._known.update((each.name, each) for each in heard)
        return self._registry.merge(heard)

    def tell(self) -> list[LoraRegistration]:
        """What the other end is to be told next, at most MAX_REGISTRATIONS; empty: it knows everything."""
        news: list[LoraRegistration] = []
        for place, each in self._registry.changes_since(self._place):
            if len(news) == MAX_REGISTRATIONS:
                break
            self._place = place
            if self._known.get(each.name) != each:
                self._known[each.name] = each
                news.append(each)
        return news
