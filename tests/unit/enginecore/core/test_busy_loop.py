"""The loop of an engine process, on a thread of its own, driven as the I/O thread drives it."""

import contextlib
import gc
import itertools
import logging
import os
import queue
import signal
import threading
import time

import msgspec
import pytest

from penstock_common.types.outputs import FinishReason
from penstock_enginecore.app import signals_handled
from penstock_enginecore.config import LoraConfig
from penstock_enginecore.core import steps_in_flight
from penstock_enginecore.core.busy_loop import BusyLoop
from penstock_enginecore.core.control import EngineControl
from penstock_enginecore.core.steps_in_flight import EngineDeadError
from penstock_enginecore.lora.core.request import LoadedLora
from tests.fakes.engines.engine_harness import (
    CLIENT,
    FakeClock,
    Transcript,
    assert_as_expected,
    assert_nothing_left,
    make_engine,
    make_request,
)
from tests.fakes.engines.fake_executor import FakeExecutor, oracle_tokens
from tests.fakes.engines.fake_leases import FakeLeases
from tests.fakes.patience import PATIENCE

TIMEOUT = PATIENCE


class RecordingSink:
    """Records everything that the loop emits."""

    def __init__(self):
        self.changed = threading.Condition()
        self.transcripts = {}
        self.utility_outputs = {}
        self.draining_timeout = None
        self.dead = None
        self.told = []
        self.told_to = []

    def of(self, client_id=CLIENT):
        return self.transcripts.setdefault(client_id, Transcript())

    def emit(self, client_id, outputs):
        with self.changed:
            self.of(client_id).add(outputs)
            if outputs.utility_output is not None:
                self.utility_outputs[outputs.utility_output.call_id] = outputs.utility_output
            self.changed.notify_all()

    def broadcast(self, outputs, to=None):
        with self.changed:
            self.told.append(outputs)
            self.told_to.append(to)
            self.changed.notify_all()

    def draining(self, timeout):
        with self.changed:
            self.draining_timeout = timeout
            self.changed.notify_all()

    def engine_dead(self, reason):
        with self.changed:
            self.dead = reason
            self.changed.notify_all()

    def wait(self, condition):
        with self.changed:
            assert self.changed.wait_for(condition, TIMEOUT)

    def wait_for_ends(self, *requests, client_id=CLIENT):
        self.wait(lambda: all(request.request_id in self.of(client_id).ends for request in requests))


class Rig:
    """A busy loop on a thread. ``gate`` holds every step in its middle while it is closed."""

    def __init__(self, executor=None, sink=None, *, clock=time.monotonic, **config):
        self.engine = make_engine(executor, **config)
        self.control = EngineControl(self.engine)
        self.executor = self.engine.executor
        self.gate = threading.Event()
        self.gate.set()
        self.in_step = threading.Event()
        self.executor.on_execute = self.pass_gate
        self.sink = sink or RecordingSink()
        self.loop = BusyLoop(self.engine, self.control, self.sink, clock=clock)
        self.error = None
        self.thread = threading.Thread(target=self.run)

    def pass_gate(self):
        self.in_step.set()
        assert self.gate.wait(TIMEOUT)

    def run(self):
        try:
            self.loop.run()
        except Exception as e:
            self.error = e

    def add_and_hold(self, request, client_id=CLIENT):
        """Add a request to an idle loop; returns when its first step is being held."""
        self.gate.clear()
        self.in_step.clear()
        self.loop.add(client_id, request)
        assert self.in_step.wait(TIMEOUT)

    def join(self):
        self.thread.join(TIMEOUT)
        assert not self.thread.is_alive()


@contextlib.contextmanager
def running(executor=None, sink=None, **config):
    rig = Rig(executor, sink, **config)
    rig.thread.start()
    try:
        yield rig
    finally:
        rig.gate.set()
        rig.loop.request_shutdown()
        rig.join()


def test_requests_are_served_and_an_idle_loop_waits_for_more():
    with running() as rig:
        for _ in range(3):
            requests = [make_request(seed=i) for i in range(5)]
            for request in requests:
                rig.loop.add(CLIENT, request)
            rig.sink.wait_for_ends(*requests)
            assert_as_expected(rig.engine, rig.sink.of(), *requests)
    assert rig.error is None
    assert_nothing_left(rig.engine)


