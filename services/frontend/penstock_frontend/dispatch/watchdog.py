"""Whether an engine that holds its connection still does its work: clocks, and what they mean. Does no I/O."""

from penstock_common.types.outputs import SchedulerStats
from penstock_frontend.config import DetectionConfig


class Watchdog:
    """Watches one session. Times are seconds of one monotonic clock that the caller passes in.

    An engine with work of this frontend says something at least once per step. When it has been silent for longer than steps
    usually take, or the coordinator does not list it, it is asked how it is: no answer means that the process or the
    way to it is stopped. Whether a step is just long or it is wedged it says itself.
    """

    def __init__(self, config: DetectionConfig, now: float) -> None:
        self._config = config
        self._heard_at = now

    def heard(self, now: float) -> None:
        """The engine has said something, or had nothing to say until now."""
        self._heard_at = now

    def doubt(self, now: float, *, has_work: bool, lease_lost: bool) -> str:
        """Why the engine should be asked how it is; ``""``: it need not be."""
        silent = now - self._heard_at
        if silent < self._config.silence:
            return ""
        if has_work:
            return f"it has work and has said nothing for {silent:.1f} s"
        return "the coordinator does not list it" if lease_lost else ""

    def verdict(self, doubt: str, answer: SchedulerStats | None) -> str:
        """Why the engine is lost; ``""``: it is well. ``answer``: what it says of its load, None when it did not answer."""
        if answer is None:
            return f"{doubt}, and it does not answer within {self._config.probe_timeout:g} s"
        return wedged(answer) if answer.wedged else ""


def wedged(stats: SchedulerStats) -> str:
    """How to say that an engine is."""
    return f"it is wedged: it has work and has not finished a step for {stats.seconds_since_last_step:.1f} s"
