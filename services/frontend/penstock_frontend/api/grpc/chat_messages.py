"""Chat: messages to the domain and back."""

from collections.abc import Mapping

from penstock.inference.v1 import messages_pb2 as pb
from penstock_common.errors import InvalidArgument
from penstock_common.rpc.sampling import set_fields
from penstock_frontend.api.grpc import message_parts
from penstock_frontend.api.grpc.context import context_of
from penstock_frontend.api.grpc.json_fields import object_of
from penstock_frontend.api.grpc.media_messages import media_part
from penstock_frontend.call_types import ChatMessage, ChatRequest, ContentPart, Tool, ToolCall
from penstock_frontend.config import LimitsConfig
from penstock_frontend.processing.chat.answers import ChatOutput
from penstock_frontend.processing.chat.histories import warn_of_lost_calls
from penstock_frontend.processing.chat.tool_choice import named_choice
from penstock_frontend.processing.prompts.counts import check_conversation, check_count
from penstock_frontend.processing.prompts.sampling_params import check_lists


def chat_request(
    message: pb.ChatRequest, *, metadata: Mapping[str, str], time_left: float | None, limits: LimitsConfig
) -> ChatRequest:
    """The domain's request. ``time_left``: seconds until the call's deadline.

    Raises InvalidArgument for what cannot be read and for lists that are too long.
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
        prediction=message_parts.prediction_of(message),
        context=context_of(message, metadata, time_left),
    )


def chat_response(output: ChatOutput, request_id: str) -> pb.ChatResponse:
    """The message for a piece of an answer."""
    message = pb.ChatResponse(
        request_id=request_id,
        index=output.index,
        content=output.content,
        reasoning=output.reasoning,
        tool_calls=[pb.ToolCall(id=call.id, name=call.name, arguments=call.arguments) for call in output.tool_calls],
        token_ids=output.token_ids,
        logprobs=message_parts.logprobs(output.logprobs),
    )
    if output.finish is not None:
        message_parts.add_finish(message, output.finish)
    return message


def _message(message: pb.ChatMessage, path: str) -> ChatMessage:
    if message.parts and message.content:
        raise InvalidArgument(f"{path}.parts is set beside content; set one", field=f"{path}.parts")
    return ChatMessage(
        role=message.role,
        content=[_part(part, f"{path}.parts[{index}]") for index, part in enumerate(message.parts)] or message.content,
        tool_calls=[ToolCall(id=call.id, name=call.name, arguments=call.arguments) for call in message.tool_calls],
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
    """The domain's ``tool_choice`` and ``named_tool``."""
    if not message.HasField("tool_choice"):
        return "auto", ""
    which = message.tool_choice.WhichOneof("choice")
    if which is None:
        raise InvalidArgument("tool_choice has neither mode nor function", field="tool_choice")
    if which == "mode":
        return message.tool_choice.mode, ""
    return named_choice(message.tool_choice.function, field="tool_choice.function")
