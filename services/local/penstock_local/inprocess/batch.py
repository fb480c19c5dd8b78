"""One call of an ``LLM``: many inputs, so many of them in the engine at once. Runs on the event loop's thread."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import TypeVar

import msgspec

from penstock_common.errors import RequestFailed, request_failed
from penstock_common.rpc.outputs import floats
from penstock_common.types.logprobs import Logprobs
from penstock_frontend.call_types import ChatRequest, GenerateRequest, PoolingRequest
from penstock_frontend.call_types import RequestOutput as Finished
from penstock_local.inprocess.outputs import CompletionOutput, EmbeddingOutput, RequestOutput
from penstock_local.inprocess.runtime import Runtime

T = TypeVar("T")
R = TypeVar("R")

_MIN_AT_ONCE = 64


class Batch:
    """Results come in the order of the inputs. The first failure ends the others and names its input, ``prompts[3]``.

    ``name``: what the inputs are called. ``done``: how many have their result.
    """

    def __init__(self, runtime: Runtime, name: str) -> None:
        self.done = 0
        self._runtime = runtime
        self._name = name
        # The engine always finds the next one waiting, and its queue stays short.
        self._gate = asyncio.Semaphore(max(_MIN_AT_ONCE, 2 * runtime.config.scheduler.max_num_seqs))

    async def generate(self, requests: Sequence[GenerateRequest]) -> list[RequestOutput]:
        """Continue prompts. All are checked before the first runs."""
        prepared = [await self._prepare(request, index) for index, request in enumerate(requests)]
        return await self._all(self._generate, prepared)

    async def chat(self, requests: Sequence[ChatRequest]) -> list[RequestOutput]:
        """Answer conversations."""
        prompts = []
        for index, request in enumerate(requests):
            with self._naming(index):
                prompts.append(await self._runtime.renderer.render(request))
        return await self.generate(prompts)

    async def embed(self, requests: Sequence[PoolingRequest]) -> list[EmbeddingOutput]:
        """Vectors of texts; each request has one."""
        return await self._all(self._embed, requests)

    async def _all(self, one: Callable[[T], Awaitable[R]], inputs: Sequence[T]) -> list[R]:
        async def run(index: int, value: T) -> R:
            async with self._gate:
                with self._naming(index):
                    result = await one(value)
            self.done += 1
            return result

        tasks = [asyncio.create_task(run(index, value)) for index, value in enumerate(inputs)]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()

    async def _prepare(self, request: GenerateRequest, index: int) -> "_Prepared":
        """A request with its prompt as token ids, checked as far as it can be without computing."""
        llm = self._runtime.llm
        text = request.prompt if isinstance(request.prompt, str) else None
        with self._naming(index):
            if text:  # an empty one is refused below, as a text
                encoded = await llm.encode(text, add_special_tokens=request.add_special_tokens)
                request = msgspec.structs.replace(request, prompt=encoded.ids or text)
            checked = await llm.inputs.process(request, "check")
            llm.inputs.check(checked, await llm.engines.wait_until_usable())
        return _Prepared(request, text, checked.prompt_token_ids)

    async def _generate(self, prepared: "_Prepared") -> RequestOutput:
        llm = self._runtime.llm
        live = llm.accept("")
        try:
            finished = [output async for output in llm.generate(prepared.request, live)]
        finally:
            llm.release(live)
        return _output(prepared, finished)

    async def _embed(self, request: PoolingRequest) -> EmbeddingOutput:
        result, _ = await self._runtime.llm.run_pooling(request)
        vectors = result.outputs[0].pooling_output
        if vectors is None:
            raise TypeError("an output without a vector is no answer")
        return EmbeddingOutput(embedding=floats(vectors), num_prompt_tokens=result.prompt_tokens)

    @contextlib.contextmanager
    def _naming(self, index: int) -> Iterator[None]:
        """Failures inside get the name of the input."""
        try:
            yield
        except RequestFailed as e:
            name = f"{self._name}[{index}]"
            if e.message.startswith(name):
                raise
            failed = request_failed(e.code, f"{name}: {e.message}", field=e.field, reason=e.reason)
            failed.retry_after = e.retry_after
            raise failed from e


class _Prepared(msgspec.Struct, frozen=True):
    """A request ready to run. ``token_ids`` are its prompt, ``text`` what they were made of."""

    request: GenerateRequest
    text: str | None
    token_ids: Sequence[int]


def _output(prepared: _Prepared, finished: Sequence[Finished]) -> RequestOutput:
    """What a prompt's sequences came to; each has sent one output, its last."""
    outputs = []
    cached = 0
    prompt_logprobs: Logprobs | None = None
    for each in sorted(finished, key=lambda output: output.index):
        if each.finish is None:
            raise TypeError("an output of kind FINAL has not ended")
        prompt_logprobs = prompt_logprobs or each.prompt_logprobs
        cached = max(cached, each.finish.usage.cached_tokens)
        outputs.append(
            CompletionOutput(
                index=each.index,
                text=each.text,
                token_ids=list(each.token_ids),
                finish_reason=each.finish.reason,
                stop_reason=each.finish.stop_reason,
                logprobs=each.logprobs,
            )
        )
    return RequestOutput(
        prompt=prepared.text,
        prompt_token_ids=list(prepared.token_ids),
        outputs=outputs,
        prompt_logprobs=prompt_logprobs,
        num_cached_tokens=cached,
    )
