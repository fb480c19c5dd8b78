"""Ranks agree that all have met: no rank treats the group as formed while another one may still give up."""

import contextlib
import itertools
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from penstock_common.security import shared_secret
from penstock_common.security.shared_secret import SharedSecret
from penstock_enginecore.core.collective_errors import CollectiveBroken
from penstock_enginecore.parallel import rendezvous as module
from penstock_enginecore.parallel.handshake import MAX_UNPROVEN
from penstock_enginecore.parallel.meeting import Meeting
from penstock_enginecore.parallel.meeting_server import MeetingServer
from penstock_enginecore.parallel.rendezvous import (
    CLAIM,
    CONFIRMED,
    READY,
    TOKEN_BYTES,
    Confirmation,
    Mesh,
    Rendezvous,
    key_of,
)
from tests.fakes.network.introductions import asking, connected, introduced, is_closed
from tests.fakes.patience import PATIENCE


def test_a_rank_confirms_when_all_are_ready_and_is_over_when_all_have_confirmed() -> None:
    rank = Confirmation([0, 2])
    assert rank.next_word() == READY
    assert rank.next_word() == b""
    rank.hear(0, READY)
    assert (rank.next_word(), rank.waits_for(), rank.confirmed) == (b"", [2], False)
    rank.hear(2, READY)
    assert rank.next_word() == CONFIRMED
    assert rank.confirmed
    assert not rank.over
    rank.hear(2, CONFIRMED)
    assert rank.waits_for() == [0]
    rank.hear(0, CONFIRMED)
    assert (rank.over, rank.next_word(), rank.missing_from(0)) == (True, b"", 0)


def test_both_words_may_come_before_a_rank_is_ready_itself() -> None:
    rank = Confirmation([1])
    rank.hear(1, READY)
    rank.hear(1, CONFIRMED)
    assert not rank.over
    assert [rank.next_word(), rank.next_word(), rank.next_word()] == [READY, CONFIRMED, b""]
    assert rank.over


@pytest.mark.parametrize("said", [[CONFIRMED], [READY, READY], [READY, CONFIRMED, b"x"], [b"collective"]])
def test_another_word_is_refused(said: list[bytes]) -> None:
    rank = Confirmation([1])
    with pytest.raises(ValueError, match="rank 1 sent .*, but READY or CONFIRMED was expected"):
        for each in said:
            rank.hear(1, each)


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_no_rank_is_over_while_one_that_has_not_confirmed_may_give_up(order: tuple[int, ...]) -> None:
    """One rank is never ready: the others wait for it, in any order of their messages."""
    ranks = {rank: Confirmation(peer for peer in range(3) if peer != rank) for rank in range(3)}
    missing, *present = order
    for _ in range(3):
        for rank in present:
            while word := ranks[rank].next_word():
                for peer in present:
                    if peer != rank:
                        ranks[peer].hear(rank, word)
    assert not any(ranks[rank].over or ranks[rank].confirmed for rank in present)
    assert all(ranks[rank].waits_for() == [missing] for rank in present)


# Ranks of a group connect while foreign peers also connect, and agree whether the group has formed.

SECRET = SharedSecret(b"s" * 32)


@pytest.fixture
def meeting() -> Iterator[Meeting]:
    server = MeetingServer("127.0.0.1", SECRET)
    yield Meeting(server.address, secret=SECRET)
    server.close()


