"""Tensors in chunks, at the end that receives them."""

from collections.abc import Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock_common.errors import InvalidArgument, RequestFailed, ResourceExhausted, Unavailable
from penstock_common.tensors.chunks import STALE_AFTER, Chunk, IncomingTensors, Limits, Outgoing, TensorPool, TensorRef
from tests.fakes.engines.engine_harness import FakeClock


def failure(tensors: IncomingTensors, transfer_id: int, size: int = 4) -> RequestFailed:
    with pytest.raises(RequestFailed) as error:
        tensors.take(transfer_id, size, keep=False, field="prompt_embeds.chunks")
    return error.value


def test_pieces_are_put_together_among_those_of_others() -> None:
    tensors = IncomingTensors(100)
    tensors.add(1, 0, b"ab")
    tensors.add(2, 0, b"xy")
    tensors.add(1, 2, b"cd")
    assert tensors.take(1, 4, keep=False, field="f") == b"abcd"
    assert tensors.take(2, 2, keep=False, field="f") == b"xy"
    assert (len(tensors), tensors.num_bytes) == (0, 0)


def test_a_tensor_is_kept_until_its_last_message() -> None:
    tensors = IncomingTensors(100)
    tensors.add(1, 0, b"abcd")
    first = tensors.take(1, 4, keep=True, field="f")
    assert tensors.take(1, 4, keep=False, field="f") is first
    assert isinstance(failure(tensors, 1), InvalidArgument)


def test_a_tensor_that_nothing_has_come_of_is_named() -> None:
    error = failure(IncomingTensors(100), 7)
    assert error.message == "prompt_embeds.chunks refers to tensor 7, but no chunk of this tensor has arrived"
    assert error.field == "prompt_embeds.chunks"


def test_a_tensor_that_has_not_come_whole_is_refused() -> None:
    tensors = IncomingTensors(100)
    tensors.add(1, 0, b"abc")
    assert "requires 4 bytes, but 3 bytes of tensor 1 have arrived" in failure(tensors, 1).message
    assert tensors.num_bytes == 0


@pytest.mark.parametrize("offset", [1, 3, 2**64 - 1])
def test_pieces_out_of_order_fail_their_own_message_alone(offset: int) -> None:
    tensors = IncomingTensors(100)
    tensors.add(1, 0, b"ab")
    tensors.add(2, 0, b"xyzw")
    tensors.add(1, offset, b"cd")
    tensors.add(1, 2, b"cd")
    assert tensors.num_bytes == 4
    assert "are not valid: " in failure(tensors, 1).message
    assert tensors.take(2, 4, keep=False, field="f") == b"xyzw"


def test_a_tensor_does_not_grow_behind_a_message_that_refers_to_it() -> None:
    tensors = IncomingTensors(100)
    tensors.add(1, 0, b"abcd")
    taken = memoryview(tensors.take(1, 4, keep=True, field="f"))
    tensors.add(1, 4, b"e")
    assert taken == b"abcd"
    assert "a chunk arrived after a message" in failure(tensors, 1).message


def test_the_total_size_of_all_tensors_is_bounded() -> None:
    tensors = IncomingTensors(6)
    tensors.add(1, 0, b"abcd")
    tensors.add(2, 0, b"xyzw")
    error = failure(tensors, 2)
    assert isinstance(error, ResourceExhausted)
    assert "would have 8 bytes; the limit is 6" in error.message
    assert tensors.take(1, 4, keep=False, field="f") == b"abcd"


def test_a_tensor_whose_rest_does_not_come_is_dropped() -> None:
    clock = FakeClock()
    tensors = IncomingTensors(100, clock)
    tensors.add(1, 0, b"ab")
    clock.now += STALE_AFTER
    tensors.add(2, 0, b"xyzw")
    clock.now += 1.0
    tensors.drop_stale()
    assert tensors.num_bytes == 4
    assert isinstance(failure(tensors, 1), Unavailable)


def test_an_abandoned_tensor_holds_nothing() -> None:
    tensors = IncomingTensors(100)
    tensors.add(1, 0, b"ab")
    tensors.abandon(1)
    tensors.abandon(2)
    assert (len(tensors), tensors.num_bytes) == (0, 0)


def test_tensors_without_bytes_are_bounded_as_well() -> None:
    tensors = IncomingTensors(100)
    for transfer_id in range(65_537):
        tensors.add(transfer_id, 0, b"")
    error = failure(tensors, 65_536, 0)
    assert isinstance(error, ResourceExhausted)
    assert (error.field, len(tensors)) == ("prompt_embeds.chunks", 65_536)
    assert "65536 tensors of this session are buffered" in error.message
    assert tensors.take(0, 0, keep=False, field="f") == b""


def test_records_of_failed_tensors_are_bounded() -> None:
    tensors = IncomingTensors(100)
    for transfer_id in range(3000):
        tensors.add(transfer_id, 1, b"a")
    assert "no chunk of this tensor has arrived" in failure(tensors, 0).message
    assert "not valid" in failure(tensors, 2999).message


