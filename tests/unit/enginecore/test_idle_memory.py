"""Times at which an engine returns freed memory to the system."""

from penstock_enginecore.idle_memory import IdleMemory

MIB = 1024 * 1024


class Loop:
    has_work = False
    last_step_time = 0.0


class Heap:
    def __init__(self) -> None:
        self.free = 200 * MIB
        self.given_back = 0

    def give_back(self) -> None:
        self.given_back += 1


def rig() -> tuple[Loop, Heap, IdleMemory]:
    loop, heap = Loop(), Heap()
    return loop, heap, IdleMemory(loop, free_bytes=lambda: heap.free, give_back=heap.give_back)


def test_it_is_given_back_once_after_the_steps_have_ended():
    loop, heap, memory = rig()
    memory.look()
    assert heap.given_back == 0  # no step has run
    loop.has_work, loop.last_step_time = True, 1.0
    memory.look()
    loop.last_step_time = 2.0
    memory.look()
    loop.has_work = False
    memory.look()
    for _ in range(3):
        memory.look()
    assert heap.given_back == 1
    loop.last_step_time = 3.0
    memory.look()
    assert heap.given_back == 1  # a step has just ended
    memory.look()
    assert heap.given_back == 2


def test_a_step_that_takes_long_is_not_idle():
    loop, heap, memory = rig()
    loop.has_work, loop.last_step_time = True, 1.0
    for _ in range(3):
        memory.look()
    assert heap.given_back == 0


def test_little_is_left_alone():
    loop, heap, memory = rig()
    heap.free = MIB
    loop.last_step_time = 1.0
    for _ in range(3):
        memory.look()
    assert heap.given_back == 0


def test_what_dropped_tensors_have_freed_is_given_back_though_no_step_has_run():
    heap, drops = Heap(), [0]
    memory = IdleMemory(Loop(), num_drops=lambda: drops[0], free_bytes=lambda: heap.free, give_back=heap.give_back)
    memory.look()
    assert heap.given_back == 0
    drops[0] = 1
    memory.look()
    assert heap.given_back == 0  # memory was returned just before
    for _ in range(3):
        memory.look()
    assert heap.given_back == 1