class Ranks:
    """Ranks on a thread each.

    ``addresses`` lists the addresses of their ports in the order in which they were opened.
    """

    def __init__(self, meeting: Meeting, monkeypatch: pytest.MonkeyPatch) -> None:
        self.meeting = meeting
        self.addresses: list[str] = []
        self.opened = threading.Semaphore(0)
        self.meshes: list[Mesh] = []
        self.threads = ThreadPoolExecutor(8)
        listener = module._listener

        def noted(address: str) -> socket.socket:
            made = listener(address)
            self.addresses.append(f"127.0.0.1:{made.getsockname()[1]}")
            self.opened.release()
            return made

        monkeypatch.setattr(module, "_listener", noted)

    def start(self, rank: int, size: int, timeout_s: float = PATIENCE, meeting: Meeting | None = None) -> Future[None]:
        """Start to connect the rank. Returns once its port is open."""
        mesh = Mesh("group", rank, size, 0.0)
        self.meshes.append(mesh)
        future = self.threads.submit(mesh.connect, meeting or self.meeting, timeout_s)
        assert self.opened.acquire(timeout=PATIENCE)
        return future

    def close(self) -> None:
        for each in self.meshes:
            each.give_up()
        self.threads.shutdown()
        for each in self.meshes:
            each.close()


@pytest.fixture
def ranks(meeting: Meeting, monkeypatch: pytest.MonkeyPatch) -> Iterator[Ranks]:
    made = Ranks(meeting, monkeypatch)
    yield made
    made.close()


def said_at_the_store(meeting: Meeting, rank: int) -> tuple[bytes, str]:
    """Return a rank's token and address, once the rank has published them."""
    connection, store = asking(meeting)
    with connection:
        found = store.get(f"group/{rank}")
    return found[:TOKEN_BYTES], found[TOKEN_BYTES:].decode()


# Foreign peers.


def test_silent_connections_keep_no_group_from_forming(ranks: Ranks) -> None:
    first = ranks.start(0, 3)
    with contextlib.ExitStack() as strangers:
        for _ in range(40):
            strangers.enter_context(connected(ranks.addresses[0]))
        began = time.monotonic()
        for each in [first, ranks.start(1, 3), ranks.start(2, 3)]:
            each.result(PATIENCE)
        # If the forty connections were handled one after another, each would take a second. Even a busy machine is
        # faster.
        assert time.monotonic() - began < 40
    assert [sorted(mesh.connections) for mesh in ranks.meshes] == [[1, 2], [0, 2], [0, 1]]


