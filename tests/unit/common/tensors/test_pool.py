"""The bound on the tensors in chunks of all sessions together."""

from penstock_common.errors import ResourceExhausted
from penstock_common.tensors.incoming import IncomingTensors, TensorPool

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
