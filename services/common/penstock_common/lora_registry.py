"""LoRA adapters by name: registrations, their merge, the messages about them, and the adapters that engines hold. Does
no I/O.
"""

import sys
from collections.abc import Callable, Iterable, Iterator
from typing import TypeAlias

import msgspec

# LoRA adapters that an engine holds, as it reports them to the cluster.

MAX_HELD = 512
"""Maximum number of active adapters, and of held adapters, that an engine reports."""
_KEY_BYTES = 8


class LoraHeld(msgspec.Struct, frozen=True, kw_only=True):
    """Adapters by their ``short`` digests. At most MAX_HELD each; adapters that are not reported count as absent.

    Attributes:
        active: Adapters that have a slot.
        held: Adapters that are in host memory or loading, including the active ones.
    """

    version: int = 0
    """Grows with every change. Of the reports of one incarnation, the highest version is the newest."""
    active: tuple[int, ...] = ()
    held: tuple[int, ...] = ()
    max_loras: int = 0
    """Maximum number of active adapters."""
    requests_per_load: float = 0.0
    """Requests with adapters that the engine completes in the time of one load. 0 if unknown."""
    full: bool = False
    """Whether loading another adapter evicts others."""


def short(digest: bytes) -> int:
    """Return a short key for a 16-byte digest. A collision of two keys affects only routing."""
    return int.from_bytes(digest[:_KEY_BYTES], "little")


# Registrations of adapter names at run time.

_RECORD_BYTES = 512
"""Maximum bytes of memory that a registration takes in a registry, in addition to its texts."""

Precedence: TypeAlias = "tuple[int, str, bool, str, bytes, bool]"


class LoraAdapter(msgspec.Struct, frozen=True):
    """An adapter as requests name it to engines."""

    name: str
    """A label. The content identifies the adapter."""
    path: str
    """Directory on the engines' machines."""
    digest: bytes = b""
    """BLAKE2b-128 of its config and tensors, as an engine computed it. Empty until an engine has read it."""


class LoraRegistration(msgspec.Struct, frozen=True, kw_only=True):
    """Registration of a name, with its version.

    An unload is also a version, so a load that arrives late does not undo a newer unload.
    """

    name: str
    version: int
    """Starts at 1: one more than the highest version of any name that its frontend had seen."""
    frontend_id: str
    """Frontend that received the registration. Of two registrations with the same version, the one with the higher ID
    wins.
    """
    unloaded: bool = False
    """Whether the name was unloaded. If so, the following fields are ignored."""
    path: str = ""
    digest: bytes = b""
    pinned: bool = False
    """Whether engines keep the adapter in memory."""

    @property
    def num_bytes(self) -> int:
        """Bytes of memory that a registry needs for this registration."""
        return _RECORD_BYTES + sum(map(sys.getsizeof, (self.name, self.frontend_id, self.path, self.digest)))

    @property
    def adapter(self) -> LoraAdapter:
        """The adapter that requests send to engines."""
        return LoraAdapter(self.name, self.path, self.digest)

    @property
    def precedence(self) -> Precedence:
        """Sort key of a registration. The registration of a name with the highest precedence wins.

        A restarted frontend with the same ID may reuse a version. The other fields then decide, so that all processes
        decide alike.
        """
        return self.version, self.frontend_id, self.unloaded, self.path, self.digest, self.pinned


class LoraRefusal(msgspec.Struct, frozen=True):
    """A registration for which the coordinator has no room."""

    name: str
    reason: str
    """The limit that was reached: number, setting and value."""


# Merge of registrations, for frontends and the coordinator. Does no I/O.

MAX_UNLOADED = 16_384
"""Maximum number of remembered unloads. If more unloads than this arrive before a late load, the load may undo an older
unload.
"""


