"""Who may still enter a bounded place that is full."""

import random

from penstock_common.tenant_room import TenantRoom, reserve_of


def fill(room: TenantRoom, tenant: str, limit: int, *, weight: float = 1.0, at_most: int = 10_000) -> int:
    """Let requests of a tenant enter until one is refused. Returns how many entered."""
    for entered in range(at_most):
        if not room.takes_count(tenant, weight, 1, limit):
            return entered
        room.enter(tenant, weight)
    return at_most


def test_one_tenant_alone_fills_the_place_and_no_more() -> None:
    assert fill(TenantRoom(), "a", 100) == 100


def test_at_the_limit_the_flooding_tenant_is_refused_and_another_one_enters() -> None:
    room = TenantRoom()
    fill(room, "a", 100)
    assert not room.takes_count("a", 1.0, 1, 100)
    assert room.takes_count("b", 1.0, 1, 100)


def test_a_tenant_in_a_place_of_one_still_lets_another_one_enter() -> None:
    room = TenantRoom()
    fill(room, "a", 1)
    assert room.takes_count("b", 1.0, 1, 1)
    room.enter("b", 1.0)
    assert not room.takes_count("c", 1.0, 1, 1)


def test_a_second_flood_leaves_half_of_the_reserve_to_tenants_with_few_requests() -> None:
    room = TenantRoom()
    assert fill(room, "a", 100) == 100
    assert fill(room, "b", 100) == reserve_of(100) // 2
    assert room.takes_count("c", 1.0, 1, 100)
    assert fill(room, "c", 100) >= 2


def test_a_tenant_that_is_not_the_largest_is_refused_above_its_own_share() -> None:
    room = TenantRoom()
    for _ in range(45):
        room.enter("a", 1.0)
    fill(room, "b", 100)
    assert not room.takes_count("b", 1.0, 1, 100), "55 of 100, and its share is 50"
    assert room.takes_count("a", 1.0, 1, 1000)


def test_shares_go_by_weights() -> None:
    room = TenantRoom()
    for _ in range(30):
        room.enter("gold", 3.0)
    for _ in range(90):
        room.enter("batch", 1.0)
    assert room.takes_count("gold", 3.0, 1, 150)
    assert not room.takes_count("batch", 1.0, 31, 150)


def test_sizes_are_shared_like_counts() -> None:
    room = TenantRoom()
    room.enter("a", 1.0, 1000)
    assert not room.takes_size("a", 1.0, 1, 1000)
    assert room.takes_size("b", 1.0, 100, 1000)
    assert not room.takes_size("b", 1.0, 101, 1000), "the reserve is a tenth"


def test_limit_and_reserve_together_are_never_exceeded_and_nothing_is_kept_of_tenants_that_left() -> None:
    chance, room = random.Random(7), TenantRoom()
    inside: list[tuple[str, int]] = []
    for _ in range(5000):
        if inside and chance.random() < 0.4:
            room.leave(*inside.pop(chance.randrange(len(inside))))
        tenant, weight, size = f"t{chance.randrange(30)}", chance.choice([0.25, 1.0, 4.0]), chance.randrange(20)
        if room.takes_count(tenant, weight, 1, 50) and room.takes_size(tenant, weight, size, 400):
            room.enter(tenant, weight, size)
            inside.append((tenant, size))
        assert (room.count, room.size) == (len(inside), sum(size for _, size in inside))
        assert room.count <= 55
        assert room.size <= 440
    for entered in inside:
        room.leave(*entered)
    assert (len(room), room.count, room.size) == (0, 0, 0)


def test_it_is_full_at_the_limit_or_at_the_end_of_the_reserve_where_tenants_are_named() -> None:
    room = TenantRoom()
    fill(room, "", 10)
    assert room.full(10)
    room.leave("")
    room.enter("a", 1.0)
    assert not room.full(10)
    room.enter("b", 1.0)
    assert room.full(10)
