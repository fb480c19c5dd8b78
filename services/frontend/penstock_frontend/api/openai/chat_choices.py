"""The choices of a chat completion, whole or in pieces."""

from collections.abc import Sequence

import msgspec

from penstock_frontend.api.custom_inputs import CustomInputs
from penstock_frontend.api.openai.choice_logprobs import BytesOf, ChatLogprobs, chat_logprobs
from penstock_frontend.api.openai.generation import FINISH_REASONS
from penstock_frontend.api.served_tools import ServedTool, ServedTools
from penstock_frontend.processing.chat.answers import ChatOutput
from penstock_frontend.processing.parsers.base import ToolCallDelta


class FunctionPart(msgspec.Struct, frozen=True, omit_defaults=True):
    """A function's name, which comes whole, and its arguments as JSON text."""

    arguments: str | msgspec.UnsetType = msgspec.UNSET
    name: str | msgspec.UnsetType = msgspec.UNSET


class CustomPart(msgspec.Struct, frozen=True, omit_defaults=True):
    """A custom tool's name, which comes whole, and its input, a text."""

    input: str | msgspec.UnsetType = msgspec.UNSET
    name: str | msgspec.UnsetType = msgspec.UNSET


class ToolCallPart(msgspec.Struct, frozen=True, kw_only=True):
    """A call, or more of it. Only the first piece has ``id`` and ``type``, only pieces have ``index``."""

    index: int | msgspec.UnsetType = msgspec.UNSET
    id: str | msgspec.UnsetType = msgspec.UNSET
    type: str | msgspec.UnsetType = msgspec.UNSET
    function: FunctionPart | msgspec.UnsetType = msgspec.UNSET
    custom: CustomPart | msgspec.UnsetType = msgspec.UNSET


class Message(msgspec.Struct, frozen=True, kw_only=True):
    """What the assistant says. Reasoning has two names, as clients read one or the other; vLLM's is there without it, too."""

    role: str = "assistant"
    content: str | None
    refusal: None = None
    reasoning_content: str | msgspec.UnsetType = msgspec.UNSET
    reasoning: str | None
    tool_calls: Sequence[ToolCallPart] | msgspec.UnsetType = msgspec.UNSET


class Delta(msgspec.Struct, frozen=True, kw_only=True):
    """What is new of a message. The first has the role."""

    role: str | msgspec.UnsetType = msgspec.UNSET
    content: str | msgspec.UnsetType = msgspec.UNSET
    reasoning_content: str | msgspec.UnsetType = msgspec.UNSET
    reasoning: str | msgspec.UnsetType = msgspec.UNSET
    tool_calls: Sequence[ToolCallPart] | msgspec.UnsetType = msgspec.UNSET


class ChatChoice(msgspec.Struct, frozen=True, kw_only=True):
    """One answer. ``stop_reason`` (the stop string or token id) and ``token_ids`` are vLLM's."""

    index: int
    message: Message
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | None
    token_ids: Sequence[int] | msgspec.UnsetType = msgspec.UNSET


class ChunkChoice(msgspec.Struct, frozen=True, kw_only=True):
    """A piece of one answer."""

    index: int
    delta: Delta
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | msgspec.UnsetType | None = msgspec.UNSET
    token_ids: Sequence[int] | msgspec.UnsetType = msgspec.UNSET


class ChatStyle(msgspec.Struct, frozen=True, kw_only=True):
    """What the choices of a call show. ``top_logprobs``: None without log-probabilities, -1 for all there are."""

    top_logprobs: int | None
    bytes_of: BytesOf
    token_ids: bool
    reasoning: bool
    parallel_tool_calls: bool


class ChatChoiceWriter:
    """Writes one answer. ``num_tokens``: those that were written."""

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
        """The choice for all of the output, in which each call is one piece."""
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
        """The choice for a piece of output; None when there is nothing to tell of it."""
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
        """The calls to show: without parallel ones only the first."""
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
        """A call whole, or a piece of it, of which the first has the name."""
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
