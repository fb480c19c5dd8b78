"""Requests and their adapters: what each waits for, and how it ends."""

from typing import Any

import pytest

from penstock_common.errors import FailedPrecondition, ResourceExhausted, Unavailable
from penstock_common.lora_registry import LoraAdapter
from penstock_common.types.kv_transfer import BlockStored
from penstock_common.types.outputs import FinishReason
from penstock_enginecore.config import LoraConfig
from penstock_enginecore.core.engine_core import EngineCore
from penstock_enginecore.core.request import Hold
from penstock_enginecore.lora.core.adapters import Usable
from penstock_enginecore.lora.core.request import LoadedLora, PartlyLoadedError
from tests.fakes.engines.engine_harness import (
    CLIENT,
    FakeClock,
    Transcript,
    add,
    assert_as_expected,
    assert_nothing_left,
    make_engine,
    make_request,
    run_to_end,
    step,
)
from tests.fakes.engines.fake_executor import FakeExecutor

MIB = 2**20


def adapter(number: int, *, known: bool = True) -> LoraAdapter:
    return LoraAdapter(f"a{number}", f"/a{number}", bytes([number]) * 16 if known else b"")


def engine_of(
    *,
    max_loras: int = 4,
    cpu_memory: int = 8 * MIB,
    at_once: bool = True,
    clock: FakeClock | None = None,
    **config: Any,
) -> EngineCore:
    executor = FakeExecutor()
    executor.loads_at_once = at_once
    for number in range(1, 9):
        executor.adapters[f"/a{number}"] = LoadedLora(bytes([number]) * 16, number, ("m",), MIB)
    lora = LoraConfig(max_loras=max_loras, cpu_memory=cpu_memory, max_wait=10.0)
    return make_engine(executor, clock or FakeClock(), lora=lora, **config)


def executor_of(engine: EngineCore) -> FakeExecutor:
    assert isinstance(engine.executor, FakeExecutor)
    return engine.executor


def test_requests_of_one_adapter_wait_for_one_load_and_others_go_on() -> None:
    engine = engine_of(at_once=False)
    executor, transcript = executor_of(engine), Transcript()
    waiting = [make_request(5, lora=adapter(1)) for _ in range(3)]
    base = make_request(5)
    add(engine, *waiting, base)
    while base.request_id not in transcript.ends:
        step(engine, transcript)
    assert [lora.path for lora in executor.loads] == ["/a1"]
    stats = engine.scheduler.stats()
    assert stats.num_skipped_reqs == 3
    assert stats.lora is not None
    assert stats.lora.num_loading_reqs == 3
    while not engine.stalled:
        step(engine, transcript)
    executor.finish_load()
    run_to_end(engine, transcript=transcript)
    assert_as_expected(engine, transcript, *waiting, base)
    assert_nothing_left(engine)


def test_the_core_is_woken_when_a_load_ends() -> None:
    engine = engine_of(at_once=False)
    answer = engine.loras.add_lora("a1", "/a1")
    assert engine.queues.get(block=False, timeout=None) is None
    assert not engine.has_work
    executor_of(engine).finish_load()
    assert engine.queues.get(block=False, timeout=None) is not None
    assert engine.has_work  # even without requests
    step(engine, Transcript())
    assert answer.done()
    assert not engine.has_work


def test_a_failed_load_ends_its_requests_and_the_next_one_tries_again() -> None:
    engine = engine_of()
    executor = executor_of(engine)
    there = executor.adapters["/a1"]
    executor.adapters["/a1"] = Unavailable("no such directory", reason="LORA_UNAVAILABLE")
    bad, good = make_request(5, lora=adapter(1)), make_request(5, lora=adapter(2))
    transcript = run_to_end(engine, bad, good)
    end = transcript.ends[bad.request_id]
    assert end.finish_reason is FinishReason.ERROR
    assert end.error is not None
    assert (end.error.code, end.error.reason) == ("UNAVAILABLE", "LORA_UNAVAILABLE")
    assert_as_expected(engine, transcript, good)
    executor.adapters["/a1"] = there
    again = make_request(5, lora=adapter(1))
    assert_as_expected(engine, run_to_end(engine, again), again)


