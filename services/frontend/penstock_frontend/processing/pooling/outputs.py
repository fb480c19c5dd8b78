"""Pooling requests on their way out: one answer per engine request."""

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence

from penstock_common.errors import Internal, RequestFailed, Unavailable
from penstock_common.observability.incidents import incident
from penstock_common.types.outputs import EngineCoreOutput, FinishReason
from penstock_common.types.request import EngineCoreRequest
from penstock_common.types.token_columns import NewTokens
from penstock_frontend.ports import OutputHandler


class PooledState:
    """One engine request until its answer."""

    __slots__ = ("answer", "external_id", "num_prompt", "request_id", "started")

    def __init__(self, request: EngineCoreRequest) -> None:
        self.request_id = request.request_id
        self.external_id = request.context.external_request_id
        self.num_prompt = len(request.prompt_token_ids)
        self.started = time.monotonic()
        self.answer: asyncio.Future[EngineCoreOutput] = asyncio.get_running_loop().create_future()


class PooledOutputs:
    """Follows every pooling request of this frontend. See ``OutputHandler``, whose part for these requests it is.

    ``on_done``: called for each that ends well, with the id of the engine that did it.
    """

    def __init__(self, on_done: Callable[[PooledState, str], None]) -> None:
        self._on_done = on_done
        self._states: dict[str, PooledState] = {}

    def __len__(self) -> int:
        """Requests that have not ended."""
        return len(self._states)

    def add(self, request: EngineCoreRequest) -> PooledState:
        """Follow a request from now on."""
        state = self._states[request.request_id] = PooledState(request)
        return state

    def remove(self, state: PooledState) -> bool:
        """Stop following a request. Returns whether it had not ended yet."""
        return self._states.pop(state.request_id, None) is not None

    def process(
        self,
        outputs: Sequence[EngineCoreOutput],
        engine: str = "",
        timestamp: float = 0.0,
        tokens: Sequence[NewTokens] = (),
    ) -> list[str]:
        """Take one step's outputs; those of other requests are not looked at. Returns what the engine need not go on with."""
        del timestamp, tokens
        to_abort: list[str] = []
        for output in outputs:
            state = self._states.get(output.request_id)
            if state is None or (output.finish_reason is None and output.error is None):
                continue
            if output.finish_reason is None:
                to_abort.append(state.request_id)
            try:
                self._end(state, output, engine)
            except Exception as e:
                self._fail(state, incident(e, request=state.external_id, doing="taking the result"))
        return to_abort

    def _end(self, state: PooledState, output: EngineCoreOutput, engine: str) -> None:
        if output.pooling_output is None or output.finish_reason is not FinishReason.STOP:
            self._fail(state, _failure(output))
            return
        self._on_done(state, engine)
        del self._states[state.request_id]
        _settle(state, output)

    def moved(self, request_ids: Iterable[str]) -> None:
        """See ``OutputHandler.moved``: nothing is kept of the engine."""

    def fail(self, request_ids: Iterable[str], error: RequestFailed) -> None:
        """End these requests, where they have not ended yet."""
        for request_id in request_ids:
            if (state := self._states.get(request_id)) is not None:
                self._fail(state, error)

    def fail_all(self, error: RequestFailed) -> list[str]:
        """End every request; returns their ids."""
        request_ids = list(self._states)
        self.fail(request_ids, error)
        return request_ids

    def _fail(self, state: PooledState, error: RequestFailed) -> None:
        self._states.pop(state.request_id, None)
        if not state.answer.done():
            state.answer.set_exception(error)


class SplitOutputs:
    """Hands engines' outputs to several handlers, of which each knows its own requests."""

    def __init__(self, *handlers: OutputHandler) -> None:
        self._handlers = handlers

    def process(
        self,
        outputs: Sequence[EngineCoreOutput],
        engine: str = "",
        timestamp: float = 0.0,
        tokens: Sequence[NewTokens] = (),
    ) -> list[str]:
        """See ``OutputHandler.process``."""
        return [id_ for handler in self._handlers for id_ in handler.process(outputs, engine, timestamp, tokens)]

    def fail(self, request_ids: Iterable[str], error: RequestFailed) -> None:
        """See ``OutputHandler.fail``."""
        ids = list(request_ids)
        for handler in self._handlers:
            handler.fail(ids, error)

    def fail_all(self, error: RequestFailed) -> list[str]:
        """See ``OutputHandler.fail_all``."""
        return [request_id for handler in self._handlers for request_id in handler.fail_all(error)]

    def moved(self, request_ids: Iterable[str]) -> None:
        """See ``OutputHandler.moved``."""
        ids = list(request_ids)
        for handler in self._handlers:
            handler.moved(ids)


def _settle(state: PooledState, output: EngineCoreOutput) -> None:
    if not state.answer.done():  # cancelled with its call
        state.answer.set_result(output)


def _failure(output: EngineCoreOutput) -> RequestFailed:
    if output.error is not None:
        return output.error.to_exception()
    if output.finish_reason is FinishReason.ABORT:
        return Unavailable("the engine ended the request because it is shutting down", reason="ENGINE_SHUT_DOWN")
    if output.finish_reason is FinishReason.ERROR:
        return Unavailable("the engine failed on this request", reason="ENGINE_ERROR")
    return Internal("the engine ended a pooling request without a result")
