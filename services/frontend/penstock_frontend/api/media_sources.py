"""Sources of media in requests of all protocols (URLs and base64), and the field names of media in errors."""

import itertools
import math
import re
from collections.abc import Sequence

import msgspec

from penstock_common.errors import InvalidArgument, Unimplemented
from penstock_common.types.media import Modality
from penstock_frontend.call_types import ChatMessage, ContentPart, Frame, Frames, Source, Url
from penstock_frontend.processing.media.data_urls import DataUrlError, decode_base64, is_data_url

_JPEG_FRAMES = "data:video/jpeg;base64,"
"""Beginning of a URL that contains the frames of a video, as in vLLM. After it, the frames follow, separated by commas."""
_FRAMES_HEAD = re.compile(r"[ \t\r\n\f]*" + _JPEG_FRAMES, re.IGNORECASE)
_COMMA = re.compile(",|%2[Cc]")
_BARE = "data:;base64,"
MAX_FRAMES = 4096
"""Maximum number of frames that the parser accepts. The limit in the configuration is checked later."""
DEFAULT_FPS = 1.0
"""Default frame rate of a video, in frames per second, as in vLLM."""


def source_of_url(modality: Modality, url: str, *, field: str, fps: float = DEFAULT_FPS) -> Source:
    """Return the media source for a URL. Nothing is downloaded. ``fps`` is the frame rate of a video whose frames are
    in the URL.

    Raises InvalidArgument if the URL is empty, and Unimplemented if it is the URL of a video file.
    """
    if not url:
        raise InvalidArgument(f"{field} is empty", field=field)
    if modality != "video":
        return Url(url)
    if (head := _FRAMES_HEAD.match(url)) is None:
        raise Unimplemented(
            f"{field} does not begin with {_JPEG_FRAMES}; this server reads no video files: send the frames as JPEG "
            "files in base64, separated by commas",
            field=field,
        )
    return Frames(_frames(url, head.end(), field, fps))


def source_of_base64(text: str) -> Source:
    """Return the media source for a file in base64. A ``data:`` URL is accepted too."""
    return Url(text) if is_data_url(text) else Url(_BARE + text, unwritten=len(_BARE))


def check_fps(fps: float, field: str) -> float:
    """Return ``fps`` unchanged. Raises InvalidArgument if ``fps`` is not above 0 and at most 1000."""
    if not (math.isfinite(fps) and 0.0 < fps <= 1000.0):
        raise InvalidArgument(f"{field} is {fps}; it must be above 0 and at most 1000", field=field)
    return fps


def _frames(url: str, start: int, field: str, fps: float) -> list[Frame]:
    ends = [comma.span() for comma in itertools.islice(_COMMA.finditer(url, start), MAX_FRAMES)]
    if len(ends) == MAX_FRAMES:
        raise InvalidArgument(
            f"{field} has more than {MAX_FRAMES} frames, which is the limit", field=field, reason="MEDIA_TOO_LARGE"
        )
    frames = []
    for index, (end, next_start) in enumerate([*ends, (len(url), len(url))]):
        try:
            frames.append(Frame(decode_base64(url, start, end), index / fps))
        except DataUrlError as e:
            raise InvalidArgument(f"{field}: frame {index} {e}", field=field, reason="MEDIA_UNREADABLE") from None
        start = next_start
    return frames


# The code below sets the field names of media in errors. The position of a message in the conversation is known only
# after the message was parsed.


def placed(messages: Sequence[ChatMessage]) -> list[ChatMessage]:
    """Return the messages with changed field paths of media. In the result, the paths are relative to the conversation
    instead of the message.
    """
    return [_placed(message, f"messages[{index}].") for index, message in enumerate(messages)]


def _placed(message: ChatMessage, prefix: str) -> ChatMessage:
    if message.content is None or isinstance(message.content, str) or not any(part.media for part in message.content):
        return message
    return msgspec.structs.replace(message, content=[_part(part, prefix) for part in message.content])


def _part(part: ContentPart, prefix: str) -> ContentPart:
    if part.media is None:
        return part
    return msgspec.structs.replace(part, media=msgspec.structs.replace(part.media, field=prefix + part.media.field))
