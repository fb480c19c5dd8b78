"""What may be answered to a request of which one thing is known to be wrong."""

import re
from typing import NamedTuple

_CODES = ("INVALID_ARGUMENT", "FAILED_PRECONDITION", "PERMISSION_DENIED", "RESOURCE_EXHAUSTED", "UNIMPLEMENTED")
_STATUSES = (400, 403, 413, 429)
_BUSY = ("QUEUE_FULL", "rate_limit_exceeded")
"""Whatever is wrong with a request, there may be no room for it."""
_OVER_HTTP = {"INVALID_FIELD": "invalid_value", "NOT_SERVED_YET": "unsupported"}
_LIMITED = re.compile(r"\d.*(limit|media\.|limits\.|multimodal\.)", re.DOTALL)
"""The value, and what bounds it."""
_SECRETS = ("secret", "passwd?", "base64,AAAA")
_LONGEST = 2000


class Blame(NamedTuple):
    """``reasons``: with which it may be refused, none: it must be answered; ``taken``: whether it may be answered. ``paths``:
    what the path of the field at fault begins with.
    """

    reasons: frozenset[str]
    taken: bool
    paths: tuple[str, ...] = ()

    def of_answer(self) -> str:
        """What is wrong with its having been answered; empty where nothing is."""
        return "" if self.taken else "it was answered"

    def of_status(self, code: str, reason: str, field: str, message: str) -> str:
        """What is wrong with an error of gRPC's."""
        if code not in _CODES:
            return f"{code} {reason} is no client error: {message}"
        return self._of(reason, field, message, self.reasons)

    def of_http(self, status: int, code: str, field: str, message: str) -> str:
        """What is wrong with an error of HTTP's. ``code``: as OpenAI has it, empty where the protocol has none."""
        if status not in _STATUSES:
            return f"{status} is no client error: {message}"
        return self._of(code, field, message, {_OVER_HTTP.get(reason, reason.lower()) for reason in self.reasons})

    def _of(self, reason: str, field: str, message: str, reasons: "frozenset[str] | set[str]") -> str:
        if reason in _BUSY:
            return ""
        if reason and reason not in reasons:
            return f"refused as {reason} at {field}: {message}"
        if not reason and not self.reasons:
            return f"refused at {field}: {message}"
        if self.paths and not field.startswith(self.paths):
            return f"{field!r} is blamed: {message}"
        if reason.upper() in ("MEDIA_TOO_LARGE", "MEDIA_TOO_MANY") and not _LIMITED.search(message):
            return f"neither value nor limit are told: {message}"
        if len(message) > _LONGEST or any(secret in message for secret in _SECRETS):
            return f"it tells too much: {message}"
        return ""
