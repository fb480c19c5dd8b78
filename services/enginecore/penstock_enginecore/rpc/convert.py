"""Messages of ``penstock.enginecore.v1`` to the domain and back, as the engine needs them."""

import time
from collections.abc import Sequence

import msgspec

from penstock.common.v1 import events_pb2, finish_pb2, stats_pb2
from penstock.enginecore.v1 import messages_pb2 as pb
from penstock_common.errors import InvalidArgument
from penstock_common.lora_registry import LoraAdapter
from penstock_common.rpc import outputs as parts
from penstock_common.rpc import request, stats
from penstock_common.rpc.data_parallel import checked
from penstock_common.rpc.kv_transfer import fill_kv, role_to_proto, source_from_proto
from penstock_common.rpc.outputs import fill_columns
from penstock_common.rpc.request import context_from_proto, limits_to_proto
from penstock_common.tensors.chunks import TensorRef
from penstock_common.types.media import MultiModalFeature
from penstock_common.types.outputs import EngineCoreOutput, EngineCoreOutputs, EngineReady, UtilityOutput
from penstock_common.types.prompt_embeds import PromptEmbeds
from penstock_common.types.request import NO_SAMPLING, EngineCoreRequest, ReasoningTokens

NOT_SERVED_YET = (
    "data_parallel_rank",
    "resumable",
)
"""Fields of a request whose feature comes later."""


def request_from_proto(
    message: pb.EngineCoreRequest, embeds: PromptEmbeds | None = None, features: Sequence[MultiModalFeature] = ()
) -> EngineCoreRequest:
    """The request; ``embeds``: the vectors of its prompt, ``features``: its media. Raises Unimplemented for a field of a later
    feature, InvalidArgument when there are no parameters.
    """
    request.refuse_set(message, NOT_SERVED_YET)
    kind = message.WhichOneof("params")
    if kind is None:
        raise InvalidArgument("sampling_params or pooling_params is required", field="sampling_params")
    pooling = parts.pooling_params_from_proto(message.pooling_params) if kind == "pooling_params" else None
    token_ids = list(message.prompt_token_ids)
    if embeds is not None and not token_ids:
        token_ids = [0] * embeds.num_tokens
    return EngineCoreRequest(
        request_id=message.request_id,
        prompt_token_ids=token_ids,
        prompt_embeds=embeds,
        mm_features=list(features),
        sampling_params=NO_SAMPLING if pooling else request.from_proto(message.sampling_params),
        pooling_params=pooling,
        lora=_lora(message),
        context=context_from_proto(message),
        current_wave=checked("current_wave", message.current_wave),
        group_epoch=message.group_epoch,
        attempt=message.attempt,
        never_admitted=message.never_admitted,
        prior_output_token_ids=list(message.prior_output_token_ids),
        second_text_start=message.second_text_start if message.HasField("second_text_start") else None,
        request_number=message.request_number,
        reasoning_ended=message.reasoning_ended if message.HasField("reasoning_ended") else None,
        reasoning_parser_kwargs=_reasoning(message.reasoning_parser_kwargs),
        prediction_token_ids=list(message.prediction_token_ids),
        kv_source=source_from_proto(message.kv_source) if message.HasField("kv_source") else None,
        handoff_after_tokens=message.handoff_after_tokens,
    )


def _lora(message: pb.EngineCoreRequest) -> LoraAdapter | None:
    if not message.HasField("lora"):
        return None
    return LoraAdapter(message.lora.name, message.lora.path, message.lora.digest)


def _reasoning(text: str) -> ReasoningTokens | None:
    if not text:
        return None
    try:
        return msgspec.json.decode(text, type=ReasoningTokens)
    except msgspec.DecodeError as e:
        raise InvalidArgument(f"reasoning_parser_kwargs: {e}", field="reasoning_parser_kwargs") from None


def draining_to_proto(time_left: float) -> pb.Draining:
    """The engine takes no new requests, and has so many seconds for what it has."""
    return pb.Draining(deadline=time.time() + time_left, time_left=time_left)


def outputs_to_proto(outputs: EngineCoreOutputs) -> pb.EngineCoreOutputs:
    """The frame of one step. Hot: called once per step and frontend."""
    message = pb.EngineCoreOutputs(
        engine_index=outputs.engine_index,
        outputs=[output_to_proto(output) for output in outputs.outputs],
        timestamp=outputs.timestamp,
        finished_requests=outputs.finished_requests,
        kv_events=[parts.kv_event_to_proto(event) for event in outputs.kv_events],
    )
    if outputs.tokens is not None:
        fill_columns(message.token_columns, outputs.tokens)
    if outputs.scheduler_stats is not None:
        message.scheduler_stats.CopyFrom(stats.to_proto(outputs.scheduler_stats))
    if outputs.utility_output is not None:
        message.utility_output.CopyFrom(utility_to_proto(outputs.utility_output))
    return message


