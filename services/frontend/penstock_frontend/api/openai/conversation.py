"""Conversion of chat messages, media, tools and the reasoning effort of a body to domain types."""

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import msgspec

from penstock_common.errors import InvalidArgument, Unimplemented, quoted
from penstock_common.types.media import Modality
from penstock_frontend.api.media_sources import DEFAULT_FPS, check_fps, source_of_base64, source_of_url
from penstock_frontend.api.tools import ServedTools, ToolChoice, input_arguments
from penstock_frontend.call_types import ChatMessage, ContentPart, MediaPart, ToolCall
from penstock_frontend.call_warnings import WarningKind, warn
from penstock_frontend.processing.chat.histories import arguments_text, warn_of_lost_calls

# The code below converts tools, tool choices and tool calls of chat completions.

T = TypeVar("T")

MODES = {"auto": "auto", "none": "none", "required": "required", "any": "required"}
"""Map from the names that clients use for tool choice modes to Penstock's names. Mistral and Anthropic call the mode
``required`` ``any``.
"""


class FunctionCallBody(msgspec.Struct, frozen=True, kw_only=True):
    """A function call in a message. ``arguments`` is a JSON object, given as text or as an object."""

    name: str = ""
    arguments: Any = None


class CustomCallBody(msgspec.Struct, frozen=True, kw_only=True):
    """A call of a custom tool in a message."""

    name: str = ""
    input: str = ""


class ToolCallBody(msgspec.Struct, frozen=True, kw_only=True):
    """A tool call in an assistant's message. The default ``type`` is ``function``."""

    id: str | None = None
    type: str | None = None
    function: FunctionCallBody | None = None
    custom: CustomCallBody | None = None


class FunctionBody(msgspec.Struct, frozen=True, kw_only=True):
    """A function that the model may call. If a call is required, the schema of the function is enforced even if
    ``strict`` is not set.
    """

    name: str = ""
    description: str | None = None
    parameters: dict[str, Any] | None = None


class GrammarBody(msgspec.Struct, frozen=True, kw_only=True):
    """Grammar of the input of a custom tool. ``syntax`` is ``lark`` or ``regex``."""

    syntax: str
    definition: str


class CustomFormatBody(msgspec.Struct, frozen=True, kw_only=True):
    """Format of the input of a custom tool, which is ``text`` or ``grammar``."""

    type: str
    grammar: GrammarBody | None = None


class CustomBody(msgspec.Struct, frozen=True, kw_only=True):
    """A custom tool, whose input is a text."""

    name: str = ""
    description: str | None = None
    format: CustomFormatBody | None = None


class ToolBody(msgspec.Struct, frozen=True, kw_only=True):
    """A tool of a body: a function or a custom tool. Tools of other types are left out."""

    type: str | None = None
    function: FunctionBody | None = None
    custom: CustomBody | None = None


class NamedTool(msgspec.Struct, frozen=True):
    """The name of a tool in a tool choice."""

    name: str


class AllowedToolBody(msgspec.Struct, frozen=True, kw_only=True):
    """A tool that the tool choice allows the model to call."""

    type: str = "function"
    name: str | None = None
    function: NamedTool | None = None
    custom: NamedTool | None = None


class AllowedToolsBody(msgspec.Struct, frozen=True, kw_only=True):
    """The tools that the tool choice allows the model to call. ``mode`` is ``auto``, or ``required`` if the model must
    call one of them.
    """

    mode: str = "auto"
    tools: list[AllowedToolBody] = []


class ToolChoiceObject(AllowedToolBody, frozen=True, kw_only=True):
    """Tool choice in the form of an object: a tool that must be called, the tools that may be called, or a mode."""

    allowed_tools: AllowedToolsBody | None = None


def tools_of(bodies: Sequence[ToolBody] | None) -> ServedTools:
    """Return the tools of a body as domain types. Raises InvalidArgument if a tool is not valid."""
    tools = ServedTools()
    for index, body in enumerate(bodies or ()):
        path = f"tools[{index}]"
        match body.type or ("custom" if body.custom else "function"):
            case "function":
                function = _set(body.function, f"{path}.function")
                tools.function(function.name, function.description, function.parameters, f"{path}.function")
            case "custom":
                custom = _set(body.custom, f"{path}.custom")
                grammar = _grammar(custom.format, f"{path}.custom.format")
                syntax, definition = (grammar.syntax, grammar.definition) if grammar else ("", "")
                check_syntax(syntax, f"{path}.custom.format.grammar.syntax")
                tools.custom(custom.name, custom.description, f"{path}.custom", syntax=syntax, definition=definition)
            case kind:
                tools.leave_out(kind, path)
    return tools


