"""Engines with host memory and a disk over an executor whose blocks hold their content: wrong content fails a step."""

from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, cast

import pytest

from penstock_common.errors import ConfigError
from penstock_common.types.kv_transfer import AllBlocksCleared, BlockName, BlockRemoved, BlockStored, KvMedium
from penstock_common.types.outputs import FinishReason
from penstock_common.types.request import EngineCoreRequest
from penstock_enginecore.core.control import EngineControl
from penstock_enginecore.core.engine_core import EngineCore
from penstock_enginecore.core.request import Request
from penstock_enginecore.kv_transfer.core.base import BlockCopier, PeerBlock, Place
from penstock_enginecore.kv_transfer.core.size_class import TierPlan
from penstock_enginecore.kv_transfer.core.tiers import PeerLoads
from penstock_enginecore.kv_transfer.core.transfer_stats import NOTHING, WHOLE, Transfer
from tests.fakes.engines.engine_harness import (
    Transcript,
    add,
    assert_as_expected,
    assert_nothing_left,
    begin_tiers,
    make_engine,
    make_request,
    run_to_end,
    step,
)
from tests.fakes.engines.fake_copier import BLOCK_BYTES
from tests.fakes.engines.fake_disk import FakeDisk
from tests.fakes.engines.fake_executor import FakeExecutor


def engine_of(num_blocks: int = 20, host_blocks: int = 64, disk: FakeDisk | None = None, **config: Any) -> EngineCore:
    config = {"max_num_batched_tokens": 64} | config
    executor = config.pop("executor", None)
    engine = make_engine(executor, num_blocks=num_blocks, host_blocks=host_blocks, **config)
    if disk is not None:
        begin_tiers(engine, TierPlan(engine.executor.copier, host_blocks, disk))
    return engine


def prompt(number: int, length: int = 40) -> list[int]:
    return [(number * 31 + i) % 900 for i in range(length)]


def cached(transcript: Transcript, request_id: str) -> tuple[int, int, int]:
    stats = transcript.outputs[request_id][0].prefill_stats
    return stats.num_cached_tokens, stats.num_host_tokens, stats.num_disk_tokens


def turn(engine: EngineCore, number: int, **fields: Any) -> tuple[int, int, int]:
    """Run a request with that prompt and check its tokens. Returns its cached tokens in total, from the host, from the
    disk.
    """
    request = make_request(prompt(number), **fields)
    transcript = run_to_end(engine, request)
    assert_as_expected(engine, transcript, request)
    return cached(transcript, request.request_id)


def test_a_prompt_whose_blocks_were_taken_comes_back_from_the_host():
    engine = engine_of()
    assert turn(engine, 0) == (0, 0, 0)
    for number in (1, 2, 3):
        turn(engine, number)
    num_cached, num_host, num_disk = turn(engine, 0)
    assert (num_cached, num_disk) == (39, 0)
    assert num_host >= 32
    stats = engine.connector.stats()
    assert stats.num_loaded_blocks[KvMedium.HOST] >= 9
    found = engine.scheduler.stats().kv_transfer
    assert found.external_prefix_cache_hits >= 36
    assert found.external_prefix_cache_queries >= 4 * 36 + found.external_prefix_cache_hits - 36
    assert (found.num_leases, found.num_leased_blocks) == (0, 0)
    assert_nothing_left(engine)


def test_what_is_in_the_pool_is_not_loaded_and_what_is_on_the_host_not_saved_again():
    engine = engine_of(num_blocks=60)
    turn(engine, 0)
    saved = engine.connector.stats().num_saved_blocks
    assert turn(engine, 0)[0] > 0
    assert engine.connector.stats().num_loaded_blocks[KvMedium.HOST] == 0
    assert engine.connector.stats().num_saved_blocks == saved


def test_fewer_tokens_than_pay_are_computed():
    engine = engine_of(min_load_tokens=41)
    for number in (0, 1, 2, 0):
        assert turn(engine, number)[1] == 0


def test_salts_are_not_crossed():
    engine = engine_of()
    for number in (0, 1, 2, 3):
        turn(engine, number, cache_salt="a")
    assert turn(engine, 0, cache_salt="b") == (0, 0, 0)
    assert turn(engine, 0, cache_salt="a")[1] > 0


