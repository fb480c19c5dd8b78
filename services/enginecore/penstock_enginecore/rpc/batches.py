"""Frames that wait for their stream: several go in one message, which costs the stream little more than one of them."""

from collections.abc import Sequence

from penstock.enginecore.v1 import messages_pb2 as pb
from penstock_common.tensors.outgoing import TensorRef

MAX_BATCH_BYTES = 32 * 1024
"""Of the frames in one message, unless it is a single one: what comes behind it does not wait for long."""
_FRAME_BYTES = 8
"""Of a frame beside its own bytes, at most."""


class FrameBatch:
    """Frames of one message, in order. More may be added until it is made."""

    __slots__ = ("_frames", "_made", "_num_bytes")

    def __init__(self) -> None:
        self._frames: list[pb.EngineCoreOutputs] = []
        self._num_bytes = 0
        self._made = False

    def __bool__(self) -> bool:
        """Whether there is a frame in it."""
        return bool(self._frames)

    def takes(self, num_bytes: int, max_bytes: int) -> bool:
        """Whether a frame of so many bytes still fits in, where a message may have ``max_bytes``."""
        return not self._made and self._num_bytes + num_bytes + _FRAME_BYTES <= min(MAX_BATCH_BYTES, max_bytes)

    def add(self, frame: pb.EngineCoreOutputs, num_bytes: int) -> None:
        """One more frame."""
        self._frames.append(frame)
        self._num_bytes += num_bytes + _FRAME_BYTES

    def make(self, _: Sequence[TensorRef]) -> pb.SessionResponse:
        """The message, when it is its turn."""
        self._made = True
        if len(self._frames) == 1:
            return pb.SessionResponse(outputs=self._frames[0])
        message = pb.SessionResponse()
        message.frames.frames.extend(self._frames)
        return message
