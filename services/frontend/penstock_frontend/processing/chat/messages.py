"""Preparation of messages for chat templates: roles are mapped, texts of clients are escaped, and positions of media
are marked.
"""

import json
import re
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

from penstock_common.errors import InvalidArgument, quoted
from penstock_common.types.media import Modality
from penstock_frontend.call_types import ChatMessage, ContentPart, MediaPart, ToolCall
from penstock_frontend.processing.chat.histories import arguments_text
from penstock_frontend.processing.chat.templates import ChatTemplates, ContentFormat
from penstock_frontend.processing.media.families.base import Family

# The code below finds and changes texts in template variables, which are JSON values. The code also finds characters in
# these texts that could be the beginning of a token.


def texts_in(value: Any) -> list[str]:
    """Return every text in a template variable, including the keys of objects."""
    texts: list[str] = []
    values = [value]
    for each in values:  # nested values are appended to the list during the loop
        if isinstance(each, str):
            texts.append(each)
        elif isinstance(each, dict):
            texts += each
            values += each.values()
        elif isinstance(each, (list, tuple)):
            values += each
    return texts


def changed(value: Any, change: Callable[[str], str]) -> Any:
    """Return a copy of a template variable in which ``change`` was applied to every text."""
    if isinstance(value, str):
        return change(value)
    # A comprehension would add a stack frame for each level of nesting, and JSON may be nested 512 levels deep.
    if isinstance(value, dict):
        mapping = {}
        for key, each in value.items():
            mapping[change(key)] = changed(each, change)
        return mapping
    if isinstance(value, (list, tuple)):
        items = []
        for each in value:
            items.append(changed(each, change))  # noqa: PERF401
        return items
    return value


def openings(tokens: Collection[str]) -> re.Pattern[str]:
    """Return a pattern that finds the first character of each occurrence of one of these tokens in a text.

    The pattern also matches if the text ends before the token is complete. The reason is that a template may trim the
    end of the text, and continue with another text that completes the token.
    """
    by_first: dict[str, list[str]] = {}
    for token in tokens:
        by_first.setdefault(token[0], []).append(token[1:])
    return re.compile("|".join(f"{re.escape(first)}(?={_rest(rests)})" for first, rests in by_first.items()))


def _rest(rests: Collection[str]) -> str:
    """Return a pattern that matches each text of ``rests``.

    At the end of the searched text, the pattern also matches the beginning of any text of ``rests``. A prefix that
    several texts share occurs only once in the pattern.
    """
    if "" in rests:
        return ""
    by_first: dict[str, list[str]] = {}
    for rest in rests:
        by_first.setdefault(rest[0], []).append(rest[1:])
    return rf"(?:\s*\Z|{'|'.join(re.escape(first) + _rest(more) for first, more in by_first.items())})"


# The code below finds the positions of media in a conversation that a template has rendered.


