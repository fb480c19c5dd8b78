"""Roles of messages, made into those that the model's chat template shows.

Clients send several system messages, some of them late, or ones of the role ``developer``. Many templates show one system message
at the beginning alone; they refuse others, or leave them out without a word.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from penstock_common.errors import InvalidArgument
from penstock_frontend.processing.chat.templates import ChatTemplates

_MAX_CHARS = 1 << 20
_SECONDS = 1.0
"""Limit of one trial."""
_DEVELOPER = "developer"
_BETWEEN = "\n\n"
"""Stands between texts that were messages of their own."""
_MARKS = ("Qmark1", "Qmark2", "Qmark3")
_CALL = {"id": "call00000", "type": "function", "function": {"name": "look", "arguments": {}}}

Message = dict[str, Any]


class ShownRoles(NamedTuple):
    """What a template shows.

    ``developer``: messages of that role, which it names: a model whose template writes any role that it is given was not trained
    on this one. ``system``: one in front. ``systems``: any number of them, anywhere. ``users``: several of the user's in a row.
    ``tool``: results of tools.
    """

    developer: bool = True
    system: bool = True
    systems: bool = True
    users: bool = True
    tool: bool = True


def shown_roles(templates: ChatTemplates, as_content: Callable[[str], Any]) -> ShownRoles:
    """By trial. ``as_content``: a text in the form in which the template reads contents. Everything counts as shown by a template
    that does not render a plain question.
    """
    one, two, three = _MARKS

    def shows(*messages: tuple[str, str], calls: bool = False) -> bool | None:
        """Whether all marks are in the prompt; None: the template refuses the messages."""
        said: list[Message] = [{"role": role, "content": as_content(text)} for role, text in messages]
        for message in said:
            if calls and message["role"] == "assistant":
                message["tool_calls"] = [_CALL]
            if message["role"] == "tool":
                message |= {"tool_call_id": _CALL["id"], "name": "look"}
        variables = {"messages": said, "tools": None, "documents": None, "add_generation_prompt": True}
        try:
            prompt = templates.render(variables, max_chars=_MAX_CHARS, seconds=_SECONDS)
        except InvalidArgument:
            return None
        return all(text in prompt for _, text in messages if text in _MARKS)

    if not templates.source or not shows(("user", one)):
        return ShownRoles()
    return ShownRoles(
        developer=_DEVELOPER in templates.source and bool(shows((_DEVELOPER, one), ("user", "Hi"))),
        system=bool(shows(("system", one), ("user", "Hi"))),
        systems=bool(
            shows(
                ("system", one), ("system", two), ("user", "Hi"), ("assistant", "Hi"), ("system", three), ("user", "Hi")
            )
        ),
        users=bool(shows(("user", one), ("user", two))),
        tool=shows(("user", "Hi"), ("assistant", ""), ("tool", one), calls=True) is not False,
    )


def as_shown(messages: Sequence[Message], shown: ShownRoles) -> list[Message]:
    """The messages as a template that shows these roles takes them.

    ``developer`` becomes ``system``. All system messages become one at the beginning, or where the template shows none, the
    beginning of the user's first. Messages of the user in a row become one. What has media stays where it is, since media are
    in the order of their places.
    """
    found = [_renamed(message, shown) for message in messages]
    systems = [message for message in found if message["role"] == "system"]
    in_place = shown.system and (shown.systems or (len(systems) == 1 and found[0] is systems[0]))
    if systems and not in_place and not any(_has_media(message) for message in systems):
        rest = [message for message in found if message["role"] != "system"]
        joined = _joined(systems)
        place = next((i for i, message in enumerate(rest) if message["role"] == "user"), None)
        if shown.system:
            found = [joined, *rest]
        elif place is None:
            found = [{**joined, "role": "user"}, *rest]
        else:
            rest[place] = {**rest[place], "content": _joined([joined, rest[place]])["content"]}
            found = rest
    return found if shown.users else _without_rows(found)


def check_shown(role: str, path: str, shown: ShownRoles) -> None:
    """Raises InvalidArgument for a message that the template would leave out."""
    if role == "tool" and not shown.tool:
        raise InvalidArgument(
            f"{path}.role is 'tool'; the model's chat template does not show such messages to the model. Say what the "
            "tool answered in a message of the user, or serve the model with a template that shows it: --chat-template",
            field=f"{path}.role",
        )


def _renamed(message: Message, shown: ShownRoles) -> Message:
    if message["role"] == _DEVELOPER and not shown.developer:
        return {**message, "role": "system"}
    return message


def _without_rows(messages: Sequence[Message]) -> list[Message]:
    found: list[Message] = []
    for message in messages:
        if found and message["role"] == found[-1]["role"] == "user":
            found[-1] = _joined([found[-1], message])
        else:
            found.append(message)
    return found


def _joined(messages: Sequence[Message]) -> Message:
    """The first of them, with the contents of all."""
    contents = [message["content"] for message in messages]
    if all(isinstance(content, str) for content in contents):
        return {**messages[0], "content": _BETWEEN.join(filter(None, contents))}
    parts: list[Mapping[str, str]] = []
    for content in contents:
        if parts and content:
            parts.append({"type": "text", "text": _BETWEEN})
        parts += [{"type": "text", "text": content}] if isinstance(content, str) else content
    return {**messages[0], "content": parts}


def _has_media(message: Message) -> bool:
    content = message["content"]
    return not isinstance(content, str) and any(part["type"] != "text" for part in content)