def pooled_to_proto(output: EngineCoreOutput, ref: TensorRef | None) -> pb.EngineCoreOutputs:
    """The frame of one output whose vectors went ahead in chunks. ``ref``: where they are."""
    vectors = output.pooling_output
    alone = output_to_proto(msgspec.structs.replace(output, pooling_output=None))
    if vectors is not None:
        alone.pooling_output.CopyFrom(parts.vectors_to_proto(vectors, ref))
    return pb.EngineCoreOutputs(outputs=[alone], finished_requests=[output.request_id])


def output_to_proto(output: EngineCoreOutput) -> pb.EngineCoreOutput:
    """New tokens of one request."""
    message = pb.EngineCoreOutput(
        request_id=output.request_id,
        attempt=output.attempt,
        offset=output.offset,
        new_token_ids=output.new_token_ids,
        num_nans_in_logits=output.num_nans_in_logits,
    )
    if output.new_logprobs is not None:
        message.new_logprobs.CopyFrom(parts.logprobs_to_proto(output.new_logprobs))
    if output.new_prompt_logprobs is not None:
        message.new_prompt_logprobs.CopyFrom(parts.logprobs_to_proto(output.new_prompt_logprobs))
    if output.pooling_output is not None:
        message.pooling_output.CopyFrom(parts.vectors_to_proto(output.pooling_output))
    if output.finish_reason is not None:
        message.finish_reason = finish_pb2.FinishReason.ValueType(output.finish_reason)
        if isinstance(output.stop_reason, int):
            message.stop_reason.token_id = output.stop_reason
        elif output.stop_reason is not None:
            message.stop_reason.text = output.stop_reason
        if output.error is not None:
            message.error.CopyFrom(parts.error_to_proto(output.error))
    for event in output.events:
        message.events.add(type=events_pb2.EngineCoreEventType.ValueType(event.type), timestamp=event.timestamp)
    if output.prefill_stats is not None:
        message.prefill_stats.CopyFrom(stats_pb2.PrefillStats(**msgspec.structs.asdict(output.prefill_stats)))
    if output.spec_decoding_stats is not None:
        message.spec_decoding_stats.CopyFrom(stats.speculation_to_proto(output.spec_decoding_stats))
    fill_kv(message, output)
    return message


def utility_to_proto(output: UtilityOutput) -> pb.UtilityOutput:
    """The answer to a utility call."""
    if output.error is not None:
        return pb.UtilityOutput(call_id=output.call_id, error=parts.error_to_proto(output.error))
    return pb.UtilityOutput(call_id=output.call_id, result=output.result)


def ready_to_proto(ready: EngineReady, *, protocol_revision: int) -> pb.Ready:
    """The first message of the engine on a session."""
    lora = None if ready.lora is None else pb.LoraLimits(**msgspec.structs.asdict(ready.lora))
    return pb.Ready(
        engine_id=ready.engine_id,
        incarnation=ready.incarnation,
        max_model_len=ready.max_model_len,
        num_kv_blocks=ready.num_kv_blocks,
        block_size=ready.block_size,
        model=ready.model,
        revision=ready.revision,
        data_parallel_rank=ready.data_parallel_rank,
        data_parallel_size=ready.data_parallel_size,
        config_hash=ready.config_hash,
        config=ready.config,
        capabilities=ready.capabilities,
        vocab_size=ready.vocab_size,
        protocol_revision=protocol_revision,
        hidden_size=ready.hidden_size,
        embedding_size=ready.embedding_size,
        max_num_seqs=ready.max_num_seqs,
        max_message_bytes=ready.max_message_bytes,
        max_tensor_bytes=ready.max_tensor_bytes,
        lora=lora,
        receiver_cache_bytes=ready.receiver_cache_bytes,
        shared_memory_id=ready.shared_memory_id,
        media=limits_to_proto(ready.media),
        encoder_cache_size=ready.encoder_cache_size,
        role=role_to_proto(ready.role),
        kv_address=ready.kv_address,
        kv_fingerprint=ready.kv_fingerprint,
    )
