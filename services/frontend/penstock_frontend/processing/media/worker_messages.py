"""Messages and decode limits shared by a frontend and its media workers."""

import struct
from typing import Literal

import msgspec

from penstock_common.types.media import Modality, TensorDtype

# Limits of decoding, and errors for media that cannot be decoded.


class DecodeLimits(msgspec.Struct, frozen=True):
    """Decode limits, with the values of ``MediaConfig``."""

    max_pixels: int
    max_frames: int
    max_audio_seconds: float


class TooLarge(Exception):  # noqa: N818 - it says what is wrong with the medium
    """Error for a media item above a limit. ``what`` is its value; ``setting`` and ``limit`` name the limit."""

    def __init__(self, what: str, setting: str, limit: float) -> None:
        super().__init__(what)
        self.what, self.setting, self.limit = what, setting, limit


class Unreadable(Exception):  # noqa: N818 - it says what is wrong with the medium
    """Error for a media item that is broken or has an unsupported format. The text contains no media content."""


LENGTH = struct.Struct("<I")
"""Length of a message head in bytes, sent before it."""


class Setup(msgspec.Struct, frozen=True, kw_only=True):
    """First message to a worker.

    Attributes:
        make_processor: Pickled function that creates the FamilyProcessor.
        sampling_rate: Sampling rate of audio in Hz.
        limits: Decode limits.
        memory: Bytes that the worker may allocate beyond its memory at that time.
        seconds: Time limit per item in seconds.
    """

    make_processor: bytes
    sampling_rate: int
    limits: DecodeLimits
    memory: int
    seconds: float


class Ready(msgspec.Struct, frozen=True, kw_only=True):
    """First message of a worker. ``error`` is the reason why it has no processor, or empty."""

    error: str = ""


class JobHead(msgspec.Struct, frozen=True, kw_only=True):
    """Head of an item, followed by its file or by the frames of a video.

    Attributes:
        modality: Modality of the item.
        sizes: Sizes of the files in bytes.
        timestamps: Times of the frames in seconds.
        arguments: Arguments of the processor, as a JSON object.
    """

    modality: Modality
    sizes: tuple[int, ...]
    timestamps: tuple[float, ...] = ()
    arguments: bytes = b"{}"


class TensorHead(msgspec.Struct, frozen=True):
    """Description of a tensor, whose ``size`` bytes follow after the head, in order."""

    name: str
    dtype: TensorDtype
    shape: tuple[int, ...]
    size: int


class Processed(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A ProcessedItem. ``seconds`` is the processing time in the worker."""

    modality: Modality
    tensors: tuple[TensorHead, ...]
    num_embeds: int
    layout: tuple[int, ...]
    seconds: float


class Refused(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Reason why an item was not processed.

    Attributes:
        kind: Kind of the refusal.
        what: Text that continues the item's name.
        setting: Setting whose ``limit`` the item exceeds; empty if there is none.
        limit: Value of that setting.
        unexpected: Place of an unexpected error for the log, without its message.
        ends: Whether the worker ends after this answer.
    """

    kind: Literal["unreadable", "too_large"]
    what: str
    setting: str = ""
    limit: float = 0
    unexpected: str = ""
    ends: bool = False


Answer = Processed | Refused

_encoder = msgspec.msgpack.Encoder()
decode_setup = msgspec.msgpack.Decoder(Setup).decode
decode_ready = msgspec.msgpack.Decoder(Ready).decode
decode_job = msgspec.msgpack.Decoder(JobHead).decode
decode_answer = msgspec.msgpack.Decoder(Answer).decode


def framed(head: Setup | Ready | JobHead | Answer) -> bytes:
    """Encode a head with its length before it."""
    encoded = _encoder.encode(head)
    return LENGTH.pack(len(encoded)) + encoded
