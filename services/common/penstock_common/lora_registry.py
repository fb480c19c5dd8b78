"""LoRA adapters by name: registrations, their merge, the messages about them, and the adapters that engines hold. Does no I/O."""

import sys
from collections.abc import Callable, Iterable, Iterator
from typing import TypeAlias

import msgspec

# Which LoRA adapters an engine holds, as it tells the cluster.

MAX_HELD = 512
"""Adapters of either kind that an engine tells of."""
_KEY_BYTES = 8


class LoraHeld(msgspec.Struct, frozen=True, kw_only=True):
    """Adapters by what is ``short`` for their digests: ``active`` have a slot, ``held`` are in host memory or on their way there,
    the active ones among them. At most MAX_HELD each; an adapter that is not told of counts as one that is not there.
    """

    version: int = 0
    """Grows with every change; of one incarnation of an engine the highest counts."""
    active: tuple[int, ...] = ()
    held: tuple[int, ...] = ()
    max_loras: int = 0
    """How many can be active at once."""
    requests_per_load: float = 0.0
    """Requests with adapters that the engine ends while it loads one; 0: not known."""
    full: bool = False
    """Whether the next one that is loaded takes the place of others."""


def short(digest: bytes) -> int:
    """What stands for a digest of 16 bytes: routing alone would take two adapters for each other of which it is the same."""
    return int.from_bytes(digest[:_KEY_BYTES], "little")


# What is said of an adapter's name at run time.

_RECORD_BYTES = 512
"""Bytes of memory that a registration and its places in a registry take beside its texts, at most."""

Precedence: TypeAlias = "tuple[int, str, bool, str, bytes, bool]"


class LoraAdapter(msgspec.Struct, frozen=True):
    """An adapter as requests name it to engines."""

    name: str
    """A label; what counts is the content."""
    path: str
    """Directory on the engines' machines."""
    digest: bytes = b""
    """BLAKE2b-128 of its config and tensors, as an engine computed it; empty where nobody has read it yet."""


class LoraRegistration(msgspec.Struct, frozen=True, kw_only=True):
    """One version of what a name means. An unload is a version, too: one that comes later than an older load undoes nothing."""

    name: str
    version: int
    """From 1; the highest that its frontend had seen of any name, plus one."""
    frontend_id: str
    """The frontend that it was said to: of two of one version that with the higher id counts."""
    unloaded: bool = False
    """Whether the name means nothing any more; then what follows means nothing either."""
    path: str = ""
    digest: bytes = b""
    pinned: bool = False
    """Whether engines keep it in memory."""

    @property
    def num_bytes(self) -> int:
        """Return the bytes of memory that a registry needs for this."""
        return _RECORD_BYTES + sum(map(sys.getsizeof, (self.name, self.frontend_id, self.path, self.digest)))

    @property
    def adapter(self) -> LoraAdapter:
        """What requests send to engines."""
        return LoraAdapter(self.name, self.path, self.digest)

    @property
    def precedence(self) -> Precedence:
        """Of two registrations of a name that with the higher one counts. What a frontend says under an id that it had in an
        earlier life may have a version that it gave then: the rest decides, so that everybody decides alike.
        """
        return self.version, self.frontend_id, self.unloaded, self.path, self.digest, self.pinned


class LoraRefusal(msgspec.Struct, frozen=True):
    """A registration for which the coordinator has no room."""

    name: str
    reason: str
    """Which limit is reached: the number, the setting, its value."""


# One merge of registrations, for frontends and the coordinator. Does no I/O.

MAX_UNLOADED = 16_384
"""Unloads that are remembered, the newest of them. A load that arrives later than so many unloads may undo an older one."""


class LoraRegistry:
    """By name, the registration that counts: of all that were ever merged that with the highest precedence. So the order in which
    they come means nothing, nor how often.
    """

    def __init__(
        self,
        *,
        max_unloaded: int = MAX_UNLOADED,
        admit: Callable[[LoraRegistration, LoraRegistration | None], bool] = lambda _new, _old: True,
    ) -> None:
        """``admit(new, old)``: whether there is room for a registration in place of another, None where the name has none."""
        self._admit = admit
        self.num_bytes = 0
        """Bytes of memory that the registrations take, unloads as well."""
        self._max_unloaded = max_unloaded
        self._registrations: dict[str, LoraRegistration] = {}
        """Those that changed last stand last."""
        self._places: dict[str, int] = {}
        """By name, which change it was."""
        self._num_changes = 0
        self._num_unloaded = 0
        self._highest = 0

    def __len__(self) -> int:
        """How many names mean something."""
        return len(self._registrations) - self._num_unloaded

    def __iter__(self) -> Iterator[LoraRegistration]:
        """All registrations that count, unloads as well, in the order in which they came."""
        return iter(list(self._registrations.values()))

    def changes_since(self, place: int) -> list[tuple[int, LoraRegistration]]:
        """What has changed behind a place, 0 for the beginning, each with its own place; in order."""
        changes: list[tuple[int, LoraRegistration]] = []
        for name, registration in reversed(self._registrations.items()):
            if self._places[name] <= place:
                break
            changes.append((self._places[name], registration))
        return changes[::-1]

    @property
    def next_version(self) -> int:
        """The version of the next registration made here: above all that were seen."""
        return self._highest + 1

    def get(self, name: str) -> LoraRegistration | None:
        """What counts of a name; None where it means nothing."""
        registration = self._registrations.get(name)
        return None if registration is None or registration.unloaded else registration

    def loaded(self) -> list[LoraRegistration]:
        """The registrations of names that mean something, by name."""
        return sorted((each for each in self if not each.unloaded), key=lambda each: each.name)

    def merge(self, registrations: Iterable[LoraRegistration]) -> list[LoraRegistration]:
        """Take what was said here or elsewhere. Returns what counts from now on."""
        changed = [each for each in registrations if self._take(each)]
        if self._num_unloaded > self._max_unloaded:
            self._forget_unloads(self._max_unloaded)
        return changed

    def is_news(self, registration: LoraRegistration, place: int) -> bool:
        """Return whether a registration counts and came behind a place."""
        name = registration.name
        return self._registrations.get(name) == registration and self._places[name] > place

    def forget_unloads(self) -> None:
        """Forget the older half of the unloads, to make room."""
        if self._num_unloaded:
            self._forget_unloads(self._num_unloaded // 2)

    def _take(self, new: LoraRegistration) -> bool:
        old = self._registrations.get(new.name)
        if old is not None and old.precedence >= new.precedence:
            return False
        if not self._admit(new, old):
            return False
        if (old := self._registrations.pop(new.name, None)) is not None:  # it may have been forgotten to make room
            self._num_unloaded -= old.unloaded
            self.num_bytes -= old.num_bytes
        self._highest = max(self._highest, new.version)
        self._registrations[new.name] = new
        self._num_changes += 1
        self._places[new.name] = self._num_changes
        self._num_unloaded += new.unloaded
        self.num_bytes += new.num_bytes
        return True

    def _forget_unloads(self, keep: int) -> None:
        unloads = sorted((each for each in self if each.unloaded), key=lambda each: (each.precedence, each.name))
        for unload in unloads[: -keep or None]:
            del self._registrations[unload.name], self._places[unload.name]
            self.num_bytes -= unload.num_bytes
        self._num_unloaded = min(self._num_unloaded, keep)


# What two ends of a stream tell each other of registrations: each what the other does not know. Does no I/O.

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
