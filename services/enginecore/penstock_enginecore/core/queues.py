"""What passes between the I/O thread and the busy loop.

Inwards: the input queue, in order, and the aborts queue, which the loop also drains between forward pass and update, so
that an abort takes effect within the step that is running. Outwards: an ``OutputSink`` of the I/O side.
"""

import queue
from collections.abc import Collection
from concurrent.futures import Future
from typing import Any, Protocol

import msgspec

from penstock_common.types.outputs import EngineCoreOutputs
from penstock_enginecore.core.request import Request
from penstock_enginecore.data_parallel.core.group_channels import GroupEvent


class AddRequest(msgspec.Struct, frozen=True):
    """A validated request."""

    request: Request


class AbortRequests(msgspec.Struct):
    """End requests of a client.

    Sits in both queues. The eager drain ends what runs already, the ordered one also what was queued just before; it then
    empties ``request_ids``, so that an eager drain still to come cannot hit a later request with the same id.
    ``reason``: why, for the log.
    """

    client_id: str
    request_ids: list[str]
    reason: str = ""


class HandOver(msgspec.Struct, frozen=True):
    """Give requests of a client away."""

    client_id: str
    request_ids: list[str]


class UtilityCall(msgspec.Struct, frozen=True):
    """Call a registered method; the answer goes to the client under ``call_id``. ``arguments``: a msgpack array."""

    client_id: str
    call_id: int
    method: str
    arguments: bytes


class UtilityDone(msgspec.Struct, frozen=True):
    """The result of a call that took its time is there."""

    call: UtilityCall
    outcome: Future[Any]


class FollowCache(msgspec.Struct, frozen=True):
    """A client wants to know of changes of the prefix cache from now on."""

    client_id: str


class ClientGone(msgspec.Struct, frozen=True):
    """A session has ended: so do its requests."""

    client_id: str


class ExecutorFailed(msgspec.Struct, frozen=True):
    """The executor can compute nothing any more."""

    error: Exception


class GroupChanged(msgspec.Struct, frozen=True):
    """Something happened to the data-parallel group."""

    event: GroupEvent


class Wakeup(msgspec.Struct, frozen=True):
    """Look at the shutdown state, and for compiled constraints."""


InputMessage = (
    AddRequest
    | AbortRequests
    | HandOver
    | UtilityCall
    | UtilityDone
    | FollowCache
    | ClientGone
    | ExecutorFailed
    | GroupChanged
    | Wakeup
)


class OutputSink(Protocol):
    """Where the busy loop's messages go. Implementations hand over to the I/O thread and return at once.

    Called from the busy loop's thread, and ``emit`` also from the thread that adds a request.
    """

    def emit(self, client_id: str, outputs: EngineCoreOutputs) -> None:
        """Send to one frontend, or drop it if that one has gone."""

    def broadcast(self, outputs: EngineCoreOutputs, to: Collection[str] | None = None) -> None:
        """Send to every frontend, or to those of these ids that are there."""

    def draining(self, timeout: float) -> None:
        """Tell every frontend that new requests are refused; those in flight have ``timeout`` seconds."""

    def engine_dead(self, reason: str) -> None:
        """Tell every frontend that nothing more will come."""


class InputQueues:
    """The two queues into the busy loop. Any thread may put; signal handlers may too."""

    def __init__(self) -> None:
        # SimpleQueue is reentrant: a signal handler may put while the main thread is in get.
        self._input: queue.SimpleQueue[InputMessage] = queue.SimpleQueue()
        self._aborts: queue.SimpleQueue[AbortRequests] = queue.SimpleQueue()

    def put(self, message: InputMessage) -> None:
        """Append to the ordered queue."""
        self._input.put(message)

    def wake(self) -> None:
        """Let the busy loop look at what needs no message. Any thread may call it, and a signal handler."""
        self._input.put(Wakeup())

    def group_changed(self, event: GroupEvent) -> None:
        """Append that something happened to the data-parallel group."""
        self._input.put(GroupChanged(event))

    def put_abort(self, abort: AbortRequests) -> None:
        """Append to both queues."""
        self._aborts.put(abort)
        self._input.put(abort)

    def get(self, *, block: bool, timeout: float | None) -> InputMessage | None:
        """The next message; None when there is none, if blocking within ``timeout`` seconds (None: for ever)."""
        try:
            return self._input.get(block, timeout)
        except queue.Empty:
            return None

    def get_abort(self) -> AbortRequests | None:
        """The next eager abort, or None."""
        try:
            return self._aborts.get_nowait()
        except queue.Empty:
            return None
