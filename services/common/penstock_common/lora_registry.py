"""LoRA adapters by name: registrations, merging and exchange of registrations, and adapters in the memory of engines.

This module does no I/O.
"""

import sys
from collections.abc import Callable, Iterable, Iterator
from typing import TypeAlias

import msgspec

# LoRA adapters in an engine's memory, as the engine reports them to the cluster.

MAX_HELD = 512
"""Maximum number of active adapters that an engine reports. The same limit applies to the adapters in memory."""
_KEY_BYTES = 8


class LoraHeld(msgspec.Struct, frozen=True, kw_only=True):
    """Adapters in an engine's memory, by their ``short`` digests. Adapters that are not reported count as absent.

    Attributes:
        active: Adapters that have a slot in device memory, at most MAX_HELD.
        held: Adapters in host memory and adapters that are loading, including the active adapters, at most MAX_HELD.
    """

    version: int = 0
    """Version of this list of adapters, which grows with every change. Among the reports of one incarnation, the
    highest version is the newest.
    """
    active: tuple[int, ...] = ()
    held: tuple[int, ...] = ()
    max_loras: int = 0
    """Maximum number of active adapters."""
    requests_per_load: float = 0.0
    """Number of requests with adapters that the engine completes while it loads one adapter. 0 if unknown."""
    full: bool = False
    """Whether the memory is full, so that loading another adapter evicts adapters."""


def short(digest: bytes) -> int:
    """Return a short key for a 16-byte digest. If two digests have the same key, only routing is affected."""
    return int.from_bytes(digest[:_KEY_BYTES], "little")


# Registrations of adapter names at run time.

_RECORD_BYTES = 512
"""Upper bound of the memory in bytes that a registry needs for a registration, in addition to its texts."""

Precedence: TypeAlias = "tuple[int, str, bool, str, bytes, bool]"


class LoraAdapter(msgspec.Struct, frozen=True):
    """A LoRA adapter, as requests to engines specify it."""

    name: str
    """Name of the adapter for display. The adapter is identified by its content, not by its name."""
    path: str
    """Directory of the adapter on the engines' machines."""
    digest: bytes = b""
    """BLAKE2b-128 hash of the adapter's config and tensors, computed by an engine. Empty until an engine has read the
    adapter's files.
    """


class LoraRegistration(msgspec.Struct, frozen=True, kw_only=True):
    """One version of the registration of a name.

    Unloading a name also creates a version, so that a load that arrives late does not undo a newer unload.
    """

    name: str
    version: int
    """Version, from 1. A frontend gives a new registration the highest version that the frontend has received for any
    name, plus one.
    """
    frontend_id: str
    """ID of the frontend that received the call. If two registrations of a name have the same version, the registration
    with the higher ID wins.
    """
    unloaded: bool = False
    """Whether the name was unloaded. If so, the next fields are ignored."""
    path: str = ""
    digest: bytes = b""
    pinned: bool = False
    """Whether engines keep the adapter in memory."""

    @property
    def num_bytes(self) -> int:
        """Memory in bytes that a registry needs for this registration."""
        return _RECORD_BYTES + sum(map(sys.getsizeof, (self.name, self.frontend_id, self.path, self.digest)))

    @property
    def adapter(self) -> LoraAdapter:
        """The adapter in the form that requests to engines contain."""
        return LoraAdapter(self.name, self.path, self.digest)

    @property
    def precedence(self) -> Precedence:
        """Sort key of a registration. The registration of a name with the highest precedence wins.

        A restarted frontend with the same ID may reuse a version. In this case, the other fields decide, so that all
        processes select the same registration.
        """
        return self.version, self.frontend_id, self.unloaded, self.path, self.digest, self.pinned


class LoraRefusal(msgspec.Struct, frozen=True):
    """A registration that the coordinator refuses because a limit is reached."""

    name: str
    reason: str
    """The limit that was reached: current number, setting, and value of the setting."""


# Merging of registrations in frontends and the coordinator.

MAX_UNLOADED = 16_384
"""Maximum number of remembered unloads.

If more unloads arrive before a delayed load, the load may undo an unload that was forgotten.
"""


