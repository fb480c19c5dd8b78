"""Conversion between messages of ``penstock.enginecore.v1`` and domain types."""

import time
from collections.abc import Sequence

import msgspec

from penstock.common.v1 import events_pb2, finish_pb2, logprobs_pb2, stats_pb2
from penstock.enginecore.v1 import messages_pb2 as pb
from penstock_common.errors import InvalidArgument
from penstock_common.rpc import outputs as parts
from penstock_common.rpc import request
from penstock_common.rpc.by_field import from_message, to_message
from penstock_common.rpc.data_parallel import checked
from penstock_common.tensors.chunks import TensorRef
from penstock_common.types.media import MultiModalFeature
from penstock_common.types.outputs import EngineCoreOutput, EngineCoreOutputs
from penstock_common.types.prompt_embeds import PromptEmbeds
from penstock_common.types.request import NO_SAMPLING, EngineCoreRequest, PoolingParams, ReasoningTokens

NOT_SERVED_YET = (
    "data_parallel_rank",
    "resumable",
)
"""Names of request fields for features that are not supported yet."""


def request_from_proto(
    message: pb.EngineCoreRequest, embeds: PromptEmbeds | None = None, features: Sequence[MultiModalFeature] = ()
) -> EngineCoreRequest:
    """Convert a request message to the domain type. ``embeds`` has the request's prompt embeddings, and ``features``
    has its media items.

    Raises Unimplemented if a field that is not supported yet is set. Raises InvalidArgument if the request has neither
    sampling nor pooling parameters.
    """
    request.refuse_set(message, NOT_SERVED_YET)
    kind = message.WhichOneof("params")
    if kind is None:
        raise InvalidArgument(
            "the request has neither sampling_params nor pooling_params; set one of them", field="sampling_params"
        )
    pooling = from_message(message.pooling_params, PoolingParams, kind) if kind == "pooling_params" else None
    token_ids = list(message.prompt_token_ids)
    if embeds is not None and not token_ids:
        token_ids = [0] * embeds.num_tokens
    return from_message(
        message,
        EngineCoreRequest,
        prompt_token_ids=token_ids,
        prompt_embeds=embeds,
        mm_features=list(features),
        sampling_params=NO_SAMPLING if pooling else request.from_proto(message.sampling_params),
        pooling_params=pooling,
        context=request.context_from_proto(message),
        current_wave=checked("current_wave", message.current_wave),
        reasoning_parser_kwargs=_reasoning(message.reasoning_parser_kwargs),
    )


def _reasoning(text: str) -> ReasoningTokens | None:
    if not text:
        return None
    try:
        return msgspec.json.decode(text, type=ReasoningTokens)
    except msgspec.DecodeError as e:
        raise InvalidArgument(f"reasoning_parser_kwargs: {e}", field="reasoning_parser_kwargs") from None


def draining_to_proto(time_left: float) -> pb.Draining:
    """Return the message that tells that the engine refuses new requests. Running requests end after ``time_left``
    seconds.
    """
    return pb.Draining(deadline=time.time() + time_left, time_left=time_left)


def outputs_to_proto(outputs: EngineCoreOutputs) -> pb.EngineCoreOutputs:
    """Return the frame (message) with the outputs of one step for one frontend. The function is a hot path: it runs
    once per step and frontend.
    """
    message = pb.EngineCoreOutputs(
        engine_index=outputs.engine_index,
        outputs=[output_to_proto(output) for output in outputs.outputs],
        timestamp=outputs.timestamp,
        finished_requests=outputs.finished_requests,
        kv_events=[parts.kv_event_to_proto(event) for event in outputs.kv_events],
    )
    if outputs.tokens is not None:
        parts.fill_columns(message.token_columns, outputs.tokens)
    if outputs.scheduler_stats is not None:
        message.scheduler_stats.CopyFrom(to_message(outputs.scheduler_stats, stats_pb2.SchedulerStats))
    if outputs.utility_output is not None:
        message.utility_output.CopyFrom(to_message(outputs.utility_output, pb.UtilityOutput))
    return message


def pooled_to_proto(output: EngineCoreOutput, ref: TensorRef | None) -> pb.EngineCoreOutputs:
    """Return the frame (message) with one pooling output whose vectors were already sent in chunks. ``ref`` refers to
    the chunks.
    """
    vectors = output.pooling_output
    alone = output_to_proto(msgspec.structs.replace(output, pooling_output=None))
    if vectors is not None:
        alone.pooling_output.CopyFrom(parts.vectors_to_proto(vectors, ref))
    return pb.EngineCoreOutputs(outputs=[alone], finished_requests=[output.request_id])


def output_to_proto(output: EngineCoreOutput) -> pb.EngineCoreOutput:
    """Convert the output of one request to a message."""
    message = pb.EngineCoreOutput(
        request_id=output.request_id,
        attempt=output.attempt,
        offset=output.offset,
        new_token_ids=output.new_token_ids,
        num_nans_in_logits=output.num_nans_in_logits,
    )
    if output.new_logprobs is not None:
        message.new_logprobs.CopyFrom(to_message(output.new_logprobs, logprobs_pb2.Logprobs))
    if output.new_prompt_logprobs is not None:
        message.new_prompt_logprobs.CopyFrom(to_message(output.new_prompt_logprobs, logprobs_pb2.Logprobs))
    if output.pooling_output is not None:
        message.pooling_output.CopyFrom(parts.vectors_to_proto(output.pooling_output))
    if output.finish_reason is not None:
        message.finish_reason = finish_pb2.FinishReason.ValueType(output.finish_reason)
        if isinstance(output.stop_reason, int):
            message.stop_reason.token_id = output.stop_reason
        elif output.stop_reason is not None:
            message.stop_reason.text = output.stop_reason
        if output.error is not None:
            message.error.CopyFrom(to_message(output.error, finish_pb2.RequestError))
    for event in output.events:
        message.events.add(type=events_pb2.EngineCoreEventType.ValueType(event.type), timestamp=event.timestamp)
    if output.prefill_stats is not None:
        message.prefill_stats.CopyFrom(to_message(output.prefill_stats, stats_pb2.PrefillStats))
    if output.spec_decoding_stats is not None:
        message.spec_decoding_stats.CopyFrom(to_message(output.spec_decoding_stats, stats_pb2.SpecDecodingStats))
    parts.fill_kv(message, output)
    return message
