"""Items of a response's input that tools have left there, as calls and results, or as text that the model sees."""

from collections.abc import Mapping
from typing import Any

import msgspec

from penstock_common.errors import InvalidArgument
from penstock_frontend.api.custom_inputs import input_arguments
from penstock_frontend.api.openai.errors import undecodable
from penstock_frontend.api.openai.responses.response_body import InputItem, InputPart
from penstock_frontend.api.served_tools import flat_name
from penstock_frontend.call_types import ToolCall
from penstock_frontend.processing.chat.histories import arguments_text
from penstock_frontend.telemetry.call_warnings import WarningKind, warn

CALLS = (
    "function_call",
    "custom_tool_call",
    "local_shell_call",
    "shell_call",
    "apply_patch_call",
    "computer_call",
    "tool_search_call",
)
"""Calls that the client answers with an item of its own."""
OUTPUTS = (
    "function_call_output",
    "custom_tool_call_output",
    "local_shell_call_output",
    "shell_call_output",
    "apply_patch_call_output",
    "computer_call_output",
    "tool_search_output",
)
TEXTS = (
    "web_search_call",
    "file_search_call",
    "code_interpreter_call",
    "image_generation_call",
    "mcp_call",
    "mcp_list_tools",
    "mcp_approval_request",
    "mcp_approval_response",
)
"""Calls that OpenAI has answered: call and result are one item."""
SECRETS = ("compaction", "compaction_summary", "context_compaction")
"""Items that only their author can read."""
_SHOWN = (
    "name",
    "server_label",
    "action",
    "operation",
    "arguments",
    "queries",
    "code",
    "approval_request_id",
    "approve",
    "reason",
    "outputs",
    "results",
    "tools",
    "error",
)


def call_of(item: InputItem, path: str) -> ToolCall:
    """The call that an item is. Raises InvalidArgument."""
    call_id, kind = item.call_id or item.id or "", item.type or ""
    if kind in ("function_call", "custom_tool_call"):
        if not item.name:
            raise InvalidArgument(f"{path}.name is not set", field=f"{path}.name", reason="MISSING_FIELD")
        name = flat_name(item.name, item.namespace)
        if kind == "function_call":
            return ToolCall(id=call_id, name=name, arguments=arguments_text(item.arguments, f"{path}.arguments"))
        text = item.input if isinstance(item.input, str) else _text(item.input or "")
        return ToolCall(id=call_id, name=name, arguments=input_arguments(text))
    given = next((value for value in (item.action, item.operation, item.arguments) if value is not None), None)
    return ToolCall(id=call_id, name=kind.removesuffix("_call"), arguments=arguments_text(given, f"{path}.{_of(item)}"))


def output_of(item: InputItem, path: str) -> str | list[InputPart]:
    """What a tool gave: text and media as the client has them, or JSON of any other form as text. Raises InvalidArgument."""
    raw = b"" if isinstance(item.output, msgspec.UnsetType) else bytes(item.output)
    if raw in (b"", b"null"):
        shown = {"status": item.status} if item.type == "apply_patch_call_output" else {"tools": item.tools}
        return _text({name: value for name, value in shown.items() if value is not None}) if any(shown.values()) else ""
    if item.type in ("function_call_output", "custom_tool_call_output"):
        try:
            return msgspec.json.decode(raw, type=str | list[InputPart])
        except msgspec.DecodeError as e:
            if not raw.startswith(b"["):
                return raw.decode()
            raise undecodable(e, f"{path}.output") from None
    found = msgspec.json.decode(raw)
    if isinstance(found, Mapping) and isinstance(url := found.get("image_url"), str):
        return [InputPart(type="input_image", image_url=url)]
    return found if isinstance(found, str) else raw.decode()


def text_of(item: InputItem, path: str) -> str:
    """An item of a tool that OpenAI runs, as text, with a warning."""
    shown = {name: value for name in _SHOWN if (value := getattr(item, name)) is not None}
    if not isinstance(item.output, msgspec.UnsetType) and bytes(item.output) != b"null":
        shown["output"] = msgspec.json.decode(bytes(item.output))
    warn(WarningKind.HISTORY_AS_TEXT, path, f"is of type '{item.type}', which the model sees as text")
    if item.result is not None:
        warn(
            WarningKind.HISTORY_LEFT_OUT, f"{path}.result", "is an image of an assistant's, which templates cannot show"
        )
    return f"[{item.type} {_text(shown)}]"


def warn_of_secret(item: InputItem, path: str) -> None:
    """Warn of an item that the model cannot see."""
    text = f"is of type '{item.type}' and is left out: only its author can read it"
    warn(WarningKind.HISTORY_LEFT_OUT, path, text)


def _of(item: InputItem) -> str:
    return next((name for name in ("action", "operation") if getattr(item, name) is not None), "arguments")


def _text(value: Any) -> str:
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()
