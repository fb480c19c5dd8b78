"""Conversion between ``penstock.inference.v1`` messages and domain types, for the calls Generate, Chat, Embed, Classify
and Score.
"""

from collections.abc import Iterable, Mapping, Sequence

from penstock.common.v1 import pooling_pb2, stats_pb2
from penstock.inference.v1 import messages_pb2 as pb
from penstock_common.errors import InvalidArgument, Unimplemented
from penstock_common.rpc import outputs as parts
from penstock_common.rpc.by_field import from_message, to_message
from penstock_common.rpc.outputs import prompt_embeds_from_proto
from penstock_common.rpc.request import set_fields
from penstock_common.types.prompt_embeds import PromptEmbeds
from penstock_common.types.request import PoolingParams, PoolingTask
from penstock_frontend.api.grpc.message_parts import (
    add_finish,
    context_of,
    media_part,
    mixed_prompt,
    object_of,
    prediction_of,
)
from penstock_frontend.call_types import (
    ChatMessage,
    ChatRequest,
    ContentPart,
    GenerateRequest,
    MixedPrompt,
    PoolingPrompt,
    PoolingRequest,
    PoolingResult,
    Prompt,
    RequestOutput,
    ScoreRequest,
    ScoreResult,
    Tool,
    ToolCall,
)
from penstock_frontend.config import LimitsConfig
from penstock_frontend.processing.chat.answers import ChatOutput
from penstock_frontend.processing.chat.histories import warn_of_lost_calls
from penstock_frontend.processing.chat.tool_choice import named_choice
from penstock_frontend.processing.outputs.pooling import vectors_of
from penstock_frontend.processing.prompts.named_prompts import NamedPrompts, num_queries_of
from penstock_frontend.processing.prompts.sampling_params import check_conversation, check_count, check_lists

# The code below converts messages of Generate and GenerateSession.


def generate_request(
    message: pb.GenerateRequest, *, metadata: Mapping[str, str], time_left: float | None, limits: LimitsConfig
) -> GenerateRequest:
    """Return the request of a message as a domain type. ``time_left`` is the number of seconds until the call's
    deadline.

    Raises InvalidArgument for fields that are not valid, and for lists that are too long.
    """
    check_lists(message.sampling_params, limits)
    return GenerateRequest(
        prompt=_prompt(message, limits),
        sampling=set_fields(message.sampling_params),
        add_special_tokens=message.add_special_tokens if message.HasField("add_special_tokens") else True,
        prediction=prediction_of(message),
        context=context_of(message, metadata, time_left),
    )


def _prompt(message: pb.GenerateRequest, limits: LimitsConfig) -> str | Sequence[int] | MixedPrompt:
    match message.WhichOneof("prompt"):
        case "text":
            return message.text
        case "token_ids":
            return message.token_ids.ids
        case "embeds":
            return MixedPrompt((prompt_embeds_from_proto(message.embeds, path="embeds"),), ("embeds",))
        case "mixed":
            return mixed_prompt(message.mixed, "mixed", limits)
        case _:
            raise InvalidArgument("prompt is not set: give text, token_ids, embeds or mixed", field="prompt")


def generate_response(output: RequestOutput, request_id: str) -> pb.GenerateResponse:
    """Return the message for a piece of output."""
    message = to_message(output, pb.GenerateResponse, request_id=request_id)
    if output.finish is not None:
        add_finish(message, output.finish)
    return message


# The code below converts messages of Chat.


def chat_request(
    message: pb.ChatRequest, *, metadata: Mapping[str, str], time_left: float | None, limits: LimitsConfig
) -> ChatRequest:
    """Return the request of a message as a domain type. ``time_left`` is the number of seconds until the call's
    deadline.

    Raises InvalidArgument for fields that are not valid, and for lists that are too long.
    """
    check_conversation(message.messages, message.tools, limits)
    for index, each in enumerate(message.messages):
        check_count(f"messages[{index}].parts", len(each.parts), limits, "max_content_parts")
    check_lists(message.sampling_params, limits)
    choice, named = _choice(message)
    messages = [_message(each, f"messages[{index}]") for index, each in enumerate(message.messages)]
    warn_of_lost_calls(messages, [f"messages[{index}]" for index in range(len(messages))])
    return ChatRequest(
        messages=messages,
        tools=[_tool(each, f"tools[{index}]") for index, each in enumerate(message.tools)],
        tool_choice=choice,
        named_tool=named,
        add_generation_prompt=message.add_generation_prompt if message.HasField("add_generation_prompt") else True,
        continue_final_message=message.continue_final_message,
        template_kwargs=object_of(message.chat_template_kwargs, "chat_template_kwargs") or {},
        sampling=set_fields(message.sampling_params),
        prediction=prediction_of(message),
        context=context_of(message, metadata, time_left),
    )


