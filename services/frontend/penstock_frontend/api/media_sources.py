"""Where clients say that media are, whatever protocol they say it in, to the domain's sources."""

import base64
import binascii
import math

from penstock_common.errors import InvalidArgument, Unimplemented
from penstock_common.types.media import Modality
from penstock_frontend.media_parts import Frame, Frames, Source, Url

_JPEG_FRAMES = "data:video/jpeg;base64,"
"""What a video as pictures begins with, as vLLM has it; the pictures follow, with commas between."""
MAX_FRAMES = 4096
"""Pictures of a video that are looked at, before the frontend's own limit is applied."""
DEFAULT_FPS = 1.0
"""Pictures a second of a video that does not say it, as in vLLM."""


def source_of_url(modality: Modality, url: str, *, field: str, fps: float = DEFAULT_FPS) -> Source:
    """What a URL stands for. ``fps``: pictures a second of a video as pictures. Nothing is fetched here.

    Raises InvalidArgument for one that is empty, Unimplemented for a video that is not given as pictures.
    """
    if not url:
        raise InvalidArgument(f"{field} is empty", field=field)
    if modality != "video":
        return Url(url)
    if not url.startswith(_JPEG_FRAMES):
        raise Unimplemented(
            f"{field} is no {_JPEG_FRAMES}...; video files are not read: give the frames as JPEG files in base64, with commas "
            "between",
            field=field,
        )
    return Frames(_frames(url, field, fps))


def check_fps(fps: float, field: str) -> float:
    """The pictures a second. Raises InvalidArgument unless they are above 0 and at most 1000."""
    if not (math.isfinite(fps) and 0.0 < fps <= 1000.0):
        raise InvalidArgument(f"{field} is {fps}; it must be above 0 and at most 1000", field=field)
    return fps


def _frames(url: str, field: str, fps: float) -> list[Frame]:
    frames = url[len(_JPEG_FRAMES) :].split(",", MAX_FRAMES)
    if len(frames) > MAX_FRAMES:
        raise InvalidArgument(
            f"{field} has more than {MAX_FRAMES} frames, the limit", field=field, reason="MEDIA_TOO_LARGE"
        )
    return [Frame(_decoded(text, index, field), index / fps) for index, text in enumerate(frames)]


def _decoded(text: str, index: int, field: str) -> bytes:
    try:
        data = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):  # whose text may quote the media
        raise InvalidArgument(f"{field}: frame {index} is no base64", field=field, reason="MEDIA_UNREADABLE") from None
    if not data:
        raise InvalidArgument(f"{field}: frame {index} is empty", field=field, reason="MEDIA_UNREADABLE")
    return data