def test_an_idle_loop_does_nothing():
    with running() as rig:
        request = make_request()
        rig.loop.add(CLIENT, request)
        rig.sink.wait_for_ends(request)
        calls = []
        rig.loop.call_utility(CLIENT, 1, "engine_info", b"")
        rig.sink.wait(lambda: 1 in rig.sink.utility_outputs)
        rig.engine.step = lambda drain: calls.append(1) or {}
        rig.loop.call_utility(CLIENT, 2, "engine_info", b"")
        rig.sink.wait(lambda: 2 in rig.sink.utility_outputs)
        assert calls == []
        assert not rig.loop.has_work
        assert rig.loop.seconds_since_last_step() == 0


def test_an_idle_loop_logs_the_steps_before_it(monkeypatch):
    lines = queue.SimpleQueue()
    monkeypatch.setattr(steps_in_flight.logger, "info", lambda text, *values: lines.put(text % values))
    with running(iteration_log_interval=0.2) as rig:
        request = make_request()
        rig.loop.add(CLIENT, request)
        rig.sink.wait_for_ends(request)
        assert "0 requests running, 0 requests waiting" in lines.get(timeout=TIMEOUT)
        assert rig.engine.seconds_to_log_line is None


def test_an_engine_is_wedged_once_a_step_has_taken_wedged_after_seconds():
    clock = FakeClock()
    with running(clock=clock) as rig:
        request = make_request()
        rig.add_and_hold(request)
        limit = rig.engine.config.wedged_after
        clock.now += limit - 1
        assert (rig.loop.wedged, rig.loop.stats().wedged) == (False, False)
        clock.now += 1
        stats = rig.loop.stats()
        assert (stats.wedged, stats.seconds_since_last_step) == (True, limit)
        rig.gate.set()
        rig.sink.wait_for_ends(request)
        rig.loop.call_utility(CLIENT, 1, "engine_info", b"")
        rig.sink.wait(lambda: 1 in rig.sink.utility_outputs)
        assert not rig.loop.wedged


def test_an_invalid_request_gets_an_error_output_and_affects_no_other():
    with running() as rig:
        good, bad = make_request(max_tokens=30), make_request([5000], attempt=2)
        rig.loop.add(CLIENT, good)
        rig.loop.add(CLIENT, bad)
        rig.sink.wait_for_ends(good, bad)
        end = rig.sink.of().ends[bad.request_id]
        assert (end.finish_reason, end.attempt) == (FinishReason.ERROR, 2)
        assert (end.error.code, end.error.field) == ("INVALID_ARGUMENT", "prompt_token_ids")
        assert "5000" in end.error.message
        assert_as_expected(rig.engine, rig.sink.of(), good)


def test_a_full_queue_answers_with_a_time_to_retry_after():
    with running(max_num_seqs=1, max_waiting_requests=1) as rig:
        first, second, third = (make_request(max_tokens=30) for _ in range(3))
        rig.add_and_hold(first)
        rig.loop.add(CLIENT, second)
        rig.loop.add(CLIENT, third)
        rig.gate.set()
        rig.sink.wait_for_ends(first, second, third)
        error = rig.sink.of().ends[third.request_id].error
        assert (error.code, error.reason) == ("RESOURCE_EXHAUSTED", "QUEUE_FULL")
        assert error.retry_after > 0


def test_a_flood_of_one_tenant_does_not_delay_another_beyond_its_share():
    with running(max_num_seqs=2) as rig:
        flood = [make_request(tenant="flood", max_tokens=3, seed=i) for i in range(60)]
        light = [make_request(tenant="light", max_tokens=3, seed=i) for i in range(5)]
        rig.add_and_hold(flood[0])
        for request in [*flood[1:], *light]:
            rig.loop.add(CLIENT, request)
        rig.gate.set()
        rig.sink.wait_for_ends(*flood, *light)
        assert_as_expected(rig.engine, rig.sink.of(), *flood, *light)
        order = list(rig.sink.of().ends)
        # From the second request on, tenants take turns, with two running requests. The light tenant's fifth request is
        # among the first 13.
        assert max(order.index(request.request_id) for request in light) <= 13


