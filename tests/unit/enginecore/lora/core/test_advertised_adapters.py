"""Adapters that an engine reports as loaded."""

from penstock_common.lora_registry import MAX_HELD, LoraHeld, short
from penstock_enginecore.core.engine_core import EngineCore
from penstock_enginecore.lora.core.adapters import LoraHoldings
from tests.fakes.engines.engine_harness import FakeClock, Transcript, add, make_request, run_to_end, step
from tests.unit.enginecore.lora.core.test_adapters import adapter, engine_of, executor_of


def keys(*numbers: int) -> set[int]:
    return {short(adapter(number).digest) for number in numbers}


def told(engine: EngineCore) -> LoraHeld:
    lora = engine.scheduler.stats().lora
    assert lora is not None
    assert lora.held is not None
    return lora.held


def test_an_adapter_is_held_from_its_load_on_and_active_while_its_requests_run() -> None:
    engine = engine_of(max_loras=3, at_once=False)
    assert (told(engine).active, told(engine).held) == ((), ())
    add(engine, make_request(5, lora=adapter(1), max_tokens=2))
    assert set(told(engine).held) == keys(1)
    assert told(engine).active == ()
    executor_of(engine).finish_load()
    transcript = Transcript()
    step(engine, transcript)
    assert set(told(engine).active) == keys(1)
    run_to_end(engine, transcript=transcript)
    held = told(engine)
    assert held.active == ()
    assert set(held.held) == keys(1)
    assert held.max_loras == 3


def test_nothing_is_sent_while_nothing_changes() -> None:
    engine = engine_of()
    run_to_end(engine, make_request(5, lora=adapter(1)))
    before = told(engine)
    run_to_end(engine, make_request(5))
    assert told(engine) is before
    run_to_end(engine, make_request(5, lora=adapter(2)))
    assert told(engine).version > before.version


def test_removed_and_evicted_adapters_are_no_longer_advertised() -> None:
    engine = engine_of(cpu_memory=2 * 2**20)
    for number in (1, 2, 3):
        run_to_end(engine, make_request(5, lora=adapter(number)))
    assert set(told(engine).held) == keys(2, 3)
    engine.loras.remove_lora(adapter(3).digest)
    assert set(told(engine).held) == keys(2)


def test_adapters_that_failed_to_load_are_not_advertised() -> None:
    engine = engine_of()
    executor_of(engine).adapters["/a1"] = RuntimeError("a defect")
    run_to_end(engine, make_request(5, lora=adapter(1)))
    assert told(engine).held == ()


def test_the_most_recently_used_are_told_of() -> None:
    holdings = LoraHoldings(2, FakeClock())
    digests = [number.to_bytes(16, "little") for number in range(1, MAX_HELD + 3)]
    holdings.changed()
    assert holdings.of((), lambda: reversed(digests)).held == tuple(range(MAX_HELD + 2, 2, -1))


def test_a_load_is_worth_the_requests_that_end_meanwhile() -> None:
    clock = FakeClock()
    holdings = LoraHoldings(2, clock)
    assert holdings.of((), list).requests_per_load == 0.0
    holdings.loaded(0.5)
    assert holdings.of((), list).requests_per_load == 0.0, "no request has ended"
    for _ in range(8):
        holdings.began()
    for _ in range(8):
        clock.now += 0.25
        holdings.ended()
    clock.now += 1000.0  # idle
    holdings.changed()
    assert abs(holdings.of((), list).requests_per_load - 2.0) < 0.1
