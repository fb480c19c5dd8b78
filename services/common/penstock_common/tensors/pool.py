"""One bound for the tensors in chunks that all sessions of an engine hold."""

from typing import Protocol


class Member(Protocol):
    """The tensors of one session, to ``TensorPool``."""

    @property
    def num_held_bytes(self) -> int:
        """Return the bytes of memory that the session's tensors take."""

    def drop_oldest(self) -> bool:
        """Drop the tensor that was begun first, one that is not whole before others. Return False if there is none."""


class TensorPool:
    """Bounds the bytes that all sessions hold for messages that have not come yet.

    A session that holds little is not disturbed by sessions that hold much: when the bound is reached, the session that holds
    the most loses a tensor. The request of that tensor is refused, and its frontend sends the request to another engine.
    Belongs to one thread.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.num_dropped = 0
        """Tensors that were dropped because of this bound."""
        self.num_drops = 0
        """Times that tensors were dropped, or a session ended that held some: then there is memory to give back."""
        self._members: dict[Member, int] = {}
        self._num_bytes = 0

    @property
    def num_bytes(self) -> int:
        """Return the bytes that all members hold."""
        return self._num_bytes

    def join(self, member: Member) -> None:
        """Count the tensors of a session from now on."""
        self._members[member] = 0
        self.held(member)

    def leave(self, member: Member) -> None:
        """Count the tensors of a session no longer. Idempotent."""
        held = self._members.pop(member, 0)
        self._num_bytes -= held
        self.num_drops += held > 0

    def held(self, member: Member) -> None:
        """Note that ``member.num_held_bytes`` has changed."""
        if member in self._members:
            now = member.num_held_bytes
            self._num_bytes += now - self._members[member]
            self._members[member] = now

    def make_room(self, member: Member, size: int) -> bool:
        """Drop tensors until ``member`` can hold ``size`` bytes more. Return whether it can.

        The largest session may be ``member`` itself, and the dropped tensor the one that was to grow.
        """
        while self._num_bytes + size > self.max_bytes:
            largest = max(self._members, key=lambda each: self._members[each] + (size if each is member else 0))
            if not largest.drop_oldest():
                return False
            self.num_dropped += 1
            self.num_drops += 1
        return True
