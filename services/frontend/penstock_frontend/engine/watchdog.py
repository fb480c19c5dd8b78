"""Whether an engine that holds its connection still does its work: clocks, and what they mean. Does no I/O."""

from penstock_frontend.config import DetectionConfig


class Watchdog:
    """Watches one session. Times are seconds of one monotonic clock that the caller passes in.

    An engine with work of this frontend says something at least once per step. When it has been silent for longer than steps
    usually take, or its lease with the coordinator has expired, it is asked for the age of its last step: no answer means that
    the process or the way to it is stopped, an old step that the engine is wedged, a young one that the step is just long.
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
        return "its lease with the coordinator has expired" if lease_lost else ""

    def verdict(self, doubt: str, step_age: float | None, *, said_to_be_wedged: bool = False) -> str:
        """Why the engine is lost; ``""``: it is well.

        ``step_age``: seconds since its last step, 0 while idle; None when it did not answer. ``said_to_be_wedged``: the
        coordinator says so, whose clock may be shorter.
        """
        if step_age is None:
            return f"{doubt}, and it does not answer within {self._config.probe_timeout:g} s"
        if step_age >= self._config.wedged_after or (said_to_be_wedged and step_age > 0):
            return f"it is wedged: it has work and has not finished a step for {step_age:.1f} s"
        return ""
