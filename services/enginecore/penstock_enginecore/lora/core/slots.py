"""Which adapters run together. A state machine: requests that start, wait and leave in, those whose wait is over out."""

from dataclasses import dataclass, field


@dataclass(slots=True)
class _Slot:
    """``running``: requests with the adapter that run. ``granted``: those that waited for the slot and have not started yet; it
    is kept for them. ``closing``: nobody starts any more.
    """

    name: str
    running: set[str] = field(default_factory=set)
    granted: set[str] = field(default_factory=set)
    closing: bool = False

    @property
    def empty(self) -> bool:
        return not (self.running or self.granted)


@dataclass(slots=True)
class _Line:
    """Requests that wait for one adapter's slot, with the seconds since when each does, the oldest first."""

    name: str
    since: dict[str, float] = field(default_factory=dict)

    @property
    def oldest(self) -> float:
        return next(iter(self.since.values()))


class LoraSlots:
    """At most ``max_loras`` adapters among running requests. One whose adapter is not among them waits, and is in nobody's way.

    A slot that is free goes to the adapter of the request that has waited longest. While adapters have waited for ``max_wait``
    seconds and none is free, as many others admit no more, those first that have had theirs longest: they go over
    once they are empty. So no adapter waits longer than ``max_wait`` and what the longest running request takes, while no more
    adapters than there are slots wait. Requests are known by key, adapters by digest; ``name`` is what stands for one in
    metrics. ``now``: monotonic seconds.
    """

    def __init__(self, max_loras: int, max_wait: float) -> None:
        self._max_loras = max_loras
        self._max_wait = max_wait
        self._slots: dict[bytes, _Slot] = {}  # that which has been active longest first
        self._lines: dict[bytes, _Line] = {}
        self._digests: dict[str, bytes] = {}

    @property
    def digests(self) -> tuple[bytes, ...]:
        """The adapters that have a slot, that which has had it longest first. Any thread."""
        return tuple(self._slots)

    @property
    def active(self) -> list[str]:
        """Names of the adapters that have a slot."""
        return [slot.name for slot in list(self._slots.values())]

    @property
    def waiting(self) -> list[str]:
        """Names of the adapters that wait for one."""
        return [line.name for line in list(self._lines.values())]

    @property
    def num_waiting(self) -> int:
        """Requests that wait for a slot."""
        return sum(len(line.since) for line in list(self._lines.values()))

    def admits(self, digest: bytes) -> bool:
        """Whether a request with this adapter may start now."""
        slot = self._slots.get(digest)
        if slot is not None:
            return not slot.closing
        return len(self._slots) < self._max_loras and not self._lines

    def start(self, key: str, digest: bytes, name: str) -> None:
        """A request starts. ValueError for one that ``admits`` does not let in, or that runs."""
        if not self.admits(digest):
            raise ValueError(f"request {key!r} starts with adapter {digest.hex()}, which has no slot")
        slot = self._slots.setdefault(digest, _Slot(name))
        if key in slot.running:
            raise ValueError(f"request {key!r} runs already")
        slot.granted.discard(key)
        slot.running.add(key)
        slot.name = name
        self._digests[key] = digest

    def wait(self, key: str, digest: bytes, name: str, now: float) -> None:
        """A request that could start waits for a slot instead."""
        line = self._lines.setdefault(digest, _Line(name))
        line.since[key] = now
        self._digests[key] = digest

    def leave(self, key: str) -> None:
        """A request has ended or lost its turn, wherever it was; one that is not known is passed over."""
        digest = self._digests.pop(key, None)
        if digest is None:
            return
        if (line := self._lines.get(digest)) is not None and line.since.pop(key, None) is not None and not line.since:
            del self._lines[digest]
        if (slot := self._slots.get(digest)) is not None:
            slot.running.discard(key)
            slot.granted.discard(key)
            if slot.empty:
                del self._slots[digest]

    def reset(self) -> None:
        """Every request has lost its turn, and its place in line: all begin anew."""
        self._slots.clear()
        self._lines.clear()
        self._digests.clear()

    def settle(self, now: float) -> list[str]:
        """See about those that wait. Returns the requests whose wait is over: each may start until its slot is taken back."""
        if not self._lines:
            for slot in self._slots.values():
                slot.closing = False
            return []
        released = self._serve()
        self._close_for_overdue(now, fresh={self._digests[key] for key in released})
        return released + self._serve()

    def _serve(self) -> list[str]:
        """Give slots to those that wait, the oldest first, until none is left."""
        released: list[str] = []
        for digest, slot in self._slots.items():
            if digest in self._lines and not slot.closing:  # it was open again
                released += self._grant(slot, self._lines.pop(digest))
        while self._lines and (len(self._slots) < self._max_loras or not self._lines.keys().isdisjoint(self._slots)):
            digest = min(self._lines, key=lambda waiting: self._lines[waiting].oldest)
            if digest not in self._slots and len(self._slots) >= self._max_loras:
                break
            line = self._lines.pop(digest)
            released += self._grant(self._slots.setdefault(digest, _Slot(line.name)), line)
        return released

    def _grant(self, slot: _Slot, line: _Line) -> list[str]:
        slot.closing = False
        slot.granted.update(line.since)
        return list(line.since)

    def _close_for_overdue(self, now: float, fresh: set[bytes]) -> None:
        """``fresh``: adapters whose requests have got their turn just now, and could not start yet."""
        overdue = sum(line.oldest + self._max_wait <= now for line in self._lines.values())
        closing = [slot for slot in self._slots.values() if slot.closing]
        for slot in closing[overdue:]:  # those that waited have gone
            slot.closing = False
        if len(closing) >= overdue:
            return
        others = [(digest, slot) for digest, slot in self._slots.items() if not slot.closing and digest not in fresh]
        for digest, slot in others[: overdue - len(closing)]:
            slot.closing = True
            for key in slot.granted:  # they have had their chance
                del self._digests[key]
            slot.granted.clear()
            if slot.empty:
                del self._slots[digest]