def test_an_abort_takes_effect_within_the_running_step():
    with running() as rig:
        request = make_request(max_tokens=200)
        rig.add_and_hold(request)
        before = rig.executor.num_steps
        rig.loop.abort(CLIENT, [request.request_id])
        rig.gate.set()
        rig.sink.wait_for_ends(request)
        assert rig.sink.of().reason(request.request_id) is FinishReason.ABORT
        scheduled = [s for s in rig.executor.steps[before:] if s.num_scheduled_tokens]
        assert scheduled == []


def test_an_abort_right_behind_its_request_is_not_lost():
    with running() as rig:
        holder, request = make_request(max_tokens=200), make_request(max_tokens=200)
        rig.add_and_hold(holder)
        rig.loop.add(CLIENT, request)
        rig.loop.abort(CLIENT, [request.request_id])
        rig.gate.set()
        rig.sink.wait_for_ends(request)
        assert rig.sink.of().reason(request.request_id) is FinishReason.ABORT
        rig.loop.abort(CLIENT, [holder.request_id])
        rig.sink.wait_for_ends(holder)


def test_an_abort_does_not_hit_a_later_request_with_the_same_id():
    outputs = []

    class ListSink(RecordingSink):
        def emit(self, client_id, frame):
            with self.changed:
                outputs.extend(output for output in frame.outputs if output.request_id == "x")
                self.changed.notify_all()

    with running(sink=ListSink()) as rig:
        first, second = make_request(request_id="x", max_tokens=200), make_request(request_id="x", attempt=1, seed=4)
        holder = make_request(max_tokens=100)
        rig.add_and_hold(holder)
        rig.loop.add(CLIENT, first)
        rig.loop.abort(CLIENT, ["x"])
        rig.loop.add(CLIENT, second)
        rig.gate.set()
        rig.sink.wait(lambda: sum(o.finish_reason is not None for o in outputs) == 2)
    assert [(o.attempt, o.finish_reason) for o in outputs if o.finish_reason] == [
        (0, FinishReason.ABORT),
        (1, FinishReason.LENGTH),
    ]
    assert [t for o in outputs if o.attempt == 1 for t in o.new_token_ids] == oracle_tokens(4, 8, 1000)


def test_an_abort_does_not_hit_a_request_that_comes_after_it():
    rig = Rig()
    request = make_request(request_id="x")
    rig.loop.abort(CLIENT, ["x"])
    rig.loop.add(CLIENT, request)
    rig.thread.start()
    rig.sink.wait_for_ends(request)
    rig.loop.request_shutdown()
    rig.join()
    assert_as_expected(rig.engine, rig.sink.of(), request)


def test_a_session_that_ends_takes_its_requests_along():
    with running() as rig:
        rig.add_and_hold(make_request(max_tokens=200), "gone")
        rig.loop.add("gone", make_request(max_tokens=200))
        rig.loop.client_gone("gone")
        stays = make_request()
        rig.loop.add(CLIENT, stays)
        rig.gate.set()
        rig.sink.wait_for_ends(stays)
        assert rig.sink.of("gone").ends == {}
    assert_nothing_left(rig.engine)


def test_cache_events_go_to_subscribed_sessions_while_there_are_any():
    with running() as rig:
        serve(rig)
        assert rig.sink.told == []
        rig.loop.follow_cache("one")
        rig.loop.follow_cache("two")
        serve(rig)
        rig.loop.client_gone("two")
        serve(rig)
        assert [outputs.kv_events[0].token_ids for outputs in rig.sink.told] == [[], []]
        assert rig.sink.told_to == [{"one", "two"}, {"one"}]
        rig.loop.client_gone("one")
        serve(rig)
        assert len(rig.sink.told) == 2
    assert rig.engine.scheduler.kv_cache.take_events() == [], "nothing was recorded for nobody"


