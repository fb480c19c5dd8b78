"""Which certificates a service warns of, and when."""

from collections.abc import Mapping

_DAY = 86_400.0
_SOON = 14 * _DAY
"""Seconds before its end from which on a certificate is warned of, once."""
_LAST_DAY = _DAY
"""Seconds before its end from which on the warning is repeated."""
_REPEAT = 3600.0
"""Seconds between two warnings in the last day, and after the end."""
_HANDSHAKES = 60.0
"""Seconds between two warnings of handshakes with an ended certificate."""


class ExpiryWarnings:
    """Decides which warnings are due. Times are Unix seconds, fields what the configuration calls a certificate."""

    def __init__(self) -> None:
        self._told: dict[str, tuple[float, int, float]] = {}
        """By field: the end that was told of, how urgently, and when."""
        self._handshakes: dict[str, float] = {}

    def due(self, ends: Mapping[str, float], now: float) -> list[str]:
        """The fields to warn of now: once within two weeks of the end, once an hour in the last day, at the end and behind it."""
        return [field for field, end in ends.items() if self._is_due(field, end, now)]

    def handshake_is_due(self, field: str, end: float, now: float) -> bool:
        """Whether to warn of a handshake: its certificate has ended, and there was no such warning in the last minute."""
        if now < end or now - self._handshakes.get(field, -_HANDSHAKES) < _HANDSHAKES:
            return False
        self._handshakes[field] = now
        return True

    def _is_due(self, field: str, end: float, now: float) -> bool:
        left = end - now
        urgency = (left <= _SOON) + (left <= _LAST_DAY) + (left <= 0)
        told_end, told_urgency, told_at = self._told.get(field, (end, 0, 0.0))
        if told_end != end:  # it was renewed
            told_urgency = 0
        if urgency <= told_urgency and (urgency < 2 or now - told_at < _REPEAT):
            return False
        self._told[field] = (end, urgency, now)
        return urgency > 0
