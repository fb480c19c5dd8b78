"""TLS certificates and keys: reading, checking, warnings before expiry, and reloading when files change."""

import datetime as dt
import ssl
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

import msgspec
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from penstock_common.config.sections import ClientTlsConfig, TlsConfig
from penstock_common.errors import ConfigError
from penstock_common.observability.logging import get_logger
from penstock_common.security.reloaded_files import WatchedFiles, read_bytes

if TYPE_CHECKING:
    from cryptography import x509


# Timing of expiry warnings.

_DAY = 86_400.0
_SOON = 14 * _DAY
"""Seconds before expiry at which the first warning is logged."""
_LAST_DAY = _DAY
"""Seconds before expiry from which on warnings are repeated."""
_REPEAT = 3600.0
"""Seconds between two warnings on the last day and after expiry."""
_HANDSHAKES = 60.0
"""Minimum seconds between two warnings about handshakes with an expired certificate."""


class ExpiryWarnings:
    """Schedule of expiry warnings. Times are Unix seconds. ``field`` is the name of a certificate in the configuration."""

    def __init__(self) -> None:
        self._told: dict[str, tuple[float, int, float]] = {}
        """Last warning of each field: the expiry time, the urgency, and the time of the warning."""
        self._handshakes: dict[str, float] = {}

    def due(self, ends: Mapping[str, float], now: float) -> list[str]:
        """Return the fields of the certificates for which a warning is due now.

        A warning is due once in the two weeks before expiry, and once an hour on the last day and after expiry.
        """
        return [field for field, end in ends.items() if self._is_due(field, end, now)]

    def handshake_is_due(self, field: str, end: float, now: float) -> bool:
        """Return whether to warn about a handshake.

        A warning is due if the certificate has expired and the last minute had no such warning.
        """
        if now < end or now - self._handshakes.get(field, -_HANDSHAKES) < _HANDSHAKES:
            return False
        self._handshakes[field] = now
        return True

    def _is_due(self, field: str, end: float, now: float) -> bool:
        left = end - now
        urgency = (left <= _SOON) + (left <= _LAST_DAY) + (left <= 0)
        told_end, told_urgency, told_at = self._told.get(field, (end, 0, 0.0))
        if told_end != end:  # the certificate was renewed
            told_urgency = 0
        if urgency <= told_urgency and (urgency < 2 or now - told_at < _REPEAT):
            return False
        self._told[field] = (end, urgency, now)
        return urgency > 0


# Certificates that a service uses, and their expiry.

_LOOK_EVERY = 60.0
"""Seconds between two expiry checks of all certificates of this process."""


class Certificates(Collector):
    """Metrics collector with one series per certificate and per CA file of a service's listeners and connections.

    The series show the certificates in use. If a new file cannot be used, the previous certificate stays in use.
    After ``follow``, this class also logs certificates that expire soon.
    """

    def __init__(self) -> None:
        self._ends: dict[str, Callable[[], Mapping[str, float]]] = {}
        self._warnings = ExpiryWarnings()
        self._lock = threading.Lock()

    def follow(self, field: str, ends: Callable[[], Mapping[str, float]]) -> None:
        """Add the certificates of a listener or connection to the metrics and the expiry checks.

        Args:
            field: Name of the TLS section in the configuration (``server.tls``).
            ends: Returns the current expiry times in Unix seconds, by the setting below ``field`` (``certificate``).
                Thread-safe.
        """
        self._ends[field] = ends
        self.warn()
        _watch(self)

    def warn(self) -> None:
        """Log certificates that expire soon, if ``ExpiryWarnings`` says that a warning is due. Thread-safe."""
        now, ends = time.time(), self._all_ends()
        with self._lock:
            due = self._warnings.due(ends, now)
        for field in due:
            if ends[field] > now:
                get_logger().warning(
                    "certificate expires soon",
                    field=field,
                    ends=_utc(ends[field]),
                    hours_left=_hours(ends[field] - now),
                )
            else:
                get_logger().error("certificate has expired", field=field, ended=_utc(ends[field]))

    def handshake(self, field: str, ends: Mapping[str, float]) -> None:
        """Record that a client starts a handshake with a listener. If the listener's certificate has expired, log an
        error, at most once a minute.
        """
        end, now = ends.get("certificate"), time.time()
        if end is None or now < end:
            return
        with self._lock:
            due = self._warnings.handshake_is_due(field, end, now)
        if due:
            get_logger().error(
                "a client started a TLS handshake, but this service's certificate has expired",
                field=f"{field}.certificate",
                ended=_utc(end),
            )

    def _all_ends(self) -> dict[str, float]:
        return {
            f"{field}.{setting}": seconds
            for field, ends in list(self._ends.items())
            for setting, seconds in ends().items()
        }

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """Yield one metric family, which is empty without TLS."""
        family = GaugeMetricFamily(
            "penstock:certificate_expiry_timestamp_seconds",
            "Expiry time of a certificate, or of the last authority in a CA file, in Unix seconds",
            labels=["field"],
        )
        for field, seconds in self._all_ends().items():
            family.add_metric([field], seconds)
        yield family


