"""Route ``/v1/chat/completions``, which generates the next message of a conversation. The answer is complete or
streamed.
"""

import functools
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from typing import Any

import msgspec

from penstock_common.errors import InvalidArgument, RequestFailed, Unimplemented
from penstock_common.types.outputs import Logprobs
from penstock_frontend.api.http.endpoint import Answer, Call
from penstock_frontend.api.http.request_body import Body
from penstock_frontend.api.http.streaming import EventStream
from penstock_frontend.api.openai import sampling_fields
from penstock_frontend.api.openai.body_fields import check_range, refuse_fields, shown
from penstock_frontend.api.openai.choice_logprobs import (
    BytesOf,
    ChatLogprobs,
    PromptLogprobs,
    chat_logprobs,
    prompt_logprobs,
)
from penstock_frontend.api.openai.context import context_of
from penstock_frontend.api.openai.conversation import (
    CONVERSATION,
    MediaIoBody,
    MessageBody,
    ToolBody,
    ToolChoiceObject,
    choice_of,
    effort_kwargs,
    messages_of,
    options_of,
    tools_of,
)
from penstock_frontend.api.openai.errors import renamed
from penstock_frontend.api.openai.generation import AS_MANY_AS_FIT, FINISH_REASONS, Generation, Source
from penstock_frontend.api.openai.sampling_fields import SamplingFields, StreamOptions, predicted_text
from penstock_frontend.api.openai.usage import UsageCount, UsageInfo, usage_info
from penstock_frontend.api.tools import ChosenTools, CustomInputs, ServedTool, ServedTools
from penstock_frontend.call_types import ChatRequest, Finish
from penstock_frontend.calls.admission import demand_of
from penstock_frontend.calls.chat import ChatCalls
from penstock_frontend.calls.generate import AsyncLLM
from penstock_frontend.processing.chat.answers import ChatOutput
from penstock_frontend.processing.parsers.base import ToolCallDelta


class FunctionPart(msgspec.Struct, frozen=True, omit_defaults=True):
    """Name and arguments of a function call. In a stream, the name comes in one piece, and the arguments come as pieces
    of JSON text.
    """

    arguments: str | msgspec.UnsetType = msgspec.UNSET
    name: str | msgspec.UnsetType = msgspec.UNSET


class CustomPart(msgspec.Struct, frozen=True, omit_defaults=True):
    """Name and input of a call of a custom tool. In a stream, the name comes in one piece, and the input comes as
    pieces of text.
    """

    input: str | msgspec.UnsetType = msgspec.UNSET
    name: str | msgspec.UnsetType = msgspec.UNSET


class ToolCallPart(msgspec.Struct, frozen=True, kw_only=True):
    """A tool call, or a piece of a tool call in a stream. Only the first piece has ``id`` and ``type``. Only pieces
    have ``index``.
    """

    index: int | msgspec.UnsetType = msgspec.UNSET
    id: str | msgspec.UnsetType = msgspec.UNSET
    type: str | msgspec.UnsetType = msgspec.UNSET
    function: FunctionPart | msgspec.UnsetType = msgspec.UNSET
    custom: CustomPart | msgspec.UnsetType = msgspec.UNSET


class Message(msgspec.Struct, frozen=True, kw_only=True):
    """The assistant's message, which is the answer.

    Reasoning has two field names, because some clients read one name and some the other. vLLM's field is present even
    if it is null.
    """

    role: str = "assistant"
    content: str | None
    refusal: None = None
    reasoning_content: str | msgspec.UnsetType = msgspec.UNSET
    reasoning: str | None
    tool_calls: Sequence[ToolCallPart] | msgspec.UnsetType = msgspec.UNSET


class Delta(msgspec.Struct, frozen=True, kw_only=True):
    """New content of the message in a stream. The first delta has the role."""

    role: str | msgspec.UnsetType = msgspec.UNSET
    content: str | msgspec.UnsetType = msgspec.UNSET
    reasoning_content: str | msgspec.UnsetType = msgspec.UNSET
    reasoning: str | msgspec.UnsetType = msgspec.UNSET
    tool_calls: Sequence[ToolCallPart] | msgspec.UnsetType = msgspec.UNSET


class ChatChoice(msgspec.Struct, frozen=True, kw_only=True):
    """One answer (choice) of a call.

    OpenAI's API does not have ``stop_reason`` (the stop string or token id that ended the answer) and ``token_ids``.
    These fields are from vLLM's API.
    """

    index: int
    message: Message
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | None
    token_ids: Sequence[int] | msgspec.UnsetType = msgspec.UNSET


class ChunkChoice(msgspec.Struct, frozen=True, kw_only=True):
    """A piece of one answer (choice) in a stream."""

    index: int
    delta: Delta
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | msgspec.UnsetType | None = msgspec.UNSET
    token_ids: Sequence[int] | msgspec.UnsetType = msgspec.UNSET


