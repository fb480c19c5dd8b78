"""Adapters in the slots of a device, and the time at which slots are written."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock_enginecore.lora.device_slots import DeviceSlots

A, B, C, D = (bytes([i]) for i in range(4))


def test_a_step_writes_the_slots_of_adapters_that_have_none() -> None:
    slots = DeviceSlots(2)
    assert slots.begin_step([A]) == {A: 0}
    assert slots.begin_step([A]) == {}
    assert slots.begin_step([B, A, B]) == {B: 1}
    assert (slots[A], slots[B]) == (0, 1)


def test_the_adapter_whose_steps_are_the_longest_ago_goes() -> None:
    slots = DeviceSlots(2)
    slots.begin_step([A, B])
    slots.begin_step([A])
    assert slots.begin_step([C]) == {C: 1}
    assert B not in slots
    assert slots.begin_step([C, B]) == {B: 0}


def test_loaded_adapters_are_copied_ahead_unless_the_last_step_uses_all_slots() -> None:
    slots = DeviceSlots(2)
    assert (slots.offer(A), slots.offer(A), slots.offer(B)) == (0, None, 1)
    slots.begin_step([B])
    assert slots.offer(C) == 0
    slots.begin_step([B, C])
    assert slots.offer(D) is None
    assert D not in slots


def test_a_slot_is_free_when_its_adapter_is_gone() -> None:
    slots = DeviceSlots(1)
    slots.begin_step([A])
    slots.remove(A)
    slots.remove(B)
    assert slots.begin_step([B]) == {B: 0}
    slots.clear()
    assert slots.offer(A) == 0


def test_more_adapters_than_slots_are_refused() -> None:
    slots = DeviceSlots(2)
    with pytest.raises(ValueError, match="a step has 3 adapters, but there are only 2 slots"):
        slots.begin_step([A, B, C])
    assert A not in slots


@given(st.lists(st.one_of(st.sets(st.integers(0, 6), max_size=3), st.integers(0, 6), st.integers(10, 16))))
def test_a_step_s_adapters_have_slots_of_their_own_with_what_was_written_last(events: list[set[int] | int]) -> None:
    """Each set is the adapters of a step. Small numbers are offered adapters, others are removed adapters."""
    slots, held = DeviceSlots(3), dict[int, int]()
    for event in events:
        if isinstance(event, set):
            written = slots.begin_step([bytes([each]) for each in sorted(event)])
            held |= {slot: digest[0] for digest, slot in written.items()}
            assert {held[slots[bytes([each])]] for each in event} == event
        elif event < 10:
            if (slot := slots.offer(bytes([event]))) is not None:
                held[slot] = event
        else:
            slots.remove(bytes([event - 10]))
