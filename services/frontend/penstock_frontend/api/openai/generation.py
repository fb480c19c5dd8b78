"""Prompts of one HTTP call, and the generation requests of the call. Each prompt has one request."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing
from types import TracebackType
from typing import Generic, NamedTuple, TypeVar

import msgspec

from penstock_common.errors import InvalidArgument, RequestFailed
from penstock_common.types.outputs import FinishReason
from penstock_frontend.api.http.request_body import Body
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
    """A request that a call wants to have accepted.

    Attributes:
        request_id: id of the request.
        demand: part of the limits on requests in flight that the request uses.
        outputs: function that returns the outputs of the request. It is called once the request is accepted.
        names: map of field names for the errors of the request, as in ``renamed``.
    """

    request_id: str
    demand: Demand
    outputs: Callable[[LiveRequest], AsyncIterator[O]]
    names: Mapping[str, str]


class PromptOutput(NamedTuple, Generic[O]):
    """A piece of output, and the index of its request in the call."""

    prompt: int
    output: O


class Generation(Generic[O]):
    """The requests of one call, used as ``with Generation(llm, sources, body) as generation``.

    All requests are accepted at the start of the ``with`` block, and released at its end in every case. The call's body
    is closed once the requests are accepted.
    """

    def __init__(self, llm: AsyncLLM, sources: Sequence[Source[O]], body: Body) -> None:
        self._llm = llm
        self._sources = sources
        self._body = body
        self._lives: list[LiveRequest] = []

    def __enter__(self) -> "Generation[O]":
        """Accept all requests of the call. If one of them is refused, none is accepted, and the error RequestFailed is
        raised.
        """
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
        """Number of prompt tokens of all requests that were sent to engines. A request that has an output was sent."""
        return sum(len(live.prompt_token_ids) for live in self._lives)

    def cancel(self) -> None:
        """Abort the requests of the call. The output that they have so far is kept.

        Requests that have started end with the finish reason ABORT. Other requests end with the error Cancelled.
        """
        for live in self._lives:
            live.abort()
            self._llm.abort(live)

    def outputs(self) -> AsyncGenerator[PromptOutput[O], None]:
        """Yield the outputs of all requests of the call.

        Raises the RequestFailed of the first request that fails, with the client's field names. At most one output of
        each request waits here for the client. Further output of a request is merged until then.
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
        except Exception as e:  # the reader of the queue raises the error again
            await queue.put(e)
        else:
            await queue.put(None)

    def _release(self) -> None:
        for live in self._lives:
            self._llm.release(live)


# The code below prepares the prompts of a completion call.

AS_MANY_AS_FIT = -1
"""Value of ``truncate_prompt_tokens`` that keeps as many prompt tokens as possible, so that the output still fits."""
Given = str | list[int]
"""A text, or token ids, which the frontend does not change."""


class Prompt(msgspec.Struct, frozen=True, kw_only=True):
    """A prompt of a completion call.

    Attributes:
        given: the prompt as text or as token ids.
        token_ids: token ids of the prompt if the answer must include them. Otherwise None.
        echo: text of the prompt, for choices that must begin with the prompt.
        names: map of field names for errors, as in ``renamed``.
    """

    given: Given
    token_ids: list[int] | None
    echo: str
    names: Mapping[str, str]


def split(prompt: str | Sequence[str | int | list[int]], limit: int) -> list[Given]:
    """Return the prompts in the field ``prompt`` of a body.

    Raises InvalidArgument if there is no prompt, if there are more than ``limit`` prompts, or if texts and token ids
    are mixed.
    """
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise InvalidArgument("prompt is an empty list; give at least one prompt", field="prompt")
    if set(map(type, prompt)) == {int}:  # this check must be fast, because a prompt may have a million token ids
        return [prompt]  # type: ignore[list-item]
    if len(prompt) > limit:
        raise InvalidArgument(f"prompt has {len(prompt)} prompts; limits.max_prompts is {limit}", field="prompt")
    prompts: list[Given] = []
    for index, each in enumerate(prompt):
        if isinstance(each, int):
            field = f"prompt[{index}]"
            raise InvalidArgument(f"{field} is {each}, a token id, but other entries are not token ids", field=field)
        prompts.append(each)
    return prompts


async def prepare(
    llm: AsyncLLM,
    given: Given,
    *,
    field: str,
    needs_ids: bool,
    echo: bool,
    keep: int | None,
    add_special_tokens: bool,
    skip_special_tokens: bool,
    names: Mapping[str, str],
) -> Prompt:
    """Return a prompt, ready for a request. If the answer or the truncation needs token ids, the prompt is tokenized
    here, and truncated to its last ``keep`` tokens. Raises RequestFailed if the prompt is empty or not valid.
    """
    names = {"text": field, "token_ids.ids": field, "token_ids": field, "prompt": field, **names}
    if not given:
        raise InvalidArgument(f"{field} is empty: there is no prompt", field=field)
    cut_echo = echo and keep is not None
    token_ids = None if isinstance(given, str) else given
    text = given if isinstance(given, str) else ""
    try:
        if token_ids is None and (needs_ids or cut_echo):
            token_ids = (await llm.encode(text, add_special_tokens=add_special_tokens)).ids
        if token_ids is not None and keep is not None:
            token_ids = token_ids[-keep:]
        if echo and token_ids is not None and (cut_echo or not text):
            text = await llm.decode(token_ids, skip_special_tokens=skip_special_tokens)
    except RequestFailed as e:
        raise renamed(e, names) from e
    return Prompt(
        given=given if token_ids is None else token_ids, token_ids=token_ids, echo=text if echo else "", names=names
    )