class ChatStyle(msgspec.Struct, frozen=True, kw_only=True):
    """Settings for the content of a call's choices. ``top_logprobs`` is None for no log-probabilities, and -1 for all
    that are available.
    """

    top_logprobs: int | None
    bytes_of: BytesOf
    token_ids: bool
    reasoning: bool
    parallel_tool_calls: bool


class ChatChoiceWriter:
    """Writes one choice of a call. ``num_tokens`` is the number of tokens that were written so far."""

    def __init__(self, index: int, style: ChatStyle, tools: ServedTools) -> None:
        self._index = index
        self._tools = tools
        self._inputs = CustomInputs(tools)
        self._called: dict[int, ServedTool | None] = {}
        self._style = style
        self._started = False
        self._has_calls = False
        self.num_tokens = 0

    def whole(self, output: ChatOutput) -> ChatChoice:
        """Return the choice for the whole output, in which each tool call is one piece."""
        output = self._inputs.read(output)
        calls = self._calls(output)
        reasoning = (output.reasoning or None) if self._style.reasoning else None
        message = Message(
            content=output.content if output.content or not calls else None,
            reasoning_content=reasoning or msgspec.UNSET,
            reasoning=reasoning,
            tool_calls=[self._part(call, index=msgspec.UNSET) for call in calls] or msgspec.UNSET,
        )
        return ChatChoice(
            index=self._index,
            message=message,
            logprobs=self._logprobs(output),
            finish_reason=self._finish_reason(output),
            stop_reason=output.finish.stop_reason if output.finish else None,
            token_ids=list(output.token_ids) if self._style.token_ids else msgspec.UNSET,
        )

    def piece(self, output: ChatOutput) -> ChunkChoice | None:
        """Return the choice for a piece of output. Return None if there is nothing to send for the piece."""
        output = self._inputs.read(output)
        calls = self._calls(output)
        self.num_tokens += len(output.token_ids)
        reasoning = output.reasoning if self._style.reasoning and output.reasoning else msgspec.UNSET
        shown = bool(output.content or reasoning or calls)
        told = bool(output.token_ids) and (self._style.top_logprobs is not None or self._style.token_ids)
        if self._started and not shown and not told and output.finish is None:
            return None
        first, self._started = not self._started, True
        delta = Delta(
            role="assistant" if first else msgspec.UNSET,
            content=output.content if output.content or (first and not shown) else msgspec.UNSET,
            reasoning_content=reasoning,
            reasoning=reasoning,
            tool_calls=[self._part(call, index=call.index) for call in calls] or msgspec.UNSET,
        )
        return ChunkChoice(
            index=self._index,
            delta=delta,
            logprobs=self._logprobs(output),
            finish_reason=self._finish_reason(output),
            stop_reason=output.finish.stop_reason if output.finish else msgspec.UNSET,
            token_ids=list(output.token_ids) if self._style.token_ids else msgspec.UNSET,
        )

    def _calls(self, output: ChatOutput) -> Sequence[ToolCallDelta]:
        """Return the tool calls to send. If parallel calls are off, only the first tool call is sent."""
        parallel = self._style.parallel_tool_calls
        calls = [call for call in output.tool_calls if parallel or call.index == 0]
        self._has_calls = self._has_calls or bool(calls)
        return calls

    def _finish_reason(self, output: ChatOutput) -> str | None:
        if output.finish is None:
            return None
        reason = FINISH_REASONS[output.finish.reason]
        return "tool_calls" if reason == "stop" and self._has_calls else reason

    def _logprobs(self, output: ChatOutput) -> ChatLogprobs | None:
        top = self._style.top_logprobs
        return None if top is None else chat_logprobs(output.logprobs, top=top, bytes_of=self._style.bytes_of)

    def _part(self, call: ToolCallDelta, *, index: int | msgspec.UnsetType) -> ToolCallPart:
        """Return a tool call, or a piece of it. The first piece has the name of the tool."""
        if call.name:
            self._called[call.index] = self._tools.called(call.name)
        tool = self._called.get(call.index)
        name = tool.name if tool is not None and call.name else call.name or msgspec.UNSET
        call_id = call.id if call.name else msgspec.UNSET
        if tool is not None and tool.custom:
            kind, custom = "custom" if call.name else msgspec.UNSET, CustomPart(input=call.arguments, name=name)
            return ToolCallPart(index=index, id=call_id, type=kind, custom=custom)
        function = FunctionPart(arguments=call.arguments, name=name)
        return ToolCallPart(index=index, id=call_id, type="function" if call.name else msgspec.UNSET, function=function)


_INT32_MAX = 2**31 - 1


