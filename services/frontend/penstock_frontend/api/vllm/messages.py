"""Conversion between ``vllm.grpc.engine`` messages and domain types, for requests, outputs, and embeddings."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec
from smg_grpc_proto.generated import vllm_engine_pb2 as pb

from penstock_common.errors import InvalidArgument
from penstock_common.rpc import outputs as parts
from penstock_common.rpc.request import refuse_set
from penstock_common.types.outputs import Logprobs
from penstock_common.types.request import PoolingParams, PoolingTask, RequestContext
from penstock_common.types.sampling import OutputKind, SamplingParams, StructuredOutput
from penstock_frontend.api.call_context import context_of_call, deadline_after, tenant_of_call
from penstock_frontend.api.vllm.media import Anchor, with_references, with_tensors
from penstock_frontend.call_types import (
    Finish,
    GenerateRequest,
    MixedPrompt,
    PoolingRequest,
    PoolingResult,
    RequestOutput,
)
from penstock_frontend.calls.live_request import LiveRequest
from penstock_frontend.dispatch.kv_gateway import answer_of


def context_of(
    message: pb.GenerateRequest | pb.EmbedRequest, metadata: Mapping[str, str], time_left: float | None
) -> RequestContext:
    """Return the request context of a message and its call. Raises InvalidArgument if a field or a header of the call
    is not valid.

    ``time_left`` is the number of seconds until the deadline of the call.
    """
    context = msgspec.structs.replace(
        context_of_call(metadata, deadline=deadline_after(time_left)), external_request_id=message.request_id
    )
    if isinstance(message, pb.GenerateRequest) and message.HasField("data_parallel_rank"):
        context = msgspec.structs.replace(context, data_parallel_rank=_rank(message.data_parallel_rank))
    return context


def _rank(rank: int) -> int:
    if rank < 0:
        raise InvalidArgument(
            f"data_parallel_rank is {rank}; it must be at least 0, or unset for any engine",
            field="data_parallel_rank",
        )
    return rank


_NOT_SERVED_YET = ("kv_transfer_params",)
_PATH = "sampling_params"
_MAX_TOP_K = 2**31 - 1
_SAME_NAMES = [
    field
    for field in pb.SamplingParams.DESCRIPTOR.fields
    if field.name in SamplingParams.__struct_fields__ and not field.is_repeated
]
"""Fields of the protocol that have the same name in SamplingParams. Lists are not included, because their types differ."""


def generate_request(
    message: pb.GenerateRequest, *, metadata: Mapping[str, str], time_left: float | None, anchor: Anchor
) -> GenerateRequest:
    """Return the request of a message as a domain type, without KV transfer parameters.

    Args:
        message: the message with the request.
        metadata: the call's metadata.
        time_left: seconds until the call's deadline, or None.
        anchor: function that returns the anchor token of media items that are given as references.

    Raises:
        Unimplemented: a field is not supported yet.
        InvalidArgument: a field is not valid.
    """
    refuse_set(message, _NOT_SERVED_YET)
    kind = message.WhichOneof("input")
    if kind is None:
        raise InvalidArgument("input is not set: give tokenized or text", field="input")
    return GenerateRequest(
        prompt=_prompt(message, kind, anchor),
        sampling=_sampling(message.sampling_params, stream=message.stream),
        context=context_of(message, metadata, time_left),
    )


def _prompt(message: pb.GenerateRequest, kind: str, anchor: Anchor) -> str | Sequence[int] | MixedPrompt:
    batches = [(message.mm_inputs, "mm_inputs")] if message.HasField("mm_inputs") else []
    batches += [(each, f"extra_mm_inputs[{index}]") for index, each in enumerate(message.extra_mm_inputs)]
    references = message.HasField("media_refs") and len(message.media_refs.items) > 0
    if not batches and not references:
        prompt: str | Sequence[int] = message.text if kind == "text" else message.tokenized.input_ids
        return prompt
    field = "media_refs" if references else batches[0][1]
    if kind == "text":
        raise InvalidArgument(f"{field} is set, but the input is text; send tokenized input instead", field=field)
    if references and batches:
        raise InvalidArgument(f"media_refs and {batches[0][1]} are both set; set only one", field="media_refs")
    if references:
        return with_references(message.tokenized.input_ids, message.media_refs, anchor)
    return with_tensors(message.tokenized.input_ids, batches)


def embed_request(message: pb.EmbedRequest, *, metadata: Mapping[str, str], time_left: float | None) -> PoolingRequest:
    """Return the request for an embedding as a domain type. ``time_left`` and the errors are the same as in
    ``generate_request``.
    """
    if not message.HasField("tokenized"):
        raise InvalidArgument("tokenized is not set", field="tokenized")
    return PoolingRequest(
        inputs=[message.tokenized.input_ids],
        fields=["tokenized.input_ids"],
        params=PoolingParams(task=PoolingTask.EMBED),
        context=context_of(message, metadata, time_left),
    )


def call_details(context: Any) -> dict[str, Any]:
    """Return the metadata and the remaining time of a call, as keyword arguments for ``generate_request``."""
    return {"metadata": _metadata(context), "time_left": context.time_remaining()}


def tenant_of(context: Any) -> str:
    """Return the tenant of a call."""
    return tenant_of_call(_metadata(context))


def _metadata(context: Any) -> dict[str, str]:
    return {key: value for key, value in context.invocation_metadata() or () if isinstance(value, str)}


def _sampling(message: pb.SamplingParams, *, stream: bool) -> dict[str, Any]:
    """Return all sampling parameters of a message, by the names of ``SamplingParams``. The gateway has applied the
    model's own defaults.

    In this protocol, 0 means unset for most fields. Unset ``n``, ``top_p`` and ``repetition_penalty`` are 1. The answer
    has only token ids. Text is produced only to find stop strings. The token that completes a stop string is included,
    because gateways cut the text themselves and the token may begin before the stop string. Raises InvalidArgument if a
    parameter is not valid.
    """
    stop = tuple(message.stop)
    unset = {field.name for field in _SAME_NAMES if field.has_presence and not message.HasField(field.name)}
    values = {field.name: None if field.name in unset else getattr(message, field.name) for field in _SAME_NAMES}
    values |= {
        "n": message.n or 1,
        "temperature": 1.0 if "temperature" in unset else message.temperature,
        "top_p": message.top_p or 1.0,
        "top_k": min(message.top_k, _MAX_TOP_K),
        "repetition_penalty": message.repetition_penalty or 1.0,
        "stop": stop,
        "include_stop_str_in_output": True,
        "stop_token_ids": tuple(message.stop_token_ids),
        "logit_bias": _logit_bias(message),
        "structured_output": _constraint(message),
        "detokenize": bool(stop),
        "output_kind": OutputKind.DELTA if stream else OutputKind.FINAL,
    }
    if "seed" in unset:  # the frontend picks a random seed
        del values["seed"]
    return values


def _logit_bias(message: pb.SamplingParams) -> dict[int, float]:
    for token_id in message.logit_bias:
        if token_id < 0:
            raise InvalidArgument(
                f"{_PATH}.logit_bias has token id {token_id}; token ids must be at least 0",
                field=f"{_PATH}.logit_bias",
            )
    return dict(message.logit_bias)


def _constraint(message: pb.SamplingParams) -> StructuredOutput | None:
    kind = message.WhichOneof("constraint")
    if kind is None or (kind == "json_object" and not message.json_object):
        return None
    if kind == "choice":
        return StructuredOutput(choice=tuple(message.choice.choices))
    constraint: dict[str, Any] = {kind: getattr(message, kind)}
    return StructuredOutput(**constraint)


# The code below converts outputs and embeddings to messages.


def embed_response(result: PoolingResult) -> pb.EmbedResponse:
    """Return the message for the embedding in a result. Raises TypeError for a result without an embedding."""
    (output,) = result.outputs
    if output.pooling_output is None:
        raise TypeError("the pooling output has no embedding")
    embedding = parts.floats(output.pooling_output)
    return pb.EmbedResponse(embedding=embedding, prompt_tokens=result.prompt_tokens, embedding_dim=len(embedding))


class GenerateResponses:
    """Makes the messages for the outputs of one call.

    In a stream, each output becomes a chunk with the new tokens. After the last chunk of a sequence comes its
    ``complete`` message, which repeats the tokens of that chunk and has the total counts. If the call is not a stream,
    the answer has only ``complete`` messages, with all tokens. The first message of sequence 0 has the prompt's
    log-probabilities.
    """

    def __init__(self, request: GenerateRequest, live: LiveRequest, *, stream: bool) -> None:
        self._live = live
        self._stream = stream
        self._top: int | None = request.sampling["logprobs"]
        self._prompt_top: int | None = request.sampling["prompt_logprobs"]

    def of(self, output: RequestOutput) -> Iterator[pb.GenerateResponse]:
        """Yield the messages for one output."""
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
        if (said := answer_of(finish)) is not None:
            complete.kv_transfer_params_json = msgspec.json.encode(said).decode()
        if isinstance(finish.stop_reason, str):
            complete.matched_stop_str = finish.stop_reason
        elif finish.stop_reason is not None:
            complete.matched_token_id = finish.stop_reason
        return complete


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
    """Return the log-probability of each prompt token, one per position. The first position has no log-probability."""
    if logprobs is None:
        return None
    values = [pb.InputTokenLogProb(value=logprobs.logprobs[start]) for start in logprobs.offsets[:-1]]
    return pb.InputLogProbs(
        token_logprobs=[pb.InputTokenLogProb(), *values],
        token_ids=prompt_token_ids[: len(values) + 1],
        top_logprobs=[pb.TopLogProbs(), *_top_logprobs(logprobs)] if top else (),
    )


def _top_logprobs(logprobs: Logprobs) -> list[pb.TopLogProbs]:
    """Return the most likely tokens of each position. The first entry of each position is left out, because it is the
    chosen token.
    """
    return [
        pb.TopLogProbs(values=logprobs.logprobs[start + 1 : stop], token_ids=logprobs.token_ids[start + 1 : stop])
        for start, stop in zip(logprobs.offsets, logprobs.offsets[1:], strict=False)
    ]
