"""The certificates that a service uses, and when they end."""

from collections.abc import Callable, Iterator, Mapping

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector


class Certificates(Collector):
    """For a service's registry: a series for each certificate, and each file of authorities, of its listeners and connections.

    What is told is what is used: a file that is there and cannot be used does not count, the one that was used before does.
    """

    def __init__(self) -> None:
        self._ends: dict[str, Callable[[], Mapping[str, float]]] = {}

    def follow(self, field: str, ends: Callable[[], Mapping[str, float]]) -> None:
        """Tell of those of a listener or a connection from now on. ``field``: what the configuration calls it (``server.tls``).
        ``ends``: by the setting below it (``certificate``), Unix seconds, as they are when it is asked, on any thread.
        """
        self._ends[field] = ends

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """One family; it has no series where nothing speaks TLS."""
        family = GaugeMetricFamily(
            "penstock:certificate_expiry_timestamp_seconds",
            "When a certificate ends, or the last of some authorities, in Unix seconds",
            labels=["field"],
        )
        for field, ends in list(self._ends.items()):
            for setting, seconds in ends().items():
                family.add_metric([f"{field}.{setting}"], seconds)
        yield family
