"""A model's outputs as answers in a conversation."""

from collections.abc import Callable, Sequence

import msgspec

from penstock_common.observability.logging import get_logger
from penstock_common.types.logprobs import Logprobs
from penstock_common.types.sampling import OutputKind
from penstock_frontend.call_types import Finish, RequestOutput
from penstock_frontend.processing.chat.reasoning_tokens import ReasoningTokenCount
from penstock_frontend.processing.parsers.answer import AnswerDelta, AnswerParser
from penstock_frontend.processing.parsers.base import ToolCallDelta


class ChatOutput(msgspec.Struct, frozen=True, kw_only=True):
    """A piece of one of the n answers, or all of it, as the output kind says; see ``RequestOutput``.

    ``tool_calls``: pieces of calls; those of the same ``index`` are one, of which the first has the name. Kinds other than
    DELTA have each call in one piece.
    """

    index: int = 0
    content: str = ""
    reasoning: str = ""
    tool_calls: Sequence[ToolCallDelta] = ()
    token_ids: Sequence[int] = ()
    logprobs: Logprobs | None = None
    prompt_logprobs: Logprobs | None = None
    finish: Finish | None = None


class ChatOutputs:
    """Reads the outputs of one request, each of its sequences with a parser of its own."""

    def __init__(
        self,
        kind: OutputKind,
        make_parser: Callable[[], AnswerParser],
        make_count: Callable[[], ReasoningTokenCount] | None = None,
    ) -> None:
        """``make_count``: counts the reasoning tokens of a sequence; None for a model that does not reason."""
        self._kind = kind
        self._make_parser = make_parser
        self._make_count = make_count
        self._answers: dict[int, _Answer] = {}

    def read(self, output: RequestOutput) -> ChatOutput:
        """The piece of answer that an output is. A token may come before the text that it is part of."""
        answer = self._answers.get(output.index)
        if answer is None:
            answer = self._answers[output.index] = _Answer(
                self._make_parser(), self._make_count() if self._make_count is not None else None
            )
        cumulative = self._kind is OutputKind.CUMULATIVE
        text = output.text[answer.length :] if cumulative else output.text
        delta = answer.push(text, ended=output.finish is not None)
        if output.finish is not None and answer.broken:
            get_logger().warning("calls of tools could not be read: they are text, or incomplete", calls=answer.broken)
        finish = answer.counted(output, delta, cumulative=cumulative)
        if self._kind is not OutputKind.DELTA:
            delta = answer.add(delta)
        return ChatOutput(
            index=output.index,
            content=delta.content,
            reasoning=delta.reasoning,
            tool_calls=delta.tool_calls,
            token_ids=output.token_ids,
            logprobs=output.logprobs,
            prompt_logprobs=output.prompt_logprobs,
            finish=finish,
        )


class _Answer:
    """One sequence. ``length``: characters of its text that were read."""

    __slots__ = ("_calls", "_content", "_count", "_parser", "_reasoning", "length", "num_counted")

    def __init__(self, parser: AnswerParser, count: ReasoningTokenCount | None) -> None:
        self._parser = parser
        self._count = count
        self.num_counted = 0
        self._content = ""
        self._reasoning = ""
        self._calls: list[ToolCallDelta] = []
        self.length = 0

    @property
    def broken(self) -> int:
        return self._parser.broken

    def push(self, text: str, *, ended: bool) -> AnswerDelta:
        self.length += len(text)
        return self._parser.push(text, ended=ended)

    def counted(self, output: RequestOutput, delta: AnswerDelta, *, cumulative: bool) -> Finish | None:
        """Count the reasoning tokens of an output, and return its finish with the count, if the model reasons."""
        if self._count is None:
            return output.finish
        new = output.token_ids[self.num_counted :] if cumulative else output.token_ids
        self.num_counted += len(new)
        self._count.push(new, reasoning=bool(delta.reasoning), ended=output.finish is not None)
        if output.finish is None:
            return None
        usage = output.finish.usage
        told = min(self._count.total, usage.completion_tokens)
        return msgspec.structs.replace(output.finish, usage=msgspec.structs.replace(usage, reasoning_tokens=told))

    def add(self, delta: AnswerDelta) -> AnswerDelta:
        """All of the answer so far, each call in one piece."""
        self._content += delta.content
        self._reasoning += delta.reasoning
        for call in delta.tool_calls:
            if call.index < len(self._calls):
                before = self._calls[call.index]
                arguments = before.arguments + call.arguments
                self._calls[call.index] = msgspec.structs.replace(before, arguments=arguments)
            else:
                self._calls.append(call)
        return AnswerDelta(self._content, self._reasoning, tuple(self._calls))
