"""Leases, and the blocks that the pool keeps for them."""

import math
import threading
from collections.abc import Sequence

import pytest

from penstock_common.types.kv_transfer import BlockName, KvSource
from penstock_common.types.request import EngineCoreRequest
from penstock_enginecore.core.kv_cache.block_pool import BlockPool, KVCacheBlock
from penstock_enginecore.core.kv_cache.manager import KVCacheManager
from penstock_enginecore.core.kv_cache.spec import KVCacheConfig, KVCacheGroup
from penstock_enginecore.core.request import Request
from penstock_enginecore.kv_transfer.core.leases import Lease, LeasedBlocks, Leases, LeaseState
from tests.fakes.patience import PATIENCE

ID, OTHER = b"1" * 16, b"2" * 16
NAMES = [BlockName(0, bytes([i]) * 16) for i in range(8)]


class Pool(BlockPool):
    """A pool of nine blocks, of which eight can be allocated."""

    def __init__(self) -> None:
        super().__init__(9)
        self.leases = Leases(self.free, 6, lease_seconds=5.0, max_seconds=20.0)

    def grant(self, lease_id: bytes, count: int, now: float = 0.0) -> Lease | None:
        return self.share(lease_id, self.allocate(count), now)

    def share(self, lease_id: bytes, blocks: Sequence[KVCacheBlock], now: float = 0.0) -> Lease | None:
        by_name = {name: block.block_id for name, block in zip(NAMES, blocks, strict=False)}
        return self.leases.grant(lease_id, [blocks], by_name, now)


@pytest.fixture
def pool() -> Pool:
    return Pool()


def test_a_lease_without_a_pull_expires_once(pool: Pool) -> None:
    pool.grant(ID, 3)
    assert pool.leases.next_expiry() == 5.0
    assert (pool.leases.expire(4.9), pool.num_free_blocks, pool.leases.num_blocks) == (0, 5, 3)
    assert (pool.leases.expire(5.0), pool.num_free_blocks, pool.leases.num_blocks) == (1, 8, 0)
    assert pool.leases.expire(6.0) == 0
    assert pool.leases.next_expiry() is None
    assert pool.leases.ends == {LeaseState.EXPIRED: 1}


def test_an_open_pull_stops_the_clock_and_its_end_starts_it_anew(pool: Pool) -> None:
    lease = pool.grant(ID, 3)
    assert pool.leases.opened(ID) is lease
    pool.leases.opened(ID)
    assert pool.leases.expire(6.0) == 0
    pool.leases.closed(ID, 6.0)
    assert pool.leases.next_expiry() == 20.0
    pool.leases.closed(ID, 7.0)
    assert pool.leases.next_expiry() == 12.0
    assert pool.leases.expire(12.0) == 1


def test_no_lease_outlives_the_longest_time(pool: Pool) -> None:
    pool.grant(ID, 3)
    pool.leases.opened(ID)
    assert pool.leases.expire(20.0) == 1
    pool.leases.closed(ID, 21.0)
    assert pool.leases.opened(ID) is None


def test_a_released_lease_is_given_back_by_the_busy_loop(pool: Pool) -> None:
    pool.grant(ID, 3)
    pool.leases.opened(ID)
    assert pool.leases.released(ID)
    assert pool.num_free_blocks == 5, "another thread gave blocks back"
    assert pool.leases.next_expiry() == 0.0
    assert (len(pool.leases), ID in pool.leases) == (1, False)
    assert pool.leases.expire(0.0) == 1
    assert (pool.num_free_blocks, len(pool.leases)) == (8, 0)


@pytest.mark.parametrize("end", ["released", "expired", "revoked", "all revoked"])
def test_blocks_under_a_copy_stay_until_it_has_ended(pool: Pool, end: str) -> None:
    pool.grant(ID, 3)
    assert pool.leases.read_began(ID, [NAMES[2], NAMES[7]]) == [3, None]
    match end:
        case "released":
            pool.leases.released(ID)
        case "expired":
            pool.leases.expire(30.0)
        case "revoked":
            assert not pool.leases.revoke_one()
        case _:
            pool.leases.revoke_all()
    assert pool.num_free_blocks == 5
    assert pool.leases.read_began(ID, NAMES) is None
    assert pool.leases.next_expiry() is None
    assert pool.leases.read_ended(ID)
    pool.leases.expire(30.0)
    assert pool.num_free_blocks == 8


def test_the_oldest_that_nothing_is_read_from_makes_room(pool: Pool) -> None:
    pool.grant(ID, 2)
    pool.grant(OTHER, 2)
    pool.leases.opened(ID)
    pool.leases.fetch_began(ID)
    assert pool.leases.revoke_one()
    assert ID in pool.leases
    assert not pool.leases.revoke_one()
    pool.leases.fetch_ended(ID)
    assert pool.leases.revoke_one()
    assert pool.num_free_blocks == 8
    assert pool.leases.ends == {LeaseState.REVOKED: 2}


