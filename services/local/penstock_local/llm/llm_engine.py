"""Classes ``LLMEngine``, which the caller drives step by step, and ``AsyncLLMEngine`` for asyncio programs."""

import asyncio
import functools
import threading
import weakref
from collections.abc import AsyncGenerator, Iterable
from concurrent.futures import Future
from typing import Any, Self

from penstock_common.errors import InvalidArgument, RequestFailed, Unavailable
from penstock_common.observability.logging import incident
from penstock_common.types.outputs import RequestError
from penstock_common.types.request import RequestContext
from penstock_common.types.sampling import OutputKind
from penstock_local.llm.calls import Calls, Prepared, pieces
from penstock_local.llm.inputs import Prompt, Requests, Sampling
from penstock_local.llm.options import engine_config
from penstock_local.llm.outputs import RequestOutput
from penstock_local.llm.parameters import ENGINE_ARGUMENTS, names_replacements
from penstock_local.llm.runtime import Runtime


class LLMEngine:
    """Engine with a step-wise interface: call ``add_request``, then ``step`` while ``has_unfinished_requests``.

    Arguments and errors are those of ``LLM``. The engine computes on its own thread. ``step`` waits for new output. The
    engine does not wait for calls of ``step``: a late call returns all output since the last call. Use the object from
    one thread only.
    """

    def __init__(self, model: str, *, tokenizer: str = "", seed: int | None = None, **options: Any) -> None:
        self._runtime = Runtime(engine_config(str(model), options), tokenizer=tokenizer)
        self._calls = Calls(self._runtime)
        self._requests = Requests(seed)
        self._board = _Board()
        self._running: dict[str, Future[None]] = {}
        self._close = weakref.finalize(self, _close, self._runtime, self._running)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Cancel running requests and release the model. Idempotent."""
        self._close()

    @names_replacements(ENGINE_ARGUMENTS)
    def add_request(
        self,
        request_id: str,
        prompt: Prompt,
        params: Sampling = None,
        *,
        output_kind: OutputKind = OutputKind.CUMULATIVE,
        priority: int = 0,
    ) -> None:
        """Start a request. ``output_kind`` selects what ``step`` returns: all output so far, new output, or only the
        end.

        Raises RequestFailed if the request is invalid or its id is in use.
        """
        if self._runtime.closed:
            raise Unavailable("this LLMEngine is closed", reason="CLOSED")
        if request_id in self._running:
            raise InvalidArgument(
                f"request_id is {request_id!r}, which a running request uses; choose another id", field="request_id"
            )
        request = self._requests.single(prompt, params, output_kind, RequestContext(priority=priority))
        prepared = self._runtime.submit(functools.partial(self._calls.prepare, request)).result()
        work = functools.partial(_run, self._runtime, request_id, prepared, self._board)
        self._running[request_id] = self._runtime.submit(work)

    def abort(self, request_ids: Iterable[str]) -> None:
        """Abort requests. Aborted requests produce no more output. Ids of requests that are not running are ignored."""
        for request_id in [request_ids] if isinstance(request_ids, str) else request_ids:
            if (running := self._running.pop(request_id, None)) is not None:
                running.cancel()
                self._board.forget(request_id)

    def has_unfinished_requests(self) -> bool:
        """Whether any request is unfinished."""
        return bool(self._running)

    def step(self) -> list[RequestOutput]:
        """Wait for new output, and return it: at most one output per request.

        The last output of a request is ``finished``. A request that fails has ``error`` set. Without running requests,
        returns an empty list immediately.
        """
        outputs: list[RequestOutput] = []
        while self._running and not outputs:
            outputs = [each for each in self._board.take(self._runtime) if each.request_id in self._running]
        for output in outputs:
            if output.finished:
                del self._running[output.request_id]
        return outputs


class _Board:
    """Buffer of the latest output of each request, until the caller takes the output.

    Until then, further deltas of the request are merged.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._new: dict[str, tuple[RequestOutput, asyncio.Event]] = {}
        self._gone: set[str] = set()

    async def put(self, output: RequestOutput) -> None:
        """Add an output, and wait until the caller has taken it. Runs on the event loop's thread."""
        taken = asyncio.Event()
        with self._changed:
            self._new[output.request_id] = output, taken
            self._changed.notify()
        await taken.wait()

    def take(self, runtime: Runtime) -> list[RequestOutput]:
        """Wait for outputs, and remove and return them."""
        with self._changed:
            while not self._new:
                self._changed.wait()
            taken = list(self._new.values())
            self._new.clear()

        def go_on() -> None:
            for _, event in taken:
                event.set()

        runtime.call(go_on)
        return [output for output, _ in taken]

    def forget(self, request_id: str) -> None:
        """Drop the output of a request."""
        with self._changed:
            self._new.pop(request_id, None)