def test_requests_of_one_prompt_wait_for_one_load():
    engine = engine_of(num_blocks=40)
    turn(engine, 0)
    for number in (1, 2, 3, 4):
        turn(engine, number)
    before = engine.executor.copier.num_copied.get("load", 0)
    requests = [make_request(prompt(0), seed=i) for i in range(4)]
    transcript = run_to_end(engine, *requests)
    assert_as_expected(engine, transcript, *requests)
    assert engine.executor.copier.num_copied["load"] - before <= 10
    assert sum(cached(transcript, request.request_id)[1] > 0 for request in requests) == 1
    assert all(cached(transcript, request.request_id)[0] >= 36 for request in requests)
    assert_nothing_left(engine)


def test_preempted_requests_come_back_from_the_host():
    """Other requests, which continue to run, take the blocks of the preempted ones."""
    engine = engine_of(num_blocks=26)
    engine.executor.copier.at_once = True
    requests = [make_request(prompt(i, 24), seed=i, max_tokens=50) for i in range(3)]
    transcript = run_to_end(engine, *requests)
    assert_as_expected(engine, transcript, *requests)
    assert engine.scheduler.stats().num_preemptions > 0
    assert engine.scheduler._kv_loads.num_loads > 0
    assert all(cached(transcript, request.request_id) == (0, 0, 0) for request in requests)
    assert_nothing_left(engine)


def test_a_host_with_fewer_slots_than_a_prompt_hands_all_of_it_on_to_the_disk():
    disk = FakeDisk(100)
    engine = engine_of(host_blocks=3, disk=disk)
    for number in range(4):
        turn(engine, number)
    assert turn(engine, 0)[2] >= 32
    assert_nothing_left(engine)


def waiting_for_its_load(engine: EngineCore, transcript: Transcript) -> str:
    """Start a request whose blocks are being loaded, and return its id."""
    for number in (0, 1, 2, 3):
        turn(engine, number)
    request = make_request(prompt(0))
    add(engine, request)
    step(engine, transcript)
    assert len(engine.scheduler._kv_loads) == 1
    assert (engine.scheduler.stats().num_running_reqs, engine.scheduler.stats().num_skipped_reqs) == (0, 1)
    return request.request_id


@pytest.mark.parametrize("how", ["abort", "reset", "sleep", "client"])
def test_a_load_that_nobody_wants_gives_its_blocks_back_when_it_has_ended(how):
    engine, transcript = engine_of(), Transcript()
    request_id = waiting_for_its_load(engine, transcript)
    pool = engine.scheduler.kv_cache.pool
    control = EngineControl(engine)
    if how == "abort":
        engine.scheduler.abort_requests("client", [request_id])
        assert pool.num_free_blocks < pool.num_usable_blocks
    elif how == "client":
        engine.scheduler.abort_client("client")
    elif how == "reset":
        assert control.reset_prefix_cache()
        assert engine.connector.stats().host_usage == 0
    else:
        control.sleep(1)
        assert engine.connector.stats().host_usage == 0
        control.wake_up()
    run_to_end(engine, transcript=transcript)
    assert_nothing_left(engine)
    if how == "reset":
        assert transcript.reason(request_id) is FinishReason.LENGTH
    assert engine.scheduler._kv_loads._loads.num_blocks == 0


def test_a_pool_that_is_short_takes_the_blocks_of_what_loads():
    engine, transcript = engine_of(num_blocks=26), Transcript()
    loading = waiting_for_its_load(engine, transcript)
    others = [make_request(prompt(9, 30), seed=7, max_tokens=60)]
    add(engine, *others)
    while len(engine.scheduler._kv_loads):
        step(engine, transcript)
    assert transcript.tokens[others[0].request_id]
    assert others[0].request_id not in transcript.ends
    assert engine.scheduler._kv_loads.num_returning > 0
    run_to_end(engine, transcript=transcript)
    assert_as_expected(engine, transcript, *others)
    assert transcript.reason(loading) is FinishReason.LENGTH
    assert_nothing_left(engine)


@pytest.mark.parametrize("name", ["save", "load"])
def test_copies_that_fail_switch_the_host_off_and_fail_no_request(name, caplog):
    engine = engine_of()
    for number in (0, 1, 2, 3):
        turn(engine, number)
    engine.executor.copier.fails = lambda method: method == name
    for number in (0, 1, 2, 3, 0, 7, 8):
        turn(engine, number)
    assert engine.connector.stats().host_usage == 0
    assert sum("the KV cache tier in host memory is switched off" in record.message for record in caplog.records) == 1
    assert_nothing_left(engine)


