"""Messages between a frontend and its media workers, and the limits on decoding."""

import struct
from typing import Literal

import msgspec

from penstock_common.types.media import Modality, TensorDtype

# The classes below are the limits on decoding, and the errors for media that cannot be decoded.


class DecodeLimits(msgspec.Struct, frozen=True):
    """Limits on the decoding of media, with the values of ``MediaConfig``."""

    max_pixels: int
    max_frames: int
    max_audio_seconds: float


class TooLarge(Exception):  # noqa: N818 - it says what is wrong with the medium
    """Error for a media item that exceeds a limit.

    ``what`` states the size of the item. ``setting`` is the name of the exceeded limit, and ``limit`` is the value of
    this setting.
    """

    def __init__(self, what: str, setting: str, limit: float) -> None:
        super().__init__(what)
        self.what, self.setting, self.limit = what, setting, limit


class Unreadable(Exception):  # noqa: N818 - it says what is wrong with the medium
    """Error for a media item that is broken or has an unsupported format. The text of the error contains no content of
    the media.
    """


LENGTH = struct.Struct("<I")
"""Binary format of the length of a message head, which is in bytes. The length is sent before the head."""


class Setup(msgspec.Struct, frozen=True, kw_only=True):
    """First message from the frontend to a worker.

    Attributes:
        make_processor: Pickled function that creates the FamilyProcessor.
        sampling_rate: Sampling rate in Hz at which the model expects audio.
        limits: Limits on decoding.
        max_speech_seconds: Maximum length of an audio file to split, in seconds.
        memory: Number of bytes that the worker may allocate in addition to its memory when it receives this message.
        seconds: Time limit for decoding and processing one item, in seconds.
        speech_seconds: Time limit for decoding and splitting one audio file, in seconds.
    """

    make_processor: bytes
    sampling_rate: int
    limits: DecodeLimits
    max_speech_seconds: float
    memory: int
    seconds: float
    speech_seconds: float


class Ready(msgspec.Struct, frozen=True, kw_only=True):
    """First message from a worker to the frontend. ``error`` is the reason why the worker could not create the
    processor, or empty.
    """

    error: str = ""


JobKind = Literal["process", "split"]
"""Kind of a worker's job: to process a media item, or to split an audio file with speech into windows."""


class JobHead(msgspec.Struct, frozen=True, kw_only=True):
    """Head of the message with a media item. After the head, the file of the item, or the frames of a video, follow.

    Attributes:
        kind: Kind of the job.
        modality: Modality of the item.
        sizes: Sizes of the files in bytes.
        timestamps: Times of the frames in seconds.
        arguments: Arguments of the processor, as a JSON object.
    """

    kind: JobKind = "process"
    modality: Modality
    sizes: tuple[int, ...]
    timestamps: tuple[float, ...] = ()
    arguments: bytes = b"{}"


class TensorHead(msgspec.Struct, frozen=True):
    """Description of a tensor. After the head of the message, the ``size`` bytes of each tensor follow, in the order of
    the tensors.
    """

    name: str
    dtype: TensorDtype
    shape: tuple[int, ...]
    size: int


class Processed(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Answer of a worker with a ProcessedItem. ``seconds`` is the time that the processing took in the worker."""

    modality: Modality
    tensors: tuple[TensorHead, ...]
    num_embeds: int
    layout: tuple[int, ...]
    seconds: float


class Refused(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Answer of a worker for a media item that it did not process.

    Attributes:
        kind: Kind of the reason for the refusal.
        what: Reason as text that follows the name of the item in messages.
        setting: Setting whose ``limit`` the item exceeds, or empty if the item exceeds no limit.
        limit: Value of that setting.
        unexpected: Type, file and line of an unexpected error, for the log. The error's message is left out.
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
    """Return the bytes of a message head, with the length of the head before it."""
    encoded = _encoder.encode(head)
    return LENGTH.pack(len(encoded)) + encoded
