"""Tools and choices of tools as Anthropic's protocol writes them, to the domain's."""

from collections.abc import Sequence

from penstock_common.errors import InvalidArgument, quoted
from penstock_frontend.api.anthropic.messages_body import ClientToolBody, ToolUseChoiceBody
from penstock_frontend.api.served_tools import ServedTools, ToolChoice

_MODES = {"auto": "auto", "any": "required", "none": "none"}


def tools_of(bodies: Sequence[ClientToolBody] | None) -> ServedTools:
    """The tools of a body. Those that Anthropic runs or defines have a type of their own. Raises InvalidArgument."""
    tools = ServedTools()
    for index, body in enumerate(bodies or ()):
        path = f"tools[{index}]"
        if body.type in (None, "custom"):
            tools.function(body.name, body.description, body.input_schema, path, schema="input_schema")
        else:
            tools.leave_out(body.type, path, body.name)
    return tools


def choice_of(choice: ToolUseChoiceBody | None, *, tools: bool) -> ToolChoice:
    """The choice of a body. ``tools``: whether it has any. Raises InvalidArgument."""
    if choice is None:
        return ToolChoice("auto")
    if choice.type == "tool":
        if not choice.name:
            raise InvalidArgument("tool_choice.name is empty", field="tool_choice.name")
        return ToolChoice("auto", named=choice.name)
    if choice.type not in _MODES:
        known = ", ".join([*_MODES, "tool"])
        raise InvalidArgument(f"tool_choice.type is {quoted(choice.type)}; known: {known}", field="tool_choice.type")
    if choice.type == "any" and not tools:
        raise InvalidArgument("tool_choice.type is 'any', but there are no tools; set tools", field="tool_choice.type")
    return ToolChoice(_MODES[choice.type], field="tool_choice.type")