def test_host_memory_that_is_not_there_is_one_line_of_the_log(caplog):
    executor = FakeExecutor()
    executor.copier.fails = lambda method: method == "reserve"
    engine = engine_of(executor=executor)
    for number in (0, 1, 2, 3, 0):
        assert turn(engine, number)[1] == 0
    assert sum("the KV cache tier in host memory is switched off" in record.message for record in caplog.records) == 1


def test_a_host_cache_below_one_block_is_refused():
    executor = FakeExecutor()
    executor.copier.block_bytes = BLOCK_BYTES + 1
    with pytest.raises(ConfigError, match="cache.host_memory is 64 bytes, but a KV block takes 65"):
        engine_of(executor=executor, host_blocks=1)


def test_blocks_evicted_from_the_host_are_loaded_from_the_disk():
    disk = FakeDisk(100)
    engine = engine_of(host_blocks=12, disk=disk)
    for number in range(5):
        turn(engine, number)
    found = turn(engine, 0)
    assert found[0] >= 36
    assert found[2] >= 32
    assert engine.connector.stats().num_loaded_blocks[KvMedium.DISK] >= 8
    assert_nothing_left(engine)


def test_a_reset_waits_for_a_load_from_the_disk():
    engine, transcript = engine_of(host_blocks=12, disk=FakeDisk(100)), Transcript()
    for number in range(5):
        turn(engine, number)
    request = make_request(prompt(0))
    add(engine, request)
    while not len(engine.scheduler._kv_loads):
        step(engine, transcript)
    assert EngineControl(engine).reset_prefix_cache()
    assert not len(engine.scheduler._kv_loads)
    run_to_end(engine, transcript=transcript)
    assert_as_expected(engine, transcript, request)
    assert_nothing_left(engine)


def test_what_comes_from_host_and_disk_is_told_of_once_each_with_whom_it_is_for():
    disk = FakeDisk(100)
    engine = engine_of(host_blocks=6, disk=disk)
    told: list[Transfer] = []
    engine.connector.observe = told.append
    for number in (0, 1, 2):
        turn(engine, number)
    assert not told, "what is saved is nobody's"
    headers = {"traceparent": "00-1-2-01"}
    _, num_host, num_disk = turn(engine, 0, trace_context=headers)
    _, more_host, more_disk = turn(engine, 2, trace_context=headers)
    blocks = {KvMedium.HOST: 0, KvMedium.DISK: 0}
    for transfer in told:
        assert (transfer.headers, transfer.transport, transfer.outcome) == (headers, "", WHOLE)
        assert transfer.num_bytes == transfer.num_blocks * BLOCK_BYTES
        assert transfer.num_wanted == transfer.num_blocks
        blocks[transfer.medium] += transfer.num_blocks
    assert bool(blocks[KvMedium.HOST]) == bool(num_host + more_host)
    assert bool(blocks[KvMedium.DISK]) == bool(num_disk + more_disk)
    assert blocks == {medium: engine.connector.stats().num_loaded_blocks[medium] for medium in blocks}


def test_events_follow_what_can_be_found_in_the_pool_on_the_host_and_on_the_disk():
    disk = FakeDisk(40)
    engine = engine_of(host_blocks=24, disk=disk, enable_kv_events=True)
    known: dict[KvMedium, set[bytes]] = {medium: set() for medium in KvMedium}
    told = Counter()

    def follow() -> None:
        for event in engine.scheduler.kv_cache.take_events():
            told[type(event), event.medium] += 1
            for block_hash in event.block_hashes:
                (known[event.medium].add if isinstance(event, BlockStored) else known[event.medium].remove)(block_hash)
            assert event.medium is KvMedium.DEVICE or not getattr(event, "token_ids", None)
        for medium, hashes in known.items():
            assert hashes == set(engine.scheduler.kv_cache.cached_blocks(0, 1, medium))
            assert len(hashes) == engine.scheduler.kv_cache.num_cached_blocks(medium)

    num_host = num_disk = 0
    for number in (0, 1, 2, 3, 1, 4, 5, 6, 4, 3, 2, 7, 8, 6, 5, 0):
        _, of_host, of_disk = turn(engine, number)
        num_host, num_disk = num_host + of_host, num_disk + of_disk
        follow()
    assert num_host
    assert num_disk
    own = (KvMedium.DEVICE, KvMedium.HOST, KvMedium.DISK)
    assert set(told) == {(kind, medium) for kind in (BlockStored, BlockRemoved) for medium in own}
    assert known[KvMedium.HOST] == {name.hash for name in engine.connector.blocks.host.index.names}
    assert known[KvMedium.DISK] == {name.hash for name in engine.connector.blocks.disk.index.names}
    disk.spoiled = {name for name, _ in disk.slots.values()}
    for number in (1, 4, 3):
        turn(engine, number)
        follow()
    assert EngineControl(engine).reset_prefix_cache()
    assert engine.scheduler.kv_cache.take_events() == [AllBlocksCleared()]
    assert not any(engine.scheduler.kv_cache.num_cached_blocks(medium) for medium in own)


