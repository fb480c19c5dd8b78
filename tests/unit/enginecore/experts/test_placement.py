"""Placement of experts on ranks."""

import pytest

from penstock_common.errors import ConfigError
from penstock_enginecore.experts.placement import Placement, fewest_slots


@pytest.mark.parametrize(("experts", "size", "slots"), [(4, 1, 4), (4, 2, 2), (4, 3, 2), (5, 2, 5), (16, 8, 3)])
def test_every_expert_is_somewhere_and_on_no_rank_twice(experts: int, size: int, slots: int) -> None:
    placement = Placement.even(2, experts, size, slots)
    for layer in range(2):
        held = [placement.held(rank, layer) for rank in range(size)]
        assert set().union(*held) == set(range(experts))
        assert all(len(set(each)) == slots for each in held)


def test_replicas_are_the_slots_that_an_expert_is_in() -> None:
    placement = Placement(3, 2, 2, ((0, 1, 2, 0),))
    assert placement.replicas(0) == [[0, 3], [1], [2]]
    assert placement.held(1, 0) == (2, 0)


def test_few_slots_are_as_few_as_hold_all() -> None:
    assert [fewest_slots(8, size) for size in (1, 2, 3, 8)] == [8, 4, 3, 1]


@pytest.mark.parametrize(
    ("size", "slots", "said"),
    [
        (5, 1, "the group has 5 ranks; the limit is 4"),
        (3, 1, r"expert_parallel.slots is 1; 3 ranks need at least 2 slots each for the model's 4 experts"),
        (2, 5, r"expert_parallel.slots is 5; it must be at most 4"),
    ],
)
def test_placements_that_do_not_fit_are_refused_with_the_limit(size: int, slots: int, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        Placement.even(1, 4, size, slots)


@pytest.mark.parametrize("layer", [(0, 1, 2, 1), (0, 1, 2), (0, 1, 2, 4)])
def test_a_layer_that_is_not_whole_is_refused(layer: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="layer 0"):
        Placement(4, 2, 2, (layer,))
