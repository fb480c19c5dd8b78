"""Slots of states: which states a step reads and writes, which of them are kept, and when slots are free again."""

import pytest

from penstock_common.block_hash import BlockHasher
from penstock_enginecore.core.kv_cache.events import KvEventLog
from penstock_enginecore.core.kv_cache.manager import KVCacheManager
from penstock_enginecore.core.kv_cache.spec import KVCacheConfig, KVCacheGroup
from penstock_enginecore.core.request import Request, RequestStatus
from penstock_enginecore.core.scheduler.output import SchedulerOutput
from penstock_enginecore.states.core.slots import StateSlots
from penstock_enginecore.states.core.spec import SPAN, ZERO_SLOT, StatePoolConfig, StateStep
from tests.fakes.engines.engine_harness import make_request, prepared

FAR = 16 * SPAN
"""An interval that no test reaches."""


def make_slots(*, kept: int = 4, requests: int = 2, interval: int = FAR, keeps: bool = True) -> StateSlots:
    config = StatePoolConfig(
        num_slots=1 + 2 * requests + kept, num_requests=requests, rows_per_request=SPAN, interval=interval
    )
    return StateSlots(config, keeps=keeps, events=KvEventLog(SPAN, 0, in_full=False))


def make(prompt: int | list[int] = 100, *, salt: str = "") -> Request:
    """Return a request whose prompt is hashed."""
    request = prepared(make_request(prompt, cache_salt=salt))
    BlockHasher(SPAN).extend(request, request.num_tokens)
    return request


def admit(slots: StateSlots, request: Request, start: int = 0, branch: int = 0) -> bool:
    admitted = slots.admit(request, start, branch)
    if admitted:
        request.num_computed_tokens = request.num_processed_tokens = start
    return admitted


def schedule(slots: StateSlots, request: Request, count: int) -> StateStep:
    """Plan a step of one request, which stays in flight."""
    output = SchedulerOutput(num_scheduled_tokens={})
    output.add_known(request, count, ())
    step = slots.plan(output, {request.key: request})[request.key]
    request.num_computed_tokens += count
    return step


def process(slots: StateSlots, request: Request, num_tokens: int) -> None:
    """Process results, after which ``num_tokens`` tokens of the request are final."""
    request.all_token_ids.extend([1] * (num_tokens - request.num_tokens))
    BlockHasher(SPAN).extend(request, request.num_tokens)
    request.num_processed_tokens = num_tokens
    slots.settle(request, num_tokens)


def run(slots: StateSlots, request: Request, count: int) -> StateStep:
    """Plan a step and process its results."""
    step = schedule(slots, request, count)
    process(slots, request, request.num_computed_tokens)
    return step


def kept_ends(slots: StateSlots, request: Request) -> list[int]:
    """Return the positions of the request's tokens whose states are kept."""
    return [SPAN * (i + 1) for i, each in enumerate(request.block_hashes) if slots.pool.get(each) is not None]


def num_free(slots: StateSlots) -> int:
    return slots.pool.num_free_blocks


# Admission.


def test_a_request_gets_two_slots_and_open_rows_and_reads_zeros() -> None:
    slots = make_slots(kept=4)
    request = make()
    assert admit(slots, request)
    assert num_free(slots) == 2 * 2 + 4 - 2
    assert schedule(slots, request, 5) == StateStep(rows=0, closed=ZERO_SLOT, writes=[])


def test_requests_beyond_the_rows_are_not_admitted_and_change_nothing() -> None:
    slots = make_slots(requests=2)
    assert admit(slots, make())
    assert admit(slots, make())
    before = num_free(slots)
    assert not admit(slots, make())
    assert num_free(slots) == before
    assert slots.stats().num_used_slots == 4


def test_a_request_is_admitted_once_another_ends() -> None:
    slots = make_slots(requests=1)
    first, second = make(), make()
    assert admit(slots, first)
    assert not admit(slots, second)
    slots.free(first, keep=True)
    assert admit(slots, second)


