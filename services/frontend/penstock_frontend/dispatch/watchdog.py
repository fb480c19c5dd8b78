"""Detection of engines that have stopped working while their connection is still open. Does no I/O."""

from penstock_common.types.outputs import SchedulerStats
from penstock_frontend.config import DetectionConfig


class Watchdog:
    """Watches one session with an engine. All times are seconds of a monotonic clock that the caller passes in.

    An engine with requests of this frontend sends a message at least once per step. If no message arrives for
    ``silence`` seconds, the frontend probes an engine that has requests, or that the coordinator does not list. If the
    engine does not answer the probe, its process or the network is down. An answer shows whether the engine is wedged
    or only busy with a long step.
    """

    def __init__(self, config: DetectionConfig, now: float) -> None:
        self._config = config
        self._heard_at = now

    def heard(self, now: float) -> None:
        """Record that the engine sent a message now, or that it had no reason to send a message until now."""
        self._heard_at = now

    def doubt(self, now: float, *, has_work: bool, lease_lost: bool) -> str:
        """Return the reason for which the engine must be probed, or an empty string if no probe is necessary."""
        silent = now - self._heard_at
        if silent < self._config.silence:
            return ""
        if has_work:
            return f"the engine had requests but sent nothing for {silent:.1f} s"
        return "the coordinator did not list the engine" if lease_lost else ""

    def verdict(self, doubt: str, answer: SchedulerStats | None) -> str:
        """Return the reason why the engine counts as lost, or an empty string if the engine is healthy.

        ``answer`` is the engine's answer to the probe, or None after a timeout.
        """
        if answer is None:
            return f"{doubt}, and the engine did not answer a probe within {self._config.probe_timeout:g} s"
        return wedged(answer) if answer.wedged else ""


def wedged(stats: SchedulerStats) -> str:
    """Return the reason why a wedged engine, which has work but completes no step, counts as lost."""
    return f"wedged: the engine had work but finished no step for {stats.seconds_since_last_step:.1f} s"