def test_a_tensor_that_was_not_announced_is_refused_where_it_has_to_be() -> None:
    tensors = IncomingTensors(100, announced=True)
    tensors.add(1, 0, b"ab")
    tensors.add(2, 0, b"xy", size=4)
    tensors.add(2, 2, b"zw")
    assert tensors.num_bytes == 4
    assert failure(tensors, 1).message == (
        "prompt_embeds.chunks: tensor_chunk.size is 0 in the first chunk of tensor 1; set this size"
    )
    assert tensors.take(2, 4, keep=False, field="f") == b"xyzw"


def test_no_more_of_a_tensor_is_held_than_was_announced() -> None:
    tensors = IncomingTensors(100, announced=True)
    tensors.add(1, 0, b"ab", size=3)
    tensors.add(1, 2, b"cd")
    assert tensors.num_bytes == 0
    assert "4 bytes have arrived, but tensor_chunk.size is 3" in failure(tensors, 1).message


def test_a_tensor_larger_than_the_free_space_is_refused_at_its_first_chunk() -> None:
    tensors = IncomingTensors(100, announced=True)
    tensors.add(1, 0, b"ab", size=101)
    assert tensors.num_bytes == 0
    assert "the buffered tensors of this session would have 101 bytes" in failure(tensors, 1).message


# The common limit of all sessions on tensors that arrive in chunks.

KIB = 1024


def session(pool: TensorPool) -> IncomingTensors:
    return IncomingTensors(1000 * KIB, announced=True, pool=pool)


def send(tensors: IncomingTensors, transfer_id: int, size: int, *, whole: bool = True) -> None:
    """Send a tensor in pieces of up to 1 KiB. Without ``whole``, its last byte is not sent."""
    for offset in range(0, size, KIB):
        data = bytes(min(KIB, size - offset))
        if not whole and offset + KIB >= size:
            data = data[:-1]
        tensors.add(transfer_id, offset, data, size=0 if offset else size)


def came(tensors: IncomingTensors, transfer_id: int, size: int) -> bool:
    try:
        return len(tensors.take(transfer_id, size, keep=False, field="f")) == size
    except ResourceExhausted as e:
        return "sessions.max_tensor_bytes" not in e.message


def test_however_many_sessions_there_are_they_hold_no_more_than_the_bound() -> None:
    pool = TensorPool(100 * KIB)
    sessions = [session(pool) for _ in range(50)]
    for each in sessions:
        for transfer_id in range(5):
            send(each, transfer_id, 10 * KIB, whole=False)
            assert pool.num_bytes <= 100 * KIB
    assert sum(each.num_held_bytes for each in sessions) == pool.num_bytes


def test_sessions_that_hold_much_take_nothing_from_one_that_holds_little() -> None:
    pool = TensorPool(100 * KIB)
    small, strangers = session(pool), [session(pool) for _ in range(4)]
    send(small, 1, 10 * KIB)
    for each in strangers:
        for transfer_id in range(20):
            send(each, transfer_id, 8 * KIB, whole=False)
    send(small, 2, 5 * KIB)
    assert came(small, 1, 10 * KIB)
    assert came(small, 2, 5 * KIB)


def test_of_the_largest_session_the_oldest_tensor_that_is_not_whole_goes_first() -> None:
    pool = TensorPool(40 * KIB)
    one = session(pool)
    send(one, 1, 10 * KIB)
    send(one, 2, 10 * KIB, whole=False)
    send(one, 3, 10 * KIB, whole=False)
    send(one, 4, 10 * KIB)
    assert [came(one, transfer_id, 10 * KIB) for transfer_id in (1, 4)] == [True, True]
    assert not came(one, 2, 10 * KIB)
    assert len(one) == 1


def test_a_tensor_that_cannot_fit_is_refused_alone() -> None:
    pool = TensorPool(10 * KIB)
    one = session(pool)
    send(one, 1, 20 * KIB)
    assert not came(one, 1, 20 * KIB)
    send(one, 2, 5 * KIB)
    assert came(one, 2, 5 * KIB)


def test_tensors_without_bytes_count_towards_the_limit() -> None:
    pool = TensorPool(100 * KIB)
    one = session(pool)
    for transfer_id in range(1000):
        one.add(transfer_id, 0, b"", size=1)
    assert len(one) < 250
    assert pool.num_bytes <= 100 * KIB


def test_the_end_of_a_session_frees_what_it_held() -> None:
    pool = TensorPool(100 * KIB)
    one, other = session(pool), session(pool)
    send(one, 1, 90 * KIB, whole=False)
    one.close()
    one.close()
    assert (pool.num_bytes, len(one), one.num_bytes) == (0, 0, 0)
    send(other, 1, 90 * KIB)
    assert came(other, 1, 90 * KIB)
    assert (pool.num_bytes, pool.num_dropped) == (0, 0)


# The order in which messages and chunks of large tensors are sent.

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
    for each in sent:  # bytes in the receiver's memory at the same time, by the receiver's count
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
