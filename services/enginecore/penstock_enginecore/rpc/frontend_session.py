"""One frontend's session with this engine, as the I/O thread sees it."""

import asyncio
from collections.abc import Sequence
from functools import partial

import msgspec

from penstock.enginecore.v1 import messages_pb2 as pb
from penstock_common.rpc.outputs import chunk_to_proto
from penstock_common.rpc.revision import ANNOUNCED_SINCE, COLUMNS_SINCE
from penstock_common.tensors.incoming import IncomingTensors
from penstock_common.tensors.outgoing import Chunk, Outgoing, TensorRef
from penstock_common.tensors.pool import TensorPool
from penstock_common.tensors.sizes import MAX_TENSOR_BYTES, MAX_UNANNOUNCED_BYTES, Buffer, Limits
from penstock_common.types.outputs import EngineCoreOutput, EngineCoreOutputs
from penstock_enginecore.rpc import convert
from penstock_enginecore.rpc.batches import FrameBatch
from penstock_enginecore.rpc.encoding import encoded, unsendable
from penstock_enginecore.rpc.features import FeatureReader
from penstock_enginecore.rpc.frames import split, too_large
from penstock_enginecore.rpc.prompts import PromptReader

_WRAPPING_BYTES = 16
"""Of a message around a frame, at most."""


class FrontendSession:
    """Messages on their way to one frontend, and what came of its prompts. Belongs to the I/O thread.

    The queue is not bounded: it holds what the frontend has not read of its own requests' output, and its requests are bounded.
    No message is larger than the frontend takes: see ``rpc/frames.py``; large vectors go ahead in chunks.
    """

    def __init__(
        self, client_id: str, limits: Limits, revision: int, incarnation: str = "", pool: TensorPool | None = None
    ) -> None:
        """``revision``: of the contract, on this stream; ``incarnation``: the frontend's. ``pool``: bounds the tensors in chunks
        of all sessions together; the session's end closes ``prompts.tensors``.
        """
        self._batches = revision >= COLUMNS_SINCE
        self._batch = FrameBatch()
        self.client_id = client_id
        self.incarnation = incarnation
        self.max_tensor_bytes = MAX_TENSOR_BYTES if revision >= ANNOUNCED_SINCE else MAX_UNANNOUNCED_BYTES
        """Bytes of tensors in chunks that the session holds at most."""
        if pool is not None:
            self.max_tensor_bytes = min(self.max_tensor_bytes, pool.max_bytes)
        announced = revision >= ANNOUNCED_SINCE
        self.prompts = PromptReader(IncomingTensors(self.max_tensor_bytes, announced=announced, pool=pool))
        self.features: FeatureReader | None = None
        """Reads media; None where the engine takes none."""
        self._limits = limits
        self._outgoing: Outgoing[pb.SessionResponse] = Outgoing(_chunk)
        self._outgoing.limit(limits)
        self._ended: set[str] = set()
        """Requests that have ended for the frontend because an output could not be sent, and not yet for the engine."""
        self._arrived = asyncio.Event()
        self._closed = False

    def put(self, message: pb.SessionResponse) -> None:
        """Queue a message."""
        self._batch = FrameBatch()  # what comes later goes behind it
        self._outgoing.put(lambda _: message)
        self._arrived.set()

    def put_outputs(self, outputs: EngineCoreOutputs, frame: pb.EngineCoreOutputs | None = None) -> list[str]:
        """Queue what a step has to say. ``frame``: its message, where that is made already. Returns the ids of requests that end
        here: an output of theirs is too large, or cannot be encoded.
        """
        if self._ended:
            outputs = _without(outputs, self._ended)
        unfinished = {output.request_id for output in outputs.outputs if output.finish_reason is None}
        refused = self._put_large(outputs) if any(map(_is_pooled, outputs.outputs)) else []
        if frame is None:
            outputs, frame, broken = encoded(outputs)
            refused += broken
        if (size := frame.ByteSize()) + _WRAPPING_BYTES <= self._limits.max_message_bytes:
            self._put_frame(frame, size)
        else:
            frames = split(outputs, self._limits.max_message_bytes)
            for part in frames.frames:
                piece = convert.outputs_to_proto(part)
                self._put_frame(piece, piece.ByteSize())
            refused += frames.refused
        self._ended |= unfinished.intersection(refused)
        return refused

    def _put_frame(self, frame: pb.EngineCoreOutputs, size: int) -> None:
        """Queue a frame, in one message with those before it where these still wait."""
        if not self._batches or not self._batch.takes(size, self._limits.max_message_bytes - _WRAPPING_BYTES):
            self._batch = FrameBatch()
        if not self._batch:
            self._outgoing.put(self._batch.make)
            self._arrived.set()
        self._batch.add(frame, size)

    def _put_large(self, outputs: EngineCoreOutputs) -> list[str]:
        """Take large vectors out of a step's outputs: they go in chunks. Returns the ids of requests that end here."""
        most, refused = self._limits.max_tensor_bytes, []
        others: list[EngineCoreOutput] = []
        for output in outputs.outputs:
            size = len(output.pooling_output.data) if output.pooling_output is not None else 0
            if output.pooling_output is None or not most or size <= self._limits.inline_bytes:
                others.append(output)
            elif size > most:
                others.append(too_large(output, size, most))
                refused.append(output.request_id)
            else:
                make = partial(_pooled, output, outputs.engine_index)
                tensors = (output.pooling_output.data,)
                self._outgoing.put(make, partial(_given, tensors))
                self._arrived.set()
                # Its end is told with its vectors, not before.
                outputs.finished_requests = [i for i in outputs.finished_requests if i != output.request_id]
        outputs.outputs = others
        return refused

    def close(self) -> None:
        """No message follows those that are queued."""
        self._closed = True
        self._arrived.set()

    async def next(self) -> pb.SessionResponse | None:
        """The next message; None when the session is closed and empty."""
        while True:
            while not self._outgoing:
                if self._closed:
                    return None
                self._arrived.clear()
                await self._arrived.wait()
            if (message := self._outgoing.next()) is not None:
                return message


def _is_pooled(output: EngineCoreOutput) -> bool:
    return output.pooling_output is not None


def _given(tensors: Sequence[Buffer]) -> Sequence[Buffer]:
    return tensors


def _pooled(output: EngineCoreOutput, engine_index: int, refs: Sequence[TensorRef]) -> pb.SessionResponse:
    try:
        frame = convert.pooled_to_proto(output, refs[0])
    except Exception as e:
        frame = convert.pooled_to_proto(unsendable(output, e), None)
    frame.engine_index = engine_index
    return pb.SessionResponse(outputs=frame)


def _chunk(chunk: Chunk) -> pb.SessionResponse:
    return pb.SessionResponse(tensor_chunk=chunk_to_proto(chunk))


def _without(outputs: EngineCoreOutputs, ended: set[str]) -> EngineCoreOutputs:
    """The outputs less those of requests that ``ended`` for the frontend; one whose last output passes leaves the set."""
    left = [output for output in outputs.outputs if output.request_id not in ended]
    over = {output.request_id for output in outputs.outputs if output.finish_reason is not None} & ended
    finished = [request_id for request_id in outputs.finished_requests if request_id not in over]
    ended -= over
    return msgspec.structs.replace(outputs, outputs=left, finished_requests=finished)
