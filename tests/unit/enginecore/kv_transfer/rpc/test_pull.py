"""Engines that pull blocks from each other, over loopback."""

import errno
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
import pytest

from penstock_common.config.sections import ServerConfig
from penstock_common.errors import ConfigError
from penstock_common.tensors.shared_memory import Arena
from penstock_common.types.kv_transfer import BlockName, KvMedium
from penstock_enginecore.config import KvTransferConfig
from penstock_enginecore.kv_transfer.core.leases import LeaseState
from penstock_enginecore.kv_transfer.core.transfer_stats import ABANDONED, PART, WHOLE
from penstock_enginecore.kv_transfer.rpc import transports
from penstock_enginecore.kv_transfer.rpc.offers import Offers
from penstock_enginecore.kv_transfer.rpc.transports import MESSAGE_BYTES
from tests.fakes.kv_engines import FakeKvEngine, content, names_of
from tests.fakes.network.certificates import Authority
from tests.fakes.nixl import NixlNetwork
from tests.fakes.patience import PATIENCE

Make = Callable[..., FakeKvEngine]


@pytest.fixture(params=["grpc", "shared_memory", "nixl"])
def engine(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Make]:
    nixl = NixlNetwork()
    common = {"root": tmp_path, "transport": request.param, "arena": 32 * MESSAGE_BYTES, "nixl": nixl}
    with ExitStack() as stack:
        yield lambda name, **settings: stack.enter_context(FakeKvEngine(name, **common, **settings))
    assert not list(tmp_path.iterdir()), "shared memory was left behind"
    assert nixl.is_clean, "memory is registered, or agents are known"


def moved(engine: FakeKvEngine, direction: str) -> tuple[int, int]:
    """Return the numbers of blocks and bytes moved over the requested transport."""
    key = direction, engine.config.kv_transfer.transport
    assert set(engine.counts.num_blocks) <= {key}
    return engine.counts.num_blocks[key], engine.counts.num_bytes[key]


def until(condition: Callable[[], Any]) -> None:
    give_up = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < give_up, "it never came to be"
        time.sleep(0.01)


def pull(source: FakeKvEngine, target: FakeKvEngine, names: list[BlockName]) -> dict[BlockName, bytes]:
    request = target.request(source.grant(names, time.monotonic()))
    target.peers.opened(request)
    assert target.peers.num_blocks(request) == len(names)
    found = target.fetch(request, names).wait()
    target.peers.closed(request)
    return found


@pytest.mark.parametrize("block_bytes", [1, 1000, MESSAGE_BYTES, MESSAGE_BYTES + 1, 3 * MESSAGE_BYTES + 5])
def test_blocks_of_any_size_come_as_they_are(engine: Make, block_bytes: int) -> None:
    source, target = engine("a", block_bytes=block_bytes), engine("b", block_bytes=block_bytes)
    names = names_of("prompt", 5)
    assert pull(source, target, names) == {name: content(name, block_bytes) for name in names}
    until(lambda: not source.leases.ends.total() - source.leases.ends[LeaseState.RELEASED] and source.leases.ends)
    assert moved(source, "out") == moved(target, "in") == (5, 5 * block_bytes)
    [told] = target.transfers
    assert (told.medium, told.transport, told.outcome) == (KvMedium.PEER, target.config.kv_transfer.transport, WHOLE)
    assert (told.num_wanted, told.num_blocks, told.num_bytes) == (5, 5, 5 * block_bytes)
    assert told.began <= told.ended
    assert not source.transfers
    assert source.offers.num_slots_used == 0
    source.leases.expire(time.monotonic())
    assert source.pool.num_free_blocks == source.pool.num_usable_blocks


def test_blocks_of_several_groups_come_once_each(engine: Make) -> None:
    source, target = engine("a"), engine("b")
    source.pool = source.pool.__class__(65, 2)
    source.leases._free = source.pool.free
    names = names_of("prompt", 4) + names_of("prompt", 3, group=1)
    assert pull(source, target, names) == {name: content(name, 1000) for name in names}
    assert source.num_read == 7


