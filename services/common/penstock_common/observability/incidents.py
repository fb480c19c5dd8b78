"""Failures that should not happen, each under a number of its own: what a client is told, and where operators find the stack."""

import logging
import secrets

from penstock_common.errors import Internal

REASON = "INCIDENT"
"""Reason of an error whose request would fail the same way elsewhere: it is final."""
STEP_FAILED = "STEP_FAILED"
"""Reason of an error whose request alone failed its engine's step: it may be tried on one other engine."""

logger = logging.getLogger(__name__)


def incident(error: BaseException, *, request: str, doing: str, reason: str = REASON) -> Internal:
    """Log an unexpected ``error`` with its stack, once, and return what ends the request that caused it.

    ``request`` is the id to find in the log, ``doing`` what was being done to it ("validating the request"). The client is told
    the incident's number and no text of ``error``, which may quote other requests.
    """
    number = secrets.token_hex(4)
    fields = {"incident": number, "request": request, "doing": doing, "error": type(error).__name__}
    logger.error("incident %s: %s failed", number, doing, exc_info=error, extra=fields)
    return Internal(f"{doing} failed unexpectedly; the service's log has it as incident {number}", reason=reason)