class ChatCompletionRequest(SamplingFields, kw_only=True):
    """Request body of ``/v1/chat/completions``."""

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

    @property
    def num_likeliest(self) -> int | None:
        """Number of most likely tokens to report per position, or None for no log-probabilities."""
        return (self.top_logprobs or 0) if self.logprobs else None


class ChatCompletion(msgspec.Struct, frozen=True, kw_only=True):
    """Complete answer of ``/v1/chat/completions``. ``prompt_logprobs`` and ``prompt_token_ids`` are fields of vLLM's
    API.
    """

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
    """A chunk of a streamed answer."""

    id: str
    object: str = "chat.completion.chunk"
    created: int
    model: str
    choices: Sequence[ChunkChoice]
    usage: UsageInfo | msgspec.UnsetType | None = msgspec.UNSET
    prompt_token_ids: Sequence[int] | msgspec.UnsetType = msgspec.UNSET
    kv_transfer_params: dict[str, Any] | msgspec.UnsetType = msgspec.UNSET


class ChatCompletions:
    """Handler of ``/v1/chat/completions``."""

    def __init__(self, llm: AsyncLLM, chat: ChatCalls) -> None:
        self._llm = llm
        self._chat = chat

    async def __call__(self, call: Call, given: Body) -> Answer:
        """Generate the next message of a conversation. Raises RequestFailed if the request is refused or fails."""
        body = await given.decode(ChatCompletionRequest)
        model = self._llm.inputs.check_model(body.model or "", body.lora or "")
        _check(body)
        if body.truncate_prompt_tokens == AS_MANY_AS_FIT:
            body.truncate_prompt_tokens = await self._llm.prompt_room(body.max_tokens or 1, call.context)
        call = sampling_fields.with_kv(call, body, self._llm.gateway, num_sequences=body.n or 1)
        tools = tools_of(body.tools)
        chosen = tools.chosen(choice_of(body.tool_choice))
        names = _names(body, chosen)
        request = await given.converted(functools.partial(_request, body, call, chosen))
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
        """Return the token ids of the prompt if the answer must include them. Otherwise return an empty list."""
        if not body.return_token_ids and not (body.stream_options and body.stream_options.continuous_usage_stats):
            return []
        try:
            rendered = await self._chat.renderer.render(request)
            ids = await self._llm.prompt_ids(rendered)
        except RequestFailed as e:
            raise renamed(e, names) from e
        return ids if body.truncate_prompt_tokens is None else ids[-body.truncate_prompt_tokens :]


class _Making:
    """Produces the answer of one call, complete or in chunks."""

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
            top_logprobs=sampling_fields.num_shown(body, body.num_likeliest),
            bytes_of=bytes_of,
            token_ids=bool(body.return_token_ids),
            reasoning=body.include_reasoning is not False,
            parallel_tool_calls=body.parallel_tool_calls is not False,
        )
        self._writers: dict[int, ChatChoiceWriter] = {}

    async def whole(self, generation: Generation[ChatOutput]) -> ChatCompletion:
        """Return the complete answer, after all sequences have ended."""
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
            **sampling_fields.kv_answer(finishes),
        )

    async def chunks(self, generation: Generation[ChatOutput]) -> AsyncGenerator[ChatCompletionChunk, None]:
        """Yield the chunks of a streamed answer."""
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
                    yield self._chunk([choice], usage, prompt, **sampling_fields.kv_answer([output.finish]))
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
        **kv: Any,
    ) -> ChatCompletionChunk:
        return ChatCompletionChunk(
            id=self._id,
            created=self._created,
            model=self._model,
            choices=choices,
            usage=usage,
            prompt_token_ids=prompt_token_ids,
            **kv,
        )


def _check(body: ChatCompletionRequest) -> None:
    sampling_fields.check(body)
    refuse_fields(body, "add_special_tokens")
    if body.modalities is not None and body.modalities != ["text"]:
        raise Unimplemented(f'modalities is {shown(body.modalities)}; it must be ["text"]', field="modalities")
    check_range("top_logprobs", body.top_logprobs, -1, _INT32_MAX)
    if body.top_logprobs and not body.logprobs:
        raise InvalidArgument(
            "top_logprobs is set, but logprobs is not true; set logprobs to true", field="top_logprobs"
        )


def _request(body: ChatCompletionRequest, call: Call, chosen: ChosenTools) -> ChatRequest:
    values = sampling_fields.values(body)
    values |= sampling_fields.num_logprobs(body, body.num_likeliest, field="logprobs to true")
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
        prediction=predicted_text(body.prediction),
        context=context_of(call, "chatcmpl", body),
    )


def _names(body: ChatCompletionRequest, chosen: ChosenTools) -> Mapping[str, str]:
    names = {**CONVERSATION, **chosen.names, "text": "messages", "prompt": "messages", **sampling_fields.names(body)}
    if body.top_logprobs is not None:
        names["sampling_params.logprobs"] = "top_logprobs"
    return names
