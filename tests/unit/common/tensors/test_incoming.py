"""Tensors in chunks, at the end that receives them."""

import pytest

from penstock_common.errors import InvalidArgument, RequestFailed, ResourceExhausted, Unavailable
from penstock_common.tensors.incoming import IncomingTensors, TensorPool
from penstock_common.tensors.sizes import STALE_AFTER
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
    assert error.message == "prompt_embeds.chunks refers to tensor 7, of which nothing has come"
    assert error.field == "prompt_embeds.chunks"


def test_a_tensor_that_has_not_come_whole_is_refused() -> None:
    tensors = IncomingTensors(100)
    tensors.add(1, 0, b"abc")
    assert "4 bytes in chunks; 3 bytes of tensor 1" in failure(tensors, 1).message
    assert tensors.num_bytes == 0


@pytest.mark.parametrize("offset", [1, 3, 2**64 - 1])
def test_pieces_out_of_order_fail_their_own_message_alone(offset: int) -> None:
    tensors = IncomingTensors(100)
    tensors.add(1, 0, b"ab")
    tensors.add(2, 0, b"xyzw")
    tensors.add(1, offset, b"cd")
    tensors.add(1, 2, b"cd")
    assert tensors.num_bytes == 4
    assert "did not come in order" in failure(tensors, 1).message
    assert tensors.take(2, 4, keep=False, field="f") == b"xyzw"


def test_a_tensor_does_not_grow_behind_a_message_that_refers_to_it() -> None:
    tensors = IncomingTensors(100)
    tensors.add(1, 0, b"abcd")
    taken = memoryview(tensors.take(1, 4, keep=True, field="f"))
    tensors.add(1, 4, b"e")
    assert taken == b"abcd"
    assert "more of it came behind a message" in failure(tensors, 1).message


def test_what_all_tensors_hold_is_bounded() -> None:
    tensors = IncomingTensors(6)
    tensors.add(1, 0, b"abcd")
    tensors.add(2, 0, b"xyzw")
    error = failure(tensors, 2)
    assert isinstance(error, ResourceExhausted)
    assert "8 bytes would wait for their messages; the limit of a session is 6" in error.message
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
    assert "65536 tensors wait for their messages" in error.message
    assert tensors.take(0, 0, keep=False, field="f") == b""


def test_what_is_remembered_of_failed_tensors_is_bounded() -> None:
    tensors = IncomingTensors(100)
    for transfer_id in range(3000):
        tensors.add(transfer_id, 1, b"a")
    assert "nothing has come" in failure(tensors, 0).message
    assert "in order" in failure(tensors, 2999).message


def test_a_tensor_that_was_not_announced_is_refused_where_it_has_to_be() -> None:
    tensors = IncomingTensors(100, announced=True)
    tensors.add(1, 0, b"ab")
    tensors.add(2, 0, b"xy", size=4)
    tensors.add(2, 2, b"zw")
    assert tensors.num_bytes == 4
    assert failure(tensors, 1).message == (
        "prompt_embeds.chunks: tensor 1 was not announced: tensor_chunk.size is 0 in its first chunk"
    )
    assert tensors.take(2, 4, keep=False, field="f") == b"xyzw"


def test_no_more_of_a_tensor_is_held_than_was_announced() -> None:
    tensors = IncomingTensors(100, announced=True)
    tensors.add(1, 0, b"ab", size=3)
    tensors.add(1, 2, b"cd")
    assert tensors.num_bytes == 0
    assert "4 bytes came where 3 were announced" in failure(tensors, 1).message


def test_a_tensor_that_announces_more_than_there_is_room_for_is_refused_at_its_first_chunk() -> None:
    tensors = IncomingTensors(100, announced=True)
    tensors.add(1, 0, b"ab", size=101)
    assert tensors.num_bytes == 0
    assert "tensors of 101 bytes would wait" in failure(tensors, 1).message


# The bound on the tensors in chunks of all sessions together.

KIB = 1024


def session(pool: TensorPool) -> IncomingTensors:
    return IncomingTensors(1000 * KIB, announced=True, pool=pool)


def send(tensors: IncomingTensors, transfer_id: int, size: int, *, whole: bool = True) -> None:
    """A tensor in pieces of up to 1 KiB; without ``whole`` its last byte does not come."""
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


def test_what_tensors_without_bytes_take_is_counted() -> None:
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