def test_more_than_a_window_comes_as_it_is_acknowledged(engine: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock_enginecore.kv_transfer.rpc.transports.Window.__init__.__defaults__", (2500,))
    source, target = engine("a"), engine("b")
    names = names_of("prompt", 30)
    request = target.request(source.grant(names, time.monotonic()))
    target.peers.opened(request)
    fetched = target.fetch(request, names, hold=True)
    until(lambda: len(fetched.held) == 2)
    time.sleep(0.1)
    assert len(fetched.held) == 2, "more came than may be under way"
    fetched.hold = False
    for block in fetched.held:
        block.done()
        block.done()  # no message must follow
    assert len(fetched.wait()) == 30


def test_blocks_outside_the_lease_are_missing(engine: Make) -> None:
    source, target = engine("a"), engine("b")
    names, others = names_of("prompt", 3), names_of("another prompt", 2)
    source.fill(others)  # cached in the pool without a lease
    request = target.request(source.grant(names, time.monotonic()))
    target.peers.opened(request)
    wanted = [names[0], others[0], names[2], others[1]]
    assert set(target.fetch(request, wanted).wait()) == {names[0], names[2]}
    assert target.counts.failures["missing"] == 2
    assert [(told.num_wanted, told.num_blocks, told.outcome) for told in target.transfers] == [(4, 2, PART)]
    assert target.peers.num_blocks(request) == 3, "the source has not failed"


def test_a_lease_that_ends_while_it_is_read_keeps_its_blocks_until_then(engine: Make) -> None:
    source, target = engine("a"), engine("b")
    names = names_of("prompt", 3)
    request = target.request(source.grant(names, time.monotonic()))
    reading, go_on = threading.Event(), threading.Event()

    def wait(_: object) -> None:
        reading.set()
        assert go_on.wait(PATIENCE)

    source.before_read = wait
    target.peers.opened(request)
    fetched = target.fetch(request, names)
    assert reading.wait(PATIENCE)
    source.leases.revoke_all()
    assert source.pool.num_free_blocks == source.pool.num_usable_blocks - 3, "blocks were given back under a copy"
    go_on.set()
    assert len(fetched.wait()) == 3
    until(lambda: source.leases.next_expiry() == 0.0)
    source.leases.expire(time.monotonic())
    assert source.pool.num_free_blocks == source.pool.num_usable_blocks
    assert target.fetch(request, names).wait() == {}, "a lease that was revoked gives nothing"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"lease_id": b"x" * 16}, "lease"),
        ({"lease_id": b"x"}, "lease"),
        ({"num_tokens": 0}, "lease"),
        ({"incarnation": "a-0"}, "restarted"),
        ({"fingerprint": b"g" * 16}, "layout"),
        ({"address": "127.0.0.1:1"}, "unreachable"),
        ({"address": "nonsense"}, "address"),
    ],
)
def test_a_source_that_is_none_brings_nothing(engine: Make, change: dict[str, Any], reason: str) -> None:
    source, target = engine("a"), engine("b")
    names = names_of("prompt", 2)
    request = target.request(msgspec.structs.replace(source.grant(names, time.monotonic()), **change))
    target.peers.opened(request)
    assert target.fetch(request, names).wait() == {}
    assert target.peers.num_blocks(request) == 0
    assert dict(target.counts.failures) == {reason: 1}
    assert {(told.num_blocks, told.outcome) for told in target.transfers} == {(0, reason)}
    assert target.transfers[0].headers == request.context.trace_context
    target.peers.closed(request)


def test_an_address_that_is_not_allowed_is_not_dialled(engine: Make) -> None:
    source = engine("a")
    target = engine("b", allowed_addresses=("10.0.0.0/8", "engine-7"))
    request = target.request(source.grant(names_of("prompt", 2), time.monotonic()))
    target.peers.opened(request)
    assert target.peers.num_blocks(request) == 0
    assert dict(target.counts.failures) == {"address": 1}
    assert not target.peers._peers


def test_an_engine_that_lies_otherwise_is_refused_by_the_source_too(engine: Make) -> None:
    source, target = engine("a"), engine("b")
    target.peers._settings = target.peers._settings._replace(fingerprint=b"g" * 16)
    names = names_of("prompt", 2)
    given = msgspec.structs.replace(source.grant(names, time.monotonic()), fingerprint=b"g" * 16)
    request = target.request(given)
    target.peers.opened(request)
    assert target.fetch(request, names).wait() == {}
    assert dict(target.counts.failures) == {"layout": 1}


def test_a_silent_source_is_given_up(engine: Make) -> None:
    source, target = engine("a"), engine("b", silence=0.2)
    names = names_of("prompt", 4)
    request = target.request(source.grant(names, time.monotonic()))
    go_on = threading.Event()
    source.before_read = lambda _: go_on.wait(PATIENCE)
    target.peers.opened(request)
    assert target.fetch(request, names).wait() == {}
    assert dict(target.counts.failures) == {"silent": 1}
    assert target.peers.num_blocks(request) == 0
    go_on.set()
    until(lambda: source.transfer.num_pulls[0] == 0)