class Places:
    """Positions of the media items in one conversation. ``media`` are the conversation's media items, in order."""

    def __init__(self, family: Family, media: Sequence[MediaPart]) -> None:
        self._family = family
        self._media = media
        self._mark = uuid.uuid4().hex
        self._modalities: dict[str, Modality] = {
            family.placeholder(modality): modality for modality in sorted(family.modalities)
        }
        tokens = sorted(self._modalities, key=len, reverse=True)
        self._placeholder = re.compile("|".join(map(re.escape, tokens)))
        self._risky = openings(tokens)
        self._named = re.compile(f"{self._mark}:([0-9]+):{self._mark}")

    def guarded(self, value: Any) -> Any:
        """Return a copy of a template variable in which no text contains a placeholder, or ends with the beginning of a
        placeholder.
        """
        return changed(value, lambda text: self._risky.sub(lambda match: f"{match[0]}{self._mark}", text))

    def named(self, index: int) -> str:
        """Return the mark that stands for the media item with this index, for templates that read plain text."""
        return f"{self._mark}:{index}:{self._mark}"

    def split(self, rendered: str, *, by_name: bool) -> list[str | MediaPart]:
        """Split the rendered conversation into texts and media items, in order. Leave out empty texts.

        If ``by_name`` is True, the marks show the positions of media items. Otherwise the placeholders of each modality
        show the positions. Raises InvalidArgument if the template has not written each item exactly once.
        """
        parts: list[str | MediaPart] = []
        begin, found = 0, []
        queues = {modality: self._of(modality) for modality in self._modalities.values()}
        for match in (self._named if by_name else self._placeholder).finditer(rendered):
            if by_name:
                index = int(match[1])
            elif queue := queues[self._modalities[match[0]]]:
                index = queue.pop(0)
            else:
                raise self._miscounted(self._modalities[match[0]], "more")
            parts += [self._unmarked(rendered[begin : match.start()]), self._media[index]]
            found.append(index)
            begin = match.end()
        parts.append(self._unmarked(rendered[begin:]))
        if sorted(found) != list(range(len(self._media))):
            missing = next((i for i in range(len(self._media)) if found.count(i) != 1), 0)
            raise self._miscounted(self._media[missing].modality, "other")
        return [part for part in parts if part != ""]

    def _of(self, modality: Modality) -> list[int]:
        return [index for index, part in enumerate(self._media) if part.modality == modality]

    def _unmarked(self, text: str) -> str:
        return text.replace(self._mark, "")

    def _miscounted(self, modality: Modality, how: str) -> InvalidArgument:
        count = len(self._of(modality))
        return InvalidArgument(
            f"messages have {count} media items of modality {modality}, but the model's chat template writes {how} "
            "placeholders than one for each media item",
            field="messages",
        )


# Clients may send several system messages, system messages after other messages, or messages with the role
# ``developer``. Many templates support only one system message at the start. Such templates refuse other system
# messages, or drop them silently. The code below changes the messages so that the template shows all of them.

_MAX_CHARS = 1 << 20
_SECONDS = 1.0
"""Time limit of one trial rendering of a template in seconds, and size limit of its prompt in characters."""
_DEVELOPER = "developer"
_BETWEEN = "\n\n"
"""Separator that is put between the texts of merged messages."""
_MARKS = ("Qmark1", "Qmark2", "Qmark3")
_CALL = {"id": "call00000", "type": "function", "function": {"name": "look", "arguments": {}}}

Message = dict[str, Any]


class ShownRoles(NamedTuple):
    """Roles whose messages a chat template writes into the prompt, so that the model sees them.

    Attributes:
        developer: Whether the template shows messages with the role ``developer``. True only if the template's source
            names the role. A template that accepts any role does not count, because its model was not trained on this
            role.
        system: Whether the template shows one system message at the start.
        systems: Whether the template shows any number of system messages at any position.
        users: Whether the template shows several consecutive user messages.
        tool: Whether the template shows tool results.
    """

    developer: bool = True
    system: bool = True
    systems: bool = True
    users: bool = True
    tool: bool = True


