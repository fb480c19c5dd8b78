"""The secret that the processes of one deployment share, and by which their internal ports recognize each other."""

import hashlib
import hmac
import os
import stat
from pathlib import Path

from penstock_common.errors import ConfigError
from penstock_common.listening import is_loopback
from penstock_common.observability.logging import get_logger

MIN_SECRET_BYTES = 32
MAX_SECRET_BYTES = 4096
SECRET_SETTING = "parallel.secret_file"  # noqa: S105 - the name of the setting
_CREATE = "create one with `openssl rand -hex 32`"


class SharedSecret:
    """A secret, and the keys and tokens derived from it. Each purpose has its own, and none of them reveals the secret."""

    def __init__(self, value: bytes) -> None:
        """Use ``value`` as the secret. ``load_secret`` checks what a file holds."""
        self._value = value

    def key(self, purpose: str) -> bytes:
        """Return the 32-byte key for ``purpose``, for example the name of a port and of its group."""
        return hmac.digest(self._value, b"penstock key " + purpose.encode(), hashlib.sha256)

    def token(self, purpose: str) -> str:
        """Return the token for ``purpose``, 64 hex digits, which a client sends to show that it knows the secret."""
        return hmac.digest(self._value, b"penstock token " + purpose.encode(), hashlib.sha256).hex()

    def accepts(self, purpose: str, token: str) -> bool:
        """Return whether ``token`` is the token for ``purpose``. The time this takes tells nothing about the right token."""
        return hmac.compare_digest(self.token(purpose).encode(), token.encode("utf-8", "surrogateescape"))


NO_SECRET = SharedSecret(b"")
"""Used where no secret is configured: everybody knows its keys and tokens, so it protects nothing."""


def load_secret(path: str, *, field: str = SECRET_SETTING) -> SharedSecret | None:
    """Read the secret from the file ``path``, without the whitespace around it. Return None if ``path`` is empty.

    Args:
        path: The file. Any bytes are a secret; the length is checked.
        field: Name of the setting, for messages.

    Raises:
        ConfigError: The file cannot be read, or holds fewer than 32 or more than 4096 bytes.
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
            f"{field}: {path} holds {len(secret)} bytes; a secret has at least {MIN_SECRET_BYTES} bytes; {_CREATE}"
        )
    if mode & stat.S_IROTH:  # readable by the group is how Kubernetes mounts secrets for a user that is not root
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
    """Refuse an internal port that other machines can reach and that recognizes nobody. Ports on loopback addresses pass.

    Args:
        host: The address or name that the port binds to.
        field: Name of the setting that ``host`` comes from, for messages.
        has_secret: Whether the shared secret is configured.
        tls: Whether the port uses TLS.
        tls_field: Name of the setting that turns TLS on, empty for a port that cannot have TLS.
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
        + f": the port would obey everybody; {remedy}, or bind to a loopback address"
    )