def _close(runtime: Runtime, running: dict[str, "Future[None]"]) -> None:
    """Cancel running requests, and close the runtime."""
    for future in running.values():
        future.cancel()
    running.clear()
    runtime.close()


async def _run(runtime: Runtime, request_id: str, prepared: Prepared, board: _Board) -> None:
    try:
        async for output in pieces(runtime, prepared, request_id):
            await board.put(output)
    except Exception as e:
        failed = e if isinstance(e, RequestFailed) else incident(e, request=request_id, doing="running a request")
        await board.put(RequestOutput(request_id=request_id, error=RequestError.from_exception(failed)))


class AsyncLLMEngine:
    """Engine for asyncio programs: ``async for output in engine.generate(...)``. Each task runs one request.

    Arguments and errors are those of ``LLM``. The constructor blocks until the model is loaded. The engine and its
    processing run on their own threads.
    """

    def __init__(self, model: str, *, tokenizer: str = "", seed: int | None = None, **options: Any) -> None:
        self._runtime = Runtime(engine_config(str(model), options), tokenizer=tokenizer)
        self._close = weakref.finalize(self, self._runtime.close)
        self._calls = Calls(self._runtime)
        self._requests = Requests(seed)
        self._running: dict[str, Any] = {}

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Cancel running requests and release the model. Idempotent."""
        await asyncio.to_thread(self._close)

    @names_replacements(ENGINE_ARGUMENTS)
    async def generate(
        self,
        prompt: Prompt,
        params: Sampling = None,
        request_id: str = "",
        *,
        output_kind: OutputKind = OutputKind.CUMULATIVE,
        priority: int = 0,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Yield the outputs of a prompt: all output so far, new output, or only the end, as ``output_kind`` says.

        The last output is ``finished``. If the caller leaves the loop early, the request is aborted, at the latest by
        ``aclose``. Raises RequestFailed if the request fails or its id is in use.
        """
        if self._runtime.closed:
            raise Unavailable("this AsyncLLMEngine is closed", reason="CLOSED")
        if request_id and request_id in self._running:
            raise InvalidArgument(
                f"request_id is {request_id!r}, which a running request uses; choose another id", field="request_id"
            )
        request = self._requests.single(prompt, params, output_kind, RequestContext(priority=priority))
        name = request_id or f"request-{id(request):x}"
        self._running[name] = None
        outputs: AsyncGenerator[RequestOutput, None] | None = None
        try:
            prepared = await self._there(functools.partial(self._calls.prepare, request))
            outputs = pieces(self._runtime, prepared, request_id, functools.partial(self._running.__setitem__, name))
            while (output := await self._there(functools.partial(_next, outputs))) is not None:
                yield output
        finally:
            del self._running[name]
            if outputs is not None and not self._runtime.closed:
                await self._there(functools.partial(_end, outputs))

    def abort(self, request_id: str) -> None:
        """Abort a request. Its ``generate`` yields the output so far with finish reason ABORT.

        If the request has not started, ``generate`` raises Cancelled instead. Ids of requests that are not running are
        ignored.
        """
        live = self._running.get(request_id)
        if live is not None:
            self._runtime.call(live.abort)
            self._runtime.call(functools.partial(self._runtime.llm.abort, live))

    async def _there(self, work: Any) -> Any:
        """Run a coroutine on the engine's event loop."""
        return await asyncio.wrap_future(self._runtime.submit(work))


async def _next(outputs: AsyncGenerator[RequestOutput, None]) -> RequestOutput | None:
    return await anext(outputs, None)


async def _end(outputs: AsyncGenerator[RequestOutput, None]) -> None:
    await outputs.aclose()
