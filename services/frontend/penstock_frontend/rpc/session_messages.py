"""Conversion between ``penstock.enginecore.v1`` messages and domain types.

The decoding of outputs must be fast, because it runs once for each step of each engine.
"""

import math
import time

import msgspec

from penstock.common.v1 import finish_pb2
from penstock.enginecore.v1 import messages_pb2 as pb
from penstock_common.errors import Internal
from penstock_common.observability.logging import incident
from penstock_common.rpc import outputs as parts
from penstock_common.rpc import stats
from penstock_common.rpc.by_field import fill, from_message
from penstock_common.rpc.request import fill_context, limits_from_proto, to_proto
from penstock_common.types.kv_transfer import KvCacheEvent
from penstock_common.types.outputs import (
    EngineCoreEvent,
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineReady,
    EventType,
    FinishReason,
    PrefillStats,
    RequestError,
    SchedulerStats,
    SpecDecodingStats,
    UtilityOutput,
)
from penstock_common.types.request import EngineCoreRequest

_FINISH_REASONS: dict[int, FinishReason] = {int(reason): reason for reason in FinishReason}
_EVENT_TYPES: dict[int, EventType] = {int(kind): kind for kind in EventType}


def add_request(
    request: EngineCoreRequest, place: parts.Place | None = None, *, every_position: bool = False
) -> pb.SessionRequest:
    """Return the message that asks an engine to start a request.

    Args:
        request: the request to start.
        place: reference to the prompt embeddings if they are not in this message. None means that the message contains
            them.
        every_position: True to send one row of embeddings for every token of a mixed prompt, because the engine needs
            all rows.
    """
    message = pb.SessionRequest()
    add = message.add
    fill_context(add, request.context)
    fill(add, request, "sampling_params", "pooling_params", "prompt_embeds", "mm_features", "reasoning_parser_kwargs")
    if request.pooling_params is not None:
        add.pooling_params.CopyFrom(parts.pooling_params_to_proto(request.pooling_params))
    else:
        add.sampling_params.CopyFrom(to_proto(request.sampling_params))
    if request.prompt_embeds is not None:
        embeds = parts.prompt_embeds_to_proto(request.prompt_embeds, place, every_position=every_position)
        add.prompt_embeds.CopyFrom(embeds)
        add.prompt_is_token_ids.extend(map(bool, request.prompt_embeds.is_token))
    if request.reasoning_parser_kwargs is not None:
        add.reasoning_parser_kwargs = msgspec.json.encode(request.reasoning_parser_kwargs).decode()
    return message


def engine_ready(message: pb.Ready) -> EngineReady:
    """Return the greeting of an engine, decoded from its message."""
    return from_message(message, EngineReady, media=limits_from_proto(message.media))


def draining_time_left(message: pb.Draining) -> float | None:
    """Return the number of seconds until a draining engine ends its requests, at least 0. Return None if the time is
    unknown.
    """
    if message.HasField("time_left"):
        time_left = message.time_left
    elif message.deadline:
        # an engine of an earlier version sends its deadline instead; assume that the clocks of both hosts agree
        time_left = message.deadline - time.time()
    else:
        return None
    return max(time_left, 0.0) if math.isfinite(time_left) else None


def engine_core_outputs(message: pb.EngineCoreOutputs, take: parts.TakeTensor | None = None) -> EngineCoreOutputs:
    """Return the outputs of one engine step for this frontend, decoded from a message. ``take`` returns the tensors
    that arrived in chunks.

    If an output cannot be read, its place in the result has an ``error`` and no ``finish_reason``. The caller must then
    end the request of this output, both in the frontend and on the engine. Raises Internal only if the token columns
    are inconsistent. In this case, the frontend must not trust the engine any more.
    """
    return EngineCoreOutputs(
        engine_index=message.engine_index,
        outputs=[_readable_output(output, take) for output in message.outputs],
        scheduler_stats=_stats(message),
        timestamp=message.timestamp,
        utility_output=from_message(message.utility_output, UtilityOutput)
        if message.HasField("utility_output")
        else None,
        finished_requests=list(message.finished_requests),
        kv_events=_kv_events(message),
        tokens=parts.columns_from_proto(message.token_columns) if message.HasField("token_columns") else None,
    )


def _stats(message: pb.EngineCoreOutputs) -> SchedulerStats | None:
    if not message.HasField("scheduler_stats"):
        return None
    try:
        return stats.from_proto(message.scheduler_stats)
    except Exception as e:
        incident(e, request="", doing="reading an engine's statistics")
        return None


def _kv_events(message: pb.EngineCoreOutputs) -> list[KvCacheEvent]:
    if not message.kv_events:
        return []
    try:
        return [event for each in message.kv_events if (event := parts.kv_event_from_proto(each)) is not None]
    except Exception as e:
        incident(e, request="", doing="reading an engine's cache events")
        return []


def _readable_output(message: pb.EngineCoreOutput, take: parts.TakeTensor | None) -> EngineCoreOutput:
    try:
        return _output(message, take)
    except Exception as e:
        failed = unreadable(e, message.request_id)
        error = RequestError.from_exception(failed)
        return EngineCoreOutput(request_id=message.request_id, attempt=message.attempt, error=error)


def unreadable(error: Exception, request_id: str) -> Internal:
    """Return the error for a request of which the frontend cannot read an output of the engine."""
    return incident(error, request=request_id, doing="reading the engine's output")


def _output(message: pb.EngineCoreOutput, take: parts.TakeTensor | None) -> EngineCoreOutput:
    output = EngineCoreOutput(
        request_id=message.request_id,
        attempt=message.attempt,
        offset=message.offset,
        new_token_ids=list(message.new_token_ids),
    )
    if message.HasField("new_logprobs"):
        output.new_logprobs = parts.logprobs_from_proto(message.new_logprobs)
    if message.HasField("new_prompt_logprobs"):
        output.new_prompt_logprobs = parts.logprobs_from_proto(message.new_prompt_logprobs)
    if message.HasField("prefill_stats"):
        output.prefill_stats = from_message(message.prefill_stats, PrefillStats)
    if message.events:
        output.events = [
            EngineCoreEvent(kind, event.timestamp)
            for event in message.events
            if (kind := _EVENT_TYPES.get(event.type)) is not None
        ]
    if message.num_nans_in_logits:
        output.num_nans_in_logits = message.num_nans_in_logits
    if message.HasField("spec_decoding_stats"):
        output.spec_decoding_stats = from_message(message.spec_decoding_stats, SpecDecodingStats)
    if message.finish_reason:
        # Treat an unknown finish reason as an error, because the request may not have ended normally.
        output.finish_reason = _FINISH_REASONS.get(message.finish_reason, FinishReason.ERROR)
        output.stop_reason = _stop_reason(message.stop_reason)
        if message.HasField("error"):
            output.error = from_message(message.error, RequestError)
    parts.read_kv(message, output)
    if message.HasField("pooling_output"):
        output.pooling_output = parts.vectors_from_proto(message.pooling_output, take)
    return output


def _stop_reason(message: finish_pb2.StopReason) -> int | str | None:
    which = message.WhichOneof("reason")
    return getattr(message, which) if which else None
