"""Messages of ``vllm.grpc.engine`` to the domain and back."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from smg_grpc_proto.generated import common_pb2
from smg_grpc_proto.generated import vllm_engine_pb2 as pb

from penstock_common.errors import InvalidArgument
from penstock_common.rpc import outputs as parts
from penstock_common.rpc.sampling import refuse_set
from penstock_common.types.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KvCacheEvent
from penstock_common.types.logprobs import Logprobs
from penstock_common.types.pooling import PoolingParams, PoolingTask
from penstock_frontend.api.call_context import context_of_call
from penstock_frontend.api.vllm.context import context_of
from penstock_frontend.api.vllm.sampling import sampling
from penstock_frontend.engine.kv_events import KvEventBatch
from penstock_frontend.live_request import LiveRequest
from penstock_frontend.processing.pooling.inputs import PoolingRequest, PoolingResult
from penstock_frontend.processing.prompts.request import Finish, GenerateRequest, RequestOutput

_NOT_SERVED_YET = ("kv_transfer_params", "kv_transfer_params_json", "mm_inputs", "extra_mm_inputs", "media_refs")
_HASH_BYTES = 8


def generate_request(
    message: pb.GenerateRequest, *, metadata: Mapping[str, str], time_left: float | None
) -> GenerateRequest:
    """The domain's request. ``time_left``: seconds until the call's deadline.

    Raises Unimplemented for fields of later features, InvalidArgument for what cannot be read.
    """
    refuse_set(message, _NOT_SERVED_YET)
    kind = message.WhichOneof("input")
    if kind is None:
        raise InvalidArgument("input is not set: give tokenized or text", field="input")
    return GenerateRequest(
        prompt=message.text if kind == "text" else message.tokenized.input_ids,
        sampling=sampling(message.sampling_params, stream=message.stream),
        context=context_of(message, metadata, time_left),
    )


def embed_request(message: pb.EmbedRequest, *, metadata: Mapping[str, str], time_left: float | None) -> PoolingRequest:
    """See ``generate_request``."""
    if not message.HasField("tokenized"):
        raise InvalidArgument("tokenized is not set", field="tokenized")
    return PoolingRequest(
        inputs=[message.tokenized.input_ids],
        fields=["tokenized.input_ids"],
        params=PoolingParams(task=PoolingTask.EMBED),
        context=context_of(message, metadata, time_left),
    )


def embed_response(result: PoolingResult) -> pb.EmbedResponse:
    """The message for one embedded input. Raises TypeError for a result without a vector."""
    (output,) = result.outputs
    if output.pooling_output is None:
        raise TypeError("an output without vectors is no answer")
    embedding = parts.floats(output.pooling_output)
    return pb.EmbedResponse(embedding=embedding, prompt_tokens=result.prompt_tokens, embedding_dim=len(embedding))


class GenerateResponses:
    """The messages for the outputs of one call.

    Streamed, each output is a chunk with what is new, and the last of each sequence is followed by its ``complete``, which
    repeats the tokens of that last chunk and has the counts of the whole. Otherwise there are only the ``complete``s, with
    everything. The prompt's log-probabilities come with the first message of sequence 0.
    """

    def __init__(self, request: GenerateRequest, live: LiveRequest, *, stream: bool) -> None:
        self._live = live
        self._stream = stream
        self._top: int | None = request.sampling["logprobs"]
        self._prompt_top: int | None = request.sampling["prompt_logprobs"]

    def of(self, output: RequestOutput) -> Iterator[pb.GenerateResponse]:
        """The messages for an output."""
        if self._stream:
            yield pb.GenerateResponse(chunk=self._chunk(output))
        if output.finish is not None:
            yield pb.GenerateResponse(complete=self._complete(output, output.finish))

    def _chunk(self, output: RequestOutput) -> pb.GenerateStreamChunk:
        return pb.GenerateStreamChunk(
            token_ids=output.token_ids,
            prompt_tokens=len(self._live.prompt_token_ids),
            completion_tokens=len(output.token_ids),
            cached_tokens=self._live.states[output.index].num_cached,
            output_logprobs=_output_logprobs(output.logprobs, self._top),
            input_logprobs=_input_logprobs(output.prompt_logprobs, self._live.prompt_token_ids, self._prompt_top),
            index=output.index,
        )

    def _complete(self, output: RequestOutput, finish: Finish) -> pb.GenerateComplete:
        prompt_logprobs = None if self._stream else output.prompt_logprobs
        complete = pb.GenerateComplete(
            output_ids=output.token_ids,
            finish_reason=finish.reason.name.lower(),
            prompt_tokens=finish.usage.prompt_tokens,
            completion_tokens=finish.usage.completion_tokens,
            cached_tokens=finish.usage.cached_tokens,
            output_logprobs=_output_logprobs(output.logprobs, self._top),
            input_logprobs=_input_logprobs(prompt_logprobs, self._live.prompt_token_ids, self._prompt_top),
            index=output.index,
        )
        if isinstance(finish.stop_reason, str):
            complete.matched_stop_str = finish.stop_reason
        elif finish.stop_reason is not None:
            complete.matched_token_id = finish.stop_reason
        return complete


def kv_event_batch(batch: KvEventBatch, first_id: int) -> common_pb2.KvEventBatch:
    """The message for changes of a prefix cache, whose events are numbered from ``first_id``."""
    return common_pb2.KvEventBatch(
        sequence_number=batch.sequence,
        timestamp=batch.timestamp,
        dp_rank=batch.rank,
        events=[_kv_event(event, first_id + index) for index, event in enumerate(batch.events)],
    )


def _kv_event(event: KvCacheEvent, event_id: int) -> common_pb2.KvCacheEvent:
    match event:
        case BlockStored():
            return common_pb2.KvCacheEvent(event_id=event_id, stored=_stored(event))
        case BlockRemoved():
            removed = common_pb2.KvBlocksRemoved(block_hashes=[_folded(each) for each in event.block_hashes])
            return common_pb2.KvCacheEvent(event_id=event_id, removed=removed)
        case AllBlocksCleared():
            return common_pb2.KvCacheEvent(event_id=event_id, cleared=common_pb2.KvCacheCleared())


def _stored(event: BlockStored) -> common_pb2.KvBlocksStored:
    size = event.block_size
    stored = common_pb2.KvBlocksStored(
        blocks=[
            common_pb2.KvBlock(
                block_hash=_folded(block_hash),
                token_ids=event.token_ids[index * size : (index + 1) * size],
                block_size=size,
            )
            for index, block_hash in enumerate(event.block_hashes)
        ]
    )
    if event.parent_hash:
        stored.parent_block_hash = _folded(event.parent_hash)
    return stored


def _folded(block_hash: bytes) -> int:
    """The last eight bytes of a digest as a signed integer: what this contract names a block by."""
    return int.from_bytes(block_hash[-_HASH_BYTES:], "big", signed=True)


def _output_logprobs(logprobs: Logprobs | None, top: int | None) -> pb.OutputLogProbs | None:
    if logprobs is None:
        return None
    starts = logprobs.offsets[:-1]
    return pb.OutputLogProbs(
        token_logprobs=[logprobs.logprobs[start] for start in starts],
        token_ids=[logprobs.token_ids[start] for start in starts],
        top_logprobs=_top_logprobs(logprobs) if top else (),
    )


def _input_logprobs(
    logprobs: Logprobs | None, prompt_token_ids: Sequence[int], top: int | None
) -> pb.InputLogProbs | None:
    """One position per prompt token; the first has no log-probability."""
    if logprobs is None:
        return None
    values = [pb.InputTokenLogProb(value=logprobs.logprobs[start]) for start in logprobs.offsets[:-1]]
    return pb.InputLogProbs(
        token_logprobs=[pb.InputTokenLogProb(), *values],
        token_ids=prompt_token_ids[: len(values) + 1],
        top_logprobs=[pb.TopLogProbs(), *_top_logprobs(logprobs)] if top else (),
    )


def _top_logprobs(logprobs: Logprobs) -> list[pb.TopLogProbs]:
    """The likeliest tokens of each position: its entries but the first, which is the chosen token."""
    return [
        pb.TopLogProbs(values=logprobs.logprobs[start + 1 : stop], token_ids=logprobs.token_ids[start + 1 : stop])
        for start, stop in zip(logprobs.offsets, logprobs.offsets[1:], strict=False)
    ]


def call_details(context: Any) -> dict[str, Any]:
    """What a call carries beside its message: arguments of the functions above."""
    return {"metadata": _metadata(context), "time_left": context.time_remaining()}


def tenant_of(context: Any) -> str:
    """Whose requests a call is about."""
    return context_of_call(_metadata(context)).tenant


def _metadata(context: Any) -> dict[str, str]:
    return {key: value for key, value in context.invocation_metadata() or () if isinstance(value, str)}