def test_running_requests_leave_the_slots_of_requests_that_can_still_start() -> None:
    slots = make_slots(requests=3, kept=1, interval=SPAN)
    first = make(160)
    assert admit(slots, first)
    schedule(slots, first, 160)
    assert num_free(slots) == 4
    assert admit(slots, make())
    assert admit(slots, make())


def test_a_hit_needs_a_free_slot_besides_its_own_two_because_it_revives_one() -> None:
    slots = make_slots(requests=2, kept=1)
    request = make(33)
    admit(slots, request)
    run(slots, request, 33)
    slots.free(request, keep=True)
    other = make(33, salt="other")
    admit(slots, other)
    run(slots, other, 33)
    while num_free(slots) > 2:
        slots.pool.allocate(1)
    assert kept_ends(slots, request) == [32]
    assert not slots.admit(make(33), 32, 0)
    assert kept_ends(slots, request) == [32]
    assert slots.admit(make(33, salt="new"), 0, 0)


def test_admission_of_a_prefix_whose_state_is_not_kept_is_an_error() -> None:
    slots = make_slots()
    request = make()
    with pytest.raises(RuntimeError, match="no state of recurrent layers is kept at position 32"):
        slots.admit(request, 32, 0)


# Reading and writing.


def test_steps_write_the_older_of_the_two_slots_and_read_the_newer() -> None:
    slots = make_slots(keeps=False)
    request = make(100)
    admit(slots, request)
    first = run(slots, request, 20)
    second = run(slots, request, 20)
    third = run(slots, request, 20)
    assert [step.closed for step in (first, second, third)] == [ZERO_SLOT, first.writes[0][1], second.writes[0][1]]
    assert [step.writes[0][0] for step in (first, second, third)] == [16, 32, 48]
    assert third.writes[0][1] == first.writes[0][1] != second.writes[0][1]


def test_a_step_over_several_spans_writes_only_the_last_state_and_kept_ones() -> None:
    slots = make_slots(interval=2 * SPAN)
    request = make(100)
    admit(slots, request)
    step = schedule(slots, request, 90)
    assert [end for end, _ in step.writes] == [32, 64, 80]
    assert len({slot for _, slot in step.writes}) == 3


def test_a_step_within_a_span_writes_nothing() -> None:
    slots = make_slots()
    request = make(100)
    admit(slots, request)
    assert run(slots, request, 15).writes == []
    run(slots, request, 1)
    assert run(slots, request, 15).writes == []


def test_a_span_closed_over_a_rejected_draft_is_closed_again_into_the_same_slot() -> None:
    slots = make_slots(keeps=False)
    request = make(14)
    admit(slots, request)
    run(slots, request, 14)
    drafted = schedule(slots, request, 5)
    process(slots, request, 15)
    request.num_computed_tokens = 15
    again = schedule(slots, request, 3)
    assert drafted.writes == again.writes
    assert again.closed == ZERO_SLOT


def test_a_kept_end_behind_a_rejected_draft_is_findable_only_once_its_tokens_are_final() -> None:
    slots = make_slots(interval=SPAN)
    request = make(14)
    admit(slots, request)
    run(slots, request, 14)
    drafted = schedule(slots, request, 5)
    process(slots, request, 15)
    request.num_computed_tokens = 15
    assert kept_ends(slots, request) == []
    assert run(slots, request, 2).writes == drafted.writes
    assert kept_ends(slots, request) == [16]


def test_accepted_drafts_complete_kept_ends() -> None:
    slots = make_slots(interval=SPAN)
    request = make(14)
    admit(slots, request)
    run(slots, request, 14)
    run(slots, request, 5)
    assert kept_ends(slots, request) == [16]


def test_a_step_from_a_state_that_nothing_wrote_is_an_error() -> None:
    slots = make_slots()
    request = make(100)
    admit(slots, request)
    request.num_computed_tokens = 40
    with pytest.raises(RuntimeError, match="there is no state of recurrent layers at position 32"):
        schedule(slots, request, 1)


