"""Tracking of all requests of a frontend until they end. There is one implementation for each kind of request."""

from collections.abc import Iterable
from typing import Generic, Protocol, TypeVar

from penstock_common.errors import RequestFailed, Unavailable
from penstock_common.types.outputs import EngineCoreOutput, FinishReason


class State(Protocol):
    """State of one request."""

    request_id: str

    def fail(self, error: RequestFailed) -> None:
        """End the request of the client with an error."""

    def moved(self) -> None:
        """Record that the request has moved to another engine, which has a different clock."""


S = TypeVar("S", bound=State)


class RequestStates(Generic[S]):
    """States of the running requests, by request id.

    Implements the methods of ``OutputHandler`` that are the same for all kinds of requests.
    """

    def __init__(self) -> None:
        self._states: dict[str, S] = {}

    def __len__(self) -> int:
        """Return the number of requests that have not ended."""
        return len(self._states)

    def remove(self, state: S) -> bool:
        """Stop tracking the state of a request. Return False if the request had already ended."""
        return self._states.pop(state.request_id, None) is not None

    def moved(self, request_ids: Iterable[str]) -> None:
        """Record that these requests continue on other engines."""
        for request_id in request_ids:
            if (state := self._states.get(request_id)) is not None:
                state.moved()

    def fail(self, request_ids: Iterable[str], error: RequestFailed) -> None:
        """End these requests with an error. Ignore requests that have already ended."""
        for request_id in request_ids:
            if (state := self._states.get(request_id)) is not None:
                self._fail(state, error)

    def fail_all(self, error: RequestFailed) -> list[str]:
        request_ids = list(self._states)
        self.fail(request_ids, error)
        return request_ids

    def _fail(self, state: S, error: RequestFailed) -> None:
        self._states.pop(state.request_id, None)
        state.fail(error)


def failure_of(output: EngineCoreOutput) -> RequestFailed:
    """Return the error for a request that its engine aborted, or ended with an error."""
    if output.error is not None:
        return output.error.to_exception()
    if output.finish_reason is FinishReason.ABORT:
        # A request that its client aborted is no longer tracked. The engine must therefore have aborted this request,
        # because it is shutting down.
        return Unavailable("the engine is shutting down, and has ended the request", reason="ENGINE_SHUT_DOWN")
    return Unavailable("the engine failed while it computed this request", reason="ENGINE_ERROR")
