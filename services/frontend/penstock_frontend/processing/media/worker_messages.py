"""Defines the messages and decode limits that a frontend and its media workers share."""

import struct
from typing import Literal

import msgspec

from penstock_common.types.media import Modality, TensorDtype

# How much of a medium is decoded, and what is wrong with one that is not.


class DecodeLimits(msgspec.Struct, frozen=True):
    """What is decoded at most, as ``MediaConfig`` has it."""

    max_pixels: int
    max_frames: int
    max_audio_seconds: float


class TooLarge(Exception):  # noqa: N818 - it says what is wrong with the medium
    """``what``: the value; ``setting`` and ``limit``: what it is above of."""

    def __init__(self, what: str, setting: str, limit: float) -> None:
        super().__init__(what)
        self.what, self.setting, self.limit = what, setting, limit


class Unreadable(Exception):  # noqa: N818 - it says what is wrong with the medium
    """It is in no format that is taken, or broken. The text has nothing of it."""


LENGTH = struct.Struct("<I")
"""Bytes of the head, in front of it."""


class Setup(msgspec.Struct, frozen=True, kw_only=True):
    """The first message to a worker. ``make_processor``: a pickle of what makes its FamilyProcessor. ``memory``: bytes that it
    may ask for beyond what it has then. ``seconds``: of an item.
    """

    make_processor: bytes
    sampling_rate: int
    limits: DecodeLimits
    memory: int
    seconds: float


class Ready(msgspec.Struct, frozen=True, kw_only=True):
    """The worker's first message. ``error``: why there is no processor; empty: there is one."""

    error: str = ""


class JobHead(msgspec.Struct, frozen=True, kw_only=True):
    """An item. Behind it a file, or those of a video's frames. ``timestamps``: of these, in seconds. ``arguments``:
    of the processor, a JSON object.
    """

    modality: Modality
    sizes: tuple[int, ...]
    timestamps: tuple[float, ...] = ()
    arguments: bytes = b"{}"


class TensorHead(msgspec.Struct, frozen=True):
    """A tensor whose ``size`` bytes come behind the head, in the order of these."""

    name: str
    dtype: TensorDtype
    shape: tuple[int, ...]
    size: int


class Processed(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A ProcessedItem. ``seconds``: what the worker took for it."""

    modality: Modality
    tensors: tuple[TensorHead, ...]
    num_embeds: int
    layout: tuple[int, ...]
    seconds: float


class Refused(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Why there is no item. ``what`` continues its name; with a ``setting`` it is above that ``limit``.

    ``unexpected``: where the processor failed, for the log, without what it said. ``ends``: the worker ends after this.
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
    """The head with its length in front."""
    encoded = _encoder.encode(head)
    return LENGTH.pack(len(encoded)) + encoded
