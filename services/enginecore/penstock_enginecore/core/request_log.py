"""Lines in the log about requests that failed, where ``log.requests`` asks for them. No text of the request is in them:
not even the error's own, which quotes values of fields.
"""

import logging
from collections.abc import Sequence

from penstock_common.errors import RequestFailed
from penstock_common.observability.incidents import REASON, incident
from penstock_common.observability.logging import REQUEST_LOGGER
from penstock_common.types.outputs import RequestError
from penstock_enginecore.core.request import Request

logger = logging.getLogger(REQUEST_LOGGER)


def log_refused(request_id: str, external_id: str, error: RequestFailed | RequestError) -> None:
    """A request was not taken. ``external_id``: the id that its client knows."""
    logger.info("request refused", extra=_fields(request_id, external_id, error))


def log_failed(request_id: str, external_id: str, error: RequestFailed | RequestError) -> None:
    """A request that was taken cannot be finished."""
    logger.info("request failed", extra=_fields(request_id, external_id, error))


def log_aborted(request_ids: Sequence[str], reason: str) -> None:
    """Requests ended because their frontend asked for it. ``request_ids``: as the frontend names them; ``reason``: its own."""
    for request_id in request_ids:
        logger.info("request aborted", extra={"engine_request": request_id, "reason": reason})


def refusal(request_id: str, external_id: str, error: Exception, *, doing: str) -> RequestFailed:
    """What ends a request that was not taken, which is logged: its own fault, or an incident."""
    if isinstance(error, RequestFailed):
        log_refused(request_id, external_id, error)
        return error
    return incident(error, request=external_id or request_id, doing=doing)


def log_incident(request: Request, error: Exception, *, doing: str, reason: str = REASON) -> RequestError:
    """Log an error that is no fault of the request, under a number that its client gets. Returns what to end the request with."""
    name = request.context.external_request_id or request.request_id
    return RequestError.from_exception(incident(error, request=name, doing=doing, reason=reason))


def _fields(request_id: str, external_id: str, error: RequestFailed | RequestError) -> dict[str, str]:
    return {
        "request": external_id or request_id,
        "engine_request": request_id,
        "code": error.code,
        "reason": error.reason,
        "field": error.field,
    }
