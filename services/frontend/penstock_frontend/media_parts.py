"""A medium as a client gives it."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from penstock_common.types.media import Modality, TensorData


class EncodedFile(msgspec.Struct, frozen=True, tag=True):
    """An encoded file's bytes."""

    data: bytes


class Url(msgspec.Struct, frozen=True, tag=True):
    """Where the file is: ``data:``, ``https:`` or ``http:``.

    ``unwritten``: characters at the start of a ``data:`` URL that the protocol's code put there and the client did not write;
    errors count positions without them.
    """

    url: str
    unwritten: int = 0


class Frame(msgspec.Struct, frozen=True):
    """A picture of a video: an encoded file, and when it is seen in seconds."""

    data: bytes
    timestamp: float


class Frames(msgspec.Struct, frozen=True, tag=True):
    """A video as pictures."""

    frames: Sequence[Frame]


class Features(msgspec.Struct, frozen=True, tag=True):
    """Processed already: the model's own inputs, by the names of its processor in transformers; ``embeds`` alone is what the
    tower would give.
    """

    tensors: Mapping[str, TensorData]


Source = EncodedFile | Url | Frames | Features


class MediaPart(msgspec.Struct, frozen=True, kw_only=True):
    """An image, a sound or a video of a request.

    ``field``: its path in the request, for errors (``messages[0].content[1].image_url``). ``processor_kwargs``: more arguments of
    the model's processor.
    """

    modality: Modality
    source: Source
    field: str
    processor_kwargs: dict[str, Any] = {}

    @property
    def num_bytes(self) -> int:
        """Of what the client sent."""
        match self.source:
            case EncodedFile(data):
                return len(data)
            case Url(url=url):
                return len(url)
            case Frames(frames):
                return sum(len(frame.data) for frame in frames)
            case Features(tensors):
                return sum(len(tensor.data) for tensor in tensors.values())
