"""The secret that the processes of one deployment share. Internal ports use the secret for mutual authentication."""

import hashlib
import hmac
import os
import secrets
import stat
from pathlib import Path

from penstock_common.addresses import is_loopback
from penstock_common.errors import ConfigError, PenstockError
from penstock_common.observability.logging import get_logger

MIN_SECRET_BYTES = 32
MAX_SECRET_BYTES = 4096
SECRET_SETTING = "parallel.secret_file"  # noqa: S105 - the name of the setting
_CREATE = "create one with `openssl rand -hex 32`"


class SharedSecret:
    """Shared secret, and the keys and tokens that are derived from it.

    Each purpose has its own key and token. Keys and tokens do not reveal the secret.
    """

    def __init__(self, value: bytes) -> None:
        """Use ``value`` as the secret. ``load_secret`` validates the content of a file."""
        self._value = value

    def key(self, purpose: str) -> bytes:
        """Return the 32-byte key for ``purpose``, for example the name of a port and of its group."""
        return hmac.digest(self._value, b"penstock key " + purpose.encode(), hashlib.sha256)

    def token(self, purpose: str) -> str:
        """Return the token for ``purpose``, 64 hex digits. A client sends the token to prove that it knows the secret."""
        return hmac.digest(self._value, b"penstock token " + purpose.encode(), hashlib.sha256).hex()

    def accepts(self, purpose: str, token: str) -> bool:
        """Return whether ``token`` is the token for ``purpose``. The comparison takes constant time."""
        return hmac.compare_digest(self.token(purpose).encode(), token.encode("utf-8", "surrogateescape"))


NO_SECRET = SharedSecret(b"")
"""Placeholder if no secret is configured. The keys and tokens of this placeholder are public, so they protect nothing.
"""


