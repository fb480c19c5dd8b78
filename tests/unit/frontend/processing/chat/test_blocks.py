"""An answer's blocks: however it is cut into deltas, they are the same."""

from collections.abc import Sequence

from penstock_common.types.outputs import FinishReason
from penstock_frontend.call_types import Finish, Usage
from penstock_frontend.processing.chat.answers import BlockKind, Blocks, ChatOutput
from penstock_frontend.processing.parsers.base import ToolCallDelta

FINISH = Finish(FinishReason.STOP, None, Usage())


def call(index: int, name: str = "", arguments: str = "") -> ToolCallDelta:
    return ToolCallDelta(index=index, id=f"call_{index}", name=name, arguments=arguments)


ANSWER = [
    ChatOutput(reasoning="I "),
    ChatOutput(reasoning="think.", content="A"),
    ChatOutput(content="da", tool_calls=[call(0, "f")]),
    ChatOutput(tool_calls=[call(0, arguments="{"), call(0, arguments="}"), call(1, "g", "{}")]),
    ChatOutput(content="end", finish=FINISH),
]


def read(blocks: Blocks, outputs: Sequence[ChatOutput]) -> list[tuple[BlockKind, str, str]]:
    """Join the pieces. Checks that exactly one block is open at a time, and none at the end."""
    open_: list[int] = []
    texts: dict[int, str] = {}
    for piece in (piece for output in outputs for piece in blocks.push(output)):
        index = piece.block.index
        if piece.begins:
            assert open_ == []
            open_.append(index)
        assert open_ == [index]
        texts[index] = texts.get(index, "") + piece.text
        if piece.ends:
            open_.remove(index)
    assert open_ == []
    assert [block.text for block in blocks.all] == [texts[index] for index in range(len(texts))]
    return [(block.kind, block.name, block.text) for block in blocks.all]


def test_blocks_stand_in_the_order_in_which_they_were_written() -> None:
    assert read(Blocks(), ANSWER) == [
        (BlockKind.REASONING, "", "I think."),
        (BlockKind.TEXT, "", "Ada"),
        (BlockKind.CALL, "f", "{}"),
        (BlockKind.CALL, "g", "{}"),
        (BlockKind.TEXT, "", "end"),
    ]


def test_what_is_not_to_be_shown_is_no_block() -> None:
    found = read(Blocks(parallel_calls=False, reasoning=False), ANSWER)
    assert [(kind, text) for kind, _, text in found] == [
        (BlockKind.TEXT, "Ada"),
        (BlockKind.CALL, "{}"),
        (BlockKind.TEXT, "end"),
    ]


def test_an_answer_without_anything_has_no_block() -> None:
    assert read(Blocks(), [ChatOutput(finish=FINISH)]) == []
