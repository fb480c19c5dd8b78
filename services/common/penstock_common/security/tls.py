"""Certificates and keys: read, checked, and read anew when their files change."""

import datetime as dt
import ssl
from collections.abc import Mapping
from typing import TYPE_CHECKING

import msgspec

from penstock_common.config.sections import ClientTlsConfig, TlsConfig
from penstock_common.errors import ConfigError
from penstock_common.security.certificates import Certificates
from penstock_common.security.watched import WatchedFiles, read_bytes

if TYPE_CHECKING:
    from cryptography import x509


class TlsMaterial(msgspec.Struct, frozen=True):
    """PEM texts; what is not set is empty. ``certificate`` is a chain, ``ca`` a bundle.

    ``ends``: Unix seconds by ``certificate`` and ``ca``, for those that are set. A chain ends with the first of its certificates,
    a bundle with the last of its authorities.
    """

    certificate: bytes
    key: bytes
    ca: bytes
    ends: Mapping[str, float]


def watched_material(
    config: TlsConfig | ClientTlsConfig, *, field: str, certificates: Certificates | None = None
) -> WatchedFiles[TlsMaterial]:
    """The files of a hop. ``field``: what the configuration calls it (``server.tls``). ``certificates``: told when they end.
    Raises ConfigError.
    """
    paths = (config.certificate, config.key, config.ca)
    watched = WatchedFiles(paths, lambda: read_material(config, field=field), what=f"certificates of {field}")
    if certificates is not None:
        certificates.follow(field, lambda: watched.current().ends)
    return watched


def read_material(config: TlsConfig | ClientTlsConfig, *, field: str) -> TlsMaterial:
    """Read and check the files. Raises ConfigError naming field and path for a file that is missing, unreadable or no PEM, a
    certificate whose time is over or has not begun, and a key that is of another certificate.
    """
    certificate = key = ca = b""
    ends: dict[str, float] = {}
    if config.certificate:
        certificate = read_bytes(config.certificate, field=f"{field}.certificate")
        key = read_bytes(config.key, field=f"{field}.key")
        chain = _certificates(certificate, f"{field}.certificate: {config.certificate}")
        leaf = chain[0]
        ends["certificate"] = min(map(_end, chain))
        _check_time(leaf, f"{field}.certificate: {config.certificate}")
        _check_key(key, leaf, f"{field}.key: {config.key}", certificate_path=config.certificate)
    if config.ca:
        ca = read_bytes(config.ca, field=f"{field}.ca")
        authorities = _certificates(ca, f"{field}.ca: {config.ca}")
        if len(authorities) == 1:  # of several, some may be on their way in or out
            _check_time(authorities[0], f"{field}.ca: {config.ca}")
        ends["ca"] = max(map(_end, authorities))
    return TlsMaterial(certificate, key, ca, ends)


def server_context(config: TlsConfig, *, field: str, certificates: Certificates | None = None) -> ssl.SSLContext:
    """The context of a listener; each handshake goes by the files as they are then. ``certificates``: told when they end. Raises
    ConfigError.
    """
    watched = WatchedFiles(
        (config.certificate, config.key, config.ca),
        lambda: _Context(config, field=field),
        what=f"certificates of {field}",
    )
    outer = watched.current().context
    if certificates is not None:
        certificates.follow(field, lambda: watched.current().material.ends)

    def renew(connection: ssl.SSLObject, server_name: str | None, context: ssl.SSLContext) -> None:
        # Called at every ClientHello, whether or not it names a server.
        del server_name, context
        current = watched.current()
        if certificates is not None:
            certificates.handshake(field, current.material.ends)
        connection.context = current.context

    outer.sni_callback = renew
    return outer


class _Context:
    """A context, and what it was made of; equal when made of the same."""

    def __init__(self, config: TlsConfig, *, field: str) -> None:
        self.material = read_material(config, field=field)
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.context.minimum_version = ssl.TLSVersion.TLSv1_2
        # A resumed session would be let in by the authorities of the time when it was begun.
        self.context.options |= ssl.OP_NO_TICKET
        self.context.num_tickets = 0
        try:
            self.context.load_cert_chain(config.certificate, config.key)
            if config.ca:
                self.context.load_verify_locations(cadata=self.material.ca.decode("ascii"))
                self.context.verify_mode = ssl.CERT_REQUIRED
        except (OSError, ValueError) as e:  # an SSLError is an OSError
            raise ConfigError(f"{field}: {config.certificate}: {e}") from None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Context) and other.material == self.material

    __hash__ = None  # type: ignore[assignment]


def _certificates(pem: bytes, where: str) -> "list[x509.Certificate]":
    from cryptography import x509

    try:
        return x509.load_pem_x509_certificates(pem)
    except ValueError as e:
        raise ConfigError(f"{where}: no certificate in PEM: {e}") from None


def _end(certificate: "x509.Certificate") -> float:
    return certificate.not_valid_after_utc.timestamp()


def _check_time(certificate: "x509.Certificate", where: str) -> None:
    now = dt.datetime.now(dt.UTC)
    if now > certificate.not_valid_after_utc:
        raise ConfigError(
            f"{where}: the certificate has expired at {certificate.not_valid_after_utc:%Y-%m-%d %H:%M} UTC"
        )
    if now < certificate.not_valid_before_utc:
        raise ConfigError(
            f"{where}: the certificate is not valid before {certificate.not_valid_before_utc:%Y-%m-%d %H:%M} UTC"
        )


def _check_key(pem: bytes, certificate: "x509.Certificate", where: str, *, certificate_path: str) -> None:
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    try:
        key = load_pem_private_key(pem, password=None)
    except TypeError:
        raise ConfigError(f"{where}: the key is encrypted; a service has nobody to ask for the password") from None
    except (ValueError, UnsupportedAlgorithm):
        # Nothing of the file's content, not even of a parser's message about it, belongs into a log.
        raise ConfigError(f"{where}: no private key in PEM") from None
    if key.public_key() != certificate.public_key():
        raise ConfigError(f"{where}: the key is not that of the certificate in {certificate_path}")
