"""Loads in flight: each block is loaded once, each load ends once, and no request waits for a finished load."""

import pytest

from penstock_common.types.kv_transfer import BlockName
from penstock_enginecore.kv_transfer.core.base import Place
from penstock_enginecore.kv_transfer.core.kv_loads import Loads


def places(*numbers: int, group: int = 0) -> list[Place]:
    return [Place(BlockName(group, bytes([n])), 10 + n) for n in numbers]


def names(*numbers: int) -> list[BlockName]:
    return [place.name for place in places(*numbers)]


def test_a_block_is_on_its_way_from_the_begin_of_its_load_to_its_end():
    loads = Loads()
    assert loads.bringing(names(1)) is None
    loads.begin(7, places(1, 2), "a")
    assert loads.bringing(names(3, 2)) == 7
    assert loads.bringing([BlockName(1, bytes([1]))]) is None
    assert (len(loads), loads.num_blocks) == (1, 2)
    load = loads.end(7)
    assert (load.owner, list(load.places), list(load.waiting)) == ("a", places(1, 2), [])
    assert loads.bringing(names(1, 2)) is None
    assert (len(loads), loads.num_blocks) == (0, 0)


def test_no_block_is_brought_twice_at_a_time_and_nobody_has_two_loads():
    loads = Loads()
    loads.begin(1, places(1), "a")
    with pytest.raises(ValueError, match="load 2 has a block that another load is already writing"):
        loads.begin(2, places(2, 1), "b")
    with pytest.raises(ValueError, match="already"):
        loads.begin(2, places(2), "a")
    loads.begin(2, places(2), "b")
    with pytest.raises(ValueError, match="already"):
        loads.wait(1, "b")
    loads.wait(2, "c")
    with pytest.raises(ValueError, match="already"):
        loads.wait(1, "c")


def test_an_owner_that_leaves_leaves_the_load_to_itself_once():
    loads = Loads()
    loads.begin(1, places(1, 2), "a")
    loads.wait(1, "b")
    assert loads.num_left_blocks == 0
    assert loads.leave("a") == 1
    assert loads.leave("a") is None
    assert loads.num_left_blocks == 2
    assert loads.bringing(names(2)) == 1
    load = loads.end(1)
    assert (load.owner, list(load.waiting)) == (None, ["b"])
    assert loads.leave("b") is None


def test_one_that_waits_may_leave_and_come_again():
    loads = Loads()
    loads.begin(1, places(1), "a")
    loads.wait(1, "b")
    assert loads.leave("b") is None
    loads.wait(1, "b")
    assert list(loads.end(1).waiting) == ["b"]
    loads.begin(2, places(1), "b")


def test_a_load_ends_once():
    loads = Loads()
    loads.begin(1, places(1), "a")
    loads.end(1)
    with pytest.raises(KeyError):
        loads.end(1)
    assert loads.leave("a") is None