def choice_of(choice: str | ToolChoiceObject | None) -> ToolChoice:
    """Return the tool choice of a body. Raises InvalidArgument if the tool choice is not valid."""
    if choice is None:
        return ToolChoice("auto")
    if isinstance(choice, str):
        return ToolChoice(mode_of(choice, "tool_choice"))
    match choice.type:
        case kind if kind in MODES:
            return ToolChoice(MODES[kind])
        case "allowed_tools":
            allowed = _set(choice.allowed_tools, "tool_choice.allowed_tools")
            path = "tool_choice.allowed_tools"
            names = [_named(tool, f"{path}.tools[{index}]")[0] for index, tool in enumerate(allowed.tools)]
            return ToolChoice(mode_of(allowed.mode, f"{path}.mode"), allowed=names, field="tool_choice")
        case "function" | "custom" | "tool":
            name, field = _named(choice, "tool_choice")
            if not name:
                raise InvalidArgument(f"{field} is empty", field=field)
            return ToolChoice("auto", named=name)
        case kind:
            return ToolChoice("auto", hosted=kind, field="tool_choice")


def call_of(body: ToolCallBody, path: str) -> ToolCall:
    """Return the tool call of a message as a domain type. Raises InvalidArgument and Unimplemented."""
    match body.type or ("custom" if body.custom else "function"):
        case "function":
            return function_call(body.id or "", _set(body.function, f"{path}.function"), f"{path}.function")
        case "custom":
            custom = _set(body.custom, f"{path}.custom")
            return ToolCall(id=body.id or "", name=custom.name, arguments=input_arguments(custom.input))
        case kind:
            raise Unimplemented(f"{path}.type is {quoted(kind)}; known: function, custom", field=f"{path}.type")


def function_call(call_id: str, body: FunctionCallBody, path: str) -> ToolCall:
    """Return the function call of a message as a domain type. Raises InvalidArgument if the function call is not valid."""
    if not body.name:
        raise InvalidArgument(f"{path}.name is empty", field=f"{path}.name")
    return ToolCall(id=call_id, name=body.name, arguments=arguments_text(body.arguments, f"{path}.arguments"))


def mode_of(text: str, field: str) -> str:
    """Return the mode of a tool choice as a domain value. Raises InvalidArgument if the mode is unknown."""
    if text not in MODES:
        raise InvalidArgument(f"{field} is {quoted(text)}; known: auto, none, required", field=field)
    return MODES[text]


def check_syntax(syntax: str, field: str) -> None:
    """Check that the syntax of a grammar is known. An empty text means that there is no grammar. Raises
    InvalidArgument.
    """
    if syntax not in ("", "lark", "regex"):
        raise InvalidArgument(f"{field} is {quoted(syntax)}; known: lark, regex", field=field)


def _grammar(format_: CustomFormatBody | None, path: str) -> GrammarBody | None:
    match format_.type if format_ else "text":
        case "text":
            return None
        case "grammar":
            return _set(format_.grammar if format_ else None, f"{path}.grammar")
        case kind:
            raise InvalidArgument(f"{path}.type is {quoted(kind)}; known: text, grammar", field=f"{path}.type")


def _named(body: AllowedToolBody, path: str) -> tuple[str, str]:
    """Return the name of a tool, and the path of this name in the body."""
    for name in ("function", "custom"):
        if (inner := getattr(body, name)) is not None:
            return inner.name, f"{path}.{name}.name"
    return body.name or "", f"{path}.name"


def _set(value: T | None, path: str) -> T:
    if value is None:
        raise InvalidArgument(f"{path} is not set", field=path, reason="MISSING_FIELD")
    return value


# The code below converts parts of messages with media, in the forms of OpenAI and vLLM.

_URLS: Mapping[str, tuple[str, Modality]] = {
    "image_url": ("image_url", "image"),
    "input_image": ("image_url", "image"),
    "audio_url": ("audio_url", "audio"),
    "video_url": ("video_url", "video"),
}
"""Types of parts that have a URL. The values are the name of the part's field with the URL, and the modality."""
_AUDIO_FORMATS = ("wav", "mp3", "flac", "ogg", "m4a", "mp4", "webm", "aac")
_OTHER_NAMES = {"wave": "wav", "vnd.wave": "wav", "mpeg": "mp3", "mpga": "mp3", "oga": "ogg"}
"""Map from other names of audio formats to OpenAI's names. The keys are in lower case, without the prefixes ``audio/``
and ``x-``.
"""
_DETAILS = ("auto", "low", "high", "original")
_REFUSED = {
    "image_embeds": "; gRPC's Media.embeds takes embeddings",
    "audio_embeds": "; gRPC's Media.embeds takes embeddings",
    "video_embeds": "; gRPC's Media.embeds takes embeddings",
    "image_pil": "; use image_url",
    "file": "; use image_url",
    "input_file": "; use input_image",
}