def chat_response(output: ChatOutput, request_id: str) -> pb.ChatResponse:
    """Return the message for a piece of an answer."""
    message = to_message(output, pb.ChatResponse, request_id=request_id)
    if output.finish is not None:
        add_finish(message, output.finish)
    return message


def _message(message: pb.ChatMessage, path: str) -> ChatMessage:
    if message.parts and message.content:
        raise InvalidArgument(f"{path}.parts and content are both set; set only one", field=f"{path}.parts")
    return ChatMessage(
        role=message.role,
        content=[_part(part, f"{path}.parts[{index}]") for index, part in enumerate(message.parts)] or message.content,
        tool_calls=[from_message(call, ToolCall) for call in message.tool_calls],
        tool_call_id=message.tool_call_id,
        reasoning=message.reasoning,
    )


def _part(part: pb.ContentPart, path: str) -> ContentPart:
    match part.WhichOneof("part"):
        case "text":
            return ContentPart(type="text", text=part.text)
        case "media":
            return ContentPart(type="media", media=media_part(part.media, f"{path}.media"))
        case _:
            raise InvalidArgument(f"{path} is not set: give text or media", field=path)


def _tool(tool: pb.Tool, path: str) -> Tool:
    return Tool(
        name=tool.name, description=tool.description, parameters=object_of(tool.parameters, f"{path}.parameters")
    )


def _choice(message: pb.ChatRequest) -> tuple[str, str]:
    """Return the tool choice of a message, as the domain values ``tool_choice`` and ``named_tool``."""
    if not message.HasField("tool_choice"):
        return "auto", ""
    which = message.tool_choice.WhichOneof("choice")
    if which is None:
        raise InvalidArgument("tool_choice has neither mode nor function; set one of them", field="tool_choice")
    if which == "mode":
        return message.tool_choice.mode, ""
    return named_choice(message.tool_choice.function, field="tool_choice.function")


# The code below converts messages of Embed, Classify and Score.

_EMBED_TASKS = (PoolingTask.EMBED, PoolingTask.TOKEN_EMBED, PoolingTask.SPARSE_EMBED)
_CLASSIFY_TASKS = (PoolingTask.CLASSIFY, PoolingTask.TOKEN_CLASSIFY)


def embed_request(
    message: pb.EmbedRequest,
    *,
    metadata: Mapping[str, str],
    time_left: float | None,
    limits: LimitsConfig,
    prompts: NamedPrompts,
) -> PoolingRequest:
    """Return the request of a message as a domain type. ``time_left`` is the number of seconds until the call's
    deadline, and ``prompts`` are the model's prompts. Raises InvalidArgument and Unimplemented.
    """
    params = _params(message.pooling_params, _EMBED_TASKS, meaningless=("use_activation",))
    inputs, fields = _inputs(message.inputs, limits)
    return PoolingRequest(
        inputs=inputs,
        fields=fields,
        params=params,
        prompt=prompts.text(message.prompt_name or None, message.input_type or None),
        num_queries=num_queries_of(message.input_type or message.prompt_name, len(inputs)),
        context=context_of(message, metadata, time_left),
    )


def classify_request(
    message: pb.ClassifyRequest, *, metadata: Mapping[str, str], time_left: float | None, limits: LimitsConfig
) -> PoolingRequest:
    """Return the request for a classification as a domain type. ``time_left`` and the errors are the same as in
    ``embed_request``.
    """
    params = _params(message.pooling_params, _CLASSIFY_TASKS, meaningless=("dimensions", "normalize"))
    inputs, fields = _inputs(message.inputs, limits)
    return PoolingRequest(inputs=inputs, fields=fields, params=params, context=context_of(message, metadata, time_left))


