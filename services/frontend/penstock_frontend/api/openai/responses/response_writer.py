"""Writer of a response: its items, its events, and its token counts."""

import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import msgspec

from penstock_common.errors import Cancelled, RequestFailed
from penstock_common.types.outputs import FinishReason
from penstock_frontend.api.openai import errors
from penstock_frontend.api.openai.choice_logprobs import BytesOf, ContentLogprob, chat_logprobs
from penstock_frontend.api.openai.responses import response
from penstock_frontend.api.openai.responses.response import (
    CustomCallItem,
    FunctionCallItem,
    IncompleteDetails,
    InputTokensDetails,
    MessageItem,
    OutputItem,
    OutputText,
    OutputTokensDetails,
    Part,
    ReasoningItem,
    ReasoningText,
    Response,
    ResponseError,
    ResponseUsage,
)
from penstock_frontend.api.openai.sampling_fields import kv_answer
from penstock_frontend.api.tools import CustomInputs, ServedTools
from penstock_frontend.call_types import Finish
from penstock_frontend.processing.chat.answers import Block, BlockKind, BlockPiece, Blocks, ChatOutput

_PREFIXES = {BlockKind.REASONING: "rs", BlockKind.TEXT: "msg", BlockKind.CALL: "fc"}
_INCOMPLETE = {FinishReason.LENGTH: "max_output_tokens", FinishReason.REPETITION: "repetition"}

E = TypeVar("E", bound=response.Event)


