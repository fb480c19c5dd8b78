"""Images and sounds that a command sends: files, and URLs that the server is to fetch."""

from pathlib import Path
from typing import TYPE_CHECKING, Literal

import msgspec

from penstock_common.errors import ConfigError

if TYPE_CHECKING:
    from penstock_client import Media

Modality = Literal["image", "audio"]
_URLS = ("http://", "https://", "data:")


class MediaFile(msgspec.Struct, frozen=True, kw_only=True):
    """A medium of a prompt. ``name``: what the user called it. Either ``data`` or ``url`` is set."""

    modality: Modality
    name: str
    data: bytes = b""
    url: str = ""

    def message(self) -> "Media":
        """As requests have it."""
        from penstock_client import Media  # imports gRPC

        if self.url:
            return Media(modality=self.modality, url=self.url)
        return Media(modality=self.modality, data=self.data)


def read_media(name: str, modality: Modality, *, of: str) -> MediaFile:
    """The medium in a file, or at a URL. ``of``: what named it. Raises ConfigError for a file that cannot be read."""
    if name.startswith(_URLS):
        return MediaFile(modality=modality, name=name, url=name)
    try:
        data = Path(name).expanduser().read_bytes()
    except OSError as e:
        raise ConfigError(f"{of}: cannot read {name!r}: {e.strerror or e}") from None
    if not data:
        raise ConfigError(f"{of}: {name!r} is empty")
    return MediaFile(modality=modality, name=name, data=data)
