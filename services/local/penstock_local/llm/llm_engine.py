"""``LLMEngine``, which its caller drives step by step, and ``AsyncLLMEngine``, for programs with an event loop."""

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
    """``add_request``, then ``step`` while ``has_unfinished_requests``. Arguments and errors as of ``LLM``.

    The engine computes on a thread of its own; ``step`` waits for what it has made since the last one. Who does not step loses
    nothing, and the engine does not wait: the next step has all of it. Methods belong to one thread.
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
        """End what runs and release the model. Idempotent."""
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
        """Begin a request. ``output_kind`` says what ``step`` gives of it: all of the output so far, what is new, or only its
        end. Raises RequestFailed for what is wrong with it, and for an id that is in use.
        """
        if self._runtime.closed:
            raise Unavailable("this LLMEngine is closed", reason="CLOSED")
        if request_id in self._running:
            raise InvalidArgument(f"request_id is {request_id!r}, which a running request has", field="request_id")
        request = self._requests.single(prompt, params, output_kind, RequestContext(priority=priority))
        prepared = self._runtime.submit(functools.partial(self._calls.prepare, request)).result()
        work = functools.partial(_run, self._runtime, request_id, prepared, self._board)
        self._running[request_id] = self._runtime.submit(work)

    def abort(self, request_ids: Iterable[str]) -> None:
        """End requests; nothing more comes of them. Those that do not run are passed over."""
        for request_id in [request_ids] if isinstance(request_ids, str) else request_ids:
            if (running := self._running.pop(request_id, None)) is not None:
                running.cancel()
                self._board.forget(request_id)

    def has_unfinished_requests(self) -> bool:
        """Whether ``step`` has something to wait for."""
        return bool(self._running)

    def step(self) -> list[RequestOutput]:
        """Wait until something is new, and take it: at most one output of each request, whose last one is ``finished``. One
        that fails has ``error``. Without requests there is nothing, at once.
        """
        outputs: list[RequestOutput] = []
        while self._running and not outputs:
            outputs = [each for each in self._board.take(self._runtime) if each.request_id in self._running]
        for output in outputs:
            if output.finished:
                del self._running[output.request_id]
        return outputs


class _Board:
    """What is new of each request, until it is taken: the request goes on telling only then, so that deltas gather behind it."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._new: dict[str, tuple[RequestOutput, asyncio.Event]] = {}
        self._gone: set[str] = set()

    async def put(self, output: RequestOutput) -> None:
        """Show an output, and wait until it is taken. On the event loop's thread."""
        taken = asyncio.Event()
        with self._changed:
            self._new[output.request_id] = output, taken
            self._changed.notify()
        await taken.wait()

    def take(self, runtime: Runtime) -> list[RequestOutput]:
        """Wait for outputs, and take them."""
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
        """Take what is new of a request, for nobody."""
        with self._changed:
            self._new.pop(request_id, None)


def _close(runtime: Runtime, running: dict[str, "Future[None]"]) -> None:
    """Nobody takes what is new any more."""
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
    """``async for output in engine.generate(...)``: as many at once as there are tasks. Arguments and errors as of ``LLM``.

    Building one loads the model, which holds the caller up. The engine and its processing have threads of their own.
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
        """End what runs and release the model. Idempotent."""
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
        """The outputs of a prompt as they grow: all there is so far, what is new, or only the end. The last is ``finished``.
        Leaving the loop early ends the request, at the latest with ``aclose``. Raises RequestFailed; also for an id that is in
        use.
        """
        if self._runtime.closed:
            raise Unavailable("this AsyncLLMEngine is closed", reason="CLOSED")
        if request_id and request_id in self._running:
            raise InvalidArgument(f"request_id is {request_id!r}, which a running request has", field="request_id")
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
        """End a request: its ``generate`` gives what there is of its output, with finish reason ABORT, or raises Cancelled
        where the request has not begun. One that does not run is passed over.
        """
        live = self._running.get(request_id)
        if live is not None:
            self._runtime.call(live.abort)
            self._runtime.call(functools.partial(self._runtime.llm.abort, live))

    async def _there(self, work: Any) -> Any:
        """Do it on the engine's event loop."""
        return await asyncio.wrap_future(self._runtime.submit(work))


async def _next(outputs: AsyncGenerator[RequestOutput, None]) -> RequestOutput | None:
    return await anext(outputs, None)


async def _end(outputs: AsyncGenerator[RequestOutput, None]) -> None:
    await outputs.aclose()
