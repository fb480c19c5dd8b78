"""The order in which messages and the chunks of large tensors go out."""

from collections.abc import Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

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
    def make(refs: Sequence[TensorRef]) -> Sent:
        return name, *refs

    return make


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


def test_a_message_waits_for_all_of_its_tensors() -> None:
    outgoing = queue()
    outgoing.put(message("both"), needs(bytes(2 * CHUNK), bytes(CHUNK)))
    outgoing.put(message("a"))
    *sent, last = rest(outgoing)
    assert names(sent) == ["1@0", "a", "2@0", "1@1000"]
    assert last == ("both", TensorRef(1, 2 * CHUNK, keep=False), TensorRef(2, CHUNK, keep=False))


def test_a_tensor_that_a_message_has_twice_goes_once() -> None:
    outgoing = queue()
    data = bytes(CHUNK)
    outgoing.put(message("twice"), needs(data, data))
    assert rest(outgoing)[1:] == [("twice", TensorRef(1, CHUNK, keep=True), TensorRef(1, CHUNK, keep=False))]


def test_what_a_message_needs_counts_when_it_is_its_turn() -> None:
    outgoing, wanted, data = queue(), [True], bytes(2 * CHUNK)
    outgoing.put(message("a"), lambda: [data] if wanted else [])
    outgoing.next()
    wanted.clear()
    assert rest(outgoing) == [Chunk(1, CHUNK, bytes(CHUNK)), ("a",), Chunk(1, 2 * CHUNK, b"", abandoned=True)]


def test_a_message_that_comes_to_need_a_tensor_waits_for_it() -> None:
    outgoing, wanted, data = queue(), list[bytes](), bytes(CHUNK)
    outgoing.put(message("a"), lambda: wanted)
    wanted.append(data)
    assert names(rest(outgoing)) == ["1@0", "a"]


def test_a_message_that_may_come_to_need_a_tensor_is_discarded_until_it_is_made() -> None:
    outgoing = queue()
    outgoing.put(message("a"), needs(), key="a")
    outgoing.put(message("b"), key="b")
    assert outgoing.discard(["a", "b"]) == ["a"]
    assert names(rest(outgoing)) == ["b"]


@given(st.data())
def test_messages_never_wait_for_each_other_in_a_circle(data: st.DataObject) -> None:
    tensors = [bytes(CHUNK * size) for size in (1, 2, 3, 4)]
    outgoing, put, sent = queue(Limits(CHUNK + 64, 5 * CHUNK)), 0, []
    for _ in range(data.draw(st.integers(1, 25))):
        chosen = data.draw(st.lists(st.sampled_from(tensors), max_size=3, unique_by=id))
        if sum(map(len, chosen)) <= 5 * CHUNK:
            outgoing.put(message(str(put)), needs(*chosen), key=str(put))
            put += 1
        for _ in range(data.draw(st.integers(0, 3))):
            if outgoing and (each := outgoing.next()) is not None:
                sent.append(each)
        if data.draw(st.booleans()):
            put -= len(outgoing.discard([str(data.draw(st.integers(0, 25)))]))
    sent += rest(outgoing)
    assert sum(not isinstance(each, Chunk) for each in sent) == put
    held: dict[int, int] = {}
    for each in sent:  # what the other end holds at once, as it would count it
        if isinstance(each, Chunk):
            if each.abandoned:
                held.pop(each.transfer_id)
            else:
                assert held.get(each.transfer_id, 0) == each.offset
                held[each.transfer_id] = each.offset + len(each.data)
        else:
            for ref in each[1:]:
                assert isinstance(ref, TensorRef)
                assert held[ref.transfer_id] == ref.size
                if not ref.keep:
                    del held[ref.transfer_id]
        assert sum(held.values()) <= 5 * CHUNK
    assert held == {}


def test_the_first_piece_of_a_tensor_announces_its_size() -> None:
    outgoing = queue()
    outgoing.put(message("large"), needs(bytes(2500)))
    sizes = [each.size for each in rest(outgoing) if isinstance(each, Chunk)]
    assert sizes == [2500, 0, 0]
