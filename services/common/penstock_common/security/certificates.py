"""The certificates that a service uses, and when they end."""

import datetime as dt
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from penstock_common.observability.logging import get_logger
from penstock_common.security.expiry import ExpiryWarnings

_LOOK_EVERY = 60.0
"""Seconds between two looks at the ends of all certificates of this process."""


class Certificates(Collector):
    """For a service's registry: a series for each certificate, and each file of authorities, of its listeners and connections.

    What is told is what is used: a file that is there and cannot be used does not count, the one that was used before does.
    The log warns of those that end soon, from when they are followed on.
    """

    def __init__(self) -> None:
        self._ends: dict[str, Callable[[], Mapping[str, float]]] = {}
        self._warnings = ExpiryWarnings()
        self._lock = threading.Lock()

    def follow(self, field: str, ends: Callable[[], Mapping[str, float]]) -> None:
        """Tell of those of a listener or a connection from now on. ``field``: what the configuration calls it (``server.tls``).
        ``ends``: by the setting below it (``certificate``), Unix seconds, as they are when it is asked, on any thread.
        """
        self._ends[field] = ends
        self.warn()
        _watch(self)

    def warn(self) -> None:
        """Log those that end soon, as often as ``ExpiryWarnings`` says. Any thread."""
        now, ends = time.time(), self._all_ends()
        with self._lock:
            due = self._warnings.due(ends, now)
        for field in due:
            if ends[field] > now:
                get_logger().warning(
                    "certificate ends soon", field=field, ends=_utc(ends[field]), hours_left=_hours(ends[field] - now)
                )
            else:
                get_logger().error("certificate has expired", field=field, ended=_utc(ends[field]))

    def handshake(self, field: str, ends: Mapping[str, float]) -> None:
        """Told when a client begins a handshake with a listener. Logs that its certificate has ended, once a minute at most."""
        end, now = ends.get("certificate"), time.time()
        if end is None or now < end:
            return
        with self._lock:
            due = self._warnings.handshake_is_due(field, end, now)
        if due:
            get_logger().error(
                "TLS handshake with an expired certificate", field=f"{field}.certificate", ended=_utc(end)
            )

    def _all_ends(self) -> dict[str, float]:
        return {
            f"{field}.{setting}": seconds
            for field, ends in list(self._ends.items())
            for setting, seconds in ends().items()
        }

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """One family; it has no series where nothing speaks TLS."""
        family = GaugeMetricFamily(
            "penstock:certificate_expiry_timestamp_seconds",
            "When a certificate ends, or the last of some authorities, in Unix seconds",
            labels=["field"],
        )
        for field, seconds in self._all_ends().items():
            family.add_metric([field], seconds)
        yield family


_followed: "weakref.WeakSet[Certificates]" = weakref.WeakSet()
_starting = threading.Lock()
_watcher: threading.Thread | None = None


def _watch(certificates: Certificates) -> None:
    """Have one thread of this process look at all of them now and then."""
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
