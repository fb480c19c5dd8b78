"""Conversion of the pooling outputs of engines to results. Each engine request gives one result."""

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence

from penstock_common.errors import Internal, RequestFailed
from penstock_common.observability.logging import incident
from penstock_common.types.outputs import Drafts, EngineCoreOutput, FinishReason, NewTokens
from penstock_common.types.request import EngineCoreRequest, Vectors
from penstock_frontend.interfaces import OutputHandler
from penstock_frontend.processing.outputs.request_states import RequestStates, failure_of


class PooledState:
    """State of one pooling request until its result arrives."""

    __slots__ = ("answer", "external_id", "num_prompt", "request_id", "started")

    def __init__(self, request: EngineCoreRequest) -> None:
        self.request_id = request.request_id
        self.external_id = request.context.external_request_id
        self.num_prompt = len(request.prompt_token_ids)
        self.started = time.monotonic()
        self.answer: asyncio.Future[EngineCoreOutput] = asyncio.get_running_loop().create_future()

    def settle(self, output: EngineCoreOutput) -> None:
        """Pass the result to the call that waits for it."""
        if not self.answer.done():  # do nothing if the call was cancelled
            self.answer.set_result(output)

    def fail(self, error: RequestFailed) -> None:
        """End the call that waits for the result with an error."""
        if not self.answer.done():
            self.answer.set_exception(error)

    def moved(self) -> None:
        """Do nothing when the request continues on another engine, because no state depends on the engine."""


class PooledOutputs(RequestStates[PooledState]):
    """``OutputHandler`` for pooling requests. The handler tracks each request until the result of the request arrives.

    ``on_done`` is called for each successful request, with the id of the engine.
    """

    def __init__(self, on_done: Callable[[PooledState, str], None]) -> None:
        super().__init__()
        self._on_done = on_done

    def add(self, request: EngineCoreRequest) -> PooledState:
        """Track a request from now on, until its result arrives."""
        state = self._states[request.request_id] = PooledState(request)
        return state

    def process(
        self,
        outputs: Sequence[EngineCoreOutput],
        engine: str = "",
        timestamp: float = 0.0,
        tokens: Sequence[NewTokens] = (),
        drafts: Sequence[Drafts] = (),
    ) -> list[str]:
        """Process the outputs of one step, and ignore outputs of generation requests.

        Return the ids of requests that the engine should abort.
        """
        del timestamp, tokens, drafts
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
                self._fail(state, incident(e, request=state.external_id, doing="processing the pooling result"))
        return to_abort

    def _end(self, state: PooledState, output: EngineCoreOutput, engine: str) -> None:
        if output.pooling_output is None or output.finish_reason is not FinishReason.STOP:
            failed = output.error is not None or output.finish_reason in (FinishReason.ERROR, FinishReason.ABORT)
            no_result = "the engine ended a pooling request without a result"
            self._fail(state, failure_of(output) if failed else Internal(no_result))
            return
        self._on_done(state, engine)
        del self._states[state.request_id]
        state.settle(output)


class SplitOutputs:
    """Passes engine outputs to several handlers. Each handler processes only the outputs of its own requests."""

    def __init__(self, *handlers: OutputHandler) -> None:
        self._handlers = handlers

    def process(
        self,
        outputs: Sequence[EngineCoreOutput],
        engine: str = "",
        timestamp: float = 0.0,
        tokens: Sequence[NewTokens] = (),
        drafts: Sequence[Drafts] = (),
    ) -> list[str]:
        """Pass the outputs of one step to each handler. Return the ids of requests that the engine should abort."""
        return [
            id_ for handler in self._handlers for id_ in handler.process(outputs, engine, timestamp, tokens, drafts)
        ]

    def fail(self, request_ids: Iterable[str], error: RequestFailed) -> None:
        """End these requests with an error in all handlers."""
        ids = list(request_ids)
        for handler in self._handlers:
            handler.fail(ids, error)

    def fail_all(self, error: RequestFailed) -> list[str]:
        """End every request of every handler with an error. Return the ids of these requests."""
        return [request_id for handler in self._handlers for request_id in handler.fail_all(error)]

    def moved(self, request_ids: Iterable[str]) -> None:
        """Record that these requests have lost their engine, and continue on another engine."""
        ids = list(request_ids)
        for handler in self._handlers:
            handler.moved(ids)


def vectors_of(output: EngineCoreOutput) -> Vectors:
    """Return the vectors in the engine's output for an input. Raises TypeError if this is the output of a generation
    request.
    """
    if output.pooling_output is None:
        raise TypeError("the engine's output has no vectors, as if it belonged to a generation request")
    return output.pooling_output