def test_leases_together_have_so_many_blocks_at_most_each_counted_once(pool: Pool) -> None:
    blocks = pool.allocate(4)
    assert pool.share(ID, blocks) is not None
    pool.touch(blocks)
    assert pool.share(OTHER, blocks) is not None
    assert pool.leases.num_blocks == 4
    assert pool.grant(b"3" * 16, 3) is None
    assert pool.leases.num_refused == 1
    pool.leases.expire(5.0)
    assert pool.num_free_blocks == 5, "those of the refused one are its own"


def test_an_id_is_one_leases(pool: Pool) -> None:
    pool.grant(ID, 1)
    pool.leases.read_began(ID, [])
    with pytest.raises(ValueError, match="already in use"):
        pool.grant(ID, 1)
    pool.leases.revoke_all()
    with pytest.raises(ValueError, match="already in use"):
        pool.grant(ID, 1)


def test_messages_about_unknown_leases_change_nothing(pool: Pool) -> None:
    assert pool.leases.opened(ID) is None
    pool.leases.closed(ID, 1.0)
    pool.leases.fetch_began(ID)
    pool.leases.fetch_ended(ID)
    assert not pool.leases.released(ID)
    assert len(pool.leases) == 0


IDENTITY = KvSource(
    engine_id="a", incarnation="a-1", address="a:50054", lease_id=b"", num_tokens=0, fingerprint=b"f" * 16
)


def cached(num_tokens: int, groups: tuple[KVCacheGroup, ...]) -> tuple[KVCacheManager, Request]:
    """Return a request whose tokens are computed except the last, and whose blocks are freed but cached."""
    config = KVCacheConfig(num_blocks=41, block_size=4, groups=groups, max_model_len=64)
    manager = KVCacheManager(config, enable_prefix_caching=True)
    sent = EngineCoreRequest(request_id="r", prompt_token_ids=list(range(1, num_tokens + 1)))
    request = Request(sent, client_id="c", max_model_len=64)
    assert manager.admit(request, manager.get_computed_blocks(request), num_tokens, reserve=0)
    request.num_computed_tokens = request.num_processed_tokens = num_tokens
    manager.cache_blocks(request)
    return manager, request


def leased_blocks(manager: KVCacheManager, max_blocks: int) -> LeasedBlocks:
    blocks = LeasedBlocks(lambda: 0.0)
    blocks.begin(Leases(manager.pool.free, max_blocks), manager, IDENTITY)
    return blocks


FULL = KVCacheGroup(layer_names=("0",))
WINDOWED = KVCacheGroup(layer_names=("1",), sliding_window=6)


@pytest.mark.parametrize(("num_tokens", "count"), [(3, 0), (4, 1), (18, 4), (20, 5)])
def test_whole_blocks_of_a_request_are_leased(num_tokens: int, count: int) -> None:
    manager, request = cached(num_tokens, (FULL,))
    blocks = leased_blocks(manager, 20)
    source = blocks.grant(request)
    manager.free(request)
    assert (0 if source is None else source.num_tokens) == count * 4
    assert blocks.leases.num_blocks == count == 40 - manager.pool.num_free_blocks
    if source is not None:
        lease = blocks.leases.get(source.lease_id)
        assert lease is not None
        assert set(lease.blocks) == {BlockName(0, each) for each in request.block_hashes[:count]}
    blocks._clock = lambda: 5.0
    assert blocks.expire() == (count > 0)
    assert manager.pool.num_free_blocks == 40


def test_of_windowed_groups_those_are_leased_that_the_next_query_sees() -> None:
    manager, request = cached(30, (FULL, WINDOWED))
    blocks = leased_blocks(manager, 20)
    source = blocks.grant(request)
    manager.free(request)
    assert source is not None
    lease = blocks.leases.get(source.lease_id)
    assert lease is not None
    hashes = request.block_hashes
    assert set(lease.blocks) == {BlockName(0, each) for each in hashes[:7]} | {
        BlockName(1, each) for each in hashes[5:7]
    }


def test_nothing_is_leased_before_other_engines_can_read_it() -> None:
    manager, request = cached(30, (FULL,))
    blocks = LeasedBlocks(lambda: 0.0)
    assert blocks.grant(request) is None
    blocks.revoke_all()
    manager.free(request)
    assert (len(blocks), blocks.expire(), blocks.revoke_one(), manager.pool.num_free_blocks) == (0, 0, False, 40)


def test_a_refused_grant_leaves_no_reference() -> None:
    manager, request = cached(30, (FULL,))
    blocks = leased_blocks(manager, 6)
    assert blocks.grant(request) is None
    manager.free(request)
    assert manager.pool.num_free_blocks == 40
    assert blocks.seconds_to_expiry() == math.inf


def test_settling_waits_for_copies_that_are_under_way(pool: Pool) -> None:
    pool.grant(ID, 3)
    pool.leases.read_began(ID, NAMES)
    assert not pool.leases.settle(0.01)
    assert pool.num_free_blocks == 5
    ending = threading.Timer(0.05, pool.leases.read_ended, [ID])
    ending.start()
    assert pool.leases.settle(PATIENCE)
    assert pool.num_free_blocks == 8
    ending.join()
