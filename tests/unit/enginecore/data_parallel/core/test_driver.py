"""The driver of ranks, as threads: real busy loops and schedulers, collectives in memory, the coordinator's own
machine.
"""

import msgspec
import pytest

from penstock_common.errors import FailedPrecondition
from penstock_common.lora_registry import LoraAdapter
from penstock_common.types.outputs import FinishReason
from penstock_enginecore.config import LoraConfig
from penstock_enginecore.data_parallel.core.driver import Standstill
from penstock_enginecore.kv_transfer.core.leases import LeasedBlocks
from penstock_enginecore.lora.core.request import LoadedLora
from tests.fakes.engines.engine_harness import FakeClock, assert_as_expected, make_request
from tests.fakes.engines.fake_leases import FakeLeases
from tests.fakes.engines.rank_threads import running_ranks, wait_until


def args(*values):
    return msgspec.msgpack.encode(list(values))


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_ranks_serve_uneven_loads_in_steps_of_all(count):
    with running_ranks(count) as ranks:
        for turn in range(3):
            given = {}
            for i, rank in enumerate(ranks.all):
                given[i] = [make_request(seed=turn + j, max_tokens=3 + 5 * j) for j in range(i * 2)]
                if count == 1:
                    given[i] = [make_request(seed=turn)]
                for request in given[i]:
                    rank.add(request)
            for i, rank in enumerate(ranks.all):
                rank.wait_for_ends(*given[i])
                assert_as_expected(rank.engine, rank.transcript, *given[i])
        ranks.wait_until_idle()
        assert ranks.room.machine.group.epoch == 1
    assert all(rank.driver.state.num_recoveries == 0 for rank in ranks.all)
    assert (ranks.all[0].executor.num_dummy_steps > 0) == (count > 1)


def test_one_request_on_one_rank_starts_all_and_all_come_to_rest():
    with running_ranks(3) as ranks:
        request = make_request(max_tokens=6)
        ranks.all[2].add(request)
        ranks.all[2].wait_for_ends(request)
        ranks.wait_until_idle()
        assert [rank.executor.num_dummy_steps for rank in ranks.all] == [6, 6, 0]
        assert {rank.driver.report.place.wave for rank in ranks.all} == {1}
        assert ranks.room.machine.waves.wave == 1
        assert not ranks.room.machine.waves.running


def test_a_group_starts_without_its_coordinator():
    with running_ranks(2) as ranks:
        ranks.room.away = True
        for _ in range(2):
            request = make_request()
            ranks.all[1].add(request)
            ranks.all[1].wait_for_ends(request)
            ranks.wait_until_idle()
        assert {rank.driver.report.place.wave for rank in ranks.all} == {2}


def test_a_refused_request_leaves_no_request_waiting():
    with running_ranks(2) as ranks:
        refused = make_request(prompt=[10**6])
        ranks.all[0].add(refused)
        ranks.all[0].wait_for_ends(refused)
        wait_until(lambda: {rank.driver.report.place.wave for rank in ranks.all} == {1})
        ranks.wait_until_idle()
        assert ranks.all[0].transcript.reason(refused.request_id) is FinishReason.ERROR


@pytest.mark.parametrize("mode", ["abort", "wait", "keep"])
def test_a_pause_that_reaches_one_rank_reaches_all_and_what_waits_goes_on_at_resume(mode):
    with running_ranks(3) as ranks:
        first, second, third = ranks.all
        running = make_request(max_tokens=150, prompt=3)
        second.add(running)
        second.wait(lambda: second.transcript.tokens[running.request_id])
        first.call(1, "pause", args(mode))
        first.wait(lambda: 1 in first.answers)
        assert first.answers[1].error is None
        wait_until(lambda: all(rank.engine.paused for rank in ranks.all))
        stood = [rank.executor.num_steps + rank.executor.num_dummy_steps for rank in ranks.all]
        held = make_request()
        third.add(held)
        third.call(2, "is_paused")
        third.wait(lambda: 2 in third.answers)
        assert [rank.executor.num_steps + rank.executor.num_dummy_steps for rank in ranks.all] == stood
        assert held.request_id not in third.transcript.ends
        if mode != "keep":
            wanted = FinishReason.ABORT if mode == "abort" else FinishReason.LENGTH
            assert second.transcript.reason(running.request_id) is wanted
        second.call(3, "resume")
        second.wait(lambda: 3 in second.answers)
        assert second.answers[3].error is None
        third.wait_for_ends(held)
        assert_as_expected(third.engine, third.transcript, held)
        if mode != "abort":
            second.wait_for_ends(running)
            assert_as_expected(second.engine, second.transcript, running)
        ranks.wait_until_idle()


def test_ranks_do_not_sleep():
    with running_ranks(1) as ranks:
        ranks.all[0].call(1, "sleep")
        ranks.all[0].wait(lambda: 1 in ranks.all[0].answers)
        assert ranks.all[0].answers[1].error.code == "UNIMPLEMENTED"