def shown_roles(templates: ChatTemplates, as_content: Callable[[str], Any]) -> ShownRoles:
    """Return the roles whose messages a template shows to the model. Trial renderings with marked messages find these
    roles.

    ``as_content`` converts a text to the form in which the template reads message contents. If the template cannot
    render even a plain question, all roles count as shown.
    """
    one, two, three = _MARKS

    def shows(*messages: tuple[str, str], calls: bool = False) -> bool | None:
        """Return whether the rendered prompt contains the marks of all messages. Return None if the template refuses
        the messages.
        """
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
    """Return the messages, changed so that the template shows all of them to the model.

    The role ``developer`` becomes ``system``. System messages are merged into one system message at the start. If the
    template shows no system messages, they are merged into the first user message. Consecutive user messages are
    merged. Messages with media are not moved, because the media must keep their order.
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
    """Raise InvalidArgument for a message whose role the template does not show to the model."""
    if role == "tool" and not shown.tool:
        raise InvalidArgument(
            f"{path}.role is 'tool', but the model's chat template does not show tool messages to the model. Put the tool's "
            "result into a user message, or set --chat-template to a template that shows tool messages",
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
    """Return the first message, whose content is replaced by the contents of all these messages."""
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


ROLES = ("system", "developer", "user", "assistant", "tool")
Content = str | list[dict[str, str]]


class MessageReader:
    """Checks the messages of one conversation, and converts them to template variables.

    ``places`` has the positions of the conversation's media, or is None. ``form`` is the format in which the template
    reads message contents.
    """

    def __init__(self, form: ContentFormat, places: Places | None, *, by_parts: bool) -> None:
        """Create the reader for one conversation.

        If ``by_parts`` is True, and the template reads content parts, message contents are passed to the template as
        parts.
        """
        self._by_parts = by_parts and form.reads_parts
        self._tells_text = form.tells_text
        self._places = places
        self._num_media = 0

    def variable(self, message: ChatMessage, path: str) -> dict[str, Any]:
        """Convert a message to a template variable.

        The key ``content`` is always set. Other keys are set only if they have a value.
        """
        if message.role not in ROLES:
            raise InvalidArgument(
                f"{path}.role is {quoted(message.role)}; known: {', '.join(ROLES)}", field=f"{path}.role"
            )
        variable: dict[str, Any] = {"role": message.role, "content": self._content(message.content, path)}
        if message.tool_calls:
            if message.role != "assistant":
                raise InvalidArgument(
                    f"{path}.tool_calls is set, but a message with role {quoted(message.role)} cannot have tool calls",
                    field=f"{path}.tool_calls",
                )
            variable["tool_calls"] = [
                _call_variable(call, f"{path}.tool_calls[{index}]") for index, call in enumerate(message.tool_calls)
            ]
        if message.reasoning:
            # Set the reasoning under three names, because templates use different names for it.
            variable["reasoning_content"] = variable["reasoning"] = variable["thinking"] = message.reasoning
        if message.tool_call_id:
            variable["tool_call_id"] = message.tool_call_id
        if message.name:
            variable["name"] = message.name
        return variable

    def _content(self, content: str | Sequence[ContentPart] | None, path: str) -> Content:
        if content is None or isinstance(content, str):
            return self.text_content(content or "")
        for index, part in enumerate(content):
            _check_part(part, f"{path}.content[{index}]")
        if self._by_parts:
            return [_part_variable(part) for part in content]
        return "\n".join(self._text(part) for part in content)

    def text_content(self, text: str) -> Content:
        """Return a text as the content of a message, in the form that the template reads."""
        return text if not self._by_parts or self._tells_text else [_text_part(text)]

    def _text(self, part: ContentPart) -> str:
        if part.media is None or self._places is None:
            return part.text
        self._num_media += 1
        return self._places.named(self._num_media - 1)


def media_of(messages: Sequence[ChatMessage]) -> list[MediaPart]:
    """Return the media items of a conversation, in order."""
    return [
        part.media
        for message in messages
        if message.content is not None and not isinstance(message.content, str)
        for part in message.content
        if part.media is not None
    ]


def add_text(content: Content, text: str) -> Content:
    """Return the content of a message with ``text`` appended."""
    if isinstance(content, str):
        return content + text
    if content and content[-1]["type"] == "text":
        return [*content[:-1], _text_part(content[-1]["text"] + text)]
    return [*content, _text_part(text)]


def size_of(content: Content) -> int:
    """Return the number of characters in all texts of a message's content."""
    return len(content) if isinstance(content, str) else sum(len(part.get("text", "")) for part in content)


def _check_part(part: ContentPart, path: str) -> None:
    if part.type not in ("text", "media"):
        raise InvalidArgument(f"{path}.type is {quoted(part.type)}; known: text, media", field=f"{path}.type")
    if (part.type == "media") != (part.media is not None):
        raise InvalidArgument(f"{path}: a part must have media if, and only if, its type is 'media'", field=path)


def _part_variable(part: ContentPart) -> dict[str, str]:
    """Return a content part of a message in the form that templates read.

    For a media part, the result has the modality both as the value of ``type`` and as a key. Each template checks only
    one of the two.
    """
    return _text_part(part.text) if part.media is None else {"type": part.media.modality, part.media.modality: ""}


def _text_part(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


def _call_variable(call: ToolCall, path: str) -> dict[str, Any]:
    if not call.name:
        raise InvalidArgument(f"{path}.name is empty", field=f"{path}.name")
    arguments = json.loads(arguments_text(call.arguments, f"{path}.arguments"))
    function = {"name": call.name, "arguments": arguments}
    # Most templates expect tool calls in OpenAI's format.
    return {"id": call.id, "type": "function", "function": function}
