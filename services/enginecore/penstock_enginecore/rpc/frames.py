"""Frames: messages with the outputs of one step for one frontend. This module encodes frames, splits them at the size
limit, and puts several frames into one gRPC message.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import msgspec

from penstock.enginecore.v1 import messages_pb2 as pb
from penstock_common.errors import RequestFailed, ResourceExhausted
from penstock_common.observability.logging import incident
from penstock_common.rpc.by_field import to_message
from penstock_common.tensors.chunks import TensorRef
from penstock_common.types.kv_transfer import AllBlocksCleared, BlockRemoved, BlockStored, KvCacheEvent, KvMedium
from penstock_common.types.outputs import (
    EngineCoreOutput,
    EngineCoreOutputs,
    FinishReason,
    Logprobs,
    RequestError,
    TokenColumns,
    UtilityOutput,
)
from penstock_enginecore.rpc import convert

# Encoding of frames. If an output cannot be encoded, only the request of this output ends.


class Encoded(NamedTuple):
    """Outputs of a step, and the frame into which they were encoded.

    Attributes:
        outputs: The outputs that the frame contains. Errors have replaced outputs that cannot be encoded.
        frame: The encoded message.
        broken: Ids of requests that end in this frame, because one of their outputs cannot be encoded.
    """

    outputs: EngineCoreOutputs
    frame: pb.EngineCoreOutputs
    broken: list[str]


def encoded(outputs: EngineCoreOutputs) -> Encoded:
    """Encode outputs of a step as a frame.

    If an output cannot be encoded, its request ends with an error. If the result of a utility call cannot be encoded,
    the call fails. Events of the prefix cache that cannot be encoded are dropped.
    """
    try:
        return Encoded(outputs, convert.outputs_to_proto(outputs), [])
    except Exception:
        sendable = msgspec.structs.replace(
            outputs,
            outputs=[_sendable(output) for output in outputs.outputs],
            utility_output=None if outputs.utility_output is None else _sendable_answer(outputs.utility_output),
            kv_events=_sendable_events(outputs.kv_events),
        )
    changed = [new.request_id for old, new in zip(outputs.outputs, sendable.outputs, strict=True) if new is not old]
    return Encoded(sendable, convert.outputs_to_proto(sendable), changed)


def unsendable(output: EngineCoreOutput, error: Exception) -> EngineCoreOutput:
    """Return an error output that ends a request and replaces the request's output ``output``, which cannot be
    encoded.
    """
    failed = incident(error, request=output.request_id, doing="encoding an output of the request")
    return EngineCoreOutput(
        request_id=output.request_id,
        attempt=output.attempt,
        offset=output.offset,
        finish_reason=FinishReason.ERROR,
        error=RequestError.from_exception(failed),
    )


def _sendable(output: EngineCoreOutput) -> EngineCoreOutput:
    try:
        convert.output_to_proto(output)
    except Exception as e:
        return unsendable(output, e)
    return output


def _sendable_answer(answer: UtilityOutput) -> UtilityOutput:
    try:
        to_message(answer, pb.UtilityOutput)
    except Exception as e:
        failed = incident(e, request="", doing="encoding the answer to a utility call")
        return UtilityOutput(call_id=answer.call_id, error=RequestError.from_exception(failed))
    return answer


def _sendable_events(events: list[KvCacheEvent]) -> list[KvCacheEvent]:
    try:
        convert.outputs_to_proto(EngineCoreOutputs(kv_events=events))
    except Exception as e:
        incident(e, request="", doing="encoding events of the prefix cache")
        return []
    return events


# Batches of frames. Sending one message with several frames takes little more time than sending a message with one
# frame.

MAX_BATCH_BYTES = 32 * 1024
"""Maximum total size in bytes of the frames in a message with several frames. The limit is small, so that later
messages need not wait long for a large message.
"""
_HEADER_BYTES = 8
"""Maximum number of bytes that a message needs for each frame in addition to the size of the frame."""


class FrameBatch:
    """The frames of one message, in order. The sender can add frames until ``make`` is called."""

    __slots__ = ("_frames", "_made", "_num_bytes")

    def __init__(self) -> None:
        self._frames: list[pb.EngineCoreOutputs] = []
        self._num_bytes = 0
        self._made = False

    def __bool__(self) -> bool:
        """Return whether the batch has at least one frame."""
        return bool(self._frames)

    def takes(self, num_bytes: int, max_bytes: int) -> bool:
        """Return whether a frame of ``num_bytes`` bytes can be added to the batch. ``max_bytes`` is the maximum size of
        a message.
        """
        return not self._made and self._num_bytes + num_bytes + _HEADER_BYTES <= min(MAX_BATCH_BYTES, max_bytes)

    def add(self, frame: pb.EngineCoreOutputs, num_bytes: int) -> None:
        """Append a frame to the batch."""
        self._frames.append(frame)
        self._num_bytes += num_bytes + _HEADER_BYTES

    def make(self, _: Sequence[TensorRef]) -> pb.SessionResponse:
        """Return the message with all frames. The sender calls this method when it sends the message."""
        self._made = True
        if len(self._frames) == 1:
            return pb.SessionResponse(outputs=self._frames[0])
        message = pb.SessionResponse()
        message.frames.frames.extend(self._frames)
        return message


_FRAME_BYTES = 1024
"""Maximum size in bytes of a frame without its outputs and events."""
_OUTPUT_BYTES = 256
_EVENT_BYTES = 32
_ENTRY_BYTES = 14
"""Maximum size in bytes of one log-probability in a frame: two integers of up to 5 bytes, and a float."""
_NUMBER_BYTES = 5
_MEDIA_BYTES = 12
"""Maximum size in bytes of a media item in a block's event, without the item's identifier."""
_COLUMN_BYTES = 4
_CHARACTER_BYTES = 4


class Frames(NamedTuple):
    """The result of ``split``.

    Attributes:
        frames: The frames, in order.
        refused: Ids of requests with an output that is too large for any frame. An error replaces the output and ends
            the request.
    """

    frames: list[EngineCoreOutputs]
    refused: list[str]


def split(outputs: EngineCoreOutputs, max_bytes: int) -> Frames:
    """Split the outputs of a step into frames of up to ``max_bytes`` bytes each, in order.

    Log-probabilities that do not fit into one frame are split over several frames. The finish reason of a request is in
    the frame with its last output. The statistics are in the last frame.
    """
    room = max_bytes - _FRAME_BYTES
    packed = _Packed(outputs, room)
    if outputs.tokens is not None:
        for columns in _cut_columns(outputs.tokens, room):
            packed.add_tokens(columns)
    refused = []
    for output in outputs.outputs:
        pieces = list(_pieces(output, room))
        if any(output_bytes(piece) > room for piece in pieces):
            packed.add(too_large(output, max(map(output_bytes, pieces)), room))
            refused.append(output.request_id)
            continue
        for piece in pieces:
            packed.add(piece)
    for event in outputs.kv_events:
        for part in _event_pieces(event, room):
            packed.add_event(part)
    if outputs.utility_output is not None:
        packed.answer(_fitting(outputs.utility_output, room))
    return Frames(packed.close(), refused)


def too_large(output: EngineCoreOutput, size: int, limit: int) -> EngineCoreOutput:
    """Return an error output that ends a request and replaces the request's output ``output``, which is too large for
    the frontend.
    """
    error = _error(f"an output of the request has {size} bytes", limit)
    return EngineCoreOutput(
        request_id=output.request_id,
        attempt=output.attempt,
        offset=output.offset,
        finish_reason=FinishReason.ERROR,
        error=RequestError.from_exception(error),
    )


def output_bytes(output: EngineCoreOutput) -> int:
    """Return an upper bound of the size in bytes that an output has in a frame."""
    size = _OUTPUT_BYTES + _CHARACTER_BYTES * len(output.request_id) + _NUMBER_BYTES * len(output.new_token_ids)
    size += _EVENT_BYTES * len(output.events) + _logprobs_bytes(output.new_logprobs)
    size += _logprobs_bytes(output.new_prompt_logprobs)
    if output.pooling_output is not None:
        size += len(output.pooling_output.data)
    if output.error is not None:
        size += _CHARACTER_BYTES * (len(output.error.message) + len(output.error.field) + len(output.error.reason))
    if isinstance(output.stop_reason, str):
        size += _CHARACTER_BYTES * len(output.stop_reason)
    return size


def _logprobs_bytes(logprobs: Logprobs | None) -> int:
    return 0 if logprobs is None else _positions_bytes(logprobs, 0, len(logprobs))


def _positions_bytes(logprobs: Logprobs, start: int, stop: int) -> int:
    entries = logprobs.offsets[stop] - logprobs.offsets[start]
    return _EVENT_BYTES + _ENTRY_BYTES * entries + _NUMBER_BYTES * (stop - start + 1)


def _pieces(output: EngineCoreOutput, room: int) -> Iterator[EngineCoreOutput]:
    """Yield ``output``. If the log-probabilities make it larger than ``room`` bytes, yield several smaller outputs
    instead.
    """
    if output_bytes(output) <= room:
        yield output
        return
    if (prompt := output.new_prompt_logprobs) is not None:
        for start, stop in _cuts(prompt, room // 2):
            yield EngineCoreOutput(
                request_id=output.request_id,
                attempt=output.attempt,
                offset=output.offset,
                new_prompt_logprobs=prompt.slice(start, stop),
            )
        output = msgspec.structs.replace(output, new_prompt_logprobs=None)
    logprobs = output.new_logprobs
    if logprobs is None or output_bytes(output) <= room:
        yield output
        return
    *cuts, (first, end) = _cuts(logprobs, room // 2)
    for start, stop in cuts:
        yield EngineCoreOutput(
            request_id=output.request_id,
            attempt=output.attempt,
            offset=output.offset + start,
            new_token_ids=output.new_token_ids[start:stop],
            new_logprobs=logprobs.slice(start, stop),
        )
    yield msgspec.structs.replace(
        output,
        offset=output.offset + first,
        new_token_ids=output.new_token_ids[first:],
        new_logprobs=logprobs.slice(first, end),
    )


def _cuts(logprobs: Logprobs, room: int) -> list[tuple[int, int]]:
    """Divide the positions of ``logprobs`` into ranges, and return the ranges. The log-probabilities of a range have up
    to ``room`` bytes. The log-probabilities of a single position may have more.
    """
    cuts, start = [], 0
    for stop in range(1, len(logprobs) + 1):
        if stop - start > 1 and _positions_bytes(logprobs, start, stop) > room:
            cuts.append((start, stop - 1))
            start = stop - 1
    cuts.append((start, len(logprobs)))
    return cuts


def _cut_columns(columns: TokenColumns, room: int) -> list[TokenColumns]:
    """Split columns (arrays with the new tokens of many requests) into parts of up to ``room`` bytes each. The tokens
    of a single request may have more.
    """
    if _columns_bytes(columns) <= room:
        return [columns]
    longest = max(columns.counts) if columns.counts else 1
    return columns.cut(max(1, (room - _OUTPUT_BYTES) // (_COLUMN_BYTES * (4 + longest))))


def _columns_bytes(columns: TokenColumns) -> int:
    return _OUTPUT_BYTES + _COLUMN_BYTES * (3 * len(columns) + len(columns.drafts) + len(columns.token_ids))


def _event_pieces(event: KvCacheEvent, room: int) -> list[KvCacheEvent]:
    """Split an event about many blocks into events of up to ``room`` bytes each."""
    if isinstance(event, AllBlocksCleared) or _event_bytes(event) <= room or len(event.block_hashes) < 2:
        return [event]
    half = len(event.block_hashes) // 2
    if isinstance(event, BlockRemoved):
        parts = (event.block_hashes[:half], event.block_hashes[half:])
        return [p for hashes in parts for p in _event_pieces(msgspec.structs.replace(event, block_hashes=hashes), room)]
    tokens = half * event.block_size
    first = msgspec.structs.replace(
        event,
        block_hashes=event.block_hashes[:half],
        token_ids=event.token_ids[:tokens],
        extra_keys=event.extra_keys[:half],
    )
    second = msgspec.structs.replace(
        event,
        block_hashes=event.block_hashes[half:],
        parent_hash=event.block_hashes[half - 1] if event.medium is KvMedium.DEVICE else b"",
        token_ids=event.token_ids[tokens:],
        extra_keys=event.extra_keys[half:],
    )
    return [*_event_pieces(first, room), *_event_pieces(second, room)]


def _event_bytes(event: KvCacheEvent) -> int:
    hashes = 0 if isinstance(event, AllBlocksCleared) else len(event.block_hashes)
    if not isinstance(event, BlockStored):
        return _EVENT_BYTES * (1 + hashes)
    name = _CHARACTER_BYTES * len(event.lora_name)
    media = sum(_NUMBER_BYTES + sum(_MEDIA_BYTES + len(m.identifier) for m in keys) for keys in event.extra_keys)
    return _EVENT_BYTES * (1 + hashes) + _NUMBER_BYTES * len(event.token_ids) + name + media


def _fitting(answer: UtilityOutput, room: int) -> UtilityOutput:
    """Return the answer to a utility call, or an error as the answer if the result has more than ``room`` bytes."""
    if len(answer.result) <= room:
        return answer
    error = RequestError.from_exception(_error(f"the answer to the utility call has {len(answer.result)} bytes", room))
    return UtilityOutput(call_id=answer.call_id, error=error)


def _error(what: str, limit: int) -> RequestFailed:
    return ResourceExhausted(f"{what}; this frontend accepts at most {limit} bytes", reason="MESSAGE_TOO_LARGE")


class _Packed:
    """Builder of frames, which fills one frame after the other with the parts of an ``EngineCoreOutputs``."""

    def __init__(self, outputs: EngineCoreOutputs, room: int) -> None:
        self._whole = outputs
        self._room = room
        self._finished = dict.fromkeys(outputs.finished_requests)
        self._frames: list[EngineCoreOutputs] = []
        self._current = self._empty()
        self._size = 0

    def add_tokens(self, tokens: TokenColumns) -> None:
        if self._current.tokens is not None:
            self._next_frame()
        self._make_room(_columns_bytes(tokens))
        self._current.tokens = tokens

    def add(self, output: EngineCoreOutput) -> None:
        self._make_room(output_bytes(output))
        self._current.outputs.append(output)
        if output.finish_reason is not None and output.request_id in self._finished:
            del self._finished[output.request_id]
            self._current.finished_requests.append(output.request_id)

    def add_event(self, event: KvCacheEvent) -> None:
        self._make_room(_event_bytes(event))
        self._current.kv_events.append(event)

    def answer(self, answer: UtilityOutput) -> None:
        self._make_room(len(answer.result))
        self._current.utility_output = answer

    def close(self) -> list[EngineCoreOutputs]:
        """Return all frames. The last frame gets the statistics and the ids of the remaining finished requests."""
        self._make_room(sum(_CHARACTER_BYTES * len(request_id) + _NUMBER_BYTES for request_id in self._finished))
        self._current.finished_requests += self._finished
        self._current.scheduler_stats = self._whole.scheduler_stats
        return [*self._frames, self._current]

    def _make_room(self, size: int) -> None:
        if self._size and self._size + size > self._room:
            self._next_frame()
        self._size += size

    def _next_frame(self) -> None:
        self._frames.append(self._current)
        self._current, self._size = self._empty(), 0

    def _empty(self) -> EngineCoreOutputs:
        whole = self._whole
        return EngineCoreOutputs(
            engine_index=whole.engine_index, outputs=[], timestamp=whole.timestamp, finished_requests=[], kv_events=[]
        )