_followed: "weakref.WeakSet[Certificates]" = weakref.WeakSet()
_starting = threading.Lock()
_watcher: threading.Thread | None = None


def _watch(certificates: Certificates) -> None:
    """Add certificates to the periodic checks of this process's single watcher thread."""
    global _watcher
    with _starting:
        _followed.add(certificates)
        if _watcher is None or not _watcher.is_alive():
            _watcher = threading.Thread(target=_look, name="certificates", daemon=True)
            _watcher.start()


def _look() -> None:
    while True:
        time.sleep(_LOOK_EVERY)
        with _starting:
            all_of_them = list(_followed)
        for each in all_of_them:
            each.warn()


def _utc(seconds: float) -> str:
    return f"{dt.datetime.fromtimestamp(seconds, dt.UTC):%Y-%m-%d %H:%M} UTC"


def _hours(seconds: float) -> float:
    return round(seconds / 3600, 1)


class TlsMaterial(msgspec.Struct, frozen=True):
    """Certificates and key as PEM texts. Unset texts are empty. ``certificate`` is a chain, ``ca`` a bundle.

    ``ends`` has the expiry times in Unix seconds of ``certificate`` and ``ca``, if set. A chain expires when its first
    certificate expires. A bundle expires when its last authority expires.
    """

    certificate: bytes
    key: bytes
    ca: bytes
    ends: Mapping[str, float]


def watched_material(
    config: TlsConfig | ClientTlsConfig, *, field: str, certificates: Certificates | None = None
) -> WatchedFiles[TlsMaterial]:
    """Watch the files of a connection or listener. Raises ConfigError if the files cannot be used.

    Args:
        config: TLS config with the paths.
        field: Name of the TLS section in the configuration (``server.tls``).
        certificates: Object that tracks the expiry times of the certificates, or None.
    """
    paths = (config.certificate, config.key, config.ca)
    watched = WatchedFiles(paths, lambda: read_material(config, field=field), what=f"certificates of {field}")
    if certificates is not None:
        certificates.follow(field, lambda: watched.current().ends)
    return watched


def read_material(config: TlsConfig | ClientTlsConfig, *, field: str) -> TlsMaterial:
    """Read and check the TLS files.

    Raises ConfigError, naming field and path, if a file is missing, unreadable or not PEM. Also raises ConfigError if a
    certificate has expired or is not valid yet, or if the key does not belong to the certificate.
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
        if len(authorities) == 1:  # with several authorities, some may be outdated because a rotation is in progress
            _check_time(authorities[0], f"{field}.ca: {config.ca}")
        ends["ca"] = max(map(_end, authorities))
    return TlsMaterial(certificate, key, ca, ends)


def server_context(config: TlsConfig, *, field: str, certificates: Certificates | None = None) -> ssl.SSLContext:
    """Return the TLS context of a listener. Raises ConfigError if the TLS files cannot be used.

    Each handshake uses the current files. ``certificates`` tracks the expiry.
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
        # Called for every ClientHello, even if it names no server.
        del server_name, context
        current = watched.current()
        if certificates is not None:
            certificates.handshake(field, current.material.ends)
        connection.context = current.context

    outer.sni_callback = renew
    return outer


class _Context:
    """A TLS context and its PEM texts. Contexts with the same texts are equal."""

    def __init__(self, config: TlsConfig, *, field: str) -> None:
        self.material = read_material(config, field=field)
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.context.minimum_version = ssl.TLSVersion.TLSv1_2
        # No session resumption: a resumed session would not be checked against the current authorities.
        self.context.options |= ssl.OP_NO_TICKET
        self.context.num_tickets = 0
        try:
            self.context.load_cert_chain(config.certificate, config.key)
            if config.ca:
                self.context.load_verify_locations(cadata=self.material.ca.decode("ascii"))
                self.context.verify_mode = ssl.CERT_REQUIRED
        except (OSError, ValueError) as e:  # an SSLError is an OSError
            raise ConfigError(f"{field}: {config.certificate} cannot be used: {e}") from None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Context) and other.material == self.material

    __hash__ = None  # type: ignore[assignment]


def _certificates(pem: bytes, where: str) -> "list[x509.Certificate]":
    from cryptography import x509

    try:
        return x509.load_pem_x509_certificates(pem)
    except ValueError as e:
        raise ConfigError(f"{where}: the file contains no certificate in PEM format: {e}") from None


def _end(certificate: "x509.Certificate") -> float:
    return certificate.not_valid_after_utc.timestamp()


def _check_time(certificate: "x509.Certificate", where: str) -> None:
    now = dt.datetime.now(dt.UTC)
    if now > certificate.not_valid_after_utc:
        raise ConfigError(f"{where}: the certificate expired at {certificate.not_valid_after_utc:%Y-%m-%d %H:%M} UTC")
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
        raise ConfigError(f"{where}: the key is encrypted; use a key without a password") from None
    except (ValueError, UnsupportedAlgorithm):
        # Omit the parser's message, because it may contain parts of the file, which must not get into a log.
        raise ConfigError(f"{where}: the file contains no private key in PEM format") from None
    if key.public_key() != certificate.public_key():
        raise ConfigError(f"{where}: the key does not belong to the certificate in {certificate_path}")