def test_what_is_no_fault_of_an_adapter_gets_a_number() -> None:
    engine = engine_of()
    executor_of(engine).adapters["/a1"] = RuntimeError("a defect")
    request = make_request(5, lora=adapter(1))
    error = run_to_end(engine, request).ends[request.request_id].error
    assert error is not None
    assert error.code == "INTERNAL"
    assert "incident" in error.message


def test_a_request_by_content_or_path_does_not_load_an_adapter_again() -> None:
    engine = engine_of()
    for known in (True, True, False):
        request = make_request(5, lora=adapter(1, known=known))
        run_to_end(engine, request)
    assert len(executor_of(engine).loads) == 1


def test_requests_that_arrived_before_the_end_of_a_load_did_not_find_their_adapter() -> None:
    clock = FakeClock()
    engine = engine_of(clock=clock)
    engine.loras.add_lora("a1", "/a1")  # A frontend lets an engine read the adapter while the first requests wait.
    engine.loras.take()
    early = [make_request(5, lora=adapter(1), arrival_time=clock.now - 1.0) for _ in range(2)]
    late = make_request(5, lora=adapter(1), arrival_time=clock.now + 1.0)
    unloaded = make_request(5, lora=adapter(2), arrival_time=clock.now + 1.0)
    run_to_end(engine, *early, late, unloaded)
    stats = engine.loras.stats()
    assert (stats.num_requests, stats.num_found) == (4, 1)
    engine.loras.remove_lora(adapter(1).digest)
    clock.now += 5.0
    engine.loras.add_lora("a1", "/a1")
    engine.loras.take()
    run_to_end(engine, make_request(5, lora=adapter(1), arrival_time=clock.now - 1.0))
    assert engine.loras.stats().num_found == 1


def test_loads_and_evictions_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    engine = engine_of(cpu_memory=2 * MIB)
    with caplog.at_level("INFO", logger="penstock_enginecore.lora"):
        for number in (1, 2, 3):
            run_to_end(engine, make_request(5, lora=adapter(number)))
    loads = [vars(record) for record in caplog.records if record.message == "LoRA adapter loaded"]
    assert [(load["adapter"], load["path"], load["bytes"], load["seconds"]) for load in loads] == [
        (f"a{number}", f"/a{number}", MIB, 0.0) for number in (1, 2, 3)
    ]
    (eviction,) = (vars(record) for record in caplog.records if record.message == "LoRA adapter evicted")
    assert (eviction["paths"], eviction["digest"], eviction["bytes"]) == (["/a1"], adapter(1).digest.hex(), MIB)


def test_a_request_aborted_while_its_adapter_is_loaded_leaves_nothing_in_use() -> None:
    engine = engine_of(at_once=False)
    request = make_request(5, lora=adapter(1))
    add(engine, request)
    engine.scheduler.abort_requests(CLIENT, [request.request_id])
    executor_of(engine).finish_load()
    run_to_end(engine)
    engine.loras.take()
    assert engine.loras.cache.digests == (adapter(1).digest,)
    assert not engine.loras.cache.is_used(adapter(1).digest)
    assert_nothing_left(engine)


def test_a_request_that_gave_up_waits_for_no_load() -> None:
    engine = engine_of(at_once=False)
    gone, stays = make_request(5, lora=adapter(1)), make_request(5, lora=adapter(1))
    add(engine, gone, stays)
    engine.scheduler.abort_requests(CLIENT, [gone.request_id])
    stats = engine.loras.stats()
    assert stats is not None
    assert stats.num_loading_reqs == 1
    executor_of(engine).finish_load()
    transcript = run_to_end(engine)
    assert_as_expected(engine, transcript, stays)
    stats = engine.loras.stats()
    assert stats is not None
    assert stats.num_loading_reqs == 0
    assert_nothing_left(engine)


