"""The engine for programs with an event loop of their own."""

import asyncio
import functools
import weakref
from collections.abc import AsyncGenerator
from typing import Any, Self

from penstock_common.errors import InvalidArgument, Unavailable
from penstock_common.types.sampling import OutputKind
from penstock_local.llm.calls import Calls
from penstock_local.llm.inputs import Prompt, Sampling
from penstock_local.llm.options import engine_config
from penstock_local.llm.outputs import RequestOutput
from penstock_local.llm.pieces import pieces
from penstock_local.llm.requests import Requests
from penstock_local.llm.runtime import Runtime
from penstock_local.llm.vllm_names import ENGINE_ARGUMENTS, names_replacements


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
        request = self._requests.single(prompt, params, output_kind, priority=priority)
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
