"""Media preparation in the calling process, with the processor of a media family."""

import hashlib
import io
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from PIL import Image

from penstock_common.types.media import Modality
from penstock_frontend.call_types import EncodedFile, Features, Frame, Frames, MediaPart, Url
from penstock_frontend.processing.media.families.base import Family, PreparedMedia, ProcessedItem


class InProcessPreparer:
    """``MediaPreparer`` without workers, limits and stores. Sound must be float32 samples, pictures PNG."""

    def __init__(self, family: Family) -> None:
        self.family = family
        self.asked: list[tuple[str, float | None, str]] = []
        self._processor = family.make_processor()()

    async def prepare(
        self, parts: Sequence[MediaPart], *, cache_salt: str, deadline: float | None, tenant: str = ""
    ) -> list[PreparedMedia]:
        """Prepare the parts one after the other."""
        self.asked.append((cache_salt, deadline, tenant))
        return [PreparedMedia(self._item(part), _identifier(part, cache_salt)) for part in parts]

    def _item(self, part: MediaPart) -> ProcessedItem:
        match part.source:
            case Features(tensors):
                return self.family.described(part.modality, tensors)
            case Frames(frames):
                images = [_picture(frame.data) for frame in frames]
                return self._processor.video(images, [frame.timestamp for frame in frames], part.processor_kwargs)
            case EncodedFile(data) if part.modality == "audio":
                return self._processor.audio(np.frombuffer(data, dtype=np.float32), part.processor_kwargs)
            case EncodedFile(data):
                return self._processor.image(_picture(data), part.processor_kwargs)
            case Url():
                raise AssertionError("nothing is fetched here")


def image_part(image: Image.Image, field: str = "media", **kwargs: Any) -> MediaPart:
    """Return a picture as a client's media part. ``kwargs``: arguments for the processor."""
    return MediaPart(modality="image", source=EncodedFile(png(image)), field=field, processor_kwargs=kwargs)


def video_part(
    images: Sequence[Image.Image], timestamps: Sequence[float], kwargs: Mapping[str, Any] | None = None
) -> MediaPart:
    """Return frames as a client's media part."""
    frames = [Frame(png(image), timestamp) for image, timestamp in zip(images, timestamps, strict=True)]
    return MediaPart(modality="video", source=Frames(frames), field="video", processor_kwargs=dict(kwargs or {}))


def part_of(modality: Modality, data: bytes = b"x", field: str = "media") -> MediaPart:
    """Return a media part that is never decoded."""
    return MediaPart(modality=modality, source=EncodedFile(data), field=field)


def png(image: Image.Image) -> bytes:
    """Return a picture as a PNG file, without loss."""
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return buffer.getvalue()


def _picture(data: bytes) -> Image.Image:
    return Image.open(io.BytesIO(data)).convert("RGB")


def _identifier(part: MediaPart, cache_salt: str) -> str:
    digest = hashlib.blake2b(cache_salt.encode(), digest_size=32)
    digest.update(repr((part.modality, part.source, sorted(part.processor_kwargs.items()))).encode())
    return digest.hexdigest()