def test_a_load_that_nobody_waits_for_any_more_takes_no_others_place() -> None:
    engine = engine_of(at_once=False, cpu_memory=2 * MIB)
    executor = executor_of(engine)
    for number in (1, 2):
        engine.loras.add_lora(f"a{number}", f"/a{number}")
        executor.finish_load()
    engine.loras.take()
    request = make_request(5, lora=adapter(3))
    add(engine, request)
    engine.scheduler.abort_requests(CLIENT, [request.request_id])
    executor.finish_load()
    run_to_end(engine)
    engine.loras.take()
    assert engine.loras.cache.digests == (adapter(1).digest, adapter(2).digest)
    assert executor.held_loras == {adapter(1).digest, adapter(2).digest}
    again = make_request(5, lora=adapter(3))
    add(engine, again)
    executor.finish_load()
    assert_as_expected(engine, run_to_end(engine), again)
    assert executor.held_loras == {adapter(2).digest, adapter(3).digest}


def test_a_load_that_somebody_wants_again_before_it_was_given_up_is_made_once_more() -> None:
    engine = engine_of(at_once=False, cpu_memory=MIB)
    executor = executor_of(engine)
    engine.loras.add_lora("a1", "/a1")
    executor.finish_load()
    engine.loras.take()
    gone, comes = make_request(5, lora=adapter(3)), make_request(5, lora=adapter(3))
    add(engine, gone)
    engine.scheduler.abort_requests(CLIENT, [gone.request_id])
    executor.finish_load()
    engine.loras.take()  # the load did not get memory, but this is not reported yet
    add(engine, comes)
    executor.finish_load()
    assert_as_expected(engine, run_to_end(engine), comes)
    assert executor.held_loras == {adapter(3).digest}


def test_a_load_that_nobody_waits_for_any_more_may_fail() -> None:
    engine = engine_of(at_once=False)
    executor_of(engine).adapters["/a1"] = Unavailable("no such directory", reason="LORA_UNAVAILABLE")
    request = make_request(5, lora=adapter(1))
    add(engine, request)
    engine.scheduler.abort_requests(CLIENT, [request.request_id])
    executor_of(engine).finish_load()
    transcript = run_to_end(engine)
    engine.loras.take()
    assert transcript.reason(request.request_id) is FinishReason.ABORT
    assert not engine.loras.has_news
    assert_nothing_left(engine)


def test_what_was_let_go_of_while_it_was_read_for_nobody_is_not_loaded_again() -> None:
    engine = engine_of(at_once=False)
    executor = executor_of(engine)
    engine.loras.add_lora("a1", "/a1")
    executor.finish_load()
    engine.loras.take()
    engine.loras.remove_lora(adapter(1).digest)
    request = make_request(5, lora=adapter(1))
    add(engine, request)
    executor.finish_load()
    engine.loras.add_lora("a1", "/a1")
    executor.finish_load()
    engine.loras.take()
    engine.loras.remove_lora(adapter(1).digest)
    engine.scheduler.abort_requests(CLIENT, [request.request_id])
    run_to_end(engine)
    engine.loras.take()
    assert engine.loras.cache.digests == ()
    assert executor.held_loras == set()


@pytest.mark.parametrize("known", [True, False])
def test_what_some_workers_have_taken_of_a_failed_load_is_let_go_of(known: bool) -> None:
    engine = engine_of()
    executor = executor_of(engine)
    there = executor.adapters["/a1"]
    executor.adapters["/a1"] = PartlyLoadedError(
        Unavailable("one cannot", reason="LORA_UNAVAILABLE"), frozenset({adapter(1).digest})
    )
    request = make_request(5, lora=adapter(1, known=known))
    call = engine.loras.add_lora("a2", "/a1")
    error = run_to_end(engine, request).ends[request.request_id].error
    assert error is not None
    assert (error.code, error.reason) == ("UNAVAILABLE", "LORA_UNAVAILABLE")
    with pytest.raises(Unavailable, match="one cannot"):
        call.result()
    assert executor.held_loras == set()
    executor.adapters["/a1"] = there
    again = make_request(5, lora=adapter(1))
    assert_as_expected(engine, run_to_end(engine, again), again)