def test_cache_events_that_are_enabled_are_told_to_all_sessions_in_full():
    with running(enable_kv_events=True) as rig:
        serve(rig)
        rig.loop.follow_cache("one")
        serve(rig)
        rig.loop.client_gone("one")
        serve(rig)
        assert all(outputs.kv_events[0].token_ids for outputs in rig.sink.told)
        assert rig.sink.told_to == [None] * 3


_numbers = itertools.count(1)


def serve(rig):
    """Serve a request that adds one block to the prefix cache, and wait for its end and its cache events."""
    request = make_request([next(_numbers)] * 5, max_tokens=2)
    rig.loop.add(CLIENT, request)
    rig.sink.wait_for_ends(request)
    rig.loop.call_utility(
        CLIENT, call_id := next(_numbers), "reset_prefix_cash", b""
    )  # answered after the pending messages
    rig.sink.wait(lambda: call_id in rig.sink.utility_outputs)


def test_utility_calls_are_answered_with_a_result_or_an_error():
    with running() as rig:
        rig.loop.call_utility(CLIENT, 7, "reset_prefix_cache", b"")
        rig.loop.call_utility(CLIENT, 8, "reset_prefix_cash", b"")
        rig.loop.call_utility(CLIENT, 9, "reset_prefix_cache", msgspec.msgpack.encode([1]))
        rig.sink.wait(lambda: len(rig.sink.utility_outputs) == 3)
    answers = rig.sink.utility_outputs
    assert msgspec.msgpack.decode(answers[7].result) is True
    assert answers[8].error.code == "UNIMPLEMENTED"
    assert "did you mean 'reset_prefix_cache'" in answers[8].error.message
    assert answers[9].error.code == "INVALID_ARGUMENT"


def test_a_utility_that_breaks_answers_with_an_internal_error():
    with running() as rig:

        def broken():
            raise KeyError("oops")

        rig.engine.scheduler.reset_prefix_cache = broken
        rig.loop.call_utility(CLIENT, 1, "reset_prefix_cache", b"")
        rig.sink.wait(lambda: 1 in rig.sink.utility_outputs)
        assert rig.sink.utility_outputs[1].error.code == "INTERNAL"
        request = make_request()
        rig.loop.add(CLIENT, request)
        rig.sink.wait_for_ends(request)


def test_draining_lets_requests_finish_and_refuses_new_ones(caplog):
    caplog.set_level(logging.INFO)
    with running(drain_timeout=TIMEOUT) as rig:
        request, late = make_request(max_tokens=30), make_request()
        rig.add_and_hold(request)
        rig.loop.request_shutdown()
        assert rig.loop.draining
        rig.loop.add(CLIENT, late)
        rig.gate.set()
        rig.join()
    assert rig.sink.draining_timeout == TIMEOUT
    assert not [line for line in caplog.messages if line.startswith("shutdown")], "whoever is told of draining logs it"
    assert_as_expected(rig.engine, rig.sink.of(), request)
    end = rig.sink.of().ends[late.request_id]
    assert (end.finish_reason, end.error.code, end.error.reason) == (FinishReason.ERROR, "UNAVAILABLE", "DRAINING")
    assert_nothing_left(rig.engine)


@pytest.mark.parametrize("drain_timeout", [0.0, 0.05])
def test_requests_left_at_the_drain_deadline_end_as_abort(drain_timeout):
    stuck = "tests.fakes.engines.engine_harness:StuckScheduler"
    with running(drain_timeout=drain_timeout, scheduler=stuck) as rig:
        request = make_request()
        rig.loop.add(CLIENT, request)
        rig.loop.request_shutdown()
        rig.join()
    end = rig.sink.of().ends[request.request_id]
    if end.finish_reason is not FinishReason.ERROR:  # the shutdown may have happened before the engine read the request
        assert (end.finish_reason, end.error.code) == (FinishReason.ABORT, "UNAVAILABLE")


def test_running_requests_end_as_abort_without_a_drain_timeout():
    with running(drain_timeout=0.0) as rig:
        request = make_request(max_tokens=200)
        rig.add_and_hold(request)
        rig.loop.request_shutdown()
        rig.gate.set()
        rig.join()
    end = rig.sink.of().ends[request.request_id]
    assert (end.finish_reason, end.error.reason) == (FinishReason.ABORT, "DRAINING")
    assert_nothing_left(rig.engine)


