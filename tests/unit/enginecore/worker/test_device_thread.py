"""Late results: the device thread continues, and futures are resolved in order as results arrive."""

import threading
from concurrent.futures import Future
from functools import partial

import pytest
import torch

from penstock_enginecore.worker.device_thread import CompletionThread, DeviceThread, Late, begin_copy
from tests.fakes.patience import PATIENCE


class Result:
    """A result that arrives on command."""

    def __init__(self, value: object) -> None:
        self._value = value
        self.there = threading.Event()

    def late(self) -> Late[object]:
        return Late(self._wait)

    def _wait(self) -> object:
        assert self.there.wait(PATIENCE)
        if isinstance(self._value, Exception):
            raise self._value
        return self._value


def test_the_device_thread_goes_on_while_a_result_is_on_its_way() -> None:
    thread, result = DeviceThread(), Result("tokens")
    late = thread.submit(result.late)
    assert thread.call(lambda: "the next step") == "the next step"
    assert not late.done()
    result.there.set()
    assert late.result(PATIENCE) == "tokens"
    thread.stop()


def test_results_are_told_in_order_though_the_later_is_there_first() -> None:
    thread, results = DeviceThread(), [Result(0), Result(1)]
    first, second = (thread.submit(result.late) for result in results)
    results[1].there.set()
    thread.call(lambda: None)
    assert not second.done()
    results[0].there.set()
    assert (first.result(PATIENCE), second.result(PATIENCE)) == (0, 1)
    thread.stop()


def test_what_a_late_result_fails_with_comes_out_of_its_future() -> None:
    completions, failing, fine = CompletionThread(), Result(ValueError("an illegal address")), Result(7)
    futures: list[Future[object]] = [Future(), Future()]
    for future, result in zip(futures, (failing, fine), strict=True):
        completions.resolve(future, result.late())
        result.there.set()
    with pytest.raises(ValueError, match="an illegal address"):
        futures[0].result(PATIENCE)
    assert futures[1].result(PATIENCE) == 7
    completions.stop()


def test_stopping_waits_for_what_is_on_its_way() -> None:
    thread, result = DeviceThread(), Result("tokens")
    late = thread.submit(result.late)
    thread.stop()
    result.there.set()
    assert late.result(PATIENCE) == "tokens"


def test_a_copy_of_a_cpu_is_there_and_its_own() -> None:
    tensor = torch.arange(6, dtype=torch.int32).view(2, 3)
    arrival = begin_copy(tensor)
    tensor.zero_()
    assert arrival.arrived()
    assert arrival.wait().tolist() == [[0, 1, 2], [3, 4, 5]]


def test_calls_marked_next_run_before_queued_ones() -> None:
    thread, started, go_on = DeviceThread(), threading.Event(), threading.Event()
    ran: list[str] = []

    def first() -> None:
        started.set()
        assert go_on.wait(PATIENCE)
        ran.append("first")

    thread.submit(first)
    assert started.wait(PATIENCE)
    queued = thread.submit(lambda: ran.append("queued"))
    following = [thread.submit_next(partial(ran.append, name)) for name in ("next", "behind it")]
    go_on.set()
    queued.result(PATIENCE)
    assert all(each.done() for each in following)
    assert ran == ["first", "next", "behind it", "queued"]
    thread.submit_next(lambda: ran.append("idle")).result(PATIENCE)
    with pytest.raises(ZeroDivisionError):
        thread.submit_next(lambda: 1 // 0).result(PATIENCE)
    assert ran[-1] == "idle"
    thread.stop()