def test_a_failed_load_of_what_is_held_already_leaves_it_there() -> None:
    engine = engine_of()
    executor, transcript = executor_of(engine), Transcript()
    runs = make_request(5, lora=adapter(1), max_tokens=20)
    add(engine, runs)
    step(engine, transcript)
    executor.adapters["/a1"] = PartlyLoadedError(
        Unavailable("one cannot"), frozenset({adapter(1).digest, adapter(2).digest})
    )
    call = engine.loras.add_lora("a1", "/a1")
    run_to_end(engine, transcript=transcript)
    assert isinstance(call.exception(), Unavailable)
    assert_as_expected(engine, transcript, runs)
    assert executor.held_loras == {adapter(1).digest} == set(engine.loras.cache.digests)


def test_a_load_beside_one_of_the_same_content_that_failed_is_done_again() -> None:
    engine = engine_of(at_once=False)
    executor = executor_of(engine)
    executor.adapters["/copy"] = PartlyLoadedError(Unavailable("one cannot"), frozenset({adapter(1).digest}))
    fails, call = engine.loras.add_lora("copy", "/copy"), engine.loras.add_lora("a1", "/a1")
    executor.finish_load()
    executor.finish_load()
    news = engine.loras._news
    ends = []
    for want in (news.get(), news.get()):
        engine.loras._room.want(want)
        ends.append(news.get())
    failed, taken = ends
    news.put(failed)  # workers have loaded the adapter, and must now free it
    news.put(taken)
    engine.loras.take()
    assert isinstance(fails.exception(), Unavailable)
    assert not call.done()
    executor.finish_load()
    engine.loras.take()
    assert call.result().digest == adapter(1).digest
    assert executor.held_loras == {adapter(1).digest} == set(engine.loras.cache.digests)


def test_a_removed_adapter_goes_with_its_last_request() -> None:
    engine = engine_of()
    executor, transcript = executor_of(engine), Transcript()
    request = make_request(5, lora=adapter(1), max_tokens=5)
    add(engine, request)
    step(engine, transcript)
    engine.loras.remove_lora(adapter(1).digest)
    assert executor.held_loras == {adapter(1).digest}
    run_to_end(engine, transcript=transcript)
    assert_as_expected(engine, transcript, request)
    assert executor.held_loras == set()
    assert engine.loras.list_loras() == []


def test_workers_have_let_go_of_others_before_they_take_an_adapter() -> None:
    engine = engine_of(cpu_memory=2 * MIB)
    executor = executor_of(engine)
    for number in range(1, 9):
        engine.loras.add_lora(f"a{number}", f"/a{number}")
        engine.loras.take()
        assert engine.loras.cache.num_reserved == 0
    assert executor.most_held_loras == 2
    assert executor.held_loras == {adapter(7).digest, adapter(8).digest}


def test_an_adapter_for_which_there_is_no_room_is_not_taken() -> None:
    engine = engine_of(at_once=False, cpu_memory=2 * MIB)
    executor = executor_of(engine)
    for number in (1, 2):
        engine.loras.add_lora(f"a{number}", f"/a{number}", pinned=True)
        executor.finish_load()
        engine.loras.take()
    answer = engine.loras.add_lora("a3", "/a3")
    executor.finish_load()
    engine.loras.take()
    with pytest.raises(ResourceExhausted, match="pinned"):
        answer.result(timeout=0)
    assert executor.most_held_loras == 2
    engine.loras.pin_lora(adapter(1).digest, pinned=False)
    waits, next_one = engine.loras.add_lora("a3", "/a3"), engine.loras.add_lora("a4", "/a4")
    executor.finish_load()
    executor.finish_load()
    engine.loras.take()
    assert waits.result(timeout=0).digest == adapter(3).digest
    # The load waited until the other adapter could be evicted.
    assert next_one.result(timeout=0).digest == adapter(4).digest
    assert executor.most_held_loras == 2