class LoraRegistry:
    """The winning registration of each name: of all merged registrations, the one with the highest precedence.

    So the result does not depend on the order of registrations or on repetitions.
    """

    def __init__(
        self,
        *,
        max_unloaded: int = MAX_UNLOADED,
        admit: Callable[[LoraRegistration, LoraRegistration | None], bool] = lambda _new, _old: True,
    ) -> None:
        """Create an empty registry.

        Args:
            max_unloaded: Maximum number of remembered unloads.
            admit: ``admit(new, old)`` returns whether there is room for a registration that replaces ``old``, or None.
        """
        self._admit = admit
        self.num_bytes = 0
        """Bytes of memory that the registrations take, including unloads."""
        self._max_unloaded = max_unloaded
        self._registrations: dict[str, LoraRegistration] = {}
        """Most recently changed last."""
        self._places: dict[str, int] = {}
        """Number of the last change of each name."""
        self._num_changes = 0
        self._num_unloaded = 0
        self._highest = 0

    def __len__(self) -> int:
        """Return the number of names that are not unloaded."""
        return len(self._registrations) - self._num_unloaded

    def __iter__(self) -> Iterator[LoraRegistration]:
        """Iterate over the winning registrations, including unloads, in order of arrival."""
        return iter(list(self._registrations.values()))

    def changes_since(self, place: int) -> list[tuple[int, LoraRegistration]]:
        """Return the changes after a place in order, each with its own place. 0 is the beginning."""
        changes: list[tuple[int, LoraRegistration]] = []
        for name, registration in reversed(self._registrations.items()):
            if self._places[name] <= place:
                break
            changes.append((self._places[name], registration))
        return changes[::-1]

    @property
    def next_version(self) -> int:
        """Version of the next registration made here: one more than all that were seen."""
        return self._highest + 1

    def get(self, name: str) -> LoraRegistration | None:
        """Return the winning registration of a name, or None if the name is unknown or unloaded."""
        registration = self._registrations.get(name)
        return None if registration is None or registration.unloaded else registration

    def loaded(self) -> list[LoraRegistration]:
        """Return the registrations that are not unloads, by name."""
        return sorted((each for each in self if not each.unloaded), key=lambda each: each.name)

    def merge(self, registrations: Iterable[LoraRegistration]) -> list[LoraRegistration]:
        """Merge registrations from here or elsewhere. Returns those that win now."""
        changed = [each for each in registrations if self._take(each)]
        if self._num_unloaded > self._max_unloaded:
            self._forget_unloads(self._max_unloaded)
        return changed

    def is_news(self, registration: LoraRegistration, place: int) -> bool:
        """Return whether a registration wins and arrived after a place."""
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


# Exchange of registrations between the two ends of a stream. Each end sends the registrations that the other end does
# not know. Does no I/O.

MAX_REGISTRATIONS = 256
"""Maximum number of registrations in one message."""


class Gossip:
    """State of one end of a stream. This end sends back nothing that it received, and sends nothing twice."""

    def __init__(self, registry: LoraRegistry) -> None:
        self._registry = registry
        self._known: dict[str, LoraRegistration] = {}
        """Registrations that the other end has sent, by name, among changes that were not sent to it yet."""
        self._place = 0
        """Place of the last change that was sent, or need not be sent."""

    def hear(self, registrations: Iterable[LoraRegistration]) -> list[LoraRegistration]:
        """Merge registrations of the other end. Returns those that win now."""
        heard = list(registrations)
        changed = self._registry.merge(heard)
        self._known.update((each.name, each) for each in heard if self._registry.is_news(each, self._place))
        return changed

    def tell(self) -> list[LoraRegistration]:
        """Return the next registrations to send, at most MAX_REGISTRATIONS. Empty if the other end knows everything."""
        news: list[LoraRegistration] = []
        for place, each in self._registry.changes_since(self._place):
            if len(news) == MAX_REGISTRATIONS:
                break
            self._place = place
            if self._known.pop(each.name, None) != each:
                news.append(each)
        return news