def test_what_a_disk_has_from_before_is_told_of():
    slots = {0: (BlockName(0, b"a" * 16), b""), 2: (BlockName(0, b"b" * 16), b"")}
    engine = engine_of(host_blocks=6, disk=FakeDisk(4, slots), enable_kv_events=True)
    (event,) = engine.scheduler.kv_cache.take_events()
    assert (event.medium, event.block_hashes) == (KvMedium.DISK, [b"a" * 16, b"b" * 16])
    assert EngineControl(engine).utilities.invoke("num_cached_blocks", [KvMedium.DISK.value]) == 2


def test_damage_on_the_disk_is_told_of():
    disk = FakeDisk(100)
    engine = engine_of(host_blocks=12, disk=disk)
    told: list[Transfer] = []
    engine.connector.observe = told.append
    for number in (0, 1, 2):
        turn(engine, number)
    disk.spoiled = {name for name, _ in disk.slots.values()}
    turn(engine, 0)
    assert [(t.num_blocks, t.outcome) for t in told if t.medium is KvMedium.DISK] == [(0, NOTHING)]


def test_a_copy_that_fails_is_told_of():
    engine = engine_of()
    told: list[Transfer] = []
    engine.connector.observe = told.append
    for number in (0, 1, 2, 3):
        turn(engine, number)
    engine.executor.copier.fails = lambda name: name == "load"
    assert turn(engine, 0)[1] == 0
    assert [(t.num_blocks, t.outcome) for t in told if t.medium is KvMedium.HOST] == [(0, NOTHING)]


def test_a_block_that_is_not_whole_on_the_disk_is_computed():
    disk = FakeDisk(100)
    engine = engine_of(host_blocks=12, disk=disk)
    for number in range(5):
        turn(engine, number)
    disk.spoiled = {name for name, _ in disk.slots.values()}
    assert turn(engine, 0)[2] == 0
    disk.spoiled = set()
    assert_nothing_left(engine)


def test_the_next_engine_has_what_the_last_one_had_on_its_host():
    disk = FakeDisk(100)
    engine = engine_of(disk=disk)
    turn(engine, 0)
    engine.executor.copier.at_once = True
    engine.shutdown()
    assert disk.closed
    again = engine_of(disk=FakeDisk(100, disk.slots))
    assert turn(again, 0)[2] >= 36


def test_a_disk_that_fails_fails_no_request(caplog):
    disk = FakeDisk(100)
    engine = engine_of(host_blocks=12, disk=disk)
    disk.fails = True
    for number in (*range(5), 0):
        assert turn(engine, number)[2] == 0
    assert sum("the KV cache tier on disk is switched off" in record.message for record in caplog.records) == 1
    assert_nothing_left(engine)


# Blocks that are pulled from other engines into the pool.

HASHES = [bytes([i]) * 16 for i in range(6)]
PLACES = [Place(BlockName(0, each), 10 + i) for i, each in enumerate(HASHES)]


class Copier:
    """A copier that writes when the test tells it to."""

    def __init__(self) -> None:
        self.asked: list[tuple[list[int], list[bytes], Future[None]]] = []
        self.refuses = False

    def write(self, block_ids: Sequence[int], contents: Sequence[bytes | memoryview]) -> "Future[None]":
        if self.refuses:
            raise RuntimeError("it has ended")
        self.asked.append((list(block_ids), [bytes(each) for each in contents], Future()))
        return self.asked[-1][2]


