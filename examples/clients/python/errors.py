"""Readable description of a failed call."""

from collections.abc import Iterator

from penstock_client import PenstockError


def describe(error: PenstockError) -> Iterator[str]:
    """Yield lines with the code, the message, and the machine-readable fields of the error."""
    yield f"{error.code}: {error.message}"
    if error.reason:
        yield f"  reason: {error.reason}"
    if error.field:
        yield f"  field: {error.field}"
    if error.retry_after is not None:
        yield f"  retry after: {error.retry_after:g} s"