def test_a_rank_that_strangers_crowd_out_comes_again(
    ranks: Ranks, meeting: Meeting, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rank's first connection is the oldest unproven one when others arrive, so it is dropped."""
    first = ranks.start(0, 2)
    to_port, crowded = Rendezvous._to_port, []

    def crowd(rendezvous: Rendezvous, whom: str, address: str) -> socket.socket:
        connection = to_port(rendezvous, whom, address)
        if whom == "rank 0" and not crowded:
            crowded.extend(connected(address) for _ in range(MAX_UNPROVEN))
            assert is_closed(connection)
        return connection

    monkeypatch.setattr(Rendezvous, "_to_port", crowd)
    second = ranks.start(1, 2)
    for each in (first, second):
        each.result(PATIENCE)
    for stranger in crowded:
        stranger.close()
    assert len(crowded) == MAX_UNPROVEN


def test_a_rank_with_another_secret_does_not_get_in_and_is_told(ranks: Ranks, meeting: Meeting) -> None:
    first = ranks.start(0, 2)
    for secret in (SharedSecret(b"o" * 32), None):
        wrong = ranks.start(1, 2, meeting=Meeting(meeting.at, secret=secret))
        with pytest.raises(
            CollectiveBroken,
            match=r"does not have the same shared secret; the files named by parallel\.secret_file must have the same content",
        ):
            wrong.result(PATIENCE)
    ranks.start(1, 2).result(PATIENCE)
    first.result(PATIENCE)


def test_who_knows_the_secret_and_not_the_token_does_not_get_in(ranks: Ranks, meeting: Meeting) -> None:
    first = ranks.start(0, 2)
    token, address = said_at_the_store(meeting, 0)
    for key in (key_of(meeting, 0, bytes(TOKEN_BYTES)), key_of(meeting, 1, token), meeting.store_key):
        with pytest.raises(shared_secret.ProofError):
            introduced(address, key, CLAIM.pack(1))
    ranks.start(1, 2).result(PATIENCE)
    first.result(PATIENCE)


def test_a_proof_that_was_heard_before_is_worth_nothing(ranks: Ranks, meeting: Meeting) -> None:
    first = ranks.start(0, 3)
    token, address = said_at_the_store(meeting, 0)
    nonce, key = shared_secret.new_nonce(), key_of(meeting, 0, token)
    heard = b""
    with connected(address) as eavesdropped, connected(address) as again:
        for connection in (eavesdropped, again):
            connection.sendall(shared_secret.hello(nonce))
            reply = connection.recv(shared_secret.REPLY_BYTES, socket.MSG_WAITALL)
            heard = heard or shared_secret.proof(key, nonce, reply, CLAIM.pack(1))
        again.sendall(heard)
        assert is_closed(again)
    for each in [ranks.start(1, 3), ranks.start(2, 3), first]:
        each.result(PATIENCE)


@pytest.mark.parametrize("claim", [0, 2, 2**32 - 1])
def test_a_rank_that_is_none_of_those_awaited_does_not_get_in(ranks: Ranks, meeting: Meeting, claim: int) -> None:
    first = ranks.start(0, 2)
    token, address = said_at_the_store(meeting, 0)
    with introduced(address, key_of(meeting, 0, token), CLAIM.pack(claim)) as wrong:
        assert is_closed(wrong)
    ranks.start(1, 2).result(PATIENCE)
    first.result(PATIENCE)


# Agreement.


def test_a_proven_peer_that_goes_silent_keeps_all_ranks_from_forming_the_group(ranks: Ranks, meeting: Meeting) -> None:
    both = [ranks.start(rank, 3, timeout_s=1.0) for rank in range(2)]
    with contextlib.ExitStack() as silent:
        for rank in range(2):
            token, address = said_at_the_store(meeting, rank)
            silent.enter_context(introduced(address, key_of(meeting, rank, token), CLAIM.pack(2)))
        for each in both:
            with pytest.raises(CollectiveBroken, match="timed out waiting for rank|has given up"):
                each.result(PATIENCE)


def test_no_rank_takes_the_group_for_formed_when_one_fails_at_its_end(ranks: Ranks, meeting: Meeting) -> None:
    """Rank 2 is connected to both others, and both to it: it ends before it says that it is ready."""
    both = [ranks.start(rank, 3) for rank in range(2)]
    ends = []
    for rank in range(2):
        token, address = said_at_the_store(meeting, rank)
        ends.append(introduced(address, key_of(meeting, rank, token), CLAIM.pack(2)))
    for end in ends:
        end.setblocking(True)
        assert end.recv(1) == b"r"  # each rank has all its connections, and has not returned
    assert not any(each.done() for each in both)
    for end in ends:
        end.close()
    for each in both:
        with pytest.raises(CollectiveBroken, match="has given up"):
            each.result(PATIENCE)


def test_a_peer_that_says_something_else_breaks_the_group(ranks: Ranks, meeting: Meeting) -> None:
    first = ranks.start(0, 2)
    token, address = said_at_the_store(meeting, 0)
    with introduced(address, key_of(meeting, 0, token), CLAIM.pack(1)) as strange:
        strange.send(b"collective")
        with pytest.raises(CollectiveBroken, match="rank 1 sent .*, but READY or CONFIRMED was expected"):
            first.result(PATIENCE)


def test_a_rank_that_gives_up_ends_the_wait_of_those_that_it_has_met(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    met, keep = threading.Semaphore(0), Rendezvous._keep

    def noted(rendezvous: Rendezvous, peer: int, connection: socket.socket) -> None:
        keep(rendezvous, peer, connection)
        met.release()

    monkeypatch.setattr(Rendezvous, "_keep", noted)
    both = [ranks.start(rank, 3) for rank in range(2)]
    for _ in both:
        assert met.acquire(timeout=PATIENCE)
    ranks.meshes[0].give_up()
    with pytest.raises(CollectiveBroken, match="was given up"):
        both[0].result(PATIENCE)
    with pytest.raises(CollectiveBroken, match="group group has not formed at rank 1: rank 0 has given up"):
        both[1].result(PATIENCE)
