"""Records of lost engines."""

import pytest

from penstock_frontend.dispatch.client import MAX_KEPT, MISSING_SECONDS, LostEngines
from tests.fakes.engines.engine_harness import FakeClock


def test_a_loss_is_kept_for_ten_minutes_with_what_became_of_its_requests() -> None:
    clock = FakeClock()
    lost = LostEngines(clock)
    lost.add("engine-0", "host:1", "the connection broke", 6)
    clock.now += 12.0
    [(engine, seconds)] = lost.recent()
    assert (engine.engine_id, engine.address, engine.reason, engine.num_moved) == (
        "engine-0",
        "host:1",
        "the connection broke",
        6,
    )
    assert seconds == 12.0
    clock.now += 589.0
    lost.joined("engine-0", "host:1")
    assert lost.recent() == []


@pytest.mark.parametrize(
    ("joins", "ends"),
    [
        (("engine-1", "host:9"), True),  # the same engine at another address
        (("engine-9", "host:1"), True),  # another engine at the same address
        (("engine-9", "host:9"), True),  # a new engine, which replaces the lost engine
        (("engine-2", "host:2"), False),  # an engine that was connected already, and has reconnected
    ],
)
def test_a_loss_is_kept_after_ten_minutes_until_the_engine_returns_or_is_replaced(
    joins: tuple[str, str], ends: bool
) -> None:
    clock = FakeClock()
    lost = LostEngines(clock)
    lost.add("engine-1", "host:1", "it hung", 1, connected=["engine-0", "engine-2"])
    clock.now += 3600.0
    assert [seconds for _, seconds in lost.recent()] == [3600.0]
    lost.joined(*joins)
    assert (lost.recent() == []) is ends
    assert lost.missing() == ([] if ends else ["engine-1"])
    clock.now += MISSING_SECONDS
    assert lost.recent() == [], "an engine that never returns is listed for a day"


def test_a_new_engine_replaces_only_one_lost_engine() -> None:
    clock = FakeClock()
    lost = LostEngines(clock)
    lost.add("engine-1", "host:1", "it hung", 0, connected=["engine-2"])
    lost.add("engine-2", "host:2", "it hung", 0)
    clock.now += 3600.0
    lost.joined("engine-2", "host:2")
    assert [each.engine_id for each, _ in lost.recent()] == ["engine-1"]
    lost.add("engine-3", "host:3", "it hung", 0)
    lost.joined("engine-4", "host:4")
    assert [each.engine_id for each, _ in lost.recent()] == ["engine-3"]


def test_only_the_latest_losses_are_kept() -> None:
    lost = LostEngines(FakeClock())
    for number in range(MAX_KEPT + 5):
        lost.add(f"e{number}", "host:1", "it failed", 0)
    kept = [engine.engine_id for engine, _ in lost.recent()]
    assert (len(kept), kept[0], kept[-1]) == (MAX_KEPT, f"e{MAX_KEPT + 4}", "e5")


def test_losses_of_missing_engines_are_kept_longest() -> None:
    lost = LostEngines(FakeClock())
    lost.add("missing", "host:0", "it hung", 0, connected=["flaps"])
    for number in range(MAX_KEPT + 5):
        lost.add("flaps", "host:1", f"failure {number}", 0, connected=[])
        lost.joined("flaps", "host:1")
    kept = [engine.reason for engine, _ in lost.recent()]
    assert (len(kept), kept[0], kept[-1]) == (MAX_KEPT, f"failure {MAX_KEPT + 4}", "it hung")