def load_secret(path: str, *, field: str = SECRET_SETTING) -> SharedSecret | None:
    """Read the secret from the file ``path``, without surrounding whitespace. Return None if ``path`` is empty.

    Args:
        path: The file. Any bytes are allowed; only the length is checked.
        field: Name of the setting, for messages.

    Raises:
        ConfigError: The file cannot be read, or contains fewer than 32 or more than 4096 bytes.
    """
    if not path:
        return None
    try:
        with Path(path).open("rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            content = file.read(MAX_SECRET_BYTES + 1)
    except OSError as e:
        raise ConfigError(f"{field}: cannot read {path}: {e.strerror or e}; {_CREATE}") from None
    if len(content) > MAX_SECRET_BYTES:
        raise ConfigError(f"{field}: {path} is larger than {MAX_SECRET_BYTES} bytes, so it is not a secret; {_CREATE}")
    secret = content.strip()
    if len(secret) < MIN_SECRET_BYTES:
        raise ConfigError(
            f"{field}: {path} contains {len(secret)} bytes; a secret has at least {MIN_SECRET_BYTES} bytes; {_CREATE}"
        )
    if (
        mode & stat.S_IROTH
    ):  # allow group access: Kubernetes mounts secrets as readable by the group if the user is not root
        get_logger().warning(
            "every user of this machine can read the shared secret; remove the permission with chmod o-r",
            field=field,
            path=path,
            mode=f"{stat.S_IMODE(mode):04o}",
        )
    return SharedSecret(secret)


def check_internal_port(
    host: str,
    *,
    field: str,
    has_secret: bool,
    tls: bool = False,
    tls_field: str = "",
    secret_field: str = SECRET_SETTING,
) -> None:
    """Raise ConfigError for an internal port that other machines can reach without authentication. Loopback addresses
    are allowed.

    Args:
        host: The address or name to which the port binds.
        field: Name of the setting of ``host``, for messages.
        has_secret: Whether the shared secret is configured.
        tls: Whether the port uses TLS.
        tls_field: Name of the setting that enables TLS. Empty for a port that cannot use TLS.
        secret_field: Name of the setting of the secret, for messages.

    Raises:
        ConfigError: ``host`` is not a loopback address, and the port has neither the secret nor TLS.
    """
    if has_secret or tls or is_loopback(host):
        return
    remedy = f"set {secret_field}" + (f" or {tls_field}" if tls_field else "")
    raise ConfigError(
        f"{field} is {host!r}, which other machines can reach, and {secret_field} is empty"
        + (f" and {tls_field} too" if tls_field else "")
        + f": the port would accept commands from anyone; {remedy}, or bind to a loopback address"
    )


# Mutual proof, over a raw connection, that both sides know the same key. These functions do no I/O.
#
# The sides exchange three messages of fixed lengths. Each side draws a nonce of 32 random bytes for the connection.
#
# 1. ``hello``, from the connecting side: a magic value of 8 bytes, and its nonce.
# 2. ``reply``, from the listening side: its nonce, and its proof.
# 3. ``proof``, from the connecting side: its claim and its proof. The port defines the content of the claim, which may
#    be empty.
#
# A proof is the HMAC-SHA256, under the key, of the side's role, both nonces and the claim. So a proof is not accepted
# on another connection, on a port whose key has another purpose, or by the side that created it.

NONCE_BYTES = 32
PROOF_BYTES = 32
_MARK = b"penstok1"
HELLO_BYTES = len(_MARK) + NONCE_BYTES
REPLY_BYTES = NONCE_BYTES + PROOF_BYTES
_LISTENS, _CONNECTS = b"listens", b"connects"


class ProofError(PenstockError):
    """Raised if the other side is not a peer: the other side uses another protocol, or does not know the key."""


def new_nonce() -> bytes:
    """Return a nonce of 32 random bytes. Each connection needs a new nonce."""
    return secrets.token_bytes(NONCE_BYTES)


def hello(nonce: bytes) -> bytes:
    """Return the first message of the connecting side. ``nonce`` is the connecting side's nonce."""
    return _MARK + nonce


def reply(key: bytes, heard_hello: bytes, nonce: bytes) -> bytes:
    """Return the answer of the listening side. ``nonce`` is the listening side's nonce.

    Raises ProofError if ``heard_hello`` is not a hello.
    """
    return nonce + _proof(key, _LISTENS, _nonce_in(heard_hello), nonce)


def proof(key: bytes, nonce: bytes, heard_reply: bytes, claim: bytes = b"") -> bytes:
    """Return the last message of the connecting side. ``nonce`` is the nonce of the connecting side's hello.

    Raises ProofError if the listening side does not know the key.
    """
    theirs = heard_reply[:NONCE_BYTES]
    if not hmac.compare_digest(heard_reply[NONCE_BYTES:], _proof(key, _LISTENS, nonce, theirs)):
        raise ProofError("the listener does not have the same shared secret")
    return claim + _proof(key, _CONNECTS, nonce, theirs, claim)


def checked_claim(key: bytes, heard_hello: bytes, nonce: bytes, heard_proof: bytes) -> bytes:
    """Return the claim of the connecting side. ``nonce`` is the nonce of the listening side's reply.

    Raises ProofError if the connecting side does not know the key.
    """
    claim, shown = heard_proof[:-PROOF_BYTES], heard_proof[-PROOF_BYTES:]
    if not hmac.compare_digest(shown, _proof(key, _CONNECTS, _nonce_in(heard_hello), nonce, claim)):
        raise ProofError("the peer does not have the same shared secret")
    return claim


def _nonce_in(heard_hello: bytes) -> bytes:
    if len(heard_hello) != HELLO_BYTES or not heard_hello.startswith(_MARK):
        raise ProofError("the first message does not belong to the authentication protocol of Penstock")
    return heard_hello[len(_MARK) :]


def _proof(key: bytes, role: bytes, connecting: bytes, listening: bytes, claim: bytes = b"") -> bytes:
    return hmac.digest(key, role + b"\0" + connecting + listening + claim, hashlib.sha256)
