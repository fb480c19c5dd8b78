"""Messages between stages arrive whole, in order, and for every step, even after failures."""

import os
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from penstock_enginecore.parallel.meeting import Meeting
from penstock_enginecore.parallel.stage_links import GlooTransport, StageFailedError, StageLinks
from tests.fakes.engines.worker_threads import Streams, ThreadTransport

WIDTH = 5


def links_of(num_stages: int, dtype: torch.dtype = torch.float32) -> list[StageLinks]:
    streams = Streams()
    links = [StageLinks(ThreadTransport(streams, stage, num_stages)) for stage in range(num_stages)]
    for each in links:
        each.open(max_tokens=16, max_seqs=8, width=WIDTH, dtype=dtype)
    return links


def states(num_tokens: int, first: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.arange(first, first + num_tokens * WIDTH).view(num_tokens, WIDTH).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_hidden_states_pass_the_stages_and_tokens_come_back(dtype: torch.dtype) -> None:
    first, middle, last = links_of(3, dtype)
    arrivals = []
    for step, count in enumerate((3, 16, 1, 7)):
        for each in (first, middle, last):
            each.begin()
        first.send(states(count, step, dtype))
        arrivals.append(first.tokens())
        middle.send(middle.receive(count) + 1)
        middle.release()
        found = last.receive(count)
        assert torch.equal(found, states(count, step, dtype) + 1)
        last.release()
        last.send_tokens(list(range(step)))
    assert [arrival.wait().tolist() for arrival in arrivals] == [[[]], [[0]], [[0, 1]], [[0, 1, 2]]]
    assert all(arrival.arrived() for arrival in arrivals)


def test_received_tensors_stay_until_released() -> None:
    first, last = links_of(2)
    first.send(states(2))
    held = last.receive(2)
    for step in range(1, 3):
        first.send(states(4, step))
    assert torch.equal(held, states(2))
    last.release()
    assert torch.equal(last.receive(4), states(4, 1))


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_a_stage_that_fails_tells_the_others_and_the_next_step_is_whole(failing: int) -> None:
    links = links_of(3)
    first, middle, last = links
    for each in links:
        each.begin()
    arrival = None
    for stage, each in enumerate(links):
        try:
            if stage == failing:
                raise RuntimeError("out of order")
            if stage:
                each.receive(2)
                each.release()
            if stage < 2:
                each.send(states(2))
            if stage == 0:
                arrival = first.tokens()
            if stage == 2:
                last.send_tokens([1])
        except (RuntimeError, StageFailedError):
            each.fail()
    if arrival is not None:
        with pytest.raises(StageFailedError):
            arrival.wait()
    for each in links:  # like a step that is not executed
        each.begin()
        each.fail()
    for each in links:
        each.begin()
    first.send(states(3))
    arrival = first.tokens()
    middle.send(middle.receive(3))
    middle.release()
    assert torch.equal(last.receive(3), states(3))
    last.release()
    last.send_tokens([7, 8])
    np.testing.assert_array_equal(arrival.wait(), [[7, 8]])


def test_tokens_that_nobody_wants_to_know_are_let_go_of() -> None:
    first, last = links_of(2)
    arrivals = []
    for _ in range(400):
        last.send_tokens([1])
        arrivals.append(first.tokens())
    assert arrivals[0].arrived()
    assert not arrivals[-1].arrived()
    assert len(first._asked) < 300


def test_a_message_of_another_size_is_an_error() -> None:
    first, last = links_of(2)
    first.send(states(2))
    with pytest.raises(RuntimeError, match="stage 1 expects hidden states of 3 tokens, but got 2"):
        last.receive(3)


def test_links_are_opened_once() -> None:
    first, _ = links_of(2)
    first.open(max_tokens=16, max_seqs=8, width=WIDTH, dtype=torch.float32)
    with pytest.raises(ValueError, match="the links were opened with sizes"):
        first.open(max_tokens=17, max_seqs=8, width=WIDTH, dtype=torch.float32)


def test_gloo_carries_messages_of_any_size_in_both_directions() -> None:
    store = os.memfd_create("store")
    with ThreadPoolExecutor(2) as threads:
        transports = list(threads.map(lambda stage: GlooTransport(Meeting(store), stage, 2), range(2)))
    first, last = (StageLinks(transport) for transport in transports)
    for each in (first, last):
        each.open(max_tokens=2000, max_seqs=8, width=WIDTH, dtype=torch.float32)
    for step, count in enumerate((1, 2000, 7, 1, 64)):
        first.send(states(count, step))
        arrival = first.tokens()
        assert torch.equal(last.receive(count), states(count, step))
        last.release()
        last.send_tokens([step] * (step + 1))
        assert arrival.wait().tolist() == [[step] * (step + 1)]
    for pending in last._posted:  # a group does not end before its receives
        first.send(states(1))
        pending[1].wait()
    os.close(store)