def test_survivors_of_a_death_in_a_step_repeat_it_and_keep_their_requests():
    with running_ranks(3) as ranks:
        first, second, third = ranks.all
        requests = [make_request(seed=i, max_tokens=40) for i in range(2)]
        first.add(requests[0])
        third.add(requests[1])
        third.wait(lambda: third.transcript.tokens[requests[1].request_id])
        ranks.kill(second)
        first.wait_for_ends(requests[0])
        third.wait_for_ends(requests[1])
        assert_as_expected(first.engine, first.transcript, requests[0])
        assert_as_expected(third.engine, third.transcript, requests[1])
        assert first.engine.scheduler.stats().num_preemptions == third.engine.scheduler.stats().num_preemptions == 0
        assert ranks.room.machine.group.members == (first.name, third.name)
        assert first.driver.state.num_recoveries == 1
        assert first.driver.state.num_switches == 0
        assert not first.engine.has_requests


def test_a_group_with_too_few_ranks_waits_for_a_replacement():
    with running_ranks(2, min_size=2) as ranks:
        first, second = ranks.all
        request = make_request(max_tokens=30)
        first.add(request)
        first.wait(lambda: first.transcript.tokens[request.request_id])
        ranks.kill(second)
        wait_until(lambda: first.driver.state.suspended)
        ranks.start("rank-2")
        first.wait_for_ends(request)
        assert_as_expected(first.engine, first.transcript, request)
        assert not first.driver.state.suspended


@pytest.mark.parametrize("size", [1, 3])
def test_a_group_changes_its_size_between_two_steps(size):
    with running_ranks(2) as ranks:
        if size == 3:
            ranks.start("rank-2")
        requests = [make_request(seed=i, max_tokens=60) for i in range(2)]
        ranks.all[0].add(requests[0])
        ranks.all[0].wait(lambda: ranks.all[0].transcript.tokens[requests[0].request_id])
        ranks.room.wait(lambda: len(ranks.room.machine.known) == len(ranks.all))
        ranks.room.then(ranks.room.machine.scale(size))
        ranks.room.wait(lambda: ranks.room.machine.finished and len(ranks.room.machine.group.members) == size)
        ranks.all[0].wait_for_ends(requests[0])
        assert_as_expected(ranks.all[0].engine, ranks.all[0].transcript, requests[0])
        states = [rank.driver.state for rank in ranks.all]
        assert all(state.num_recoveries == 0 for state in states)
        assert [state.num_switches for state in states] == ([1, 0] if size == 1 else [1, 1, 0])
        assert states[0].switch_seconds > 0
        last = ranks.all[-1]
        last.add(requests[1])
        if size == 1:
            wait_until(lambda: last.driver.state.rank is None)
        else:
            last.wait_for_ends(requests[1])


@pytest.mark.parametrize("how", ["leaves", "stands still"])
def test_a_rank_keeps_blocks_of_moved_requests_for_their_next_engines(how):
    with running_ranks(2, min_size=1 if how == "leaves" else 2) as ranks:
        first, last = ranks.all
        FakeLeases(last.engine, FakeClock())
        last.driver._move_after = 0.0
        request = make_request(14, max_tokens=500)
        last.add(request)
        last.wait(lambda: last.transcript.tokens[request.request_id])
        if how == "leaves":
            ranks.room.then(ranks.room.machine.scale(1))
        else:
            ranks.kill(first)
        last.wait_for_ends(request)
        end = last.transcript.ends[request.request_id]
        assert end.finish_reason is FinishReason.ABORT
        assert end.error.reason == ("LEFT_GROUP" if how == "leaves" else "GROUP_SUSPENDED")
        assert end.kv_source.num_tokens >= 12
        last.engine.leases = LeasedBlocks(FakeClock())


LORA = LoraAdapter("a", "/a", b"a" * 16)
LOADED = LoadedLora(LORA.digest, 8, ("m",), 2**20)


def test_a_request_waits_for_its_adapter_while_the_ranks_keep_stepping():
    with running_ranks(2, lora=LoraConfig(max_loras=2)) as ranks:
        first, second = ranks.all
        first.executor.adapters["/a"] = LOADED
        first.executor.loads_at_once = False
        waiting, base = make_request(lora=LORA, max_tokens=6), make_request(max_tokens=4)
        first.add(waiting)
        second.add(base)
        second.wait_for_ends(base)
        dummy = second.executor.num_dummy_steps
        wait_until(lambda: second.executor.num_dummy_steps > dummy + 5)  # the wave continues for the waiting request
        assert waiting.request_id not in first.transcript.ends
        assert first.executor.finish_load()
        first.wait_for_ends(waiting)
        assert_as_expected(first.engine, first.transcript, waiting)
        assert_as_expected(second.engine, second.transcript, base)
        ranks.wait_until_idle()
        assert (first.executor.held_loras, second.executor.held_loras) == ({LORA.digest}, set())