def test_a_stuck_request_ends_at_its_deadline_though_nothing_else_happens():
    with running(scheduler="tests.fakes.engines.engine_harness:StuckScheduler") as rig:
        request = make_request(deadline=time.time() + 0.05)
        rig.loop.add(CLIENT, request)
        rig.sink.wait_for_ends(request)
        assert rig.sink.of().ends[request.request_id].error.code == "DEADLINE_EXCEEDED"


def test_a_fatal_error_reaches_every_client_and_leaves_the_loop():
    rig = Rig(FakeExecutor(fail_at_step=2))
    rig.thread.start()
    rig.loop.add(CLIENT, make_request())
    rig.join()
    assert isinstance(rig.error, EngineDeadError)
    assert "the fake device is gone" in rig.sink.dead


def test_an_idle_loop_ends_when_the_executor_says_that_it_computes_nothing_any_more():
    rig = Rig()
    rig.thread.start()
    rig.executor.fail_for_good(RuntimeError("worker 1 was killed"))
    rig.join()
    assert isinstance(rig.error, EngineDeadError)
    assert "the executor failed: worker 1 was killed" in rig.sink.dead


@pytest.mark.parametrize("round_number", range(20))
def test_a_signal_wakes_the_loop_whether_it_is_idle_or_about_to_be(round_number):
    rig = Rig()

    def serve_then_signal():
        request = make_request()
        rig.loop.add(CLIENT, request)
        rig.sink.wait_for_ends(request)
        os.kill(os.getpid(), signal.SIGUSR1)

    helper = threading.Thread(target=serve_then_signal)
    with signals_handled((signal.SIGUSR1,), rig.loop.request_shutdown):
        helper.start()
        rig.loop.run()
    helper.join(TIMEOUT)
    assert rig.sink.draining_timeout is not None


def test_the_heap_of_start_up_is_frozen():
    with running() as rig:
        request = make_request()
        rig.loop.add(CLIENT, request)
        rig.sink.wait_for_ends(request)
        assert gc.get_freeze_count() > 0
    gc.unfreeze()


def test_health_shows_a_step_that_does_not_end():
    with running() as rig:
        request = make_request(max_tokens=50)
        rig.add_and_hold(request)
        seen = rig.loop.last_step_time
        assert rig.loop.has_work
        assert rig.loop.seconds_since_last_step() >= 0
        rig.gate.set()
        rig.sink.wait_for_ends(request)
        assert rig.loop.last_step_time > seen


def test_a_drained_loop_refuses_requests_and_waits_to_be_told_to_leave():
    with running() as rig:
        request, late = make_request(max_tokens=5), make_request()
        rig.add_and_hold(request)
        rig.loop.call_utility(CLIENT, 1, "drain", msgspec.msgpack.encode([3600.0]))
        rig.gate.set()
        rig.sink.wait_for_ends(request)
        rig.sink.wait(lambda: rig.sink.draining_timeout == 3600.0)
        rig.loop.add(CLIENT, late)
        rig.sink.wait_for_ends(late)
        assert rig.sink.of().ends[late.request_id].error.reason == "DRAINING"
        rig.loop.call_utility(CLIENT, 2, "drain", msgspec.msgpack.encode([0.0]))
        rig.sink.wait(lambda: 2 in rig.sink.utility_outputs)
        assert msgspec.msgpack.decode(rig.sink.utility_outputs[2].result) == 0
        assert rig.loop.draining
        assert rig.thread.is_alive()
    assert rig.error is None
    assert_nothing_left(rig.engine)


def test_requests_left_at_the_drain_deadline_end_so_that_other_engines_resume_them():
    with running() as rig:
        request = make_request(max_tokens=1000)
        rig.add_and_hold(request)
        rig.loop.call_utility(CLIENT, 1, "drain", msgspec.msgpack.encode([0.0]))
        rig.gate.set()
        rig.sink.wait_for_ends(request)
        end = rig.sink.of().ends[request.request_id]
        assert (end.finish_reason, end.error.code, end.error.reason) == (FinishReason.ABORT, "UNAVAILABLE", "DRAINING")