def score_request(
    message: pb.ScoreRequest, *, metadata: Mapping[str, str], time_left: float | None, prompts: NamedPrompts
) -> ScoreRequest:
    """Return the request for scores as a domain type. ``time_left``, ``prompts`` and the errors are the same as in
    ``embed_request``.
    """
    query, query_field = _plain(message.query, "query")
    documents = [_plain(each, f"documents[{index}]") for index, each in enumerate(message.documents)]
    return ScoreRequest(
        queries=[query],
        query_fields=[query_field],
        documents=[document for document, _ in documents],
        document_fields=[field for _, field in documents],
        query_prompt=prompts.text(message.prompt_name or None, None),
        context=context_of(message, metadata, time_left),
    )


def embed_response(result: PoolingResult, request_id: str) -> pb.EmbedResponse:
    """Return the message with the embeddings of a result."""
    return pb.EmbedResponse(
        request_id=request_id,
        embeddings=[parts.vectors_to_proto(vectors_of(output)) for output in result.outputs],
        usage=to_message(result, stats_pb2.Usage),
    )


def classify_response(
    result: PoolingResult, request_id: str, *, per_token: bool, labels: Sequence[str]
) -> pb.ClassifyResponse:
    """Return the message with the classes of a result."""
    response = pb.ClassifyResponse(request_id=request_id, usage=to_message(result, stats_pb2.Usage))
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
    """Return the message with the scores of a result."""
    return to_message(result, pb.ScoreResponse, usage=to_message(result, stats_pb2.Usage))


def _params(
    message: pooling_pb2.PoolingParams, tasks: tuple[PoolingTask, ...], *, meaningless: tuple[str, ...]
) -> PoolingParams:
    """Return the pooling parameters of a message. If the message sets no task, the task is the first of ``tasks``."""
    for field, value in message.ListFields():
        if field.name in meaningless:
            raise InvalidArgument(
                f"pooling_params.{field.name} is {value}, but it has no meaning for this call; leave it unset",
                field=f"pooling_params.{field.name}",
            )
    given = pooling_pb2.PoolingParams()
    given.CopyFrom(message)
    if not given.task:
        given.task = pooling_pb2.PoolingTask.ValueType(tasks[0])
    params = from_message(given, PoolingParams, "pooling_params")
    if params.task not in tasks:
        *names, last = (task.name for task in tasks)
        supported = f"{', '.join(names)} and {last}" if names else last
        raise InvalidArgument(
            f"pooling_params.task is {params.task.name}; this call supports {supported}",
            field="pooling_params.task",
        )
    return params


def _inputs(inputs: Iterable[pb.PoolingInput], limits: LimitsConfig) -> tuple[list[PoolingPrompt], list[str]]:
    """Return the inputs of a pooling request, and the path of each input."""
    found = [_input(each, f"inputs[{index}]", limits) for index, each in enumerate(inputs)]
    return [prompt for prompt, _ in found], [field for _, field in found]


def _input(message: pb.PoolingInput, path: str, limits: LimitsConfig) -> tuple[PoolingPrompt, str]:
    if message.WhichOneof("input") != "mixed":
        return _plain(message, path, "text, token_ids or mixed")
    prompt = mixed_prompt(message.mixed, f"{path}.mixed", limits)
    for part, field in zip(prompt.parts, prompt.fields, strict=True):
        if isinstance(part, PromptEmbeds):
            raise Unimplemented(f"{field} is set; embeddings are not supported as inputs", field=field)
    return prompt, f"{path}.mixed"


def _plain(message: pb.PoolingInput, path: str, choices: str = "text or token_ids") -> tuple[Prompt, str]:
    """Return the text or the token ids of a prompt, and the path of the field that contains them."""
    match message.WhichOneof("input"):
        case "text":
            return message.text, f"{path}.text"
        case "token_ids":
            return message.token_ids.ids, f"{path}.token_ids.ids"
        case "mixed":
            raise Unimplemented(
                f"{path}.mixed is set, but only text and token ids can be scored; set text or token_ids instead",
                field=f"{path}.mixed",
            )
        case _:
            raise InvalidArgument(f"{path} is not set: give {choices}", field=path)