def test_room_for_a_load_that_fails_is_given_back() -> None:
    engine = engine_of(at_once=False)
    executor = executor_of(engine)
    answer = engine.loras.add_lora("a1", "/a1")
    executor.finish_load()
    executor.adapters["/a1"] = Unavailable("gone", reason="LORA_UNAVAILABLE")
    other = engine.loras.add_lora("a1", "/a1", adapter(1).digest)
    executor.finish_load()
    engine.loras.take()
    assert answer.done()
    assert isinstance(other.exception(timeout=0), Unavailable)
    assert engine.loras.cache.num_reserved == 0
    assert engine.loras.cache.num_bytes == MIB


def test_one_that_was_let_go_of_while_it_was_read_again_is_loaded_once_more() -> None:
    engine = engine_of(at_once=False)
    executor = executor_of(engine)
    known = engine.loras.add_lora("a1", "/a1", adapter(1).digest)
    executor.finish_load()
    engine.loras.take()
    assert known.done()
    by_path = engine.loras.add_lora("a1", "/a1")  # reads the adapter's files again
    executor.finish_load()
    engine.loras._room.want(engine.loras._news.get())  # memory is available, so the load reserves it
    engine.loras.remove_lora(adapter(1).digest)  # before the engine has handled the loaded adapter
    engine.loras.take()
    assert not by_path.done()
    executor.finish_load()
    engine.loras.take()
    assert by_path.result().digest == adapter(1).digest
    assert executor.held_loras == {adapter(1).digest} == set(engine.loras.cache.digests)


def test_other_content_at_a_path_is_another_adapter_from_then_on() -> None:
    engine = engine_of()
    executor = executor_of(engine)
    old = make_request(5, lora=adapter(1))
    transcript = run_to_end(engine, old)
    executor.adapters["/a1"] = LoadedLora(bytes([77]) * 16, 1, ("m",), MIB)
    answer = engine.loras.add_lora("a1", "/a1")
    engine.loras.take()
    assert answer.result().digest == bytes([77]) * 16
    new = make_request(5, lora=LoraAdapter("a1", "/a1", bytes([77]) * 16))
    by_path = make_request(5, lora=adapter(1, known=False))
    still = make_request(5, lora=adapter(1))
    run_to_end(engine, new, by_path, still, transcript=transcript)
    assert_as_expected(engine, transcript, old, new, still)
    assert transcript.tokens[by_path.request_id] == transcript.tokens[new.request_id]
    engine.loras.remove_lora(adapter(1).digest)
    with pytest.raises(FailedPrecondition):
        answer = engine.loras.add_lora("a1", "/a1", adapter(1).digest)
        engine.loras.take()
        answer.result()


def test_a_request_learns_in_one_call_whether_it_can_use_its_adapter() -> None:
    engine = engine_of(max_loras=1, at_once=False, max_num_seqs=1)
    loras = engine.loras
    requests = [engine.preprocess("c", make_request(5, lora=adapter(number))) for number in (1, 1, 2)]

    def usable() -> list[Usable]:
        return [loras.acquire(request, request.lora) for request in requests if request.lora is not None]

    for request in requests:
        engine.add(request)
    assert usable() == [Usable.LOADING] * 3
    for _ in range(2):
        executor_of(engine).finish_load()
    loras.take()
    assert [request.hold for request in requests] == [Hold.NONE] * 3
    engine.step(lambda: None)
    assert usable() == [Usable.READY, Usable.READY, Usable.NO_SLOT]


