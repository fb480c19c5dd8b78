"""Detection of a file's format by the first bytes of the file. File names and declared media types are ignored."""

from typing import Literal

from penstock_common.types.media import Modality

ImageFormat = Literal["JPEG", "PNG", "WEBP", "GIF"]
SoundFormat = Literal["WAV", "FLAC", "OGG", "MP3", "MP4", "WEBM", "AAC"]

FORMATS: dict[Modality, tuple[str, ...]] = {
    "image": ("JPEG", "PNG", "WebP", "GIF"),
    "audio": ("WAV", "FLAC", "Ogg", "MP3", "MP4", "WebM", "AAC"),
    "video": ("JPEG", "PNG", "WebP", "GIF"),
}
"""Names of the accepted file formats of each modality, for messages. For video, these are the formats of its frames."""


_IMAGE_BRANDS = (b"avif", b"avis", b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"mif1", b"msf1", b"crx ")
"""Brands of image files that have the structure of MP4 files."""
_EBML = b"\x1aE\xdf\xa3"
_DOC_TYPES = (b"webm", b"matroska")
_DOC_TYPE_END = 64
"""Number of bytes at the start of a WebM file in which the file's type must be."""


def image_format(data: bytes) -> ImageFormat | None:
    """Return Pillow's name of the format of an image file. Return None if the format is not accepted."""
    if data.startswith(b"\xff\xd8\xff"):
        return "JPEG"
    if data.startswith(b"\x89PNG\r\n\x1a\n"):
        return "PNG"
    if data.startswith((b"GIF87a", b"GIF89a")):
        return "GIF"
    return "WEBP" if data[:4] == b"RIFF" and data[8:12] == b"WEBP" else None


def sound_format(data: bytes) -> SoundFormat | None:
    """Return the name of the format of an audio file. Return None if the format is not accepted.

    ``MP4`` stands for all files with the structure of MP4, such as M4A and QuickTime, ``WEBM`` also for Matroska, and
    ``AAC`` for AAC without a container (ADTS).
    """
    if data[:4] == b"RIFF" and data[8:12] == b"WAVE":
        return "WAV"
    if data.startswith(b"fLaC"):
        return "FLAC"
    if data.startswith(b"OggS"):
        return "OGG"
    if data[4:8] == b"ftyp" and data[8:12] not in _IMAGE_BRANDS:
        return "MP4"
    if data.startswith(_EBML) and any(word in data[:_DOC_TYPE_END] for word in _DOC_TYPES):
        return "WEBM"
    if _is_aac_frame(data):
        return "AAC"
    return "MP3" if data.startswith(b"ID3") or _is_mp3_frame(data) else None


def _is_aac_frame(data: bytes) -> bool:
    """Return whether the data begin with the header of an ADTS frame.

    The header has 12 set bits, layer 0, and a known sampling rate.
    """
    return len(data) >= 4 and data[0] == 0xFF and data[1] & 0xF6 == 0xF0 and data[2] >> 2 & 15 < 13


def _is_mp3_frame(data: bytes) -> bool:
    """Return whether the data begin with the header of an MPEG layer III frame.

    The header has 11 set bits, and a known version, layer, bit rate and sampling rate.
    """
    if len(data) < 4 or data[0] != 0xFF or data[1] & 0xE0 != 0xE0:
        return False
    version, layer = data[1] >> 3 & 3, data[1] >> 1 & 3
    return version != 1 and layer == 1 and data[2] >> 4 not in (0, 15) and data[2] >> 2 & 3 != 3


def is_of(modality: Modality, data: bytes) -> bool:
    """Return whether the data begin like a file with an accepted format of this modality."""
    return (sound_format(data) if modality == "audio" else image_format(data)) is not None
