"""Errors of engines, as who asked is told them."""

from penstock_common.errors import RequestFailed, request_failed


def of_engine(engine: str, error: RequestFailed) -> RequestFailed:
    """The same error with the engine's name."""
    failed = request_failed(error.code, f"engine {engine}: {error.message}", field=error.field, reason=error.reason)
    failed.retry_after = error.retry_after
    return failed