class Peers:
    """Sources with four blocks each. The test decides which blocks arrive."""

    def __init__(self) -> None:
        self.log: list[object] = []
        self.num = 4
        self.arrived: Callable[[Sequence[PeerBlock]], None]
        self.ended: Callable[[], None]

    def opened(self, request: Request) -> None:
        self.log.append(("opened", request.request_id))

    def closed(self, request: Request) -> None:
        self.log.append(("closed", request.request_id))

    def num_blocks(self, request: Request) -> int:
        return self.num

    def fetch(
        self,
        request: Request,
        names: Sequence[BlockName],
        arrived: Callable[[Sequence[PeerBlock]], None],
        ended: Callable[[], None],
    ) -> int:
        self.log.append(("fetch", [name.hash[0] for name in names]))
        self.arrived, self.ended = arrived, ended
        return 7

    def abandon(self, fetch_id: int) -> None:
        self.log.append(("abandon", fetch_id))


class Rig:
    def __init__(self) -> None:
        self.peers, self.copier = Peers(), Copier()
        self.loads = PeerLoads(self.peers, cast("BlockCopier", self.copier))
        self.request = Request(EngineCoreRequest(request_id="r", prompt_token_ids=[1]), client_id="c", max_model_len=64)
        self.request.block_hashes = list(HASHES)
        self.over: list[list[Place]] = []
        self.done: list[int] = []

    def load(self, places: Sequence[Place] = PLACES) -> int:
        return self.loads.load(self.request, places, self.over.append)

    def come(self, *places: int) -> None:
        self.peers.arrived([PeerBlock(i, bytes([i]), lambda i=i: self.done.append(i)) for i in places])  # type: ignore[misc]


@pytest.fixture
def rig() -> Rig:
    return Rig()


def test_a_source_has_what_it_said_until_it_fails(rig: Rig) -> None:
    assert [rig.loads.has(rig.request, place.name) for place in PLACES] == [True] * 4 + [False] * 2
    assert rig.loads.has(rig.request, BlockName(1, HASHES[0]))
    assert not rig.loads.has(rig.request, BlockName(0, b"x" * 16))
    rig.peers.num = 0
    assert not rig.loads.has(rig.request, PLACES[0].name)


def test_blocks_are_written_as_they_come_and_the_load_is_over_once(rig: Rig) -> None:
    assert rig.load() == 7
    rig.come(0)
    rig.come(1, 2)
    rig.come(4)
    assert [(ids, contents) for ids, contents, _ in rig.copier.asked] == [([10], [b"\0"])]
    assert rig.done == []
    rig.copier.asked[0][2].set_result(None)
    assert rig.copier.asked[1][0] == [11, 12, 14], "what came meanwhile is written together"
    assert rig.done == [0]
    rig.peers.ended()
    assert rig.over == [], "a write is under way"
    rig.copier.asked[1][2].set_result(None)
    assert rig.done == [0, 1, 2, 4]
    assert rig.over == [[PLACES[0], PLACES[1], PLACES[2], PLACES[4]]]


def test_blocks_that_did_not_arrive_are_not_requested_again(rig: Rig) -> None:
    rig.load(PLACES[:4])
    rig.come(0, 2)
    rig.copier.asked[0][2].set_result(None)
    rig.peers.ended()
    assert [rig.loads.has(rig.request, place.name) for place in PLACES[:4]] == [True, False, True, False]
    rig.loads.closed(rig.request)
    assert rig.loads.has(rig.request, PLACES[1].name), "of another life of the request nothing is known"


def test_abandoned_loads_may_be_requested_again(rig: Rig) -> None:
    number = rig.load(PLACES[:4])
    rig.loads.abandon(number)
    rig.peers.ended()
    assert all(rig.loads.has(rig.request, place.name) for place in PLACES[:4])


def test_a_load_without_anything_is_over(rig: Rig) -> None:
    rig.load()
    rig.peers.ended()
    assert rig.over == [[]]


@pytest.mark.parametrize("at_once", [True, False])
def test_a_failed_write_stores_no_blocks(rig: Rig, at_once: bool) -> None:
    rig.copier.refuses = at_once
    rig.load()
    rig.come(0)
    if not at_once:
        rig.copier.asked[0][2].set_exception(MemoryError("no room"))
    rig.copier.refuses = False
    rig.come(1)
    rig.copier.asked[-1][2].set_result(None)
    rig.peers.ended()
    assert rig.done == [0, 1]
    assert rig.over == [[PLACES[1]]]


def test_what_is_told_is_passed_on(rig: Rig) -> None:
    rig.loads.opened(rig.request)
    rig.loads.abandon(rig.load())
    rig.loads.closed(rig.request)
    assert rig.peers.log == [("opened", "r"), ("fetch", [0, 1, 2, 3, 4, 5]), ("abandon", 7), ("closed", "r")]
