"""Mutual proofs over a connection: who passes, and what is worth nothing elsewhere."""

import pytest

from penstock_common.security import challenge
from penstock_common.security.challenge import ProofError
from penstock_common.security.shared_secret import NO_SECRET, SharedSecret

SECRET = SharedSecret(b"s" * 32)
KEY = SECRET.key("mesh")
OTHERS = [SharedSecret(b"o" * 32).key("mesh"), SECRET.key("store"), NO_SECRET.key("mesh")]


class Connection:
    """One handshake; ``key`` is that of the side that connects."""

    def __init__(self, key: bytes = KEY) -> None:
        self.key = key
        self.connecting, self.listening = challenge.new_nonce(), challenge.new_nonce()
        self.hello = challenge.hello(self.connecting)
        self.reply = challenge.reply(KEY, self.hello, self.listening)

    def proof(self, claim: bytes = b"") -> bytes:
        return challenge.proof(self.key, self.connecting, self.reply, claim)

    def claim_in(self, proof: bytes) -> bytes:
        return challenge.checked_claim(KEY, self.hello, self.listening, proof)


@pytest.mark.parametrize("claim", [b"", b"\0\0\0\7"])
def test_two_that_know_the_key_agree_on_the_claim(claim: bytes) -> None:
    connection = Connection()
    assert (len(connection.hello), len(connection.reply)) == (challenge.HELLO_BYTES, challenge.REPLY_BYTES)
    proof = connection.proof(claim)
    assert len(proof) == len(claim) + challenge.PROOF_BYTES
    assert connection.claim_in(proof) == claim


@pytest.mark.parametrize("other", OTHERS)
def test_a_listener_with_another_secret_or_purpose_gets_no_proof(other: bytes) -> None:
    with pytest.raises(ProofError, match="listener does not know the secret"):
        Connection(other).proof()


@pytest.mark.parametrize("other", OTHERS)
def test_a_peer_with_another_secret_or_purpose_does_not_pass(other: bytes) -> None:
    connection = Connection()
    theirs = challenge.reply(other, connection.hello, connection.listening)
    forged = challenge.proof(other, connection.connecting, theirs, b"claim")
    with pytest.raises(ProofError, match="peer does not know the secret"):
        connection.claim_in(forged)


def test_a_proof_is_worth_nothing_on_another_connection() -> None:
    first, second = Connection(), Connection()
    with pytest.raises(ProofError):
        second.claim_in(first.proof())
    again = Connection()  # the same hello once more: the listener's nonce is another one
    again.hello = first.hello
    with pytest.raises(ProofError):
        again.claim_in(first.proof())


def test_a_listeners_proof_is_worth_nothing_when_it_is_sent_back() -> None:
    connection = Connection()
    mirrored = challenge.reply(KEY, challenge.hello(connection.listening), connection.connecting)
    for shown in (connection.reply[challenge.NONCE_BYTES :], mirrored[challenge.NONCE_BYTES :]):
        with pytest.raises(ProofError):
            connection.claim_in(shown)


def test_a_proof_holds_for_its_claim_alone() -> None:
    connection = Connection()
    proof = connection.proof(b"rank1")
    for changed in (b"rank2" + proof[5:], proof[5:], b"rank" + proof, proof[:-1] + b"\0\0", b""):
        with pytest.raises(ProofError):
            connection.claim_in(changed)


@pytest.mark.parametrize("said", [b"", b"GET / HTTP/1.1\r\n" + b" " * 24, b"\0" * 40, b"penstok1"])
def test_another_protocol_is_told_apart(said: bytes) -> None:
    with pytest.raises(ProofError, match="another protocol"):
        challenge.reply(KEY, said, challenge.new_nonce())
