"""Allowed answers for a request with one known error."""

import re
from typing import NamedTuple

_CODES = ("INVALID_ARGUMENT", "FAILED_PRECONDITION", "PERMISSION_DENIED", "RESOURCE_EXHAUSTED", "UNIMPLEMENTED")
_STATUSES = (400, 403, 413, 429)
_BUSY = ("QUEUE_FULL", "rate_limit_exceeded")
"""Reasons of refusals without space for a request, which are allowed for every request."""
_OVER_HTTP = {"INVALID_FIELD": "invalid_value", "NOT_SERVED_YET": "unsupported"}
_LIMITED = re.compile(r"\d.*(limit|media\.|limits\.|multimodal\.)", re.DOTALL)
"""Pattern of errors that name a value and its limit."""
_SECRETS = ("secret", "passwd?", "base64,AAAA")
_LONGEST = 2000


class Blame(NamedTuple):
    """Allowed answers of a request.

    Attributes:
        reasons: Allowed reasons of a refusal. If empty, the request must succeed.
        taken: Whether the request may succeed.
        paths: Allowed prefixes of the path of the invalid field.
    """

    reasons: frozenset[str]
    taken: bool
    paths: tuple[str, ...] = ()

    def of_answer(self) -> str:
        """Return the problem if the request was answered, or an empty string."""
        return "" if self.taken else "it was answered"

    def of_status(self, code: str, reason: str, field: str, message: str) -> str:
        """Return the problem with a gRPC error, or an empty string."""
        if code not in _CODES:
            return f"{code} {reason} is no client error: {message}"
        return self._of(reason, field, message, self.reasons)

    def of_http(self, status: int, code: str, field: str, message: str) -> str:
        """Return the problem with an HTTP error, or an empty string. ``code`` is OpenAI's error code, empty for other
        protocols.
        """
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