def test_a_source_is_not_silent_while_nothing_is_asked_of_it_or_taken(engine: Make) -> None:
    source, target = engine("a"), engine("b", silence=0.1)
    names = names_of("prompt", 4)
    request = target.request(source.grant(names, time.monotonic()))
    target.peers.opened(request)
    fetched = target.fetch(request, names[:2], hold=True)
    until(lambda: len(fetched.held) == 2)
    time.sleep(0.5)
    for block in fetched.held:
        block.done()
    fetched.wait()
    time.sleep(0.5)
    assert len(target.fetch(request, names[2:]).wait()) == 2
    assert not target.counts.failures


def test_a_source_that_stops_ends_what_it_owes(engine: Make) -> None:
    source, target = engine("a"), engine("b")
    names = names_of("prompt", 4)
    request = target.request(source.grant(names, time.monotonic()))
    read = threading.Event()
    go_on = threading.Event()

    def wait(_: object) -> None:
        read.set()
        go_on.wait(PATIENCE)

    source.before_read = wait
    target.peers.opened(request)
    fetched = target.fetch(request, names)
    assert read.wait(PATIENCE)
    stopping = threading.Thread(target=source.transfer.stop)
    stopping.start()
    assert fetched.wait() == {}
    go_on.set()
    stopping.join()


def test_the_lease_lasts_while_a_pull_is_open_and_runs_out_behind_it(engine: Make) -> None:
    source, target = engine("a", lease=0.2), engine("b")
    names = names_of("prompt", 2)
    request = target.request(source.grant(names, time.monotonic()))
    target.peers.opened(request)
    until(lambda: source.transfer.num_pulls[0])
    time.sleep(0.4)
    assert source.leases.expire(time.monotonic()) == 0
    target.transfer.stop()  # stops without a message to the source
    until(lambda: source.leases.expire(time.monotonic()))
    assert source.leases.ends == {LeaseState.EXPIRED: 1}
    assert source.pool.num_free_blocks == source.pool.num_usable_blocks


def test_a_closed_request_gives_the_lease_up_and_ends_what_it_fetches(engine: Make) -> None:
    source, target = engine("a"), engine("b")
    names = names_of("prompt", 4)
    request = target.request(source.grant(names, time.monotonic()))
    target.peers.opened(request)
    fetched = target.fetch(request, names, hold=True)
    until(lambda: len(fetched.held) == 4)
    target.peers.closed(request)
    fetched.wait()
    until(lambda: source.leases.ends == {LeaseState.RELEASED: 1})
    for block in fetched.held:
        block.done()
    assert source.woken.is_set()
    assert [(told.num_wanted, told.outcome) for told in target.transfers] in ([(4, WHOLE)], [(4, ABANDONED)])


def test_an_abandoned_fetch_ends_and_others_go_on(engine: Make) -> None:
    source, target = engine("a"), engine("b")
    names = names_of("prompt", 8)
    request = target.request(source.grant(names, time.monotonic()))
    reading, go_on = threading.Event(), threading.Event()

    def wait(_: object) -> None:
        reading.set()
        assert go_on.wait(PATIENCE)

    source.before_read = wait
    target.peers.opened(request)
    first, second = target.fetch(request, names[:4]), target.fetch(request, names[4:])
    assert reading.wait(PATIENCE)
    target.peers.abandon(first.number)
    assert first.wait() == {}
    go_on.set()
    assert len(second.wait()) == 4
    assert [(told.num_blocks, told.outcome) for told in target.transfers] == [(0, ABANDONED), (4, WHOLE)]
    assert first.contents == {}
    target.peers.abandon(first.number)  # no message must follow


def test_own_leases_need_no_pull(engine: Make) -> None:
    own = engine("a", lease=0.2)
    names = names_of("prompt", 2)
    request = own.request(own.grant(names, time.monotonic()))
    own.peers.opened(request)
    assert own.peers.num_blocks(request) == 0
    assert own.leases.expire(time.monotonic() + 1) == 0, "it lasts until the request goes on"
    own.peers.closed(request)
    assert own.leases.ends == {LeaseState.RELEASED: 1}
    assert not own.counts.num_blocks


