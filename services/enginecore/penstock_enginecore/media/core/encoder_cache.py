"""Whose embeddings of media the workers keep, how many, and what operators can do about it."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from penstock_enginecore.core.model_info import ModelInfo
from penstock_enginecore.core.scheduler.base import Scheduler
from penstock_enginecore.core.utility import utility
from penstock_enginecore.media.core.receiver_cache import MediaInputs

# A state machine: what is wanted and used goes in, what must go for it comes out.


@dataclass(slots=True)
class _Rows:
    """``num_users``: places in running requests that need them. ``claims``: keys of the waiting requests that they are meant
    for.
    """

    num_embeds: int
    num_users: int = 0
    claims: set[str] = field(default_factory=set)


class EncoderCache:
    """Items of media by identifier, up to ``capacity`` embeddings. An item has its room from when it joins those to be encoded.

    Rows that running requests need (``pin``) stay. Others make room, the least recently used first; those that a waiting request
    is to start with (``claim``) only for a running one: it may hold what others wait for, and must get on. Nobody waits
    for a request that waits, so there is always one that gets on.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.num_embeds = 0
        """Of the items that have room."""
        self._items: dict[str, _Rows] = {}  # the least recently used first

    def __len__(self) -> int:
        return len(self._items)

    def __contains__(self, identifier: str) -> bool:
        return identifier in self._items

    @property
    def usage(self) -> float:
        """Used fraction, in [0, 1]."""
        return self.num_embeds / self.capacity if self.capacity else 0.0

    @property
    def not_pinned(self) -> list[str]:
        """Items that no running request needs, the least recently used first."""
        return [identifier for identifier, rows in self._items.items() if not rows.num_users]

    def is_wanted(self, identifier: str) -> bool:
        """Whether a request needs an item, or is to start with it; also False for one that is not there."""
        rows = self._items.get(identifier)
        return rows is not None and bool(rows.num_users or rows.claims)

    def claims(self, identifier: str) -> Sequence[str]:
        """Keys of the waiting requests that are to start with an item."""
        rows = self._items.get(identifier)
        return () if rows is None else tuple(rows.claims)

    def room_for(self, num_embeds: int, *, urgent: bool) -> list[str] | None:
        """Items that must go for ``num_embeds`` embeddings more, for the caller to ``remove``; None where what must stay leaves
        no room. ``urgent``: for a running request.
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
        """Give an item room. ValueError where it has some, or there is too little."""
        if identifier in self._items or self.num_embeds + num_embeds > self.capacity:
            raise ValueError(f"item {identifier} has room already, or there is none")
        self._items[identifier] = _Rows(num_embeds)
        self.num_embeds += num_embeds

    def remove(self, identifier: str) -> None:
        """An item has gone. ValueError for one that is pinned."""
        if self._items[identifier].num_users:
            raise ValueError(f"item {identifier} is needed by a running request")
        self.num_embeds -= self._items.pop(identifier).num_embeds

    def pin(self, identifier: str) -> None:
        """A running request needs an item at one more place."""
        self._touch(identifier).num_users += 1

    def unpin(self, identifier: str) -> None:
        """A running request has passed a place, or runs no more."""
        rows = self._touch(identifier)
        if not rows.num_users:
            raise ValueError(f"item {identifier} is not pinned")
        rows.num_users -= 1

    def unpin_all(self) -> None:
        """No request runs."""
        for rows in self._items.values():
            rows.num_users = 0

    def claim(self, identifier: str, key: str) -> None:
        """A waiting request is to start with an item."""
        self._touch(identifier).claims.add(key)

    def unclaim(self, identifier: str, key: str) -> None:
        """It has started, or no longer is; an item that has gone is passed over."""
        if (rows := self._items.get(identifier)) is not None:
            rows.claims.discard(key)

    def _touch(self, identifier: str) -> _Rows:
        rows = self._items[identifier] = self._items.pop(identifier)
        return rows


def encoder_cache_size(configured: int, step_tokens: int, model: ModelInfo) -> int:
    """As ``multimodal.encoder_cache_size`` says, and the largest item at least; 0 configured: twice the tokens of a step. 0 for a
    model that takes no media.
    """
    if not model.media:
        return 0
    return max(configured or 2 * step_tokens, *(info.max_embeds for info in model.media))


class MediaControl:
    """Utilities of an engine, called as those of ``EngineControl`` are."""

    def __init__(self, scheduler: Scheduler, inputs: MediaInputs) -> None:
        self._scheduler = scheduler
        self._inputs = inputs

    @utility
    def reset_mm_cache(self) -> None:
        """Forget the inputs of media that are kept for frontends: what a request needs is sent again. Requests that were added
        keep theirs.
        """
        self._inputs.clear()

    @utility
    def reset_encoder_cache(self) -> None:
        """Forget the embeddings of media. Those that running requests need stay until they have passed them."""
        self._scheduler.reset_encoder_cache()
