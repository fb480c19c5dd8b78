"""One merge of registrations, for frontends and the coordinator. Does no I/O."""

from collections.abc import Callable, Iterable, Iterator

from penstock_common.lora.registration import LoraRegistration

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
