"""``/v1/chat/completions``: answers conversations."""

import functools
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from typing import Any

import msgspec

from penstock_common.errors import InvalidArgument, RequestFailed, Unimplemented
from penstock_common.types.logprobs import Logprobs
from penstock_frontend.api.openai import sampling_fields
from penstock_frontend.api.openai.bodies import Body
from penstock_frontend.api.openai.body_fields import check_range, refuse_fields, shown
from penstock_frontend.api.openai.chat_choices import ChatChoice, ChatChoiceWriter, ChatStyle, ChunkChoice
from penstock_frontend.api.openai.chat_tools import ToolBody, ToolChoiceObject, choice_of, tools_of
from penstock_frontend.api.openai.choice_logprobs import BytesOf, PromptLogprobs, prompt_logprobs
from penstock_frontend.api.openai.context import context_of
from penstock_frontend.api.openai.conversation import CONVERSATION, MessageBody, messages_of
from penstock_frontend.api.openai.endpoint import Answer, Call
from penstock_frontend.api.openai.errors import renamed
from penstock_frontend.api.openai.generation import Generation, Source
from penstock_frontend.api.openai.media_fields import MediaIoBody, options_of
from penstock_frontend.api.openai.prediction import text_of
from penstock_frontend.api.openai.prompts import AS_MANY_AS_FIT
from penstock_frontend.api.openai.sampling_fields import SamplingFields, StreamOptions
from penstock_frontend.api.openai.sse import EventStream
from penstock_frontend.api.openai.usage import UsageCount, UsageInfo, usage_info
from penstock_frontend.api.reasoning_effort import effort_kwargs
from penstock_frontend.api.served_tools import ChosenTools, ServedTools
from penstock_frontend.call_types import ChatRequest, Finish, KvParams
from penstock_frontend.calls.admission import demand_of
from penstock_frontend.calls.chat import ChatCalls
from penstock_frontend.calls.generate import AsyncLLM
from penstock_frontend.processing.chat.answers import ChatOutput

_INT32_MAX = 2**31 - 1


class ChatCompletionRequest(SamplingFields, kw_only=True):
    """The body."""

    messages: list[MessageBody]
    tools: list[ToolBody] | None = None
    tool_choice: str | ToolChoiceObject | None = None
    parallel_tool_calls: bool | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    reasoning_effort: str | None = None
    include_reasoning: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    modalities: list[str] | None = None
    mm_processor_kwargs: dict[str, Any] | None = None
    media_io_kwargs: MediaIoBody | None = None


class ChatCompletion(msgspec.Struct, frozen=True, kw_only=True):
    """The answer. ``prompt_logprobs`` and ``prompt_token_ids`` are vLLM's."""

    id: str
    object: str = "chat.completion"
    created: int
    model: str
    choices: Sequence[ChatChoice]
    usage: UsageInfo
    prompt_logprobs: PromptLogprobs | msgspec.UnsetType = msgspec.UNSET
    prompt_token_ids: Sequence[int] | msgspec.UnsetType = msgspec.UNSET
    kv_transfer_params: dict[str, Any] | msgspec.UnsetType = msgspec.UNSET


class ChatCompletionChunk(msgspec.Struct, frozen=True, kw_only=True):
    """A piece of the answer."""

    id: str
    object: str = "chat.completion.chunk"
    created: int
    model: str
    choices: Sequence[ChunkChoice]
    usage: UsageInfo | msgspec.UnsetType | None = msgspec.UNSET
    prompt_token_ids: Sequence[int] | msgspec.UnsetType = msgspec.UNSET
    kv_transfer_params: dict[str, Any] | msgspec.UnsetType = msgspec.UNSET


class ChatCompletions:
    """The handler."""

    def __init__(self, llm: AsyncLLM, chat: ChatCalls) -> None:
        self._llm = llm
        self._chat = chat

    async def __call__(self, call: Call, given: Body) -> Answer:
        """Answer the conversation. Raises RequestFailed."""
        body = await given.decode(ChatCompletionRequest)
        model = self._llm.inputs.check_model(body.model or "", body.lora or "")
        _check(body)
        if body.truncate_prompt_tokens == AS_MANY_AS_FIT:
            body.truncate_prompt_tokens = await self._llm.prompt_room(body.max_tokens or 1, call.context)
        kv = sampling_fields.kv_params(body, self._llm.gateway, num_sequences=body.n or 1)
        tools = tools_of(body.tools)
        chosen = tools.chosen(choice_of(body.tool_choice))
        names = _names(body, chosen)
        request = await given.converted(functools.partial(_request, body, call, kv, chosen))
        demand = demand_of(request)
        self._llm.check_room([demand])
        prompt_token_ids = await self._prompt_token_ids(body, request, names)
        request_id = request.context.external_request_id
        source = Source(request_id, demand, functools.partial(self._chat.run, request), names)
        making = _Making(body, request_id, model, prompt_token_ids, self._llm.tokenizer.bytes_of, tools)
        generation = Generation(self._llm, [source], given)
        if body.stream:
            return await EventStream.started(making.chunks(generation))
        return await making.whole(generation)

    async def _prompt_token_ids(
        self, body: ChatCompletionRequest, request: ChatRequest, names: Mapping[str, str]
    ) -> list[int]:
        """The prompt's, where the answer speaks of them; else none."""
        if not body.return_token_ids and not (body.stream_options and body.stream_options.continuous_usage_stats):
            return []
        try:
            rendered = await self._chat.renderer.render(request)
            ids = await self._llm.prompt_ids(rendered)
        except RequestFailed as e:
            raise renamed(e, names) from e
        return ids if body.truncate_prompt_tokens is None else ids[-body.truncate_prompt_tokens :]


