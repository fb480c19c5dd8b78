"""Images and audio that a command sends: local files, and URLs for the server to fetch."""

from pathlib import Path
from typing import TYPE_CHECKING, Literal

import msgspec

from penstock_common.errors import ConfigError

if TYPE_CHECKING:
    from penstock_client import Media

Modality = Literal["image", "audio"]
_URLS = ("http://", "https://", "data:")


class MediaFile(msgspec.Struct, frozen=True, kw_only=True):
    """An image or audio item of a prompt. Either ``data`` or ``url`` is set.

    Attributes:
        name: File name or URL as the user gave it.
    """

    modality: Modality
    name: str
    data: bytes = b""
    url: str = ""

    def message(self) -> "Media":
        """Return the item as a client message."""
        from penstock_client import Media  # imports gRPC

        if self.url:
            return Media(modality=self.modality, url=self.url)
        return Media(modality=self.modality, data=self.data)


def read_media(name: str, modality: Modality, *, of: str) -> MediaFile:
    """Read a file. A URL is not read, but passed to the server.

    Errors begin with ``of``, the flag or command that named the file. Raises ConfigError if the file is empty or
    unreadable.
    """
    if name.startswith(_URLS):
        return MediaFile(modality=modality, name=name, url=name)
    try:
        data = Path(name).expanduser().read_bytes()
    except OSError as e:
        raise ConfigError(f"{of}: cannot read {name!r}: {e.strerror or e}") from None
    if not data:
        raise ConfigError(f"{of}: {name!r} is empty")
    return MediaFile(modality=modality, name=name, data=data)
