"""Slots: each is free, filled or being filled, and the block used least recently makes room."""

from hypothesis import given
from hypothesis import strategies as st

from penstock_common.types.kv_transfer import BlockName
from penstock_enginecore.kv_transfer.core.host_disk_tiers import SlotIndex


def name(number: int) -> BlockName:
    return BlockName(number % 2, bytes([number]))


def index_of(num_slots: int, *entries: tuple[int, BlockName]) -> SlotIndex:
    return SlotIndex(num_slots, lambda _name, _is_there: None, entries)


def test_the_block_used_least_recently_makes_room():
    index = index_of(2)
    for number in (1, 2):
        slot, before = index.take()
        assert before is None
        index.put(name(number), slot)
    index.touch(name(1))
    slot, before = index.take()
    assert before == name(2)
    assert name(2) not in index
    assert index.names == [name(1)]
    index.put(name(3), slot)
    assert (index.get(name(3)), index.get(name(2))) == (slot, None)


def test_nothing_is_taken_while_all_slots_are_being_filled():
    index = index_of(1)
    slot, _ = index.take()
    assert index.take() is None
    index.give_back(slot)
    assert index.take() == (slot, None)


def test_of_two_equal_blocks_the_first_stays():
    index = index_of(2)
    first, second = index.take()[0], index.take()[0]
    index.put(name(1), first)
    index.put(name(1), second)
    assert index.get(name(1)) == first
    assert index.take() == (second, None)


def test_what_is_there_from_before_is_found_and_its_slots_are_not_free():
    index = index_of(3, (1, name(5)))
    assert index.get(name(5)) == 1
    assert {index.take()[0], index.take()[0]} == {0, 2}
    assert index.take() == (1, name(5))


@given(
    st.lists(st.tuples(st.sampled_from(["take", "put", "give_back", "remove", "touch", "clear"]), st.integers(0, 7)))
)
def test_no_slot_is_lost_or_had_twice_and_what_can_be_found_is_told(calls):
    known: list[BlockName] = []

    def told(block: BlockName, is_there: bool) -> None:
        (known.append if is_there else known.remove)(block)

    index, taken = SlotIndex(4, told, [(2, name(6))]), []
    for call, number in calls:
        if call == "take" and (found := index.take()) is not None:
            taken.append(found[0])
        elif call == "put" and taken:
            index.put(name(number), taken.pop())
        elif call == "give_back" and taken:
            index.give_back(taken.pop())
        elif call == "remove":
            index.remove(name(number))
        elif call == "touch" and name(number) in index:
            index.touch(name(number))
        elif call == "clear":
            index.clear()
        filled = [index.get(each) for each in index.names]
        assert sorted([*filled, *taken, *index._free]) == [0, 1, 2, 3]
        assert len(index) == len(filled)
        assert sorted(known) == sorted(index.names)
