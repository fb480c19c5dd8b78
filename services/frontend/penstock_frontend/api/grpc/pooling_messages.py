"""Embed, Classify and Score: messages to the domain and back."""

from collections.abc import Iterable, Mapping, Sequence

from penstock.common.v1 import pooling_pb2, stats_pb2
from penstock.inference.v1 import messages_pb2 as pb
from penstock_common.errors import InvalidArgument, Unimplemented
from penstock_common.rpc import outputs as parts
from penstock_common.types.pooling import PoolingParams, PoolingTask
from penstock_common.types.prompt_embeds import PromptEmbeds
from penstock_frontend.api.grpc import message_parts
from penstock_frontend.api.grpc.context import context_of
from penstock_frontend.api.grpc.media_messages import mixed_prompt
from penstock_frontend.call_types import (
    PoolingPrompt,
    PoolingRequest,
    PoolingResult,
    Prompt,
    ScoreRequest,
    ScoreResult,
    Usage,
)
from penstock_frontend.config import LimitsConfig
from penstock_frontend.processing.pooling.outputs import vectors_of

_EMBED_TASKS = (PoolingTask.EMBED, PoolingTask.TOKEN_EMBED)
_CLASSIFY_TASKS = (PoolingTask.CLASSIFY, PoolingTask.TOKEN_CLASSIFY)


def embed_request(
    message: pb.EmbedRequest, *, metadata: Mapping[str, str], time_left: float | None, limits: LimitsConfig
) -> PoolingRequest:
    """The domain's request. ``time_left``: seconds until the call's deadline. Raises InvalidArgument or Unimplemented."""
    params = _params(message.pooling_params, _EMBED_TASKS, meaningless=("use_activation",))
    inputs, fields = _inputs(message.inputs, limits)
    return PoolingRequest(inputs=inputs, fields=fields, params=params, context=context_of(message, metadata, time_left))


def classify_request(
    message: pb.ClassifyRequest, *, metadata: Mapping[str, str], time_left: float | None, limits: LimitsConfig
) -> PoolingRequest:
    """The domain's request, for classes. ``time_left`` and errors as of ``embed_request``."""
    params = _params(message.pooling_params, _CLASSIFY_TASKS, meaningless=("dimensions", "normalize"))
    inputs, fields = _inputs(message.inputs, limits)
    return PoolingRequest(inputs=inputs, fields=fields, params=params, context=context_of(message, metadata, time_left))


def score_request(message: pb.ScoreRequest, *, metadata: Mapping[str, str], time_left: float | None) -> ScoreRequest:
    """The domain's request. ``time_left`` and errors as of ``embed_request``."""
    query, query_field = _plain(message.query, "query")
    documents = [_plain(each, f"documents[{index}]") for index, each in enumerate(message.documents)]
    return ScoreRequest(
        queries=[query],
        query_fields=[query_field],
        documents=[document for document, _ in documents],
        document_fields=[field for _, field in documents],
        context=context_of(message, metadata, time_left),
    )


def embed_response(result: PoolingResult, request_id: str) -> pb.EmbedResponse:
    """The message for embedded inputs."""
    return pb.EmbedResponse(
        request_id=request_id,
        embeddings=[parts.vectors_to_proto(vectors_of(output)) for output in result.outputs],
        usage=_usage(result),
    )


def classify_response(
    result: PoolingResult, request_id: str, *, per_token: bool, labels: Sequence[str]
) -> pb.ClassifyResponse:
    """The message for classified inputs."""
    response = pb.ClassifyResponse(request_id=request_id, usage=_usage(result))
    for output in result.outputs:
        vectors = vectors_of(output)
        if per_token:
            response.scores.add(token_probabilities=parts.vectors_to_proto(vectors))
            continue
        probabilities = parts.floats(vectors)
        best = max(range(len(probabilities)), key=probabilities.__getitem__)
        response.scores.add(probabilities=probabilities, label=labels[best] if best < len(labels) else "")
    return response


def score_response(result: ScoreResult) -> pb.ScoreResponse:
    """The message for scored pairs."""
    usage = message_parts.usage(Usage(prompt_tokens=result.prompt_tokens))
    return pb.ScoreResponse(request_id=result.request_id, scores=result.scores, usage=usage)


def _params(
    message: pooling_pb2.PoolingParams, tasks: tuple[PoolingTask, PoolingTask], *, meaningless: tuple[str, ...]
) -> PoolingParams:
    """The parameters; an unset task is the first of ``tasks``."""
    for field, value in message.ListFields():
        if field.name in meaningless:
            raise InvalidArgument(
                f"pooling_params.{field.name} is {value}; it means nothing to this call",
                field=f"pooling_params.{field.name}",
            )
    given = pooling_pb2.PoolingParams()
    given.CopyFrom(message)
    if not given.task:
        given.task = pooling_pb2.PoolingTask.ValueType(tasks[0])
    params = parts.pooling_params_from_proto(given)
    if params.task not in tasks:
        raise InvalidArgument(
            f"pooling_params.task is {params.task.name}; this call serves {' and '.join(task.name for task in tasks)}",
            field="pooling_params.task",
        )
    return params


def _usage(result: PoolingResult) -> stats_pb2.Usage:
    return message_parts.usage(Usage(prompt_tokens=result.prompt_tokens, media_tokens=result.media_tokens))


def _inputs(inputs: Iterable[pb.PoolingInput], limits: LimitsConfig) -> tuple[list[PoolingPrompt], list[str]]:
    """The inputs and the names of their fields."""
    found = [_input(each, f"inputs[{index}]", limits) for index, each in enumerate(inputs)]
    return [prompt for prompt, _ in found], [field for _, field in found]


def _input(message: pb.PoolingInput, path: str, limits: LimitsConfig) -> tuple[PoolingPrompt, str]:
    if message.WhichOneof("input") != "mixed":
        return _plain(message, path, "text, token_ids or mixed")
    prompt = mixed_prompt(message.mixed, f"{path}.mixed", limits)
    for part, field in zip(prompt.parts, prompt.fields, strict=True):
        if isinstance(part, PromptEmbeds):
            raise Unimplemented(f"{field} is set; vectors are not served as inputs", field=field)
    return prompt, f"{path}.mixed"


def _plain(message: pb.PoolingInput, path: str, choices: str = "text or token_ids") -> tuple[Prompt, str]:
    """The text or the token ids, and the name of their field."""
    match message.WhichOneof("input"):
        case "text":
            return message.text, f"{path}.text"
        case "token_ids":
            return message.token_ids.ids, f"{path}.token_ids.ids"
        case "mixed":
            raise Unimplemented(f"{path}.mixed is not served; scores are of texts", field=f"{path}.mixed")
        case _:
            raise InvalidArgument(f"{path} is not set: give {choices}", field=path)
