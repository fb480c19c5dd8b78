"""A queue that tenants share."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock_frontend.processing.media.pool import FairQueue

TENANTS = "abc"


def filled(text: str) -> FairQueue[str]:
    """Items by their tenant's letter and their number of the tenant's."""
    queue: FairQueue[str] = FairQueue()
    for index, tenant in enumerate(text):
        queue.put(tenant, f"{tenant}{text[:index].count(tenant)}")
    return queue


def emptied(queue: FairQueue[str]) -> list[str]:
    return [queue.take() for _ in range(len(queue))]


def test_tenants_take_turns_and_each_is_served_in_order() -> None:
    assert emptied(filled("aaaabbc")) == ["a0", "b0", "c0", "a1", "b1", "a2", "a3"]


def test_who_comes_later_waits_for_one_of_each_other_at_most() -> None:
    queue = filled("aaabbb")
    assert queue.take() == "a0"
    queue.put("c", "c0")
    assert emptied(queue) == ["b0", "a1", "c0", "b1", "a2", "b2"]


def test_what_is_put_back_is_next() -> None:
    queue = filled("aabb")
    assert queue.take() == "a0"
    queue.put_back("a", "a0")
    assert emptied(queue) == ["a0", "b0", "a1", "b1"]


def test_the_last_of_whoever_has_most_is_displaced() -> None:
    queue = filled("aaab")
    assert queue.displace("c") == "a2"
    assert queue.displace("b") is None
    assert emptied(queue) == ["a0", "b0", "a1"]


@pytest.mark.parametrize(
    ("text", "tenant"), [("", "a"), ("a", "b"), ("ab", "c"), ("aa", "a"), ("aab", "a"), ("aab", "b")]
)
def test_nobody_is_displaced_by_who_would_have_as_many(text: str, tenant: str) -> None:
    queue = filled(text)
    assert queue.displace(tenant) is None
    assert len(queue) == len(text)


def test_nothing_comes_of_an_empty_queue() -> None:
    with pytest.raises(IndexError, match="nothing waits"):
        filled("").take()


@given(
    st.lists(
        st.sampled_from(["take", *(f"put {t}" for t in TENANTS), *(f"displace {t}" for t in TENANTS)]), max_size=60
    )
)
def test_nothing_is_lost_and_nobody_waits_for_more_than_one_of_each_other(actions: list[str]) -> None:
    queue: FairQueue[tuple[str, int]] = FairQueue()
    waiting: dict[str, list[int]] = {tenant: [] for tenant in TENANTS}
    others: dict[str, dict[str, int]] = {}
    for number, action in enumerate(actions):
        what, _, tenant = action.partition(" ")
        if what == "put":
            queue.put(tenant, (tenant, number))
            waiting[tenant].append(number)
            if len(waiting[tenant]) == 1:
                others[tenant] = dict.fromkeys(TENANTS, 0)
        elif what == "displace":
            if (gone := queue.displace(tenant)) is not None:
                assert waiting[gone[0]].pop() == gone[1]
        elif len(queue):
            whose, first = queue.take()
            assert waiting[whose].pop(0) == first
            others[whose] = dict.fromkeys(TENANTS, 0)
            for each in TENANTS:
                if waiting[each] and each != whose:
                    others[each][whose] += 1
                    assert others[each][whose] <= 1
        assert len(queue) == sum(map(len, waiting.values()))
