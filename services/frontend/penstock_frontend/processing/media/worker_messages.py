"""What a frontend and its media workers say to each other: a head in msgpack, and behind it the bytes it tells the sizes of."""

import struct
from typing import Literal

import msgspec

from penstock_common.types.media import Modality, TensorDtype
from penstock_frontend.processing.media.decode_limits import DecodeLimits

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
