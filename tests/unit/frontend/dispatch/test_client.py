"""Records of lost engines."""

from penstock_frontend.dispatch.client import MAX_KEPT, LostEngines
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
    assert lost.recent() == []


def test_only_the_latest_losses_are_kept() -> None:
    lost = LostEngines(FakeClock())
    for number in range(MAX_KEPT + 5):
        lost.add(f"e{number}", "host:1", "it failed", 0)
    kept = [engine.engine_id for engine, _ in lost.recent()]
    assert (len(kept), kept[0], kept[-1]) == (MAX_KEPT, f"e{MAX_KEPT + 4}", "e5")
