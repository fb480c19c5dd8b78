"""The requests behind one HTTP call, one per prompt."""

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from types import TracebackType

import msgspec

from penstock_common.errors import RequestFailed
from penstock_common.types.outputs import FinishReason
from penstock_frontend.api.openai.errors import renamed
from penstock_frontend.async_llm import AsyncLLM, LiveRequest
from penstock_frontend.processing.request import GenerateRequest, RequestOutput

FINISH_REASONS = {
    FinishReason.STOP: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.REPETITION: "repetition",
}


class PromptOutput(msgspec.Struct, frozen=True):
    """A piece of output, and the index of the prompt that it continues."""

    prompt: int
    output: RequestOutput


class Generation:
    """``with Generation(llm, requests, names) as generation``: all are accepted, and released however the block ends.

    ``names[i]``: our names of fields to the client's, for errors of request i.
    """

    def __init__(self, llm: AsyncLLM, requests: Sequence[GenerateRequest], names: Sequence[Mapping[str, str]]) -> None:
        self._llm = llm
        self._requests = requests
        self._names = names
        self._lives: list[LiveRequest] = []

    def __enter__(self) -> "Generation":
        """Raises RequestFailed when one is not accepted; none is then."""
        try:
            for request in self._requests:
                self._lives.append(self._llm.accept(request.request_id))
        except BaseException:
            self._release()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._release()

    async def outputs(self) -> AsyncGenerator[PromptOutput, None]:
        """Outputs of all prompts as they come. Raises the RequestFailed of the first that fails, in the client's terms.

        At most one output of each prompt waits here for the client; the rest gathers in its collector.
        """
        if len(self._requests) == 1:
            async with aclosing(self._of(0)) as outputs:
                async for output in outputs:
                    yield output
            return
        queue: asyncio.Queue[PromptOutput | Exception | None] = asyncio.Queue(maxsize=1)
        readers = [asyncio.create_task(self._read(index, queue)) for index in range(len(self._requests))]
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

    async def _of(self, index: int) -> AsyncGenerator[PromptOutput, None]:
        try:
            async for output in self._llm.generate(self._requests[index], self._lives[index]):
                yield PromptOutput(index, output)
        except RequestFailed as e:
            raise renamed(e, self._names[index]) from e

    async def _read(self, index: int, queue: "asyncio.Queue[PromptOutput | Exception | None]") -> None:
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
