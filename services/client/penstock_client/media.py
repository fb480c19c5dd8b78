"""Images, sound and video of prompts and messages."""

from collections.abc import Iterable
from pathlib import Path

from penstock.common.v1.media_pb2 import Media, MediaFrame, MediaFrames
from penstock.inference.v1.messages_pb2 import ChatMessage, ContentPart

Source = bytes | Path | str
"""An encoded file's bytes, a file to read, or a URL: ``data:``, ``https:`` or ``http:``."""


def image(source: Source, *, processor_kwargs: str = "") -> Media:
    """An image: JPEG, PNG, WebP or GIF. ``processor_kwargs``: more arguments of the model's processor, as a JSON object."""
    return _media("image", source, processor_kwargs)


def audio(source: Source, *, processor_kwargs: str = "") -> Media:
    """A sound: WAV, FLAC, Ogg or MP3."""
    return _media("audio", source, processor_kwargs)


def video(
    frames: Iterable[bytes | Path],
    *,
    fps: float = 1.0,
    timestamps: Iterable[float] | None = None,
    processor_kwargs: str = "",
) -> Media:
    """A video as its pictures, files of one size: ``fps`` a second, or seen at ``timestamps``, in seconds. Raises ValueError
    where there are not as many of these as pictures.
    """
    pictures = [_read(frame) for frame in frames]
    times = [index / fps for index in range(len(pictures))] if timestamps is None else list(timestamps)
    if len(times) != len(pictures):
        raise ValueError(f"timestamps has {len(times)} entries for {len(pictures)} frames")
    each = [MediaFrame(data=data, timestamp=time) for data, time in zip(pictures, times, strict=True)]
    return Media(modality="video", frames=MediaFrames(frames=each), processor_kwargs=processor_kwargs)


def message(role: str, *parts: str | Media) -> ChatMessage:
    """A turn of texts and media, in order."""
    return ChatMessage(
        role=role,
        parts=[ContentPart(text=part) if isinstance(part, str) else ContentPart(media=part) for part in parts],
    )


def _media(modality: str, source: Source, processor_kwargs: str) -> Media:
    if isinstance(source, str):
        return Media(modality=modality, url=source, processor_kwargs=processor_kwargs)
    return Media(modality=modality, data=_read(source), processor_kwargs=processor_kwargs)


def _read(source: bytes | Path) -> bytes:
    return source.read_bytes() if isinstance(source, Path) else source
