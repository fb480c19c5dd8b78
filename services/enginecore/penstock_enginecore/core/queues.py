"""Queues between the I/O thread and the busy loop.

The input queue keeps messages in order. The busy loop also drains the aborts queue between the forward pass and the
update of a step, so that an abort takes effect within that step. The busy loop passes outputs to an ``OutputSink``,
which the I/O thread implements.
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
    """Adds a validated request."""

    request: Request


class AbortRequests(msgspec.Struct):
    """Ends requests of a client.

    The message is put into both queues. Through the aborts queue, the abort reaches running requests early. Through the
    ordered queue, the abort also reaches requests that were queued just before the abort. When the busy loop handles
    the message from the ordered queue, it empties ``request_ids``. A later read from the aborts queue therefore cannot
    end a newer request with the same id. The log shows ``reason``.
    """

    client_id: str
    request_ids: list[str]
    reason: str = ""


class HandOver(msgspec.Struct, frozen=True):
    """Ends requests of a client with finish reason HANDOFF, so that the frontend resumes the requests on another
    engine.
    """

    client_id: str
    request_ids: list[str]


class UtilityCall(msgspec.Struct, frozen=True):
    """Calls a registered utility method. The client gets the result together with ``call_id``. ``arguments`` is a
    msgpack array.
    """

    client_id: str
    call_id: int
    method: str
    arguments: bytes


class UtilityDone(msgspec.Struct, frozen=True):
    """Reports that the Future that a utility method returned is done."""

    call: UtilityCall
    outcome: Future[Any]


class FollowCache(msgspec.Struct, frozen=True):
    """Subscribes a client to changes of the prefix cache."""

    client_id: str


class ClientGone(msgspec.Struct, frozen=True):
    """Reports that a client's session has ended. The client's requests end as well."""

    client_id: str


class ExecutorFailed(msgspec.Struct, frozen=True):
    """Reports that the executor cannot compute any more."""

    error: Exception


class GroupChanged(msgspec.Struct, frozen=True):
    """Reports an event of the data-parallel group."""

    event: GroupEvent


class Wakeup(msgspec.Struct, frozen=True):
    """Wakes the busy loop, which then checks the shutdown state and the compiled constraints."""


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
    """Destination of the busy loop's messages. Implementations pass messages to the I/O thread and return without
    waiting. The busy loop's thread calls all methods. Threads that add requests also call ``emit``.
    """

    def emit(self, client_id: str, outputs: EngineCoreOutputs) -> None:
        """Send outputs to one frontend. If the frontend is disconnected, the outputs are dropped."""

    def broadcast(self, outputs: EngineCoreOutputs, to: Collection[str] | None = None) -> None:
        """Send outputs to every connected frontend. If ``to`` is given, send outputs only to the frontends whose ids
        are in ``to``.
        """

    def draining(self, timeout: float) -> None:
        """Tell every frontend that new requests are refused, and that running requests end after ``timeout`` seconds."""

    def engine_dead(self, reason: str) -> None:
        """Tell every frontend that the engine is dead."""


class InputQueues:
    """The two input queues of the busy loop. Any thread and any signal handler may add messages."""

    def __init__(self) -> None:
        # SimpleQueue is reentrant: a signal handler may call put while the main thread is inside get.
        self._input: queue.SimpleQueue[InputMessage] = queue.SimpleQueue()
        self._aborts: queue.SimpleQueue[AbortRequests] = queue.SimpleQueue()

    def put(self, message: InputMessage) -> None:
        """Append a message to the ordered queue."""
        self._input.put(message)

    def wake(self) -> None:
        """Wake the busy loop without a message for it. Any thread and any signal handler may call this."""
        self._input.put(Wakeup())

    def group_changed(self, event: GroupEvent) -> None:
        """Append an event of the data-parallel group."""
        self._input.put(GroupChanged(event))

    def put_abort(self, abort: AbortRequests) -> None:
        """Append an abort to the ordered queue and to the aborts queue."""
        self._aborts.put(abort)
        self._input.put(abort)

    def get(self, *, block: bool, timeout: float | None) -> InputMessage | None:
        """Return the next message of the ordered queue, or None. If ``block`` is true, wait up to ``timeout`` seconds
        for a message, or forever if ``timeout`` is None.
        """
        try:
            return self._input.get(block, timeout)
        except queue.Empty:
            return None

    def get_abort(self) -> AbortRequests | None:
        """Return the next abort from the aborts queue, or None if the queue is empty."""
        try:
            return self._aborts.get_nowait()
        except queue.Empty:
            return None
