"""Requests of ``vllm.grpc.engine`` to the domain, and what their calls carry beside them."""

from collections.abc import Mapping, Sequence
from typing import Any

from smg_grpc_proto.generated import vllm_engine_pb2 as pb

from penstock_common.errors import InvalidArgument
from penstock_common.rpc.sampling import refuse_set
from penstock_common.types.pooling import PoolingParams, PoolingTask
from penstock_common.types.sampling import OutputKind, SamplingParams, StructuredOutput
from penstock_frontend.api.call_context import tenant_of_call
from penstock_frontend.api.vllm.context import context_of
from penstock_frontend.api.vllm.media import Anchor, with_references, with_tensors
from penstock_frontend.call_types import GenerateRequest, MixedPrompt, PoolingRequest

_NOT_SERVED_YET = ("kv_transfer_params",)
_PATH = "sampling_params"
_MAX_TOP_K = 2**31 - 1
_SAME_NAMES = [
    field
    for field in pb.SamplingParams.DESCRIPTOR.fields
    if field.name in SamplingParams.__struct_fields__ and not field.is_repeated
]
"""Fields of the contract that are parameters of ours by the same name; lists have another form."""


def generate_request(
    message: pb.GenerateRequest, *, metadata: Mapping[str, str], time_left: float | None, anchor: Anchor
) -> GenerateRequest:
    """The domain's request, but for what is said of keys and values. ``time_left``: seconds until the call's deadline.
    ``anchor``: of media that are given as references.

    Raises Unimplemented for fields of later features, InvalidArgument for what cannot be read.
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
        raise InvalidArgument(f"{field} is set beside text; it needs tokenized", field=field)
    if references and batches:
        raise InvalidArgument(f"media_refs is set beside {batches[0][1]}; set one", field="media_refs")
    if references:
        return with_references(message.tokenized.input_ids, message.media_refs, anchor)
    return with_tensors(message.tokenized.input_ids, batches)


def embed_request(message: pb.EmbedRequest, *, metadata: Mapping[str, str], time_left: float | None) -> PoolingRequest:
    """The domain's request for a vector. ``time_left`` and errors as of ``generate_request``."""
    if not message.HasField("tokenized"):
        raise InvalidArgument("tokenized is not set", field="tokenized")
    return PoolingRequest(
        inputs=[message.tokenized.input_ids],
        fields=["tokenized.input_ids"],
        params=PoolingParams(task=PoolingTask.EMBED),
        context=context_of(message, metadata, time_left),
    )


def call_details(context: Any) -> dict[str, Any]:
    """What a call carries beside its message: arguments of the functions above."""
    return {"metadata": _metadata(context), "time_left": context.time_remaining()}


def tenant_of(context: Any) -> str:
    """Whose requests a call is about."""
    return tenant_of_call(_metadata(context))


def _metadata(context: Any) -> dict[str, str]:
    return {key: value for key, value in context.invocation_metadata() or () if isinstance(value, str)}


def _sampling(message: pb.SamplingParams, *, stream: bool) -> dict[str, Any]:
    """All parameters, by the names of ``SamplingParams``: the model's own defaults are for the gateway to apply.

    Unset and 0 are the same for most fields of this contract: ``n``, ``top_p`` and ``repetition_penalty`` are 1 then.
    Text is made only for stop strings to be found: what is sent are token ids, all up to the one that completes a stop
    string, because gateways cut the text themselves, and a token may have a part of it. Raises InvalidArgument.
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
    if "seed" in unset:  # one is picked
        del values["seed"]
    return values


def _logit_bias(message: pb.SamplingParams) -> dict[int, float]:
    for token_id in message.logit_bias:
        if token_id < 0:
            raise InvalidArgument(
                f"{_PATH}.logit_bias is given for token id {token_id}; ids are not negative",
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