def test_a_source_that_cannot_read_leaves_blocks_out(engine: Make) -> None:
    source, target = engine("a"), engine("b")
    names = names_of("prompt", 4)
    request = target.request(source.grant(names, time.monotonic()))

    def fail(_: object) -> None:
        raise OSError("no such device")

    source.before_read = fail
    target.peers.opened(request)
    assert target.fetch(request, names).wait() == {}
    assert source.counts.failures["read"] == 1
    source.before_read = lambda _: None
    assert len(target.fetch(request, names).wait()) == 4


def test_a_block_with_a_flipped_bit_is_missing_and_three_leave_the_peer_alone(
    engine: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = engine("a"), engine("b")
    names = names_of("prompt", 6)
    bad = set(names[1:2])
    whole = transports.block_message

    def flipped(fetch_id: int, name: Any, data: bytes) -> Any:
        message = whole(fetch_id, name, data)
        message.crc32 ^= name in bad
        return message

    monkeypatch.setattr(transports, "block_message", flipped)
    given = source.grant(names, time.monotonic())
    request = target.request(given)
    target.peers.opened(request)
    assert set(target.fetch(request, names).wait()) == set(names) - bad
    assert target.peers.num_blocks(request) == 6
    bad.update(names)
    assert target.fetch(request, names[2:]).wait() == {}
    assert target.peers.num_blocks(request) == 0, "three were bad"
    another = target.request(given)
    target.peers.opened(another)
    assert target.peers.num_blocks(another) == 0
    assert target.counts.failures == {"checksum": 4, "left_alone": 1}


def test_idle_connections_are_closed(engine: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock_enginecore.kv_transfer.rpc.transfer._IDLE", 0.1)
    source, target = engine("a"), engine("b", silence=0.1)
    pull(source, target, names_of("prompt", 2))
    until(lambda: not target.peers._peers)
    assert not target.peers._fetching
    assert target.transfer.num_pulls == (0, 0)


def test_another_hosts_memory_is_not_used(tmp_path: Path) -> None:
    ours, theirs = tmp_path / "a", tmp_path / "b"
    ours.mkdir()
    theirs.mkdir()
    with (
        FakeKvEngine("a", root=ours, transport="shared_memory") as source,
        FakeKvEngine("b", root=theirs, transport="shared_memory") as target,
    ):
        names = names_of("prompt", 3)
        assert len(pull(source, target, names)) == 3
        assert set(target.counts.num_blocks) == {("in", "grpc")}


def test_blocks_that_do_not_fit_into_the_arena_are_sent_in_messages(tmp_path: Path) -> None:
    size = MESSAGE_BYTES // 3
    with (
        FakeKvEngine("a", root=tmp_path, transport="shared_memory", arena=MESSAGE_BYTES, block_bytes=size) as source,
        FakeKvEngine("b", root=tmp_path, transport="shared_memory", block_bytes=size) as target,
    ):
        names = names_of("prompt", 8)
        request = target.request(source.grant(names, time.monotonic()))
        target.peers.opened(request)
        fetched = target.fetch(request, names, hold=True)
        assert fetched.wait() == {name: content(name, size) for name in names}
        assert source.offers.num_slots_used == 3
        for block in fetched.held:
            block.done()
        until(lambda: source.offers.num_slots_used == 0)


def test_a_bit_that_flips_in_the_arena_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put = Arena.put

    def flipped(arena: Arena, data: bytes) -> int | None:
        return put(arena, bytes([data[0] ^ 1]) + data[1:])

    monkeypatch.setattr(Arena, "put", flipped)
    with (
        FakeKvEngine("a", root=tmp_path, transport="shared_memory") as source,
        FakeKvEngine("b", root=tmp_path, transport="shared_memory") as target,
    ):
        assert pull(source, target, names_of("prompt", 2)) == {}
        assert target.counts.failures == {"checksum": 2}


def nixl_engine(name: str, nixl: NixlNetwork, **more: Any) -> FakeKvEngine:
    return FakeKvEngine(name, nixl=nixl, **{"transport": "nixl", "arena": MESSAGE_BYTES, **more})


def test_a_slot_is_not_used_again_before_a_read_into_it_is_over() -> None:
    nixl = NixlNetwork()
    size = MESSAGE_BYTES // 2
    with (
        nixl_engine("a", nixl, block_bytes=size) as source,
        nixl_engine("b", nixl, block_bytes=size, silence=0.2) as target,
    ):
        nixl.stuck = True
        names = names_of("prompt", 3)
        request = target.request(source.grant(names, time.monotonic()))
        target.peers.opened(request)
        assert target.fetch(request, names).wait() == {}
        assert target.counts.failures == {"silent": 1}
        until(lambda: target.transfer.num_pulls == (0, 0))
        assert target.offers.num_slots_used == 1, "the read is not over"
        nixl.stuck = False
        until(lambda: target.offers.num_slots_used == 0)
        until(lambda: source.leases.settle(0))
        assert len(pull(source, target, names_of("another", 2))) == 2


def test_a_read_that_fails_ends_the_pull() -> None:
    nixl = NixlNetwork()
    with nixl_engine("a", nixl) as source, nixl_engine("b", nixl) as target:
        nixl.fails = True
        assert pull(source, target, names_of("prompt", 3)) == {}
        assert target.counts.failures == {"unreadable": 1}
        assert target.offers.num_slots_used == 0


def test_nixl_is_an_error_where_it_is_asked_for_and_not_there() -> None:
    def missing(_: str) -> Any:
        raise ImportError("No module named 'nixl'")

    config = KvTransferConfig(transport="nixl")
    with pytest.raises(ConfigError, match="kv_transfer.transport is 'nixl', but the package nixl cannot be imported"):
        Offers(config, incarnation="a", block_bytes=1000, make_agent=missing)
    offers = Offers(KvTransferConfig(transport="auto"), incarnation="a", block_bytes=1000, make_agent=missing)
    assert "nixl" not in offers.transports
    offers.close()


def test_nixl_is_between_hosts_what_shared_memory_is_on_one(tmp_path: Path) -> None:
    nixl = NixlNetwork()
    ours, theirs = tmp_path / "a", tmp_path / "b"
    ours.mkdir()
    theirs.mkdir()
    with (
        nixl_engine("a", nixl, root=ours, transport="auto") as source,
        nixl_engine("b", nixl, root=theirs, transport="auto") as target,
    ):
        assert target.offers.transports == ("shared_memory", "nixl", "grpc")
        assert len(pull(source, target, names_of("prompt", 3))) == 3
        assert set(target.counts.num_blocks) == {("in", "nixl")}


def test_an_engine_without_shared_memory_does_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with (
        FakeKvEngine("a", root=tmp_path, transport="shared_memory") as source,
        FakeKvEngine("b", root=tmp_path / "nowhere", transport="shared_memory") as target,
    ):
        assert len(pull(source, target, names_of("prompt", 2))) == 2
        assert len(pull(target, source, names_of("prompt", 2))) == 2


def test_with_tls_only_engines_of_the_authority_are_served(tmp_path: Path) -> None:
    ours, theirs = Authority("ours"), Authority("theirs")
    name = "penstock-enginecore"
    files = {
        "engine": ours.issue(name).write(tmp_path / "engine"),
        "frontend": ours.issue("penstock-frontend").write(tmp_path / "frontend"),
        "stranger": theirs.issue(name).write(tmp_path / "stranger"),
    }
    server = ServerConfig(host="127.0.0.1", tls=files["engine"].server())
    found = {}
    with FakeKvEngine("a", server=server) as source:
        names = names_of("prompt", 2)
        given = source.grant(names, time.monotonic())
        for who, of in files.items():
            with FakeKvEngine(who, tls=of.client(server_name=name)) as target:
                request = target.request(given)
                target.peers.opened(request)
                found[who] = len(target.fetch(request, names).wait()), dict(target.counts.failures)
        with FakeKvEngine("plain") as target:
            request = target.request(given)
            target.peers.opened(request)
            found["plain"] = len(target.fetch(request, names).wait()), dict(target.counts.failures)
    assert found == {
        "engine": (2, {}),
        "frontend": (0, {"refused": 1}),
        "stranger": (0, {"unreachable": 1}),
        "plain": (0, {"unreachable": 1}),
    }


def test_no_pull_begins_behind_the_end(engine: Make) -> None:
    source, target = engine("a"), engine("b")
    names = names_of("prompt", 3)
    request = target.request(source.grant(names, time.monotonic()))
    target.transfer._thread.run(target.peers.close())
    target.peers.opened(request)
    assert target.fetch(request, names).wait() == {}
    assert target.counts.failures["stopped"] == 1
    assert not target.peers._peers, "a connection was made that nobody closes"


def test_a_port_that_is_taken_leaves_no_thread_behind() -> None:
    with FakeKvEngine("a") as engine:
        other = FakeKvEngine("b", port=engine.transfer.port)
        with pytest.raises(ConfigError, match="cannot listen on"):
            other.transfer.start()
        assert not other.transfer._thread.running
        other.offers.close()
        other._reader.shutdown()