# Hits.


def test_a_hit_reads_the_kept_slot_in_place_and_writes_its_own() -> None:
    slots = make_slots()
    first, second = make(40), make(60)
    admit(slots, first)
    slot = run(slots, first, 40).writes[-1][1]
    assert kept_ends(slots, first) == [32]
    assert admit(slots, second, 32)
    step = schedule(slots, second, 28)
    assert step.closed == slot
    assert slot not in [each for _, each in step.writes]


def test_equal_prompts_read_one_slot_and_the_last_one_to_leave_it_frees_it() -> None:
    slots = make_slots(requests=3)
    first = make(33)
    admit(slots, first)
    run(slots, first, 33)
    slots.free(first, keep=True)
    readers = [make(33), make(33)]
    for reader in readers:
        assert admit(slots, reader, 32)
    (slot,) = {schedule(slots, reader, 1).closed for reader in readers}
    assert slots.pool.blocks[slot].ref_count == 2
    process(slots, readers[0], 33)
    for count, reader in zip((1, 0), readers, strict=True):
        run(slots, reader, 15)
        assert slots.pool.blocks[slot].ref_count == count
    assert kept_ends(slots, first) == [32]


def test_a_kept_slot_is_not_evicted_while_a_request_reads_it_or_a_step_in_flight_does() -> None:
    slots = make_slots(requests=2, kept=1, keeps=True)
    first = make(33)
    admit(slots, first)
    run(slots, first, 33)
    slots.free(first, keep=True)
    reader = make(100)
    assert admit(slots, reader, 32)
    slot = schedule(slots, reader, 20).closed
    schedule(slots, reader, 20)
    slots.pool.allocate(num_free(slots))
    assert slots.pool.get(first.block_hashes[1]) is slots.pool.blocks[slot]
    process(slots, reader, 52)
    assert num_free(slots) == 1
    slots.pool.allocate(1)
    assert slots.pool.get(first.block_hashes[1]) is None


def test_a_longer_prefix_without_a_state_is_not_found() -> None:
    slots = make_slots()
    request = make(100)
    admit(slots, request)
    run(slots, request, 40)
    slots.free(request, keep=True)
    assert slots.longest(request.block_hashes, 6) == 2
    assert slots.longest(request.block_hashes, 1) == 0


# Kept states.


def test_the_last_block_end_of_a_prompt_is_kept_without_its_last_token() -> None:
    for length, end in ((15, None), (16, None), (17, 16), (32, 16), (33, 32), (100, 96)):
        slots = make_slots()
        request = make(length)
        admit(slots, request)
        run(slots, request, length)
        assert kept_ends(slots, request) == ([] if end is None else [end]), length


def test_every_interval_is_kept_in_chunks_of_any_size() -> None:
    for chunk in (1, 7, 16, 17, 50, 200):
        slots = make_slots(interval=3 * SPAN, kept=8)
        request = make(200)
        admit(slots, request)
        while request.num_computed_tokens < 200:
            run(slots, request, min(chunk, 200 - request.num_computed_tokens))
        assert kept_ends(slots, request) == [48, 96, 144, 192], chunk


def test_intervals_of_output_tokens_are_kept_even_after_a_prompt_shorter_than_a_block() -> None:
    slots = make_slots(interval=SPAN)
    request = make(3)
    admit(slots, request)
    run(slots, request, 3)
    for _ in range(31):
        run(slots, request, 1)
    assert kept_ends(slots, request) == [16, 32]


def test_a_branch_is_kept_as_the_request_passes_it() -> None:
    slots = make_slots()
    request = make(100)
    admit(slots, request, branch=48)
    assert [end for end, _ in run(slots, request, 100).writes] == [48, 96]
    assert kept_ends(slots, request) == [48, 96]
    assert slots.stats().num_recomputed_tokens == 48


