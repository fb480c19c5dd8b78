"""Blocks of other engines on their way into the pool."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import cast

import pytest

from penstock_common.types.kv_transfer import BlockName
from penstock_common.types.request import EngineCoreRequest
from penstock_enginecore.core.request import Request
from penstock_enginecore.kv_transfer.core.base import BlockCopier, PeerBlock, Place
from penstock_enginecore.kv_transfer.core.tiers import PeerLoads

HASHES = [bytes([i]) * 16 for i in range(6)]
PLACES = [Place(BlockName(0, each), 10 + i) for i, each in enumerate(HASHES)]


class Copier:
    """Writes when it is told to."""

    def __init__(self) -> None:
        self.asked: list[tuple[list[int], list[bytes], Future[None]]] = []
        self.refuses = False

    def write(self, block_ids: Sequence[int], contents: Sequence[bytes | memoryview]) -> "Future[None]":
        if self.refuses:
            raise RuntimeError("it has ended")
        self.asked.append((list(block_ids), [bytes(each) for each in contents], Future()))
        return self.asked[-1][2]


class Peers:
    """Sources that have four blocks; what comes is up to the test."""

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


def test_what_did_not_come_is_not_asked_for_again(rig: Rig) -> None:
    rig.load(PLACES[:4])
    rig.come(0, 2)
    rig.copier.asked[0][2].set_result(None)
    rig.peers.ended()
    assert [rig.loads.has(rig.request, place.name) for place in PLACES[:4]] == [True, False, True, False]
    rig.loads.closed(rig.request)
    assert rig.loads.has(rig.request, PLACES[1].name), "of another life of the request nothing is known"


def test_what_was_abandoned_may_be_asked_for_again(rig: Rig) -> None:
    number = rig.load(PLACES[:4])
    rig.loads.abandon(number)
    rig.peers.ended()
    assert all(rig.loads.has(rig.request, place.name) for place in PLACES[:4])


def test_a_load_without_anything_is_over(rig: Rig) -> None:
    rig.load()
    rig.peers.ended()
    assert rig.over == [[]]


@pytest.mark.parametrize("at_once", [True, False])
def test_what_cannot_be_written_has_not_arrived(rig: Rig, at_once: bool) -> None:
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