class _Making:
    """One call's answer in the making."""

    def __init__(
        self,
        body: ChatCompletionRequest,
        completion_id: str,
        model: str,
        prompt_token_ids: Sequence[int],
        bytes_of: BytesOf,
        tools: ServedTools,
    ) -> None:
        self._body = body
        self._tools = tools
        self._id = completion_id
        self._model = model
        self._created = int(time.time())
        self._prompt_token_ids = prompt_token_ids
        self._usage = UsageCount()
        self._style = ChatStyle(
            top_logprobs=(body.top_logprobs or 0) if body.logprobs else None,
            bytes_of=bytes_of,
            token_ids=bool(body.return_token_ids),
            reasoning=body.include_reasoning is not False,
            parallel_tool_calls=body.parallel_tool_calls is not False,
        )
        self._writers: dict[int, ChatChoiceWriter] = {}

    async def whole(self, generation: Generation[ChatOutput]) -> ChatCompletion:
        """The answer, once all sequences have ended."""
        choices: dict[int, ChatChoice] = {}
        of_prompt: Logprobs | None = None
        finishes: list[Finish | None] = []
        with generation:
            async with aclosing(generation.outputs()) as outputs:
                async for _, output in outputs:
                    choices[output.index] = self._writer(output.index).whole(output)
                    of_prompt = of_prompt or output.prompt_logprobs
                    finishes.append(output.finish)
                    self._count(output)
        asked = self._body.prompt_logprobs is not None
        return ChatCompletion(
            id=self._id,
            created=self._created,
            model=self._model,
            choices=[choices[index] for index in sorted(choices)],
            usage=self._usage.total(),
            prompt_logprobs=prompt_logprobs(of_prompt) if asked else msgspec.UNSET,
            prompt_token_ids=self._prompt_token_ids if self._body.return_token_ids else msgspec.UNSET,
            kv_transfer_params=sampling_fields.kv_answer(finishes),
        )

    async def chunks(self, generation: Generation[ChatOutput]) -> AsyncGenerator[ChatCompletionChunk, None]:
        """The answer in pieces."""
        options = self._body.stream_options or StreamOptions()
        none = None if options.include_usage else msgspec.UNSET
        prompt: Sequence[int] | msgspec.UnsetType
        prompt = self._prompt_token_ids if self._body.return_token_ids else msgspec.UNSET
        with generation:
            async with aclosing(generation.outputs()) as outputs:
                async for _, output in outputs:
                    writer = self._writer(output.index)
                    choice = writer.piece(output)
                    self._count(output)
                    if choice is None:
                        continue
                    so_far = usage_info(len(self._prompt_token_ids), writer.num_tokens)
                    usage = so_far if options.continuous_usage_stats else none
                    yield self._chunk([choice], usage, prompt, sampling_fields.kv_answer([output.finish]))
                    prompt = msgspec.UNSET
        if options.include_usage:
            yield self._chunk([], self._usage.total(), msgspec.UNSET)

    def _writer(self, index: int) -> ChatChoiceWriter:
        if index not in self._writers:
            self._writers[index] = ChatChoiceWriter(index, self._style, self._tools)
        return self._writers[index]

    def _count(self, output: ChatOutput) -> None:
        if output.finish is not None:
            self._usage.finished(0, output.index, output.finish.usage)

    def _chunk(
        self,
        choices: Sequence[ChunkChoice],
        usage: UsageInfo | msgspec.UnsetType | None,
        prompt_token_ids: Sequence[int] | msgspec.UnsetType,
        kv: dict[str, Any] | msgspec.UnsetType = msgspec.UNSET,
    ) -> ChatCompletionChunk:
        return ChatCompletionChunk(
            id=self._id,
            created=self._created,
            model=self._model,
            choices=choices,
            usage=usage,
            prompt_token_ids=prompt_token_ids,
            kv_transfer_params=kv,
        )


def _check(body: ChatCompletionRequest) -> None:
    sampling_fields.check(body)
    refuse_fields(body, "add_special_tokens")
    if body.modalities is not None and body.modalities != ["text"]:
        raise Unimplemented(f'modalities is {shown(body.modalities)}; only ["text"] is served', field="modalities")
    check_range("top_logprobs", body.top_logprobs, -1, _INT32_MAX)
    if body.top_logprobs and not body.logprobs:
        raise InvalidArgument("top_logprobs is set; it needs logprobs", field="top_logprobs")


def _request(body: ChatCompletionRequest, call: Call, kv: KvParams, chosen: ChosenTools) -> ChatRequest:
    values = sampling_fields.values(body)
    if body.logprobs:
        values["logprobs"] = body.top_logprobs or 0
    kwargs = {**effort_kwargs(body.reasoning_effort, "reasoning_effort"), **(body.chat_template_kwargs or {})}
    return ChatRequest(
        messages=messages_of(body.messages, options_of(body.mm_processor_kwargs, body.media_io_kwargs)),
        tools=chosen.tools,
        tool_choice=chosen.mode,
        named_tool=chosen.named,
        add_generation_prompt=body.add_generation_prompt is not False,
        continue_final_message=bool(body.continue_final_message),
        template=body.chat_template or "",
        template_kwargs=kwargs,
        sampling=values,
        prediction=text_of(body.prediction),
        kv=kv,
        context=context_of(call, "chatcmpl", body),
    )


def _names(body: ChatCompletionRequest, chosen: ChosenTools) -> Mapping[str, str]:
    names = {**CONVERSATION, **chosen.names, "text": "messages", "prompt": "messages", **sampling_fields.names(body)}
    if body.top_logprobs is not None:
        names["sampling_params.logprobs"] = "top_logprobs"
    return names
