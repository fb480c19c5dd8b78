"""Configuration of the coordinator.

Every value is validated when the struct is built; unknown keys are refused by ``penstock_common.config.loader``.
"""

from collections.abc import Mapping
from typing import ClassVar

import msgspec

from penstock_common.config.checks import ENGINES_DECIDE, check_range
from penstock_common.config.sections import LogConfig, MetricsConfig, PeersConfig, ServerConfig, TracingConfig


class CoordinatorConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything the coordinator needs to know. Times are in seconds.

    ``lease_seconds``: an engine that is not heard of for so long is gone. ``view_interval``: changes of counts alone reach the
    frontends at most so often. ``restart_grace``: after a start no view is sent for so long, because engines that served under
    the coordinator's predecessor may still be on their way back and a view without them would end their requests; unset, it is
    one lease.
    """

    REMOVED: ClassVar[Mapping[str, str]] = {"wedged_after": ENGINES_DECIDE}

    lease_seconds: float = 5.0
    view_interval: float = 0.1
    restart_grace: float | None = None
    server: ServerConfig = ServerConfig(port=50050)
    peers: PeersConfig = PeersConfig()
    metrics: MetricsConfig = MetricsConfig()
    log: LogConfig = LogConfig()
    tracing: TracingConfig = TracingConfig()

    def __post_init__(self) -> None:
        check_range("lease_seconds", self.lease_seconds, low=0.1, high=3600)
        check_range("view_interval", self.view_interval, low=0.01, high=60)
        check_range("restart_grace", self.restart_grace, low=0.0, high=3600)

    @property
    def first_view_after(self) -> float:
        """Seconds from the start to the first view."""
        return self.lease_seconds if self.restart_grace is None else self.restart_grace