def test_stateless_tokens_of_a_request_count_once_although_it_is_preempted() -> None:
    slots = make_slots()
    request = make(100)
    admit(slots, request, branch=48)
    slots.free(request, keep=True)
    request.num_preemptions = 1
    admit(slots, request, branch=48)
    assert slots.stats().num_recomputed_tokens == 48


def test_if_slots_are_short_the_prompts_end_and_the_branch_come_before_intervals() -> None:
    slots = make_slots(requests=1, kept=3, interval=SPAN)
    request = make(100)
    admit(slots, request, branch=64)
    run(slots, request, 100)
    assert kept_ends(slots, request) == [16, 64, 96]


def test_without_a_free_slot_nothing_is_kept_and_the_request_goes_on() -> None:
    slots = make_slots(requests=1, kept=1, interval=SPAN)
    slots.pool.allocate(1)
    request = make(100)
    admit(slots, request)
    for _ in range(5):
        step = run(slots, request, 20)
        assert len(step.writes) == 1
    assert kept_ends(slots, request) == []


@pytest.mark.parametrize("status", [RequestStatus.FINISHED_STOPPED, RequestStatus.FINISHED_ABORTED])
def test_the_last_closed_state_of_an_ended_or_preempted_request_is_kept(status: RequestStatus) -> None:
    slots = make_slots()
    request = make(20)
    admit(slots, request)
    run(slots, request, 20)
    for _ in range(30):
        run(slots, request, 1)
    request.status = status
    slots.free(request, keep=True)
    assert kept_ends(slots, request) == [16, 48]


def test_nothing_more_is_kept_of_a_failed_request() -> None:
    slots = make_slots()
    request = make(20)
    admit(slots, request)
    run(slots, request, 20)
    run(slots, request, 30)
    slots.free(request, keep=False)
    assert kept_ends(slots, request) == [16]


def test_states_of_tokens_that_are_not_processed_are_not_kept() -> None:
    slots = make_slots(interval=SPAN, kept=8)
    request = make(100)
    admit(slots, request)
    run(slots, request, 20)
    schedule(slots, request, 60)
    slots.free(request, keep=True)
    assert kept_ends(slots, request) == [16]


def test_a_slot_that_a_step_in_flight_writes_is_not_kept() -> None:
    slots = make_slots()
    request = make(10)
    admit(slots, request)
    run(slots, request, 20)
    schedule(slots, request, 16)
    schedule(slots, request, 16)
    slots.free(request, keep=True)
    assert kept_ends(slots, request) == []


def test_a_state_with_a_kept_equal_is_not_kept_twice() -> None:
    slots = make_slots()
    for _ in range(2):
        request = make(33)
        admit(slots, request)
        run(slots, request, 33)
        slots.free(request, keep=True)
    assert slots.stats().num_kept == 1


def test_without_prefix_caching_nothing_is_kept() -> None:
    slots = make_slots(keeps=False, interval=SPAN)
    request = make(100)
    admit(slots, request)
    run(slots, request, 100)
    slots.free(request, keep=False)
    assert slots.stats().num_kept == 0


# The zero slot, eviction and the end.


def test_the_zero_slot_is_never_allocated_written_or_freed() -> None:
    slots = make_slots(interval=SPAN)
    zero = slots.pool.null_block
    for round_number in range(20):
        request = make(90, salt=str(round_number))
        admit(slots, request)
        step = run(slots, request, 90)
        assert ZERO_SLOT not in [slot for _, slot in step.writes]
        assert zero not in slots._requests[request.key].own
        slots.free(request, keep=True)
        assert (zero.ref_count, zero.block_hash, zero.next) == (0, None, None)
    assert num_free(slots) == slots.pool.num_usable_blocks


def test_kept_states_are_evicted_least_recently_used_first() -> None:
    slots = make_slots(requests=1, kept=2)
    requests = {name: make(33, salt=name) for name in "abc"}

    def use(request: Request, start: int) -> None:
        admit(slots, request, start)
        run(slots, request, 33 - start)
        slots.free(request, keep=True)

    use(requests["a"], 0)
    use(requests["b"], 0)
    use(make(33, salt="a"), 32)
    use(requests["c"], 0)
    found = {name: kept_ends(slots, request) for name, request in requests.items()}
    assert found == {"a": [32], "b": [], "c": [32]}
    assert slots.stats().num_evictions == 1


