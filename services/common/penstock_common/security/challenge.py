"""Mutual proof over a raw connection that both sides know the same key. Pure functions; the caller does the I/O.

Three messages, each of a fixed length. The nonces are 32 random bytes that each side draws for this connection alone:

1. ``hello``, from the side that connects: a mark of 8 bytes, and its nonce.
2. ``reply``, from the side that listens: its nonce, and its proof.
3. ``proof``, from the side that connects: its claim and its proof. What a claim says, if anything, the port defines.

A proof is the HMAC-SHA256, under the key, of the side's role, both nonces and the claim. So a proof is worth nothing on another
connection, on a port whose key has another purpose, or when it is sent back to the side that made it.
"""

import hashlib
import hmac
import secrets

from penstock_common.errors import PenstockError

NONCE_BYTES = 32
PROOF_BYTES = 32
_MARK = b"penstok1"
HELLO_BYTES = len(_MARK) + NONCE_BYTES
REPLY_BYTES = NONCE_BYTES + PROOF_BYTES
_LISTENS, _CONNECTS = b"listens", b"connects"


class ProofError(PenstockError):
    """The other side is not a peer: it speaks another protocol, or does not know the key."""


def new_nonce() -> bytes:
    """Return 32 random bytes. Each connection needs its own."""
    return secrets.token_bytes(NONCE_BYTES)


def hello(nonce: bytes) -> bytes:
    """Return the first message of the side that connects. ``nonce``: its own."""
    return _MARK + nonce


def reply(key: bytes, heard_hello: bytes, nonce: bytes) -> bytes:
    """Return the answer of the side that listens. ``nonce``: its own. Raises ProofError if ``heard_hello`` is not a hello."""
    return nonce + _proof(key, _LISTENS, _nonce_in(heard_hello), nonce)


def proof(key: bytes, nonce: bytes, heard_reply: bytes, claim: bytes = b"") -> bytes:
    """Return the last message of the side that connects. ``nonce``: the one in its hello.

    Raises ProofError if the side that listens does not know the key.
    """
    theirs = heard_reply[:NONCE_BYTES]
    if not hmac.compare_digest(heard_reply[NONCE_BYTES:], _proof(key, _LISTENS, nonce, theirs)):
        raise ProofError("the listener does not know the secret")
    return claim + _proof(key, _CONNECTS, nonce, theirs, claim)


def checked_claim(key: bytes, heard_hello: bytes, nonce: bytes, heard_proof: bytes) -> bytes:
    """Return the claim of the side that connects. ``nonce``: the one in the reply.

    Raises ProofError if the side that connects does not know the key.
    """
    claim, shown = heard_proof[:-PROOF_BYTES], heard_proof[-PROOF_BYTES:]
    if not hmac.compare_digest(shown, _proof(key, _CONNECTS, _nonce_in(heard_hello), nonce, claim)):
        raise ProofError("the peer does not know the secret")
    return claim


def _nonce_in(heard_hello: bytes) -> bytes:
    if len(heard_hello) != HELLO_BYTES or not heard_hello.startswith(_MARK):
        raise ProofError("the peer speaks another protocol")
    return heard_hello[len(_MARK) :]


def _proof(key: bytes, role: bytes, connecting: bytes, listening: bytes, claim: bytes = b"") -> bytes:
    return hmac.digest(key, role + b"\0" + connecting + listening + claim, hashlib.sha256)
