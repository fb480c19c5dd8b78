"""What the rest of a frontend asks of its media."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from penstock_frontend.media_parts import MediaPart
from penstock_frontend.processing.media.families.base import Family
from penstock_frontend.processing.media.item import ProcessedItem


class PreparedMedia(NamedTuple):
    """An item, and the 64 hexadecimal digits that stand for all that its embeddings depend on and for the cache salt."""

    item: ProcessedItem
    identifier: str


class MediaPreparer(Protocol):
    """Fetches, checks, names and processes media, each once while the store holds it."""

    family: Family

    async def prepare(
        self, parts: Sequence[MediaPart], *, cache_salt: str, deadline: float | None, tenant: str = ""
    ) -> list[PreparedMedia]:
        """In the order of ``parts``. ``deadline`` in seconds since the Unix epoch. ``tenant``: whose they are.

        Raises InvalidArgument with reason MEDIA_UNREADABLE, MEDIA_TOO_LARGE or MEDIA_TOO_MANY, PermissionDenied with
        MEDIA_NOT_ALLOWED, Unavailable or, where another try brings nothing, InvalidArgument with MEDIA_FETCH_FAILED, each with
        the part's field, the value and the limit; ResourceExhausted while queues are full; DeadlineExceeded.
        """