@pytest.mark.parametrize("paused", [False, True])
def test_adapters_come_and_fail_to_come_while_the_ranks_compute_no_step(paused):
    with running_ranks(2, lora=LoraConfig(max_loras=2)) as ranks:
        rank = ranks.all[0]
        rank.executor.adapters |= {"/a": LOADED, "/broken": FailedPrecondition("it is broken", reason="LORA_REFUSED")}
        rank.executor.loads_at_once = False
        if paused:
            rank.call(1, "pause", args("keep"))
            rank.wait(lambda: 1 in rank.answers)
        for number, name in ((2, "/a"), (3, "/broken")):
            rank.call(number, "add_lora", args(name, name))
            wait_until(rank.executor.finish_load)
            rank.wait(lambda number=number: number in rank.answers)
        assert rank.answers[2].error is None
        assert rank.answers[3].error.reason == "LORA_REFUSED"
        assert not rank.executor.num_steps + rank.executor.num_dummy_steps
        if paused:
            rank.call(4, "resume")
            rank.wait(lambda: 4 in rank.answers)
        rank.executor.loads_at_once = True
        broken, good = make_request(lora=LoraAdapter("b", "/broken")), make_request(lora=LORA)
        rank.add(broken)
        rank.add(good)
        rank.wait_for_ends(broken, good)
        assert rank.transcript.reason(broken.request_id) is FinishReason.ERROR
        assert_as_expected(rank.engine, rank.transcript, good)
        ranks.wait_until_idle()


def test_survivors_of_a_death_keep_their_adapters():
    with running_ranks(3, lora=LoraConfig(max_loras=2)) as ranks:
        first, second, third = ranks.all
        for rank in ranks.all:
            rank.executor.adapters["/a"] = LOADED
        requests = [make_request(seed=i, max_tokens=40, lora=LORA) for i in range(2)]
        first.add(requests[0])
        third.add(requests[1])
        third.wait(lambda: third.transcript.tokens[requests[1].request_id])
        ranks.kill(second)
        first.wait_for_ends(requests[0])
        third.wait_for_ends(requests[1])
        assert_as_expected(first.engine, first.transcript, requests[0])
        assert_as_expected(third.engine, third.transcript, requests[1])
        assert [len(rank.executor.loads) for rank in (first, third)] == [1, 1]


# The time for which a change of the group stops a rank's steps.


class Hands:
    """A clock whose time the test sets."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def hands() -> Hands:
    return Hands()


@pytest.fixture
def standstill(hands: Hands) -> Standstill:
    return Standstill(hands)


def measured(standstill: Standstill) -> tuple[int, float, int, float]:
    return (
        standstill.num_switches,
        standstill.switch_seconds,
        standstill.num_recoveries,
        standstill.recovery_seconds,
    )


def switch(standstill: Standstill, hands: Hands, agreeing: float, opening: float) -> bool:
    standstill.exchanging()
    hands.now += agreeing
    standstill.switching()
    standstill.exchanging()
    hands.now += opening
    return standstill.opened()


def test_a_planned_change_counts_from_the_exchange_behind_the_last_step(standstill: Standstill, hands: Hands) -> None:
    standstill.exchanging()
    hands.now += 8  # a long step, without a change of the group
    assert not switch(standstill, hands, agreeing=0.5, opening=0.25)
    assert measured(standstill) == (1, 0.75, 0, 0)
    assert not switch(standstill, hands, agreeing=1, opening=1)
    assert measured(standstill) == (2, 2.75, 0, 0)


def test_a_group_that_is_entered_from_none_is_no_change(standstill: Standstill, hands: Hands) -> None:
    standstill.exchanging()
    hands.now += 1
    assert not standstill.opened()
    assert measured(standstill) == (0, 0, 0, 0)


def test_a_loss_counts_from_when_it_was_seen_first(standstill: Standstill, hands: Hands) -> None:
    standstill.exchanging()
    hands.now += 1
    standstill.lost()
    hands.now += 0.5
    standstill.lost()
    assert standstill.seconds_since_loss == 0.5
    standstill.exchanging()
    hands.now += 0.5
    assert standstill.opened()
    assert measured(standstill) == (0, 0, 1, 1)
    assert standstill.seconds_since_loss == 0


def test_a_planned_change_in_which_the_new_group_is_lost_is_a_loss_alone(standstill: Standstill, hands: Hands) -> None:
    standstill.exchanging()
    hands.now += 1
    standstill.switching()
    standstill.exchanging()
    hands.now += 1
    standstill.lost()
    standstill.exchanging()
    hands.now += 2
    assert standstill.opened()
    assert measured(standstill) == (0, 0, 1, 2)
    assert not switch(standstill, hands, agreeing=1, opening=1)
    assert measured(standstill) == (1, 2, 1, 2)
