"""The order in which messages and the chunks of large tensors go out."""

from collections.abc import Callable, Sequence

import pytest

from penstock_common.tensors.outgoing import Chunk, Outgoing, TensorRef
from penstock_common.tensors.sizes import Limits

CHUNK = 1000
LIMITS = Limits(CHUNK + 64, 10_000)
Sent = tuple[str, *tuple[TensorRef, ...]] | Chunk


def queue(limits: Limits = LIMITS) -> Outgoing[Sent]:
    outgoing: Outgoing[Sent] = Outgoing(lambda chunk: chunk)
    outgoing.limit(limits)
    return outgoing


def message(name: str) -> Callable[[Sequence[TensorRef]], Sent]:
    return lambda refs: (name, *refs)


def needs(*tensors: bytes) -> Callable[[], Sequence[bytes]]:
    return lambda: tensors


def rest(outgoing: Outgoing[Sent]) -> list[Sent]:
    sent = []
    while outgoing:
        if (each := outgoing.next()) is not None:
            sent.append(each)
    return sent


def names(sent: list[Sent]) -> list[str]:
    return [f"{each.transfer_id}@{each.offset}" if isinstance(each, Chunk) else each[0] for each in sent]


def test_messages_keep_their_order() -> None:
    outgoing = queue()
    for name in "abc":
        outgoing.put(message(name))
    assert names(rest(outgoing)) == ["a", "b", "c"]


def test_a_tensor_goes_ahead_in_order_and_whole() -> None:
    outgoing = queue()
    data = bytes(range(250)) * 10
    outgoing.put(message("large"), needs(data))
    *chunks, last = rest(outgoing)
    assert b"".join(chunk.data for chunk in chunks if isinstance(chunk, Chunk)) == data
    assert last == ("large", TensorRef(1, 2500, keep=False))


def test_messages_take_turns_with_chunks() -> None:
    outgoing = queue()
    outgoing.put(message("large"), needs(bytes(3 * CHUNK)))
    outgoing.put(message("a"))
    outgoing.put(message("b"))
    assert names(rest(outgoing)) == ["1@0", "a", "1@1000", "b", "1@2000", "large"]


def test_tensors_take_turns_with_each_other() -> None:
    outgoing = queue()
    outgoing.put(message("first"), needs(bytes(2 * CHUNK)))
    outgoing.put(message("second"), needs(bytes(CHUNK)))
    assert names(rest(outgoing)) == ["1@0", "2@0", "second", "1@1000", "first"]


def test_messages_share_the_chunks_of_one_tensor() -> None:
    outgoing = queue()
    data = bytes(CHUNK)
    for name in "abc":
        outgoing.put(message(name), needs(data))
    chunk, *users = rest(outgoing)
    assert isinstance(chunk, Chunk)
    kept, last = TensorRef(1, CHUNK, keep=True), TensorRef(1, CHUNK, keep=False)
    assert users == [("a", kept), ("b", kept), ("c", last)]


def test_a_tensor_that_is_out_is_sent_again() -> None:
    outgoing = queue()
    data = bytes(CHUNK)
    outgoing.put(message("a"), needs(data))
    rest(outgoing)
    outgoing.put(message("b"), needs(data))
    assert names(rest(outgoing)) == ["2@0", "b"]


def test_not_more_is_under_way_than_the_other_end_holds() -> None:
    outgoing = queue(Limits(CHUNK + 64, 2 * CHUNK))
    outgoing.put(message("first"), needs(bytes(2 * CHUNK)))
    outgoing.put(message("second"), needs(bytes(CHUNK)))
    assert names(rest(outgoing)) == ["1@0", "1@1000", "first", "2@0", "second"]


def test_a_message_is_discarded_while_its_tensor_is_under_way() -> None:
    outgoing = queue()
    outgoing.put(message("a"), needs(bytes(3 * CHUNK)), key="a")
    outgoing.next()
    assert outgoing.discard(["a", "unknown"]) == ["a"]
    assert rest(outgoing) == [Chunk(1, CHUNK, b"", abandoned=True)]


def test_a_message_that_is_discarded_before_its_turn_leaves_nothing() -> None:
    outgoing = queue(Limits(CHUNK + 64, CHUNK))
    outgoing.put(message("first"), needs(bytes(CHUNK)), key="first")
    outgoing.put(message("second"), needs(bytes(CHUNK)), key="second")
    outgoing.discard(["second"])
    assert names(rest(outgoing)) == ["1@0", "first"]


def test_others_go_on_with_a_tensor_that_one_does_not_want_any_more() -> None:
    outgoing = queue()
    data = bytes(CHUNK)
    outgoing.put(message("a"), needs(data), key="a")
    outgoing.put(message("b"), needs(data), key="b")
    outgoing.discard(["a"])
    assert rest(outgoing)[-1] == ("b", TensorRef(1, CHUNK, keep=False))


def test_the_tensor_of_a_message_that_cannot_be_made_is_abandoned() -> None:
    outgoing = queue()

    def fail(refs: Sequence[TensorRef]) -> Sent:
        raise ValueError(f"no message for {refs}")

    outgoing.put(fail, needs(bytes(CHUNK)))
    outgoing.next()
    with pytest.raises(ValueError, match="no message"):
        outgoing.next()
    assert rest(outgoing) == [Chunk(1, CHUNK, b"", abandoned=True)]
