"""Route ``POST /v1/responses``, which continues a conversation with a new response. Later calls can continue the
response.
"""

import functools
import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

import msgspec

from penstock_common.errors import Cancelled, InvalidArgument
from penstock_common.types.sampling import OutputKind
from penstock_frontend.api.http.endpoint import Answer, Call
from penstock_frontend.api.http.request_body import Body
from penstock_frontend.api.http.streaming import EventStream, StreamForm, named
from penstock_frontend.api.media_sources import placed
from penstock_frontend.api.openai import errors, sampling_fields
from penstock_frontend.api.openai.context import context_of
from penstock_frontend.api.openai.conversation import options_of
from penstock_frontend.api.openai.generation import Generation, Source
from penstock_frontend.api.openai.responses import input_items, response
from penstock_frontend.api.openai.responses.input_items import SERVED, choice_of, tools_of
from penstock_frontend.api.openai.responses.response import (
    Event,
    FormatBody,
    InputItem,
    InputPart,
    ReasoningBody,
    Response,
    ResponseBody,
    TextBody,
    check,
)
from penstock_frontend.api.openai.responses.response_store import ResponseStore, Running, resolved
from penstock_frontend.api.openai.responses.response_writer import ResponseWriter
from penstock_frontend.api.openai.sampling_fields import predicted_text
from penstock_frontend.api.tools import ChosenTools, ServedTools
from penstock_frontend.call_types import ChatMessage, ChatRequest
from penstock_frontend.call_warnings import name_fields
from penstock_frontend.calls.admission import demand_of
from penstock_frontend.calls.chat import ChatCalls
from penstock_frontend.calls.generate import AsyncLLM
from penstock_frontend.processing.chat.answers import ChatOutput
from penstock_frontend.processing.chat.histories import warn_of_lost_calls


def _unexpected(error: Exception, request_id: str) -> bytes:
    return b"event: error\ndata: %b\n\n" % errors.answer(error, request_id).body


EVENTS = StreamForm(named, _unexpected)


class ResponseCreation:
    """Handler of ``POST /v1/responses``."""

    def __init__(self, llm: AsyncLLM, chat: ChatCalls, store: ResponseStore) -> None:
        self._llm = llm
        self._chat = chat
        self._store = store

    async def __call__(self, call: Call, given: Body) -> Answer:
        """Generate the response to a conversation. Raises RequestFailed if the request is refused or fails."""
        body = await given.decode(ResponseBody)
        model = self._llm.inputs.check_model(body.model or "", body.lora or "")
        check(body)
        keep = self._store.enabled if body.store is None else body.store
        if keep and not self._store.enabled:
            raise InvalidArgument(
                "store is true, but this server stores no responses (http.responses.max_stored is 0)",
                field="store",
                reason="RESPONSES_NOT_STORED",
            )
        tools = tools_of(body.tools)
        chosen = tools.chosen(choice_of(body.tool_choice))
        tenant = call.context.tenant
        body = msgspec.structs.replace(body, input=resolved(body.input, self._store, tenant))
        given_turns = await given.converted(functools.partial(_turns, body))
        before = (
            self._store.messages(tenant, body.previous_response_id) if body.previous_response_id is not None else []
        )
        messages = [*before, *given_turns.messages]
        warn_of_lost_calls(messages, [""] * len(before) + given_turns.places)
        call = sampling_fields.with_kv(call, body, self._llm.gateway, num_sequences=1)
        request = _request(body, call, messages, chosen)
        num_before = len(request.messages) - len(given_turns.messages)
        names = input_items.names(body, given_turns.places, num_before, chosen)
        name_fields(names)
        demand = demand_of(request)
        self._llm.check_room([demand])
        label = request.context.external_request_id
        source = Source(label, demand, functools.partial(self._chat.run, request), names)
        # Clients may use one request id for several calls, but the ids of responses must be unique.
        response_id = f"resp_{uuid.uuid4().hex if call.given_id else call.request_id}"
        making = _Making(self._begun(body, response_id, model, keep=keep), self._llm, body, tenant, messages, tools)
        generation = Generation(self._llm, [source], given)
        if body.stream:
            return await EventStream.started(making.events(generation, self._store), EVENTS)
        return await making.whole(generation, self._store)

    def _begun(self, body: ResponseBody, response_id: str, model: str, *, keep: bool) -> Response:
        text = body.text or TextBody()
        return Response(
            id=response_id,
            created_at=int(time.time()),
            status=response.IN_PROGRESS,
            instructions=body.instructions,
            max_output_tokens=body.max_tokens,
            metadata=body.metadata or {},
            model=model,
            parallel_tool_calls=body.parallel_tool_calls is not False,
            previous_response_id=body.previous_response_id,
            reasoning=body.reasoning or ReasoningBody(),
            store=keep,
            temperature=body.temperature,
            text=TextBody(format=text.format or FormatBody(type="text"), verbosity=text.verbosity),
            tool_choice=body.tool_choice or "auto",
            tools=[tool for tool in body.tools or () if tool.type in SERVED],
            top_logprobs=body.top_logprobs or 0,
            top_p=body.top_p,
            user=body.user,
        )


