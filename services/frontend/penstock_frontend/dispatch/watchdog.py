"""Detection of engines that stopped working although their connection is open. Does no I/O."""

from penstock_common.types.outputs import SchedulerStats
from penstock_frontend.config import DetectionConfig


class Watchdog:
    """Watches one engine session. Times are seconds of a monotonic clock that the caller passes in.

    An engine with requests of this frontend sends a message at least once per step. If it is silent for longer than a
    step usually takes, or the coordinator does not list it, the frontend probes it. If there is no answer, the process
    or the network is down. The answer says whether the engine is wedged or only busy with a long step.
    """

    def __init__(self, config: DetectionConfig, now: float) -> None:
        self._config = config
        self._heard_at = now

    def heard(self, now: float) -> None:
        """Record that the engine sent a message, or had no reason to send one until now."""
        self._heard_at = now

    def doubt(self, now: float, *, has_work: bool, lease_lost: bool) -> str:
        """Return the reason for probing the engine, or an empty string if it need not be probed."""
        silent = now - self._heard_at
        if silent < self._config.silence:
            return ""
        if has_work:
            return f"it has requests but has sent nothing for {silent:.1f} s"
        return "the coordinator does not list it" if lease_lost else ""

    def verdict(self, doubt: str, answer: SchedulerStats | None) -> str:
        """Return why the engine is lost, or an empty string if it is healthy. ``answer`` is its answer to the probe,
        None after a timeout.
        """
        if answer is None:
            return f"{doubt}, and it does not answer within {self._config.probe_timeout:g} s"
        return wedged(answer) if answer.wedged else ""


def wedged(stats: SchedulerStats) -> str:
    """Return the message for a wedged engine."""
    return f"it is wedged: it has work and has not finished a step for {stats.seconds_since_last_step:.1f} s"
