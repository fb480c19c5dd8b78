"""The requests behind one HTTP call, one per prompt."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing
from types import TracebackType
from typing import Generic, NamedTuple, TypeVar

from penstock_common.errors import RequestFailed
from penstock_common.types.outputs import FinishReason
from penstock_frontend.api.openai.bodies import Body
from penstock_frontend.api.openai.errors import renamed
from penstock_frontend.calls.admission import Demand
from penstock_frontend.calls.generate import AsyncLLM
from penstock_frontend.calls.live_request import LiveRequest

FINISH_REASONS = {
    FinishReason.STOP: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.ABORT: "abort",
    FinishReason.REPETITION: "repetition",
}

O = TypeVar("O")  # noqa: E741 - an output


class Source(NamedTuple, Generic[O]):
    """A request to accept under an id, what it takes up, and its outputs once it is accepted. ``names``: see ``renamed``, for
    its errors.
    """

    request_id: str
    demand: Demand
    outputs: Callable[[LiveRequest], AsyncIterator[O]]
    names: Mapping[str, str]


class PromptOutput(NamedTuple, Generic[O]):
    """A piece of output, and the index of the request that it is of."""

    prompt: int
    output: O


class Generation(Generic[O]):
    """``with Generation(llm, sources, body) as generation``: all are accepted, and released however the block ends.

    The call's body is closed as soon as they are accepted.
    """

    def __init__(self, llm: AsyncLLM, sources: Sequence[Source[O]], body: Body) -> None:
        self._llm = llm
        self._sources = sources
        self._body = body
        self._lives: list[LiveRequest] = []

    def __enter__(self) -> "Generation[O]":
        """Raises RequestFailed when one is not accepted; none is then."""
        try:
            for source in self._sources:
                self._lives.append(self._llm.accept(source.request_id, source.demand))
        except BaseException:
            self._release()
            raise
        self._body.close()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._release()

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the prompts that are on their way to engines, which all are that have an output."""
        return sum(len(live.prompt_token_ids) for live in self._lives)

    def cancel(self) -> None:
        """End the requests with what there is of their outputs: those that have begun with finish reason ABORT, others with
        Cancelled.
        """
        for live in self._lives:
            live.abort()
            self._llm.abort(live)

    def outputs(self) -> AsyncGenerator[PromptOutput[O], None]:
        """Outputs of all requests as they come. Raises the RequestFailed of the first that fails, in the client's terms.

        At most one output of each waits here for the client; the rest gathers in its collector.
        """
        return self._of(0) if len(self._sources) == 1 else self._of_all()

    async def _of_all(self) -> AsyncGenerator[PromptOutput[O], None]:
        queue: asyncio.Queue[PromptOutput[O] | Exception | None] = asyncio.Queue(maxsize=1)
        readers = [asyncio.create_task(self._read(index, queue)) for index in range(len(self._sources))]
        try:
            num_running = len(readers)
            while num_running:
                item = await queue.get()
                if isinstance(item, Exception):
                    raise item
                if item is None:
                    num_running -= 1
                else:
                    yield item
        finally:
            for reader in readers:
                reader.cancel()
            await asyncio.gather(*readers, return_exceptions=True)

    async def _of(self, index: int) -> AsyncGenerator[PromptOutput[O], None]:
        try:
            async for output in self._sources[index].outputs(self._lives[index]):
                yield PromptOutput(index, output)
        except RequestFailed as e:
            raise renamed(e, self._sources[index].names) from e

    async def _read(self, index: int, queue: "asyncio.Queue[PromptOutput[O] | Exception | None]") -> None:
        try:
            async with aclosing(self._of(index)) as outputs:
                async for output in outputs:
                    await queue.put(output)
        except Exception as e:  # raised again by who reads the queue
            await queue.put(e)
        else:
            await queue.put(None)

    def _release(self) -> None:
        for live in self._lives:
            self._llm.release(live)