class _Making:
    """Produces one response. ``messages`` are the messages of the conversation without instructions."""

    def __init__(
        self,
        begun: Response,
        llm: AsyncLLM,
        body: ResponseBody,
        tenant: str,
        messages: Sequence[ChatMessage],
        tools: ServedTools,
    ) -> None:
        self._writer = ResponseWriter(
            begun,
            parallel_calls=begun.parallel_tool_calls,
            reasoning=body.include_reasoning is not False,
            top_logprobs=sampling_fields.num_shown(body, begun.top_logprobs if body.with_logprobs else None),
            bytes_of=llm.tokenizer.bytes_of,
            tools=tools,
        )
        self._tools = tools
        self._tenant = tenant
        self._items = _items(body.input)
        self._messages = messages

    async def whole(self, generation: Generation[ChatOutput], store: ResponseStore) -> Response:
        """Return the complete response, after it has ended. Raises RequestFailed, but not for a cancelled response."""
        with generation:
            self._begin(generation, store)
            try:
                async with aclosing(generation.outputs()) as outputs:
                    async for _, output in outputs:
                        for _ in self._writer.take(output):
                            pass
            except Cancelled as e:
                self._writer.fail(e)
            except BaseException:
                store.end(self._tenant, self._writer.response.id)
                raise
        self._end(store)
        return self._writer.response

    async def events(self, generation: Generation[ChatOutput], store: ResponseStore) -> AsyncGenerator[Event, None]:
        """Yield the events of the response. An error before the first output is raised. A later error becomes the last
        event.
        """
        begun = False
        with generation:
            self._begin(generation, store)
            try:
                async with aclosing(generation.outputs()) as outputs:
                    async for _, output in outputs:
                        if not begun:
                            begun = True
                            for event in self._writer.begin():
                                yield event
                        for event in self._writer.take(output):
                            yield event
            except Exception as e:
                if not begun:
                    store.end(self._tenant, self._writer.response.id)
                    raise
                self._writer.fail(e)
            except BaseException:  # the client has disconnected from the stream
                store.end(self._tenant, self._writer.response.id)
                raise
        self._end(store)
        yield self._writer.last()

    def _begin(self, generation: Generation[ChatOutput], store: ResponseStore) -> None:
        if self._writer.response.store:
            store.begin(self._tenant, Running(self._writer.response, self._items, generation.cancel))

    def _end(self, store: ResponseStore) -> None:
        ended = self._writer.response
        if store.end(self._tenant, ended.id) and ended.status != response.FAILED:
            messages = [*self._messages, *input_items.answered(self._writer.blocks.all, self._tools)]
            store.keep(self._tenant, ended, self._items, messages)


def _turns(body: ResponseBody) -> input_items.Turns:
    return input_items.turns_of(body.input, options_of(body.mm_processor_kwargs, body.media_io_kwargs))


def _request(body: ResponseBody, call: Call, messages: Sequence[ChatMessage], chosen: ChosenTools) -> ChatRequest:
    # Request deltas even for a response that is not streamed, so that the response has the same items as a stream.
    own = input_items.format_constraint(body.text.format if body.text is not None else None)
    values = {**sampling_fields.values(body, own), "output_kind": OutputKind.DELTA}
    asked = (body.top_logprobs or 0) if body.with_logprobs else None
    values |= sampling_fields.num_logprobs(body, asked, field='include to ["message.output_text.logprobs"]')
    instructions = [ChatMessage(role="system", content=body.instructions)] if body.instructions else []
    return ChatRequest(
        messages=placed([*instructions, *messages]),
        tools=chosen.tools,
        tool_choice=chosen.mode,
        named_tool=chosen.named,
        template=body.chat_template or "",
        template_kwargs=input_items.template_kwargs(body),
        sampling=values,
        prediction=predicted_text(body.prediction),
        context=context_of(call, "resp", body),
    )


def _items(given: str | Sequence[InputItem]) -> list[InputItem]:
    """Return the input of the body as items that have ids and types."""
    if isinstance(given, str):
        part = InputPart(type="input_text", text=given)
        given = [InputItem(type="message", role="user", content=[part])]
    return [
        msgspec.structs.replace(item, id=item.id or f"item_{uuid.uuid4().hex}", type=item.type or "message")
        for item in given
    ]
