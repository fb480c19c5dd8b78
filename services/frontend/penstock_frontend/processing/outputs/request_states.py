"""The requests that a frontend follows until they end, whatever they produce."""

from collections.abc import Iterable
from typing import Generic, Protocol, TypeVar

from penstock_common.errors import RequestFailed, Unavailable
from penstock_common.types.outputs import EngineCoreOutput, FinishReason


class State(Protocol):
    """What is kept of one request."""

    request_id: str

    def fail(self, error: RequestFailed) -> None:
        """End it for its client."""

    def moved(self) -> None:
        """It goes on on another engine, whose clock is another one."""


S = TypeVar("S", bound=State)


class RequestStates(Generic[S]):
    """The states by request id, and the part of an ``OutputHandler`` that is the same for all kinds of requests."""

    def __init__(self) -> None:
        self._states: dict[str, S] = {}

    def __len__(self) -> int:
        """Requests that have not ended."""
        return len(self._states)

    def remove(self, state: S) -> bool:
        """Stop following a request. Returns whether it had not ended yet."""
        return self._states.pop(state.request_id, None) is not None

    def moved(self, request_ids: Iterable[str]) -> None:
        """These requests go on on another engine."""
        for request_id in request_ids:
            if (state := self._states.get(request_id)) is not None:
                state.moved()

    def fail(self, request_ids: Iterable[str], error: RequestFailed) -> None:
        """End these requests, where they have not ended yet."""
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
    """What a request ends with whose engine ended it with an error, or aborted it."""
    if output.error is not None:
        return output.error.to_exception()
    if output.finish_reason is FinishReason.ABORT:
        # Requests that the client ended are not followed any more: the engine did this, on its way out.
        return Unavailable("the engine ended the request because it is shutting down", reason="ENGINE_SHUT_DOWN")
    return Unavailable("the engine failed on this request", reason="ENGINE_ERROR")