def test_a_request_without_a_slot_waits_and_is_in_nobodys_way() -> None:
    engine = engine_of(max_loras=1)
    transcript = Transcript()
    hot = make_request(5, lora=adapter(1), max_tokens=30)
    waits = make_request(5, lora=adapter(2), max_tokens=3)
    behind = [make_request(5, max_tokens=3), make_request(5, lora=adapter(1), max_tokens=3)]
    add(engine, hot, waits, *behind)
    while not all(request.request_id in transcript.ends for request in behind):
        step(engine, transcript)
    stats = engine.scheduler.stats().lora
    assert stats is not None
    assert (stats.active, stats.waiting, stats.num_waiting_reqs) == (["a1"], ["a2"], 1)
    assert waits.request_id not in transcript.tokens
    run_to_end(engine, transcript=transcript)
    assert_as_expected(engine, transcript, hot, waits, *behind)
    assert executor_of(engine).most_loras == 1


def test_a_hot_adapter_lets_another_in_after_max_wait() -> None:
    engine = engine_of(max_loras=1)
    clock, transcript = engine._wall_clock, Transcript()
    assert isinstance(clock, FakeClock)
    waits = make_request(5, lora=adapter(2), max_tokens=3)
    requests = [make_request(5, lora=adapter(1), max_tokens=12), waits]
    add(engine, *requests)
    while waits.request_id not in transcript.ends:
        requests.append(make_request(5, lora=adapter(1), max_tokens=12))
        add(engine, requests[-1])
        for _ in range(4):
            step(engine, transcript)
            clock.now += 1.0
        assert len(requests) < 30, "it waits for ever"
    assert 4 < len(requests) < 12  # requests of 10 seconds, plus the running requests, of at most 12 steps
    run_to_end(engine, transcript=transcript)
    assert_as_expected(engine, transcript, *requests)
    assert executor_of(engine).most_loras == 1


def test_those_that_wait_for_a_slot_go_on_after_all_were_preempted() -> None:
    engine = engine_of(max_loras=1)
    transcript = Transcript()
    requests = [make_request(5, lora=adapter(1 + i % 2), seed=i) for i in range(4)]
    add(engine, *requests)
    step(engine, transcript)
    stats = engine.scheduler.stats().lora
    assert stats is not None
    assert stats.num_waiting_reqs == 2
    engine.finish_steps()
    engine.scheduler.preempt_all()
    run_to_end(engine, transcript=transcript)
    assert_as_expected(engine, transcript, *requests)
    assert executor_of(engine).most_loras == 1


def test_requests_of_different_adapters_share_no_prefix() -> None:
    engine = engine_of(max_loras=4)
    requests = [make_request(9, lora=lora, max_tokens=2) for lora in (adapter(1), adapter(2), None, adapter(1))]
    cached = []
    for request in requests:
        transcript = run_to_end(engine, request)
        assert_as_expected(engine, transcript, request)
        prefill = transcript.outputs[request.request_id][0].prefill_stats
        assert prefill is not None
        cached.append(prefill.num_cached_tokens)
    assert cached == [0, 0, 0, 8]


def test_preempted_requests_come_back_with_their_adapters() -> None:
    engine = engine_of(max_loras=2, num_blocks=12)
    requests = [make_request(10, lora=adapter(1 + i % 3), seed=i, max_tokens=25) for i in range(8)]
    transcript = run_to_end(engine, *requests)
    assert engine.scheduler.stats().num_preemptions > 5
    assert_as_expected(engine, transcript, *requests)
    assert_nothing_left(engine)
    assert executor_of(engine).most_loras == 2


def test_blocks_that_become_findable_are_told_with_the_name_of_their_adapter() -> None:
    engine = engine_of(enable_kv_events=True)
    told = []
    for request in (make_request(40, lora=adapter(1)), make_request(40)):
        run_to_end(engine, request)
        told += engine.scheduler.kv_cache.take_events()
    names = [event.lora_name for event in told if isinstance(event, BlockStored)]
    assert list(dict.fromkeys(names)) == ["a1", ""]
