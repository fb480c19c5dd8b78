"""What a failed call tells, in lines for people."""

from collections.abc import Iterator

from penstock_client import PenstockError


def describe(error: PenstockError) -> Iterator[str]:
    """The code and the message of a failed call, and what programs go by."""
    yield f"{error.code}: {error.message}"
    if error.reason:
        yield f"  reason: {error.reason}"
    if error.field:
        yield f"  field: {error.field}: {error.message}"
    if error.retry_after is not None:
        yield f"  retry after: {error.retry_after:g} s"
