"""The engine core's record of the media embeddings that workers cache, and utility methods for operators."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from penstock_enginecore.core.model_info import ModelInfo
from penstock_enginecore.core.scheduler.base import Scheduler
from penstock_enginecore.core.utility import utility
from penstock_enginecore.media.core.receiver_cache import MediaInputs

# ``EncoderCache`` is a state machine without I/O. With ``claim`` and ``pin``, callers name the media items that
# requests need. ``room_for`` returns the items that callers must evict before they add a new item.


@dataclass(slots=True)
class _Rows:
    """Record of the embeddings of one media item.

    Attributes:
        num_users: Number of pins: how often the item occurs in running requests that still need the item.
        claims: Keys of waiting requests that need the item before they can start.
    """

    num_embeds: int
    num_users: int = 0
    claims: set[str] = field(default_factory=set)


class EncoderCache:
    """Tracks the media items in the encoder cache by identifier, up to ``capacity`` embeddings in total. The space for
    an item is reserved when the item is queued for encoding.

    Items that running requests need (``pin``) are never evicted. Other items are evicted in least-recently-used order.
    An item that a waiting request needs to start (``claim``) is evicted only for a running request. Running requests
    have priority over waiting requests, because the items that running requests have pinned occupy space that other
    requests need. Running requests never wait for waiting requests, so at least one request can always proceed.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.num_embeds = 0
        """Total number of embeddings of all items in the cache."""
        self._items: dict[str, _Rows] = {}  # In the order of use, the least recently used item first.

    def __len__(self) -> int:
        return len(self._items)

    def __contains__(self, identifier: str) -> bool:
        return identifier in self._items

    @property
    def usage(self) -> float:
        """Used fraction of the capacity, in [0, 1]."""
        return self.num_embeds / self.capacity if self.capacity else 0.0

    @property
    def not_pinned(self) -> list[str]:
        """Identifiers of the items that no running request needs, least recently used first."""
        return [identifier for identifier, rows in self._items.items() if not rows.num_users]

    def is_wanted(self, identifier: str) -> bool:
        """Return whether a running request needs an item or a waiting request has claimed the item. The result is False
        if the item is unknown.
        """
        rows = self._items.get(identifier)
        return rows is not None and bool(rows.num_users or rows.claims)

    def claims(self, identifier: str) -> Sequence[str]:
        """Return the keys of the waiting requests that have claimed an item."""
        rows = self._items.get(identifier)
        return () if rows is None else tuple(rows.claims)

    def room_for(self, num_embeds: int, *, urgent: bool) -> list[str] | None:
        """Return the items that the caller must ``remove`` to free space for ``num_embeds`` embeddings. Return None if
        too few items can be evicted.

        Args:
            num_embeds: Number of embeddings to add.
            urgent: Whether the space is for a running request. For running requests, claimed items may also be evicted.
        """
        room = self.capacity - self.num_embeds
        going: list[str] = []
        if room >= num_embeds:
            return going
        for claimed in (False, True) if urgent else (False,):
            for identifier, rows in self._items.items():
                if not rows.num_users and bool(rows.claims) is claimed:
                    going.append(identifier)
                    room += rows.num_embeds
                    if room >= num_embeds:
                        return going
        return None

    def add(self, identifier: str, num_embeds: int) -> None:
        """Add an item to the cache. Raises ValueError if the item is already in the cache or the cache has too little
        space.
        """
        if identifier in self._items or self.num_embeds + num_embeds > self.capacity:
            raise ValueError(
                f"media item {identifier} is already in the encoder cache, or the cache has too little space for the item"
            )
        self._items[identifier] = _Rows(num_embeds)
        self.num_embeds += num_embeds

    def remove(self, identifier: str) -> None:
        """Remove an item from the cache. Raises ValueError if the item is pinned."""
        if self._items[identifier].num_users:
            raise ValueError(f"media item {identifier} cannot be removed, because a running request needs the item")
        self.num_embeds -= self._items.pop(identifier).num_embeds

    def pin(self, identifier: str) -> None:
        """Record that a running request needs an item, for one occurrence of the item in the request."""
        self._touch(identifier).num_users += 1

    def unpin(self, identifier: str) -> None:
        """Undo one ``pin`` of an item, because the request has computed that occurrence of the item, or does not run
        any more.
        """
        rows = self._touch(identifier)
        if not rows.num_users:
            raise ValueError(f"media item {identifier} is not pinned in the encoder cache")
        rows.num_users -= 1

    def unpin_all(self) -> None:
        """Remove all pins of all items, because no request runs."""
        for rows in self._items.values():
            rows.num_users = 0

    def claim(self, identifier: str, key: str) -> None:
        """Record that a waiting request needs an item before it can start."""
        self._touch(identifier).claims.add(key)

    def unclaim(self, identifier: str, key: str) -> None:
        """Remove a request's claim on an item. If the item is unknown, do nothing."""
        if (rows := self._items.get(identifier)) is not None:
            rows.claims.discard(key)

    def _touch(self, identifier: str) -> _Rows:
        rows = self._items[identifier] = self._items.pop(identifier)
        return rows


def encoder_cache_size(configured: int, step_tokens: int, model: ModelInfo) -> int:
    """Return the size of the encoder cache, as a number of embeddings. The size is the configured size, or the number
    of embeddings of the largest possible item if that number is larger.

    If the configured size is 0, the maximum number of tokens in a step, times two, is used instead. The result is 0 for
    a model without media.
    """
    if not model.media:
        return 0
    return max(configured or 2 * step_tokens, *(info.max_embeds for info in model.media))


class MediaControl:
    """Utility methods for media, for operators. Frontends call these methods by name, as they call the methods of
    ``EngineControl``.
    """

    def __init__(self, scheduler: Scheduler, inputs: MediaInputs) -> None:
        self._scheduler = scheduler
        self._inputs = inputs

    @utility
    def reset_mm_cache(self) -> None:
        """Drop the media inputs (such as pixels) that the engine caches for frontends. Frontends send the inputs again
        when a request needs them. Existing requests keep their inputs.
        """
        self._inputs.clear()

    @utility
    def reset_encoder_cache(self) -> None:
        """Drop the cached embeddings of media. Embeddings that running requests still need stay until the requests have
        used them.
        """
        self._scheduler.reset_encoder_cache()
