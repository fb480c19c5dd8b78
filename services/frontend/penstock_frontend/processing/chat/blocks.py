"""An answer as the blocks it is made of, one behind the other: reasoning, text, calls of tools."""

import enum
from collections.abc import Iterator
from typing import NamedTuple

from penstock_frontend.processing.chat.answers import ChatOutput
from penstock_frontend.processing.parsers.base import ToolCallDelta


class BlockKind(enum.Enum):
    """What a block is."""

    REASONING = enum.auto()
    TEXT = enum.auto()
    CALL = enum.auto()


class Block:
    """One block, in the making. ``call_id`` and ``name`` are those of a call; ``text`` is what there is of it, of a call its
    arguments.
    """

    __slots__ = ("call_id", "index", "kind", "name", "text")

    def __init__(self, index: int, kind: BlockKind, call: ToolCallDelta | None = None) -> None:
        self.index = index
        self.kind = kind
        self.call_id = call.id if call else ""
        self.name = call.name if call else ""
        self.text = ""


class BlockPiece(NamedTuple):
    """What is new of a block: text that was added to it; whether it begins, and whether it ends, with this piece."""

    block: Block
    text: str = ""
    begins: bool = False
    ends: bool = False


class Blocks:
    """Reads the deltas of one sequence. Without ``parallel_calls`` calls behind the first are left out, without ``reasoning``
    that is.
    """

    def __init__(self, *, parallel_calls: bool = True, reasoning: bool = True) -> None:
        self.all: list[Block] = []
        self._reasoning = reasoning
        self._parallel_calls = parallel_calls
        self._open: Block | None = None
        self._call_index = -1

    def push(self, output: ChatOutput) -> Iterator[BlockPiece]:
        """The pieces that a delta is. The last one ends the block that is open."""
        if output.reasoning and self._reasoning:
            yield from self._text(BlockKind.REASONING, output.reasoning)
        if output.content:
            yield from self._text(BlockKind.TEXT, output.content)
        for call in output.tool_calls:
            if self._parallel_calls or call.index == 0:
                yield from self._call(call)
        if output.finish is not None:
            yield from self._close()

    def has(self, kind: BlockKind) -> bool:
        """Whether there is a block of that kind."""
        return any(block.kind is kind for block in self.all)

    def _text(self, kind: BlockKind, text: str) -> Iterator[BlockPiece]:
        if self._open is None or self._open.kind is not kind:
            yield from self._begin(kind)
        yield from self._add(text)

    def _call(self, call: ToolCallDelta) -> Iterator[BlockPiece]:
        if self._open is None or self._open.kind is not BlockKind.CALL or call.index != self._call_index:
            self._call_index = call.index
            yield from self._begin(BlockKind.CALL, call)
        if call.arguments:
            yield from self._add(call.arguments)

    def _begin(self, kind: BlockKind, call: ToolCallDelta | None = None) -> Iterator[BlockPiece]:
        yield from self._close()
        self._open = Block(len(self.all), kind, call)
        self.all.append(self._open)
        yield BlockPiece(self._open, begins=True)

    def _add(self, text: str) -> Iterator[BlockPiece]:
        if self._open is not None:
            self._open.text += text
            yield BlockPiece(self._open, text)

    def _close(self) -> Iterator[BlockPiece]:
        if self._open is not None:
            yield BlockPiece(self._open, ends=True)
            self._open = None