class ResponseWriter:
    """Converts outputs into events of a response, and keeps track of the current state of the response.

    ``reasoning`` is True if the response shows reasoning. ``top_logprobs`` is None for no log-probabilities.
    """

    def __init__(
        self,
        begun: Response,
        *,
        parallel_calls: bool,
        reasoning: bool,
        top_logprobs: int | None,
        bytes_of: BytesOf,
        tools: ServedTools,
    ) -> None:
        self.response = begun
        self._tools = tools
        self._inputs = CustomInputs(tools)
        self.blocks = Blocks(parallel_calls=parallel_calls, reasoning=reasoning)
        self._top_logprobs = top_logprobs
        self._bytes_of = bytes_of
        self._ids: list[str] = []
        self._logprobs: list[list[ContentLogprob]] = []
        self._untold: list[ContentLogprob] = []  # log-probabilities of tokens whose text has not arrived yet
        self._number = 0

    def begin(self) -> Iterator[response.Event]:
        """Yield the events at the start of the response."""
        yield self._event(response.ResponseEvent, "response.created", response=self.response)
        yield self._event(response.ResponseEvent, "response.in_progress", response=self.response)

    def take(self, output: ChatOutput) -> Iterator[response.Event]:
        """Yield the events for a piece of output. After the last piece, ``response`` is in its final state."""
        output = self._inputs.read(output)
        logprobs = self._logprobs_of(output)
        for piece in self.blocks.push(output):
            told: Sequence[ContentLogprob] = []
            if piece.text and piece.block.kind is BlockKind.TEXT:
                begun = bool(self._logprobs[piece.block.index]) or piece.block.index == 0
                told = logprobs if begun else _of_text(logprobs, piece.text)
            yield from self._events(piece, told, ended=output.finish)
        if output.finish is not None:
            self._finish(output.finish)

    def last(self) -> response.Event:
        """Return the last event, which reports the end of the response."""
        status = self.response.status
        kind = (
            "incomplete" if status == response.CANCELLED else status
        )  # the protocol has no event for a cancelled response
        return self._event(response.ResponseEvent, f"response.{kind}", response=self.response)

    def fail(self, error: Exception) -> None:
        """End the response with an error. The output so far stays in the response."""
        if isinstance(error, Cancelled):
            self._end(response.CANCELLED)
            return
        told = msgspec.json.decode(errors.answer(error, self.response.id).body, type=errors.ErrorBody).error
        code = told.code if isinstance(error, RequestFailed) and told.code else "server_error"
        self._end(response.FAILED, error=ResponseError(code, told.message))

    def _finish(self, finish: Finish) -> None:
        usage = finish.usage
        told = ResponseUsage(
            input_tokens=usage.prompt_tokens,
            input_tokens_details=InputTokensDetails(usage.cached_tokens),
            output_tokens=usage.completion_tokens,
            output_tokens_details=OutputTokensDetails(usage.reasoning_tokens or 0),
            total_tokens=usage.prompt_tokens + usage.completion_tokens,
        )
        kv = kv_answer([finish])
        if finish.reason is FinishReason.ABORT:
            self._end(response.CANCELLED, usage=told)
        elif (why := _INCOMPLETE.get(finish.reason)) is not None:
            why_not = IncompleteDetails(why)
            self._end(response.INCOMPLETE, usage=told, incomplete_details=why_not, **kv)
        else:
            self._end(response.COMPLETED, usage=told, **kv)

    def _end(self, status: str, **fields: Any) -> None:
        complete = status == response.COMPLETED
        output = [self._item(block, _status(block, self.blocks.all, complete=complete)) for block in self.blocks.all]
        completed_at = int(time.time()) if complete else None
        self.response = msgspec.structs.replace(
            self.response, status=status, output=output, completed_at=completed_at, **fields
        )

    def _events(
        self, piece: BlockPiece, logprobs: Sequence[ContentLogprob], *, ended: Finish | None
    ) -> Iterator[response.Event]:
        block = piece.block
        if piece.begins:
            prefix = "ctc" if self._is_custom(block) else _PREFIXES[block.kind]
            self._ids.append(f"{prefix}_{uuid.uuid4().hex}")
            self._logprobs.append([])
            item = self._item(block, response.IN_PROGRESS, empty=True)
            yield self._event(response.ItemEvent, "response.output_item.added", output_index=block.index, item=item)
            if block.kind is not BlockKind.CALL:
                yield self._part_event("response.content_part.added", block, empty=True)
        if piece.text:
            self._logprobs[block.index] += logprobs
            yield self._delta(block, piece.text, logprobs)
        if piece.ends:
            yield self._done(block)
            if block.kind is not BlockKind.CALL:
                yield self._part_event("response.content_part.done", block)
            complete = ended is None or ended.reason is FinishReason.STOP
            item = self._item(block, response.COMPLETED if complete else response.INCOMPLETE)
            yield self._event(response.ItemEvent, "response.output_item.done", output_index=block.index, item=item)

    def _delta(self, block: Block, text: str, logprobs: Sequence[ContentLogprob]) -> response.Event:
        place: dict[str, Any] = {"item_id": self._ids[block.index], "output_index": block.index, "delta": text}
        match block.kind:
            case BlockKind.TEXT:
                kind = "response.output_text.delta"
                return self._event(response.TextDelta, kind, **place, content_index=0, logprobs=logprobs)
            case BlockKind.REASONING:
                return self._event(response.ReasoningDelta, "response.reasoning_text.delta", **place, content_index=0)
            case BlockKind.CALL if self._is_custom(block):
                return self._event(response.InputDelta, "response.custom_tool_call_input.delta", **place)
            case BlockKind.CALL:
                return self._event(response.ArgumentsDelta, "response.function_call_arguments.delta", **place)

    def _done(self, block: Block) -> response.Event:
        place: dict[str, Any] = {"item_id": self._ids[block.index], "output_index": block.index}
        match block.kind:
            case BlockKind.TEXT:
                whole = {"text": block.text, "logprobs": self._logprobs[block.index]}
                return self._event(response.TextDone, "response.output_text.done", **place, content_index=0, **whole)
            case BlockKind.REASONING:
                kind = "response.reasoning_text.done"
                return self._event(response.ReasoningDone, kind, **place, content_index=0, text=block.text)
            case BlockKind.CALL if self._is_custom(block):
                return self._event(
                    response.InputDone, "response.custom_tool_call_input.done", **place, input=block.text
                )
            case BlockKind.CALL:
                tool = self._tools.called(block.name)
                call = {"name": tool.name if tool else block.name, "arguments": block.text}
                return self._event(response.ArgumentsDone, "response.function_call_arguments.done", **place, **call)

    def _part_event(self, kind: str, block: Block, *, empty: bool = False) -> response.Event:
        return self._event(
            response.PartEvent,
            kind,
            item_id=self._ids[block.index],
            output_index=block.index,
            content_index=0,
            part=self._part(block, empty=empty),
        )

    def _part(self, block: Block, *, empty: bool = False) -> Part:
        text = "" if empty else block.text
        if block.kind is BlockKind.REASONING:
            return ReasoningText(text=text)
        return OutputText(text=text, logprobs=[] if empty else self._logprobs[block.index])

    def _item(self, block: Block, status: str, *, empty: bool = False) -> OutputItem:
        item_id = self._ids[block.index]
        if block.kind is BlockKind.CALL:
            text, tool = "" if empty else block.text, self._tools.called(block.name)
            call: dict[str, Any] = {"id": item_id, "status": status, "call_id": block.call_id, "name": block.name}
            if tool is not None:
                call |= {"name": tool.name, "namespace": tool.namespace or msgspec.UNSET}
            return (
                CustomCallItem(**call, input=text)
                if self._is_custom(block)
                else FunctionCallItem(**call, arguments=text)
            )
        parts: list[Any] = [] if empty else [self._part(block)]
        if block.kind is BlockKind.REASONING:
            return ReasoningItem(id=item_id, status=status, content=parts)
        return MessageItem(id=item_id, status=status, content=parts)

    def _is_custom(self, block: Block) -> bool:
        return block.kind is BlockKind.CALL and (tool := self._tools.called(block.name)) is not None and tool.custom

    def _logprobs_of(self, output: ChatOutput) -> list[ContentLogprob]:
        """Return the log-probabilities for the text of a piece. The result includes the log-probabilities of earlier
        tokens whose text arrives only now.

        Reasoning and tool calls have no log-probabilities.
        """
        if self._top_logprobs is None:
            return []
        if (found := chat_logprobs(output.logprobs, top=self._top_logprobs, bytes_of=self._bytes_of)) is not None:
            self._untold += found.content
        if not output.content and not output.reasoning and not output.tool_calls and output.finish is None:
            return []
        told, self._untold = self._untold, []
        return told

    def _event(self, kind: Callable[..., E], name: str, /, **fields: Any) -> E:
        event = kind(type=name, sequence_number=self._number, **fields)
        self._number += 1
        return event


def _of_text(logprobs: Sequence[ContentLogprob], text: str) -> Sequence[ContentLogprob]:
    """Return the log-probabilities of the last tokens, which form ``text``. The tokens before them may belong to a tag."""
    size, begin = len(text.encode()), len(logprobs)
    while begin and size > 0:
        begin -= 1
        token = logprobs[begin]
        size -= len(token.bytes)
    return logprobs[begin:]


def _status(block: Block, blocks: Sequence[Block], *, complete: bool) -> str:
    """Return the status of a block of the response. If the response is incomplete, only its last block is incomplete."""
    return response.COMPLETED if complete or block is not blocks[-1] else response.INCOMPLETE