def test_all_slots_and_rows_are_free_after_the_end_and_freeing_twice_is_harmless() -> None:
    slots = make_slots(interval=SPAN)
    request = make(100)
    admit(slots, request)
    run(slots, request, 50)
    schedule(slots, request, 50)
    slots.free(request, keep=True)
    slots.free(request, keep=True)
    assert num_free(slots) == slots.pool.num_usable_blocks
    assert not slots.in_use
    assert admit(slots, make())
    assert admit(slots, make())


def test_kept_states_are_forgotten_only_while_no_request_runs() -> None:
    slots = make_slots()
    request = make(33)
    admit(slots, request)
    run(slots, request, 33)
    assert not slots.forget()
    assert kept_ends(slots, request) == [32]
    slots.free(request, keep=True)
    assert slots.forget()
    assert kept_ends(slots, request) == []
    assert slots.stats().num_kept == 0


# The manager.


def make_manager() -> KVCacheManager:
    states = StatePoolConfig(num_slots=9, num_requests=2, rows_per_request=SPAN, interval=FAR)
    config = KVCacheConfig(
        num_blocks=40,
        block_size=SPAN,
        groups=(KVCacheGroup(layer_names=("layer",)),),
        max_model_len=1000,
        states=states,
    )
    return KVCacheManager(config, enable_prefix_caching=True)


def start(manager: KVCacheManager, request: Request, chunks: list[int]) -> int:
    """Run a request through its prompt. Return the number of tokens that it found."""
    computed = manager.get_computed_blocks(request)
    assert manager.admit(request, computed, chunks[0], reserve=0)
    request.num_computed_tokens = request.num_processed_tokens = computed.num_tokens
    for count in chunks:
        assert manager.allocate_slots(request, count) is not None
        assert manager.states is not None
        schedule(manager.states, request, count)
        request.num_processed_tokens = request.num_computed_tokens
        manager.cache_blocks(request)
    return computed.num_tokens


def test_a_hit_never_includes_the_last_token() -> None:
    for length, found in ((33, 32), (32, 16), (31, 16), (17, 16), (16, 0)):
        manager = make_manager()
        request, again = prepared(make_request(40)), prepared(make_request(length))
        start(manager, request, [16, 16, 8])
        for end in (16, 32):
            slot = manager.states.pool.allocate(1)[0]  # type: ignore[union-attr]
            manager.states.pool.cache(slot, request.block_hashes[end // SPAN - 1])  # type: ignore[union-attr]
        assert manager.get_computed_blocks(again).num_tokens == found, length


def test_a_shared_prefix_hits_fully_from_the_third_request() -> None:
    manager = make_manager()
    prefix = list(range(64))
    found = []
    for tail in range(4):
        request = prepared(make_request([*prefix, *[100 + tail] * 30]))
        computed = manager.get_computed_blocks(request).num_tokens
        found.append(start(manager, request, [94 - computed]))
        manager.free(request)
    assert found == [0, 0, 64, 64]


def test_reset_forgets_blocks_and_states_together_or_neither() -> None:
    manager = make_manager()
    request = prepared(make_request(40))
    start(manager, request, [40])
    assert not manager.reset_prefix_cache()
    manager.free(request)
    waiting = prepared(make_request(40))
    computed = manager.get_computed_blocks(waiting)
    assert computed.num_tokens == 32
    manager.hold(waiting, computed.blocks, computed.num_blocks)
    assert not manager.reset_prefix_cache()
    assert manager.get_computed_blocks(prepared(make_request(40))).num_tokens == 32
    manager.free(waiting)
    assert manager.reset_prefix_cache()
    assert manager.get_computed_blocks(prepared(make_request(40))).num_tokens == 0
