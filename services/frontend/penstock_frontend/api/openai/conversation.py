"""Conversion of chat messages, their media and the reasoning effort to the domain's."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from penstock_common.errors import InvalidArgument, Unimplemented, quoted
from penstock_common.types.media import Modality
from penstock_frontend.api.media_sources import DEFAULT_FPS, check_fps, source_of_base64, source_of_url
from penstock_frontend.api.openai.chat_tools import FunctionCallBody, ToolCallBody, call_of, function_call
from penstock_frontend.call_types import ChatMessage, ContentPart, MediaPart
from penstock_frontend.call_warnings import WarningKind, warn
from penstock_frontend.processing.chat.histories import warn_of_lost_calls

# Parts of messages that are media, as OpenAI's and vLLM's bodies write them.

_URLS: Mapping[str, tuple[str, Modality]] = {
    "image_url": ("image_url", "image"),
    "input_image": ("image_url", "image"),
    "audio_url": ("audio_url", "audio"),
    "video_url": ("video_url", "video"),
}
"""Types of parts with a URL: its field, and what it is of."""
_AUDIO_FORMATS = ("wav", "mp3", "flac", "ogg")
_OTHER_NAMES = {"wave": "wav", "vnd.wave": "wav", "mpeg": "mp3", "mpga": "mp3", "oga": "ogg"}
"""What programs call these formats besides, in lower case and without ``audio/`` and ``x-``."""
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
    """Where a medium is. ``detail``: OpenAI's; the model's own processor decides on sizes, whatever it says."""

    url: str
    detail: str | None = None


class InputAudioBody(msgspec.Struct, frozen=True, kw_only=True):
    """A sound: a file in base64."""

    data: str
    format: str


class MediaFields(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The fields of a part that may be a medium; a part of each type has one of them."""

    image_url: UrlBody | str | None = None
    input_audio: InputAudioBody | None = None
    audio_url: UrlBody | str | None = None
    video_url: UrlBody | str | None = None
    detail: str | None = None
    file_id: Any = None
    uuid: Any = None


class VideoIoBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a video is read. ``fps``: pictures a second of one that is given as pictures."""

    fps: float = DEFAULT_FPS


class MediaIoBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """vLLM's ``media_io_kwargs``: how media are read."""

    video: VideoIoBody = VideoIoBody()

    @property
    def fps(self) -> float:
        """Pictures a second. Raises InvalidArgument."""
        return check_fps(self.video.fps, "media_io_kwargs.video.fps")


class MediaOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What a body says of all its media: more arguments of the processor, and pictures a second of videos."""

    processor_kwargs: dict[str, Any] = {}
    fps: float = DEFAULT_FPS


def options_of(processor_kwargs: dict[str, Any] | None, io: MediaIoBody | None) -> MediaOptions:
    """The options that a body's fields say. Raises InvalidArgument."""
    return MediaOptions(processor_kwargs=processor_kwargs or {}, fps=io.fps if io is not None else DEFAULT_FPS)


MEDIA_TYPES = ("image_url", "input_audio", "audio_url", "video_url")
"""Types of parts with a medium in chat completions. Responses write ``input_image``."""


def is_media(kind: str) -> bool:
    """Whether parts of that type are media, among them those that are refused by name."""
    return kind in _URLS or kind == "input_audio" or kind in _REFUSED


def media_of(kind: str, body: MediaFields, path: str, options: MediaOptions) -> MediaPart:
    """The medium of a part of a type that ``is_media``; ``path``: the part's.

    Raises InvalidArgument for a field that is missing or wrong, Unimplemented for those that are not served.
    """
    if kind in _REFUSED:
        raise Unimplemented(f"{path}.type is {quoted(kind)}, which is not served{_REFUSED[kind]}", field=f"{path}.type")
    for name, why in (("uuid", "media are known by their content"), ("file_id", "there are no files; use image_url")):
        if getattr(body, name) is not None:
            raise Unimplemented(f"{path}.{name} is not served: {why}", field=f"{path}.{name}")
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
    """Return a format's name as OpenAI writes it, of a name in any case or of a media type with its parameters."""
    kind, slash, subtype = name.strip().lower().partition("/")
    short = subtype.partition(";")[0].strip() if slash and kind == "audio" else name.strip().lower()
    short = short.removeprefix("x-")
    return _OTHER_NAMES.get(short, short)


def _check_detail(detail: str | None, field: str) -> None:
    if detail is not None and detail not in _DETAILS:
        raise InvalidArgument(f"{field} is {quoted(detail)}; known: {', '.join(_DETAILS)}", field=field)


_NO_OPTIONS = MediaOptions()
CONVERSATION = {"prompt is": "the conversation with its template and tools is"}
"""What a prompt is called that a chat template has made."""


class PartBody(MediaFields, frozen=True, kw_only=True):
    """A part of a message's content: text or a medium. The domain refuses what is neither."""

    type: str
    text: str = ""
    refusal: str | None = None


class MessageBody(msgspec.Struct, frozen=True, kw_only=True):
    """A turn. What an assistant thought has two names. ``function_call`` and the role ``function`` are OpenAI's older form of
    a call and its result.
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
    """The domain's messages. Raises InvalidArgument, Unimplemented."""
    messages = [_message(body, f"messages[{index}]", options) for index, body in enumerate(bodies)]
    warn_of_lost_calls(messages, [f"messages[{index}]" for index in range(len(messages))])
    return messages


def _message(body: MessageBody, path: str, options: MediaOptions) -> ChatMessage:
    if body.audio is not None:
        warn(WarningKind.HISTORY_LEFT_OUT, f"{path}.audio", "is an answer as sound, which this server does not keep")
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
"""Values of OpenAI's and Anthropic's protocols."""


def effort_kwargs(effort: str | None, field: str) -> dict[str, Any]:
    """Return the variables for an effort: ``none`` turns reasoning off, where the template knows that. Raises InvalidArgument."""
    if effort is None:
        return {}
    if effort not in EFFORTS:
        raise InvalidArgument(
            f"{field} is {quoted(effort)}; known: {', '.join(EFFORTS)}. Other values go into "
            "chat_template_kwargs.reasoning_effort",
            field=field,
        )
    return {"enable_thinking": False} if effort == "none" else {"reasoning_effort": effort}
