"""Tenants that have a separate metric series."""

from penstock_frontend.tenants import MAX_LABELS, OTHER, TenantLabels, own_label
from tests.fakes.engines.engine_harness import FakeClock


def labels(clock: FakeClock | None = None) -> tuple[TenantLabels, list[str]]:
    ended: list[str] = []
    return TenantLabels(ended.append, clock or FakeClock()), ended


def see(made: TenantLabels, tenant: str, times: int) -> None:
    for _ in range(times):
        made.seen(tenant)


def test_the_first_tenants_have_labels_of_their_own_and_the_rest_share_one() -> None:
    made, _ = labels()
    for number in range(100):
        made.seen(f"t{number}")
    own = [number for number in range(100) if made.label_of(f"t{number}") != OTHER]
    assert own == list(range(MAX_LABELS))


def test_a_tenant_with_twice_the_traffic_replaces_the_smallest_and_its_series_ends() -> None:
    made, ended = labels()
    for number in range(MAX_LABELS):
        see(made, f"t{number}", 10 + number)
    see(made, "late", 20)
    assert (made.label_of("late"), ended) == (OTHER, []), "not for a small lead"
    see(made, "late", 2)
    assert (made.label_of("late"), made.label_of("t0"), ended) == ("late", OTHER, ["t0"])


def test_tenants_of_like_traffic_do_not_alternate() -> None:
    made, ended = labels()
    for _ in range(200):
        for number in range(MAX_LABELS + 5):
            made.seen(f"t{number}")
    assert ended == []


def test_old_traffic_counts_less_so_that_a_new_flood_gets_its_label() -> None:
    clock = FakeClock()
    made, ended = labels(clock)
    for number in range(MAX_LABELS):
        see(made, f"t{number}", 1000)
    clock.now += 600.0
    see(made, "flood", 10)
    assert made.label_of("flood") == "flood"
    assert len(ended) == 1


def test_no_tenant_is_mistaken_for_all_others_or_for_another_one() -> None:
    names = ["other", "tenant:other", "tenant:tenant:other", "tenant:", "a", ""]
    assert [own_label(name) for name in names] == [
        "tenant:other",
        "tenant:tenant:other",
        "tenant:tenant:tenant:other",
        "tenant:tenant:",
        "a",
        "",
    ]


def test_names_that_are_made_up_take_a_bounded_amount_of_memory() -> None:
    made, _ = labels()
    for number in range(10_000):
        made.seen(f"t{number}")
    assert len(made._traffic) <= 1000
