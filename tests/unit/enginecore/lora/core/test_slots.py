"""Adapters of running requests: never more than the slots, and no request waits forever."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from penstock_enginecore.lora.core.cache import LoraSlots

A, B, C, D = b"a", b"b", b"c", b"d"


class Queue:
    """A scheduler without KV blocks: starts each request that may start, in order, and keeps the others waiting."""

    def __init__(self, max_loras: int, max_wait: float) -> None:
        self.slots = LoraSlots(max_loras, max_wait)
        self.now = 0.0
        self.adapters: dict[str, bytes] = {}
        self.queue: list[str] = []
        self.running: dict[str, float] = {}
        self.came: dict[str, float] = {}
        self.waited: dict[str, float] = {}

    def add(self, key: str, digest: bytes) -> None:
        self.adapters[key] = digest
        self.came[key] = self.now
        self.queue.append(key)

    def schedule(self, room: int = 1_000) -> None:
        self.queue = [*self.slots.settle(self.now), *self.queue]
        while self.queue and len(self.running) < room:
            key = self.queue.pop(0)
            digest = self.adapters[key]
            if self.slots.admits(digest):
                self.slots.start(key, digest, digest.hex())
                self.running[key] = self.now
                self.waited[key] = self.now - self.came[key]
            else:
                self.slots.wait(key, digest, digest.hex(), self.now)

    def end(self, key: str) -> None:
        self.running.pop(key, None)
        if key in self.queue:
            self.queue.remove(key)
        self.slots.leave(key)
        del self.adapters[key]

    @property
    def running_adapters(self) -> set[bytes]:
        return {self.adapters[key] for key in self.running}


def test_a_request_without_a_slot_is_in_nobodys_way() -> None:
    queue = Queue(2, 5.0)
    for key, digest in (("a", A), ("b", B), ("c", C), ("a2", A)):
        queue.add(key, digest)
    queue.schedule()
    assert list(queue.running) == ["a", "b", "a2"]
    assert queue.slots.active == ["61", "62"]
    assert queue.slots.waiting == ["63"]
    assert queue.slots.num_waiting == 1


def test_a_free_slot_goes_to_the_adapter_that_has_waited_longest() -> None:
    queue = Queue(1, 100.0)
    for key, digest in (("a", A), ("c", C), ("b", B), ("c2", C)):
        queue.add(key, digest)
        queue.schedule()
        queue.now += 1
    queue.end("a")
    queue.add("d", D)  # no request overtakes the waiting ones
    queue.schedule()
    assert list(queue.running) == ["c", "c2"]


def test_a_hot_adapter_gives_its_slot_up_when_another_has_waited_long_enough() -> None:
    queue = Queue(1, 5.0)
    queue.add("a", A)
    queue.schedule()
    queue.add("b", B)
    queue.schedule()
    queue.now = 4.9
    queue.add("a2", A)
    queue.schedule()
    assert "a2" in queue.running
    queue.now = 5.0
    queue.schedule()
    queue.add("a3", A)
    queue.schedule()
    assert "a3" not in queue.running
    queue.end("a")
    queue.schedule()
    assert list(queue.running) == ["a2"]  # the slot is still in use
    queue.end("a2")
    queue.schedule()
    assert list(queue.running) == ["b"]
    queue.end("b")
    queue.schedule()
    assert list(queue.running) == ["a3"]


def test_the_adapter_that_has_been_active_longest_goes_first() -> None:
    queue = Queue(2, 5.0)
    for key, digest in (("a", A), ("b", B), ("c", C)):
        queue.add(key, digest)
        queue.schedule()
    queue.now = 5.0
    queue.schedule()
    queue.add("a2", A)
    queue.add("b2", B)
    queue.schedule()
    assert list(queue.running) == ["a", "b", "b2"]


def test_a_slot_is_open_again_when_those_that_waited_have_gone() -> None:
    queue = Queue(1, 5.0)
    queue.add("a", A)
    queue.schedule()
    queue.add("b", B)
    queue.schedule()
    queue.now = 5.0
    queue.schedule()
    queue.add("a2", A)
    queue.schedule()
    assert "a2" not in queue.running
    queue.end("b")
    queue.schedule()
    assert "a2" in queue.running


def test_a_slot_that_its_requests_do_not_take_goes_on() -> None:
    queue = Queue(1, 5.0)
    queue.add("a", A)
    queue.schedule()
    queue.add("b", B)
    queue.schedule()
    queue.end("a")
    queue.schedule(room=0)  # it is adapter b's turn, but there is no free slot
    assert queue.slots.active == ["62"]
    queue.slots.wait("c", C, "63", queue.now)
    queue.now = 5.0
    assert queue.slots.settle(queue.now) == ["c"]
    assert not queue.slots.admits(B)


def test_after_a_reset_nothing_runs_and_nobody_waits() -> None:
    queue = Queue(1, 5.0)
    queue.add("a", A)
    queue.add("b", B)
    queue.schedule()
    assert queue.slots.reset() == ["b"]
    assert queue.slots.active == queue.slots.waiting == queue.slots.settle(queue.now) == []
    assert queue.slots.admits(B)


def test_starting_without_a_slot_is_a_defect() -> None:
    slots = LoraSlots(1, 5.0)
    slots.start("a", A, "a")
    with pytest.raises(ValueError, match="has no slot"):
        slots.start("b", B, "b")
    with pytest.raises(ValueError, match="already running"):
        slots.start("a", A, "a")


@given(
    max_loras=st.integers(1, 4),
    max_wait=st.integers(0, 20),
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=8),
    others=st.lists(st.tuples(st.integers(0, 60), st.integers(0, 3)), max_size=30),
    hot=st.integers(1, 3),
)
@settings(max_examples=200)
def test_no_adapter_waits_longer_than_max_wait_and_the_longest_running_request(
    max_loras: int, max_wait: int, lengths: list[int], others: list[tuple[int, int]], hot: int
) -> None:
    """The ``hot`` adapters always have requests. Four others have requests at times."""
    queue = Queue(max_loras, float(max_wait))
    ends: dict[str, int] = {}
    crowded: set[str] = set()
    for now in range(2000):
        queue.now = float(now)
        for key in [key for key, end in ends.items() if end <= now]:
            del ends[key]
            queue.end(key)
        for adapter in range(hot):
            queue.add(f"hot{adapter}-{now}", bytes([adapter]))
        for number, (at, which) in enumerate(others):
            if at == now:
                queue.add(f"other-{number}", bytes([100 + which]))
        queue.schedule()
        for key in queue.running:
            ends.setdefault(key, now + lengths[int(key.split("-")[1]) % len(lengths)])
        if len(queue.slots.waiting) > max_loras:
            crowded.update(queue.came.keys() - queue.waited.keys())
        if now > 60 and all(f"other-{number}" in queue.waited for number in range(len(others))):
            break
    waited = {key: wait for key, wait in queue.waited.items() if key.startswith("other")}
    assert len(waited) == len(others)  # every request starts after some time
    late = {key: wait for key, wait in waited.items() if wait > max_wait + max(lengths) + 1}
    assert late.keys() <= crowded, late


class SlotsMachine(RuleBasedStateMachine):
    """Random lives: no request is lost, none runs without a slot, and no slot is free while a request waits for one."""

    @initialize(max_loras=st.integers(1, 4), max_wait=st.sampled_from([0.0, 1.0, 10.0]))
    def begin(self, max_loras: int, max_wait: float) -> None:
        self.max_loras = max_loras
        self.queue = Queue(max_loras, max_wait)
        self.number = 0

    @rule(adapter=st.integers(0, 6))
    def add(self, adapter: int) -> None:
        self.queue.add(f"r{self.number}", bytes([adapter]))
        self.number += 1

    @rule(room=st.integers(0, 10))
    def schedule(self, room: int) -> None:
        self.queue.schedule(room)

    @precondition(lambda self: self.queue.adapters)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        self.queue.end(data.draw(st.sampled_from(sorted(self.queue.adapters))))

    @precondition(lambda self: self.queue.running)
    @rule(data=st.data())
    def preempt(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.queue.running)))
        del self.queue.running[key]
        self.queue.slots.leave(key)
        self.queue.queue.insert(0, key)

    @rule()
    def preempt_all(self) -> None:
        queue = self.queue
        queue.queue = [*queue.running, *(key for key in queue.adapters if key not in queue.running)]
        queue.running = {}
        self.queue.slots.reset()

    @rule(seconds=st.sampled_from([0.1, 1.0, 5.0]))
    def pass_time(self, seconds: float) -> None:
        self.queue.now += seconds

    @invariant()
    def no_more_adapters_than_slots_run(self) -> None:
        queue = getattr(self, "queue", None)
        if queue is not None:
            assert len(queue.running_adapters) <= len(queue.slots.active) <= self.max_loras

    def teardown(self) -> None:
        """Check that all requests end as time passes."""
        queue = getattr(self, "queue", None)
        if queue is None:
            return
        for _ in range(20 * (self.number + 1)):
            queue.schedule()
            for key in list(queue.running):
                queue.end(key)
            queue.now += 11.0
            if not queue.adapters:
                break
        assert not queue.adapters, "requests wait for ever"
        assert queue.slots.active == queue.slots.waiting == []
        assert queue.slots.num_waiting == 0


TestSlotsMachine = SlotsMachine.TestCase
