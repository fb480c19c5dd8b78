"""A heap whose members leave it and change their rank."""

from hypothesis import given
from hypothesis import strategies as st

from penstock_enginecore.core.scheduler.waiting_queue import KeyedHeap

OPERATIONS = st.lists(st.tuples(st.sampled_from(["set", "remove"]), st.sampled_from("abcd"), st.integers(0, 4)))


@given(OPERATIONS)
def test_the_head_is_the_lowest_of_those_that_are_there(operations):
    heap, ranks = KeyedHeap(), {}
    for operation, key, rank in operations:
        if operation == "set":
            heap.set(key, rank)
            ranks[key] = rank
        elif key in ranks:
            heap.remove(key)
            del ranks[key]
        assert len(heap) == len(ranks)
        assert [heap.rank(key) for key in "abcd"] == [ranks.get(key) for key in "abcd"]
        if ranks:
            assert heap.peek() == min(ranks, key=lambda key: (ranks[key], key))


def test_what_is_out_of_date_does_not_pile_up():
    heap = KeyedHeap()
    heap.set("head", -1)
    for rank in range(1000):
        heap.set("moving", rank)
        heap.set(f"passing {rank}", 5)
        heap.remove(f"passing {rank}")
    assert len(heap._heap) < 100
    assert heap.peek() == "head"