@pytest.mark.parametrize("timeout", [-1.0, float("nan"), 1e9])
def test_a_drain_without_a_sensible_deadline_is_refused(timeout):
    with running() as rig:
        rig.loop.call_utility(CLIENT, 1, "drain", msgspec.msgpack.encode([timeout]))
        rig.sink.wait(lambda: 1 in rig.sink.utility_outputs)
        assert rig.sink.utility_outputs[1].error.field == "timeout"
        assert not rig.loop.draining


def test_a_utility_that_meets_the_end_of_the_engine_does_not_hide_it():
    """The utility finishes the steps in flight, of which one has failed for good."""

    def dead(method, arguments):
        raise EngineDeadError("a step failed: the device is gone")

    rig = Rig()
    rig.control.utilities.call = dead
    rig.thread.start()
    rig.loop.call_utility(CLIENT, 1, "pause", b"")
    rig.join()
    assert isinstance(rig.error, EngineDeadError)
    assert "the device is gone" in rig.sink.dead


def test_requests_are_handed_over_and_an_engine_that_leaves_stays_for_their_blocks():
    with running() as rig:
        clock = FakeClock()
        leases = FakeLeases(rig.engine, clock, seconds=1e9)
        request = make_request(14, max_tokens=900)
        rig.add_and_hold(request)
        rig.loop.hand_over(CLIENT, [request.request_id, "unknown"])
        rig.gate.set()
        rig.sink.wait_for_ends(request)
        end = rig.sink.of().ends[request.request_id]
        assert (end.finish_reason, end.kv_source.num_tokens) == (FinishReason.HANDOFF, 12)
        rig.loop.request_shutdown()
        rig.sink.wait(lambda: rig.sink.draining_timeout is not None)
        rig.thread.join(0.1)
        assert rig.thread.is_alive()
        leases.end(end.kv_source.lease_id)
        rig.engine.queues.wake()
        rig.join()
    assert rig.error is None
    assert_nothing_left(rig.engine)


def test_all_frontends_hear_that_an_idle_engine_keeps_nothing_any_more():
    with running() as rig:
        clock = FakeClock()
        leases = FakeLeases(rig.engine, clock)
        request = msgspec.structs.replace(make_request(14), handoff_after_tokens=2)
        rig.loop.add(CLIENT, request)
        rig.sink.wait_for_ends(request)
        assert len(leases) == 1
        clock.now += 5.0
        rig.engine.queues.wake()
        rig.sink.wait(lambda: rig.sink.told)
    [told] = rig.sink.told
    assert told.scheduler_stats.kv_cache_usage == 0


def test_all_frontends_hear_of_the_adapters_of_an_idle_engine():
    digest = bytes(16)
    executor = FakeExecutor()
    executor.adapters["/a"] = LoadedLora(digest, 8, ("m",), 2**20)

    def last():
        return rig.sink.told[-1].scheduler_stats.lora if rig.sink.told else None

    with running(executor, lora=LoraConfig(max_loras=1)) as rig:
        rig.loop.call_utility(CLIENT, 1, "add_lora", msgspec.msgpack.encode(["a", "/a"]))
        rig.sink.wait(lambda: last() is not None and (last().num_cached, last().cached_bytes) == (1, 2**20))
        rig.loop.call_utility(CLIENT, 2, "remove_lora", msgspec.msgpack.encode([digest]))
        rig.sink.wait(lambda: (last().num_cached, last().cached_bytes) == (0, 0))


def test_leases_end_with_the_drains_deadline():
    with running(drain_timeout=0.2) as rig:
        leases = FakeLeases(rig.engine, FakeClock(), seconds=1e9)
        request = msgspec.structs.replace(make_request(14), handoff_after_tokens=2)
        rig.loop.add(CLIENT, request)
        rig.sink.wait_for_ends(request)
        assert len(leases) == 1
        rig.loop.request_shutdown()
        rig.join()
    assert (rig.error, len(leases)) == (None, 0)
    assert_nothing_left(rig.engine)
