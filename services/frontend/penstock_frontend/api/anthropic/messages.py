"""``/v1/messages`` and ``/v1/messages/count_tokens``: the routes for conversations in Anthropic's protocol."""

import functools
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from typing import Any

from starlette.routing import Route

from penstock_common.errors import RequestFailed
from penstock_common.types.sampling import OutputKind
from penstock_frontend.api.anthropic import errors
from penstock_frontend.api.anthropic.protocol import (
    AssistantMessage,
    ConversationBody,
    MessagesBody,
    MessageWriter,
    StreamEvent,
    TokenCount,
    check,
)
from penstock_frontend.api.anthropic.turns import (
    Turns,
    choice_of,
    continues,
    format_constraint,
    template_kwargs,
    tools_of,
    turns_of,
)
from penstock_frontend.api.http.endpoint import Answer, Call, Endpoint, Gate, Handler
from penstock_frontend.api.http.model_switch import for_each_model
from penstock_frontend.api.http.request_body import Bodies, Body
from penstock_frontend.api.http.streaming import EventStream, StreamForm, named
from penstock_frontend.api.media_sources import placed
from penstock_frontend.api.openai import sampling_fields
from penstock_frontend.api.openai.audio.transcriptions import refuse_text
from penstock_frontend.api.openai.context import context_of
from penstock_frontend.api.openai.conversation import CONVERSATION
from penstock_frontend.api.openai.errors import renamed
from penstock_frontend.api.openai.generation import Generation, Source
from penstock_frontend.api.openai.sampling_fields import predicted_text
from penstock_frontend.api.tools import ChosenTools
from penstock_frontend.call_types import ChatRequest
from penstock_frontend.call_warnings import WarningKind, name_fields, warn
from penstock_frontend.calls.admission import demand_of
from penstock_frontend.calls.chat import ChatCalls
from penstock_frontend.calls.generate import AsyncLLM
from penstock_frontend.processing.chat.answers import ChatOutput
from penstock_frontend.served_models import ServedModel, ServedModels

EVENTS = StreamForm(named, errors.event)
_NAMES = {
    **CONVERSATION,
    "text": "messages",
    "prompt": "messages",
    "continue_final_message": "messages",
}


class Messages:
    """Handlers of the routes of the Messages API."""

    def __init__(self, llm: AsyncLLM, chat: ChatCalls) -> None:
        self._llm = llm
        self._chat = chat

    async def create(self, call: Call, given: Body) -> Answer:
        """Generate the next message of a conversation. Raises RequestFailed if the request is refused or fails."""
        body = await given.decode(MessagesBody)
        model = self._llm.inputs.check_model(body.model or "", body.lora or "")
        check(body)
        turns = turns_of(body)
        tools = tools_of(body.tools)
        chosen = tools.chosen(choice_of(body.tool_choice, tools=bool(body.tools)))
        request = _request(body, call, turns, self._sampling(body), chosen)
        names = _names(body, turns, chosen)
        name_fields(names)
        demand = demand_of(request)
        self._llm.check_room([demand])
        label = request.context.external_request_id
        source = Source(label, demand, functools.partial(self._chat.run, request), names)
        choice = body.tool_choice
        writer = MessageWriter(
            label,
            model,
            parallel_calls=choice is None or not choice.disable_parallel_tool_use,
            thinking=body.thinking is None or body.thinking.display != "omitted",
        )
        generation = Generation(self._llm, [source], given)
        if body.stream:
            return await EventStream.started(_events(writer, generation), EVENTS)
        return await _whole(writer, generation)

    async def count(self, call: Call, given: Body) -> Answer:
        """Return the number of prompt tokens of a conversation. Raises RequestFailed if the request is refused or
        fails.
        """
        body = await given.decode(ConversationBody)
        self._llm.inputs.check_model(body.model or "", body.lora or "")
        check(body)
        turns = turns_of(body)
        chosen = tools_of(body.tools).chosen(choice_of(body.tool_choice, tools=bool(body.tools)))
        try:
            rendered = await self._chat.renderer.render(_request(body, call, turns, {}, chosen))
            token_ids = await self._llm.prompt_ids(rendered)
        except RequestFailed as e:
            raise renamed(e, _names(body, turns, chosen)) from e
        return TokenCount(len(token_ids))

    def _sampling(self, body: MessagesBody) -> dict[str, Any]:
        # Request deltas even for an answer that is not streamed, so that the answer has the same blocks as a stream.
        values = {**sampling_fields.values(body, format_constraint(body)), "output_kind": OutputKind.DELTA}
        # Clients send a budget for reasoning even to models without reasoning, in which there is nothing to limit.
        if self._chat.reasons and body.thinking is not None and body.thinking.budget_tokens is not None:
            if self._llm.inputs.reasoning is not None:
                values["thinking_token_budget"] = body.thinking.budget_tokens
            else:
                why = "is not enforced: the reasoning tags of this model are several tokens"
                warn(WarningKind.HINT_IGNORED, "thinking.budget_tokens", why)
        return values


async def _whole(writer: MessageWriter, generation: Generation[ChatOutput]) -> AssistantMessage:
    with generation:
        async with aclosing(generation.outputs()) as outputs:
            async for _, output in outputs:
                for _ in writer.take(output):
                    pass
    return writer.whole()


async def _events(writer: MessageWriter, generation: Generation[ChatOutput]) -> AsyncGenerator[StreamEvent, None]:
    begun = False
    with generation:
        async with aclosing(generation.outputs()) as outputs:
            async for _, output in outputs:
                if not begun:
                    begun = True
                    yield writer.begin(generation.prompt_tokens)
                for event in writer.take(output):
                    yield event


def _request(
    body: ConversationBody, call: Call, turns: Turns, sampling: dict[str, Any], chosen: ChosenTools
) -> ChatRequest:
    return ChatRequest(
        messages=placed(turns.messages),
        tools=chosen.tools,
        tool_choice=chosen.mode,
        named_tool=chosen.named,
        continue_final_message=continues(body),
        template=body.chat_template or "",
        template_kwargs=template_kwargs(body),
        sampling=sampling,
        prediction=predicted_text(body.prediction),
        context=context_of(call, "msg", body),
    )


def _names(body: ConversationBody, turns: Turns, chosen: ChosenTools) -> Mapping[str, str]:
    """Return the map from the names of Penstock's fields to the names of the client's fields."""
    thinking = {} if body.thinking is None else {"sampling_params.thinking_token_budget": "thinking.budget_tokens"}
    return {
        **{f"messages[{index}]": place for index, place in enumerate(turns.places)},
        **chosen.names,
        **_NAMES,
        **thinking,
        **sampling_fields.names(body, format_constraint(body)),
    }


def routes(models: ServedModels, *, gate: Gate, bodies: Bodies) -> Sequence[Route]:
    """Return all routes of the Messages API. Other protocols of the HTTP listener use the same ``gate`` and ``bodies``.

    For a model that only transcribes audio files, the routes refuse all calls.
    """

    def create(model: ServedModel) -> Handler:
        return Messages(model.llm, model.chat).create if model.speech is None else refuse_text

    def count(model: ServedModel) -> Handler:
        return Messages(model.llm, model.chat).count if model.speech is None else refuse_text

    handlers = {
        errors.PREFIX: for_each_model(models, create),
        f"{errors.PREFIX}/count_tokens": for_each_model(models, count),
    }
    return [
        Route(path, Endpoint(gate, bodies, handler, errors.answer), methods=["POST"])
        for path, handler in handlers.items()
    ]
