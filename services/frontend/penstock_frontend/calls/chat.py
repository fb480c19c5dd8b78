"""Chat calls, each of which turns a conversation into a stream of outputs."""

import functools
from collections.abc import AsyncIterator, Callable
from typing import Any

import msgspec

from penstock_common.errors import InvalidArgument, RequestFailed
from penstock_common.types.sampling import OutputKind, StructuredOutput
from penstock_frontend.call_types import ChatRequest, GenerateRequest, MixedPrompt
from penstock_frontend.calls.admission import check_deadline
from penstock_frontend.calls.generate import AsyncLLM
from penstock_frontend.calls.live_request import LiveRequest
from penstock_frontend.processing.chat.answers import (
    ChatOutput,
    ChatOutputs,
    CountByParser,
    CountToEndToken,
    ReasoningTokenCount,
)
from penstock_frontend.processing.chat.rendering import ChatRenderer
from penstock_frontend.processing.chat.tool_choice import blamed_on_tools, check_choice, tool_constraint
from penstock_frontend.processing.outputs.detokenizer import IncrementalDetokenizer
from penstock_frontend.processing.parsers.base import AnswerParser
from penstock_frontend.processing.parsers.registry import Parsers
from penstock_frontend.processing.prompts.tokenizer import Tokenizer


class ChatCalls:
    """This class renders conversations to prompts, generates output with ``AsyncLLM``, and parses the output with the
    model's parsers.

    The output is parsed for tool calls only if the model may call tools of the request. The output is always parsed for
    reasoning.
    """

    def __init__(self, llm: AsyncLLM, renderer: ChatRenderer, parsers: Parsers, tokenizer: Tokenizer) -> None:
        self._llm = llm
        self.renderer = renderer
        self._parsers = parsers
        self._tokenizer = tokenizer

    @property
    def reasons(self) -> bool:
        """True if the model's output is parsed for reasoning text."""
        return self._parsers.reasoning is not None

    async def run(self, request: ChatRequest, live: LiveRequest) -> AsyncIterator[ChatOutput]:
        """Yield the outputs of a chat request that ``AsyncLLM.accept`` has accepted.

        The output kind of the request decides whether each yielded output is a new piece or the whole output so far.
        Raises RequestFailed if the request is refused or fails.
        """
        check_deadline(request.context.deadline)
        self._llm.inputs.check_model(request.context.model, request.context.lora)
        check_choice(request.tools, request.tool_choice, request.named_tool)
        parsers = self._parsers if request.may_call else self._parsers._replace(tool=None)
        rendered = self._constrained(request, await self.renderer.render(request), parsers)
        prompt = text_of(rendered)

        def make_parser() -> AnswerParser:
            reasoning = parsers.reasoning(prompt) if parsers.reasoning is not None else None
            tool = parsers.tool() if parsers.tool is not None else None
            if tool is not None:
                tool.expect({each.name: each.parameters or {} for each in request.tools})
            return AnswerParser(reasoning, tool)

        kind = request.sampling.get("output_kind", OutputKind.DELTA)
        outputs = ChatOutputs(kind, make_parser, self._counts(rendered, prompt))
        try:
            async for output in self._llm.generate(rendered, live):
                try:
                    answer = outputs.read(output)
                except Exception as e:
                    live.observed.failed(e)
                    raise
                yield answer
        except RequestFailed as e:
            if rendered.sampling.get("structured_output") is request.sampling.get("structured_output"):
                raise
            raise blamed_on_tools(e, request.tools, request.named_tool) from e

    def _counts(self, rendered: GenerateRequest, prompt: str) -> Callable[[], ReasoningTokenCount] | None:
        """Return a function that creates, for one sequence, a counter of its reasoning tokens. Return None if the model
        has no reasoning parser.
        """
        parser, known = self._parsers.reasoning, self._llm.inputs.reasoning
        if parser is None:
            return None
        if known is not None:
            return functools.partial(CountToEndToken, known.tokens)
        skip = rendered.sampling.get("skip_special_tokens", True)

        def by_parser() -> ReasoningTokenCount:
            text = IncrementalDetokenizer(self._tokenizer, (), skip_special_tokens=skip)
            return CountByParser(parser(prompt), text.push)

        return by_parser

    def _constrained(self, request: ChatRequest, rendered: GenerateRequest, parsers: Parsers) -> GenerateRequest:
        """Return the request with the output constraint that its tools and tool choice require.

        If a parser looks for special tokens in the output, the returned request keeps special tokens in the output.
        """
        sampling: dict[str, Any] = dict(rendered.sampling)
        constraint = tool_constraint(
            request.tools,
            request.tool_choice,
            parsers.tool,
            named=request.named_tool,
            reasoning=parsers.reasoning if self._llm.inputs.reasoning is None else None,
            prompt=text_of(rendered),
        )
        if constraint is not None:
            given: StructuredOutput = sampling.get("structured_output", StructuredOutput())
            if given.constrains:
                raise InvalidArgument(
                    "sampling_params.structured_output is set, but a required tool call already constrains the output; "
                    "remove one of the two",
                    field="sampling_params.structured_output",
                )
            sampling["structured_output"] = msgspec.structs.replace(constraint, json_whitespace=given.json_whitespace)
        tags = [tag for parser in parsers if parser is not None for tag in parser.tags]
        if any(self._tokenizer.is_special(tag) for tag in tags):
            sampling.setdefault("skip_special_tokens", False)
        return msgspec.structs.replace(rendered, sampling=sampling)


def text_of(rendered: GenerateRequest) -> str:
    """Return the text of a rendered conversation. The media of the conversation are left out."""
    return rendered.prompt.text if isinstance(rendered.prompt, MixedPrompt) else str(rendered.prompt)
