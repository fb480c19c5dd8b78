"""What an engine keeps of this frontend's media, as the frontend has told it to. Does no I/O."""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from penstock_common.types.media import MultiModalFeature


class Sent(NamedTuple):
    """How a feature goes into a message: with its data or without, and whether the engine is to keep that."""

    feature: MultiModalFeature
    with_data: bool
    keep: bool


def first_of_each(features: Iterable[MultiModalFeature]) -> list[MultiModalFeature]:
    """The first of each identifier: it stands for the others of the same message."""
    found: dict[str, MultiModalFeature] = {}
    for feature in features:
        found.setdefault(feature.identifier, feature)
    return list(found.values())


class MediaMirror:
    """The items that a session's engine keeps, those used last at the end, within the bytes that the engine allows.

    The engine obeys and evicts nothing, so both ends agree at every message if what is done here is told in the same order:
    ``take_drops`` goes out before anything that is done here afterwards. Each stream has a mirror of its own, which begins empty,
    as the engine's end does.

    What the engine has forgotten by itself it says (``cleared``), and what it could not take its refusals say (``refused``).
    Messages that were under way then may have had it keep something after all: so both are answered with drops.
    """

    def __init__(self, quota: int) -> None:
        """``quota``: bytes that the engine keeps for this session; 0: none."""
        self._quota = quota
        self._kept: OrderedDict[str, int] = OrderedDict()
        """Bytes by identifier, the ones used least recently first."""
        self._drops: dict[str, None] = {}
        self.num_bytes = 0
        self.num_queries = 0
        """Items that were sent, or left out."""
        self.num_hits = 0
        """Items that were left out."""

    def __len__(self) -> int:
        return len(self._kept)

    def __contains__(self, identifier: str) -> bool:
        """Whether the engine has it, once it has read what was told so far."""
        return identifier in self._kept

    @property
    def identifiers(self) -> frozenset[str]:
        """What the engine has, once it has read what was told so far."""
        return frozenset(self._kept)

    def missing(self, features: Iterable[MultiModalFeature]) -> list[MultiModalFeature]:
        """Those that are to go with their data, the first of each identifier."""
        return first_of_each(feature for feature in features if feature.identifier not in self._kept)

    def send(self, features: Sequence[MultiModalFeature], *, plain: bool = False) -> list[Sent]:
        """How the features of a request go into the message that goes next. ``plain``: whatever is kept, all go with their data,
        and nothing is to be kept of them.
        """
        sent: list[Sent] = []
        here = {feature.identifier for feature in features}
        told: set[str] = set()
        for feature in features:
            identifier = feature.identifier
            if identifier in told:  # what stands for one stands for the others of the same message
                sent.append(Sent(feature, with_data=False, keep=False))
                continue
            told.add(identifier)
            self.num_queries += 1
            if plain:
                sent.append(Sent(feature, with_data=True, keep=False))
            elif identifier in self._kept:
                self.num_hits += 1
                self._kept.move_to_end(identifier)
                sent.append(Sent(feature, with_data=False, keep=False))
            else:
                keep = self._make_room(feature.num_bytes, here)
                if keep:
                    self._kept[identifier] = feature.num_bytes
                    self.num_bytes += feature.num_bytes
                sent.append(Sent(feature, with_data=True, keep=keep))
        return sent

    def _make_room(self, size: int, but: set[str]) -> bool:
        """Drop what was used least recently, ``but`` these, until so many bytes fit. Returns whether they do; nothing is dropped
        where they cannot.
        """
        if size > self._quota:
            return False
        going, left = [], self.num_bytes
        for identifier, num_bytes in self._kept.items():
            if left + size <= self._quota:
                break
            if identifier not in but:
                going.append(identifier)
                left -= num_bytes
        if left + size > self._quota:
            return False
        self._drop(going)
        return True

    def cleared(self) -> None:
        """The engine has forgotten everything."""
        self._drop(list(self._kept))

    def refused(self, identifiers: Iterable[str]) -> None:
        """The engine has refused a request with these, or has not had them: it may have some or none."""
        identifiers = list(identifiers)
        self._drop(identifiers)
        self._drops |= dict.fromkeys(identifiers)

    @property
    def has_drops(self) -> bool:
        """Whether something is to be dropped."""
        return bool(self._drops)

    def take_drops(self, at_most: int) -> list[str]:
        """What the engine is to drop, so many at a time: to be sent before the next message is made."""
        drops = list(self._drops)[:at_most]
        for identifier in drops:
            del self._drops[identifier]
        return drops

    def _drop(self, identifiers: Iterable[str]) -> None:
        for identifier in identifiers:
            if (size := self._kept.pop(identifier, None)) is not None:
                self.num_bytes -= size
                self._drops[identifier] = None