class LoraRegistry:
    """Store of the winning registration of each name: the merged registration with the highest precedence.

    The result depends neither on the order of the registrations nor on repetitions.
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
            admit: ``admit(new, old)`` returns whether the limits allow registration ``new`` in place of ``old`` (may be
                None).
        """
        self._admit = admit
        self.num_bytes = 0
        """Memory in bytes that all registrations use, including unloads."""
        self._max_unloaded = max_unloaded
        self._registrations: dict[str, LoraRegistration] = {}
        """Winning registrations by name. The most recently changed registration is the last."""
        self._places: dict[str, int] = {}
        """Number of the last change of each name. Changes are numbered from 1."""
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
        """Return the registrations whose change number is above ``place``, in order, as pairs of change number and
        registration.
        """
        changes: list[tuple[int, LoraRegistration]] = []
        for name, registration in reversed(self._registrations.items()):
            if self._places[name] <= place:
                break
            changes.append((self._places[name], registration))
        return changes[::-1]

    @property
    def next_version(self) -> int:
        """Version of the next registration that this process creates: the highest version so far, plus one."""
        return self._highest + 1

    def get(self, name: str) -> LoraRegistration | None:
        """Return the winning registration of a name, or None if the name is unknown or unloaded."""
        registration = self._registrations.get(name)
        return None if registration is None or registration.unloaded else registration

    def loaded(self) -> list[LoraRegistration]:
        """Return the registrations that are not unloads, sorted by name."""
        return sorted((each for each in self if not each.unloaded), key=lambda each: each.name)

    def merge(self, registrations: Iterable[LoraRegistration]) -> list[LoraRegistration]:
        """Merge registrations, and return the registrations that have become the winning ones of their names."""
        changed = [each for each in registrations if self._take(each)]
        if self._num_unloaded > self._max_unloaded:
            self._forget_unloads(self._max_unloaded)
        return changed

    def is_news(self, registration: LoraRegistration, place: int) -> bool:
        """Return whether a registration is the winning one of its name, and has a change number above ``place``."""
        name = registration.name
        return self._registrations.get(name) == registration and self._places[name] > place

    def forget_unloads(self) -> None:
        """Forget the older half of the unloads, to free memory."""
        if self._num_unloaded:
            self._forget_unloads(self._num_unloaded // 2)

    def _take(self, new: LoraRegistration) -> bool:
        old = self._registrations.get(new.name)
        if old is not None and old.precedence >= new.precedence:
            return False
        if not self._admit(new, old):
            return False
        if (old := self._registrations.pop(new.name, None)) is not None:  # forget_unloads may have removed it
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
# not know.

MAX_REGISTRATIONS = 256
"""Maximum number of registrations in one message."""


class Gossip:
    """State of one end of a stream on which both ends exchange registrations. An end sends a registration at most once,
    and never to the end from which the registration came.
    """

    def __init__(self, registry: LoraRegistry) -> None:
        self._registry = registry
        self._known: dict[str, LoraRegistration] = {}
        """Registrations that the other end has sent, by name, so that this end does not send them back. Only
        registrations whose change number is above ``_place`` are necessary.
        """
        self._place = 0
        """Number of the last change that was sent, or that the other end already knows."""

    def hear(self, registrations: Iterable[LoraRegistration]) -> list[LoraRegistration]:
        """Merge registrations of the other end, and return the registrations that have become the winning
        registrations.
        """
        heard = list(registrations)
        changed = self._registry.merge(heard)
        self._known.update((each.name, each) for each in heard if self._registry.is_news(each, self._place))
        return changed

    def tell(self) -> list[LoraRegistration]:
        """Return the next registrations to send, at most MAX_REGISTRATIONS. Empty if the other end knows all
        registrations.
        """
        news: list[LoraRegistration] = []
        for place, each in self._registry.changes_since(self._place):
            if len(news) == MAX_REGISTRATIONS:
                break
            self._place = place
            if self._known.pop(each.name, None) != each:
                news.append(each)
        return news
