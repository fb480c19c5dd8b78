"""Functions that build request messages from Python values, including images, audio and video."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypedDict, TypeVar

from google.protobuf.message import Message

from penstock.common.v1.media_pb2 import Media, MediaFrame, MediaFrames
from penstock.common.v1.sampling_pb2 import OUTPUT_KIND_FINAL, SamplingParams
from penstock.inference.v1 import messages_pb2 as pb
from penstock.inference.v1.messages_pb2 import ChatMessage, ContentPart
from penstock_client.messages import build, nearest, shown

M = TypeVar("M", bound=Message)

Prompt = str | Sequence[int]
"""Prompt as text or as token ids. Token ids are used unchanged."""
MixedPrompt = Prompt | Sequence[str | Sequence[int] | Media]
"""Prompt as text, as token ids, or as a sequence of texts, token ids and media."""


class CallOptions(TypedDict, total=False):
    """Fields that every request may have. For missing fields, the server uses its defaults."""

    model: str
    lora: str
    request_id: str
    routing: pb.RoutingHints | None


class ScoreOptions(CallOptions, total=False):
    """Fields of a ScoreRequest."""

    prompt_name: str


class EmbedOptions(ScoreOptions, total=False):
    """Fields of an EmbedRequest."""

    input_type: str


class GenerateOptions(CallOptions, total=False):
    """Fields of a GenerateRequest."""

    cache_salt: str
    add_special_tokens: bool | None


class ChatOptions(CallOptions, total=False):
    """Fields of a ChatRequest."""

    tools: Iterable[pb.Tool]
    tool_choice: pb.ToolChoice | None
    add_generation_prompt: bool | None
    continue_final_message: bool
    chat_template_kwargs: str | Mapping[str, Any]
    cache_salt: str


class TranscribeOptions(CallOptions, total=False):
    """Fields of a TranscribeRequest. ``task`` is ``transcribe`` or ``translate``."""

    task: str
    language: str
    prompt: str
    temperatures: Iterable[float]
    seed: int | None
    segments: bool
    cache_salt: str


_NAMED = ("sampling", "prediction", "timeout")
"""Other arguments of the methods, for hints in errors."""


def request_of(kind: type[M], allowed: Any, options: Mapping[str, Any], **fields: Any) -> M:
    """Build the request of a method from its keyword arguments ``options`` and from other fields of the request.

    Args:
        kind: Class of the request.
        allowed: TypedDict with the allowed options.
        options: Keyword arguments of the caller.
        fields: Other fields of the request.

    Raises:
        TypeError: An option is unknown, or a value has the wrong type.
        ValueError: A value is out of range.
    """
    for name, value in options.items():
        if name in allowed.__optional_keys__:
            continue
        if name in SamplingParams.DESCRIPTOR.fields_by_name and "sampling_params" in kind.DESCRIPTOR.fields_by_name:
            remedy = f"; it is a field of SamplingParams: pass SamplingParams({name}={shown(value)}) as sampling"
        else:
            remedy = nearest(name, [*allowed.__optional_keys__, *_NAMED])
        raise TypeError(f"this method has no argument {name!r}{remedy}")
    return build(kind, {**fields, **options})


def check_sampling(sampling: object) -> None:
    """Check the type of the argument ``sampling``. Raises TypeError if ``sampling`` is neither None nor a
    ``SamplingParams``.
    """
    if sampling is None or isinstance(sampling, SamplingParams):
        return
    given = ", ".join(f"{name}={value!r}" for name, value in sampling.items()) if isinstance(sampling, dict) else "..."
    raise TypeError(f"sampling is {shown(sampling)}; pass penstock_client.SamplingParams({given})")


def whole(sampling: SamplingParams | None) -> SamplingParams:
    """Return the same sampling parameters, except that the server sends a single message at the end."""
    check_sampling(sampling)
    final = SamplingParams()
    if sampling is not None:
        final.CopyFrom(sampling)
    final.output_kind = OUTPUT_KIND_FINAL
    return final


def generate_request(
    prompt: MixedPrompt, sampling: SamplingParams | None, prediction: Prompt | None, options: GenerateOptions
) -> pb.GenerateRequest:
    """Build a request to continue a prompt. ``prediction`` is the output that the caller expects."""
    check_sampling(sampling)
    fields = {**_content("prompt", prompt), "sampling_params": sampling, "prediction": prediction_of(prediction)}
    return request_of(pb.GenerateRequest, GenerateOptions, options, **fields)


def chat_request(
    messages: Iterable[ChatMessage], sampling: SamplingParams | None, prediction: Prompt | None, options: ChatOptions
) -> pb.ChatRequest:
    """Build a request to answer a conversation. ``prediction`` is the output that the caller expects."""
    check_sampling(sampling)
    given: object = messages
    if isinstance(given, str | ChatMessage):
        example = '[ChatMessage(role="user", content="...")]'
        raise TypeError(f"messages is {shown(given)}; it must be a list of ChatMessage, such as {example}")
    fields = {"messages": messages, "sampling_params": sampling, "prediction": prediction_of(prediction)}
    return request_of(pb.ChatRequest, ChatOptions, options, **fields)


def transcribe_request(audio: bytes | Path, options: TranscribeOptions) -> pb.TranscribeRequest:
    """Build a request to transcribe an audio file. Raises TypeError if ``audio`` is neither bytes nor a path."""
    if not isinstance(audio, bytes | Path):
        raise TypeError(f"audio is {shown(audio)}; pass the bytes of an audio file, or its path as a pathlib.Path")
    return request_of(pb.TranscribeRequest, TranscribeOptions, options, audio=_read(audio))


def prediction_of(given: Prompt | None) -> pb.Prediction | None:
    """Build the message for the output that the caller expects."""
    if given is None:
        return None
    return build(pb.Prediction, {"text" if isinstance(given, str) else "token_ids": given}, "prediction")


def pooling_input(given: MixedPrompt, name: str = "input") -> pb.PoolingInput:
    """Build the message for one input to embed, classify or score. ``name``: the argument, for errors."""
    return pb.PoolingInput(**_content(name, given))


def pooling_inputs(given: Sequence[MixedPrompt], name: str) -> list[pb.PoolingInput]:
    """Build the messages for several inputs. ``name``: the argument, for errors. Raises TypeError for a single text."""
    if isinstance(given, str):
        raise TypeError(f"{name} is {shown(given)}; it must be a list: pass [{shown(given)}]")
    return [pooling_input(each, f"{name}[{index}]") for index, each in enumerate(given)]


def _content(name: str, given: MixedPrompt) -> dict[str, Any]:
    """Return the field for a prompt: its text, token ids or parts. ``name``: the argument, for errors."""
    if isinstance(given, str):
        return {"text": given}
    try:
        if (mixed := _mixed(given)) is not None:
            return {"mixed": mixed}
        return {"token_ids": pb.TokenIds(ids=given)}  # type: ignore[arg-type]  # _mixed has checked the type
    except (TypeError, ValueError, LookupError):
        form = "a text, a list of token ids, or a list of texts, lists of token ids and media"
        raise TypeError(f"{name} is {shown(given)}; it must be {form}") from None


def _mixed(given: Sequence[int] | Sequence[str | Sequence[int] | Media]) -> pb.MixedPrompt | None:
    """Return the message for a prompt of texts, token ids and media. Return None if the value has only token ids."""
    if not given or isinstance(given[0], int):
        return None
    return pb.MixedPrompt(parts=map(_part, given))


def _part(given: Any) -> pb.PromptPart:
    if isinstance(given, Media):
        return pb.PromptPart(media=given)
    return pb.PromptPart(text=given) if isinstance(given, str) else pb.PromptPart(token_ids=pb.TokenIds(ids=given))


# The functions below build images, audio and video for prompts and messages.

Source = bytes | Path | str
"""Source of a media item: bytes of an encoded file, path of a file to read, or URL (``data:``, ``https:`` or
``http:``).
"""


def image(source: Source, *, processor_kwargs: str = "") -> Media:
    """Return an image in JPEG, PNG, WebP or GIF format.

    ``processor_kwargs`` has additional arguments for the model's processor, as the JSON text of an object.
    """
    return _media("image", source, processor_kwargs)


def audio(source: Source, *, processor_kwargs: str = "") -> Media:
    """Return an audio item in WAV, FLAC, Ogg, MP3, MP4 (M4A), WebM or AAC format."""
    return _media("audio", source, processor_kwargs)


def video(
    frames: Iterable[bytes | Path],
    *,
    fps: float = 1.0,
    timestamps: Iterable[float] | None = None,
    processor_kwargs: str = "",
) -> Media:
    """Return a video made of frames. The frames are image files of equal size.

    ``timestamps`` are the times of the frames in seconds. Without timestamps, ``fps`` is the number of frames per
    second. Raises ValueError if the number of timestamps differs from the number of frames.
    """
    pictures = [_read(frame) for frame in frames]
    times = [index / fps for index in range(len(pictures))] if timestamps is None else list(timestamps)
    if len(times) != len(pictures):
        raise ValueError(
            f"timestamps has {len(times)} entries, but frames has {len(pictures)}; give one timestamp per frame"
        )
    each = [MediaFrame(data=data, timestamp=time) for data, time in zip(pictures, times, strict=True)]
    return Media(modality="video", frames=MediaFrames(frames=each), processor_kwargs=processor_kwargs)


def message(role: str, *parts: str | Media) -> ChatMessage:
    """Return a chat message that consists of these texts and media, in order."""
    return ChatMessage(
        role=role,
        parts=[ContentPart(text=part) if isinstance(part, str) else ContentPart(media=part) for part in parts],
    )


def _media(modality: str, source: Source, processor_kwargs: str) -> Media:
    if isinstance(source, str):
        return Media(modality=modality, url=source, processor_kwargs=processor_kwargs)
    return Media(modality=modality, data=_read(source), processor_kwargs=processor_kwargs)


def _read(source: bytes | Path) -> bytes:
    return source.read_bytes() if isinstance(source, Path) else source