class UrlBody(msgspec.Struct, frozen=True, kw_only=True):
    """URL of a media item in a message part. OpenAI's ``detail`` has no effect, because the model's processor chooses
    the size.
    """

    url: str
    detail: str | None = None


class InputAudioBody(msgspec.Struct, frozen=True, kw_only=True):
    """An audio file, encoded in base64."""

    data: str
    format: str


class MediaFields(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Fields of a message part that contain media. A media part has one of these fields, depending on its type."""

    image_url: UrlBody | str | None = None
    input_audio: InputAudioBody | None = None
    audio_url: UrlBody | str | None = None
    video_url: UrlBody | str | None = None
    detail: str | None = None
    file_id: Any = None
    uuid: Any = None


class VideoIoBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options for reading videos. ``fps`` is the frame rate of a video that is sent as frames."""

    fps: float = DEFAULT_FPS


class MediaIoBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """vLLM's field ``media_io_kwargs``, which has options for reading media."""

    video: VideoIoBody = VideoIoBody()

    @property
    def fps(self) -> float:
        """Frame rate of videos, in frames per second. Raises InvalidArgument if the value is not valid."""
        return check_fps(self.video.fps, "media_io_kwargs.video.fps")


class MediaOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options for all media of a body: additional arguments for the model's processor, and the frame rate of videos."""

    processor_kwargs: dict[str, Any] = {}
    fps: float = DEFAULT_FPS


def options_of(processor_kwargs: dict[str, Any] | None, io: MediaIoBody | None) -> MediaOptions:
    """Return the media options of a body. Raises InvalidArgument if an option is not valid."""
    return MediaOptions(processor_kwargs=processor_kwargs or {}, fps=io.fps if io is not None else DEFAULT_FPS)


MEDIA_TYPES = ("image_url", "input_audio", "audio_url", "video_url")
"""Types of media parts in chat completions. The Responses API has the type ``input_image`` instead."""


def is_media(kind: str) -> bool:
    """Return True if parts of this type are media. This includes media types that the server does not support."""
    return kind in _URLS or kind == "input_audio" or kind in _REFUSED


def media_of(kind: str, body: MediaFields, path: str, options: MediaOptions) -> MediaPart:
    """Return the media item of the part at ``path``. ``is_media`` must be true for the type of the part.

    Raises InvalidArgument if a field is missing or wrong, and Unimplemented if a field or type is not supported.
    """
    if kind in _REFUSED:
        raise Unimplemented(
            f"{path}.type is {quoted(kind)}, which is not supported{_REFUSED[kind]}", field=f"{path}.type"
        )
    for name, why in (("uuid", "media are known by their content"), ("file_id", "there are no files; use image_url")):
        if getattr(body, name) is not None:
            raise Unimplemented(f"{path}.{name} is not supported: {why}", field=f"{path}.{name}")
    if kind == "input_audio":
        return _sound(body.input_audio, f"{path}.input_audio", options)
    name, modality = _URLS[kind]
    given: UrlBody | str | None = getattr(body, name)
    field = f"{path}.{name}"
    if given is None:
        raise InvalidArgument(f"{field} is not set", field=field, reason="MISSING_FIELD")
    if isinstance(given, UrlBody):
        _check_detail(given.detail, f"{field}.detail")
        field, url = f"{field}.url", given.url
    else:
        url = given
    _check_detail(body.detail, f"{path}.detail")
    return MediaPart(
        modality=modality,
        source=source_of_url(modality, url, field=field, fps=options.fps),
        field=field,
        processor_kwargs=options.processor_kwargs,
    )


def _sound(body: InputAudioBody | None, path: str, options: MediaOptions) -> MediaPart:
    if body is None:
        raise InvalidArgument(f"{path} is not set", field=path, reason="MISSING_FIELD")
    if _audio_format(body.format) not in _AUDIO_FORMATS:
        field = f"{path}.format"
        raise InvalidArgument(f"{field} is {quoted(body.format)}; known: {', '.join(_AUDIO_FORMATS)}", field=field)
    field = f"{path}.data"
    if not body.data:
        raise InvalidArgument(f"{field} is empty", field=field)
    return MediaPart(
        modality="audio",
        source=source_of_base64(body.data),
        field=field,
        processor_kwargs=options.processor_kwargs,
    )


def _audio_format(name: str) -> str:
    """Return OpenAI's name of an audio format. The format is given as a name in upper or lower case, or as a media type
    with parameters.
    """
    kind, slash, subtype = name.strip().lower().partition("/")
    short = subtype.partition(";")[0].strip() if slash and kind == "audio" else name.strip().lower()
    short = short.removeprefix("x-")
    return _OTHER_NAMES.get(short, short)


def _check_detail(detail: str | None, field: str) -> None:
    if detail is not None and detail not in _DETAILS:
        raise InvalidArgument(f"{field} is {quoted(detail)}; known: {', '.join(_DETAILS)}", field=field)


_NO_OPTIONS = MediaOptions()
CONVERSATION = {"prompt is": "the conversation with its template and tools is"}
"""Map for ``renamed``. With this map, errors call a prompt that the chat template rendered a conversation."""


class PartBody(MediaFields, frozen=True, kw_only=True):
    """A part of a message's content: text or media. Parts of other types are refused later."""

    type: str
    text: str = ""
    refusal: str | None = None


class MessageBody(msgspec.Struct, frozen=True, kw_only=True):
    """A message of the conversation in the request body.

    The assistant's reasoning has two field names. ``function_call`` is OpenAI's older form of a tool call, and a
    message with the role ``function`` is OpenAI's older form of a tool result.
    """

    role: str
    content: str | list[PartBody] | None = None
    tool_calls: list[ToolCallBody] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    name: str | None = None
    function_call: FunctionCallBody | None = None
    audio: Any = None


def messages_of(bodies: Sequence[MessageBody], options: MediaOptions = _NO_OPTIONS) -> list[ChatMessage]:
    """Return the messages of a body as domain types. Raises InvalidArgument and Unimplemented."""
    messages = [_message(body, f"messages[{index}]", options) for index, body in enumerate(bodies)]
    warn_of_lost_calls(messages, [f"messages[{index}]" for index in range(len(messages))])
    return messages


def _message(body: MessageBody, path: str, options: MediaOptions) -> ChatMessage:
    if body.audio is not None:
        warn(
            WarningKind.HISTORY_LEFT_OUT,
            f"{path}.audio",
            "is an audio answer, which this server does not store",
        )
    calls = [call_of(call, f"{path}.tool_calls[{index}]") for index, call in enumerate(body.tool_calls or ())]
    if body.function_call is not None:
        calls.append(function_call("", body.function_call, f"{path}.function_call"))
    content = body.content
    return ChatMessage(
        role="tool" if body.role == "function" else body.role,
        content=content
        if content is None or isinstance(content, str)
        else [_part(part, f"{path}.content[{index}]", options) for index, part in enumerate(content)],
        tool_calls=calls,
        tool_call_id=body.tool_call_id or "",
        reasoning=body.reasoning_content or body.reasoning or "",
        name=body.name or "",
    )


def _part(body: PartBody, path: str, options: MediaOptions) -> ContentPart:
    if is_media(body.type):
        return ContentPart(type="media", media=media_of(body.type, body, path, options))
    if body.type == "refusal":
        return ContentPart(type="text", text=body.refusal or "")
    if body.type != "text":
        known = ", ".join(["text", *MEDIA_TYPES])
        raise InvalidArgument(f"{path}.type is {quoted(body.type)}; known: {known}", field=f"{path}.type")
    return ContentPart(type=body.type, text=body.text)


EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
"""Values of the reasoning effort that OpenAI's and Anthropic's protocols have."""


def effort_kwargs(effort: str | None, field: str) -> dict[str, Any]:
    """Return the variables of the chat template for a reasoning effort. Raises InvalidArgument if the effort is
    unknown.

    The effort ``none`` turns reasoning off, if the template supports this.
    """
    if effort is None:
        return {}
    if effort not in EFFORTS:
        raise InvalidArgument(
            f"{field} is {quoted(effort)}; known: {', '.join(EFFORTS)}. Send other values in "
            "chat_template_kwargs.reasoning_effort",
            field=field,
        )
    return {"enable_thinking": False} if effort == "none" else {"reasoning_effort": effort}
