"""Functions that build request messages from Python values, including images, audio and video."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, TypedDict

from penstock.common.v1.media_pb2 import Media, MediaFrame, MediaFrames
from penstock.common.v1.sampling_pb2 import OUTPUT_KIND_FINAL, SamplingParams
from penstock.inference.v1 import messages_pb2 as pb
from penstock.inference.v1.messages_pb2 import ChatMessage, ContentPart

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
    chat_template_kwargs: str
    cache_salt: str


def whole(sampling: SamplingParams | None) -> SamplingParams:
    """Return the same sampling parameters, except that the server sends a single message at the end."""
    final = SamplingParams()
    if sampling is not None:
        final.CopyFrom(sampling)
    final.output_kind = OUTPUT_KIND_FINAL
    return final


def generate_request(
    prompt: MixedPrompt, sampling: SamplingParams | None, prediction: Prompt | None, options: GenerateOptions
) -> pb.GenerateRequest:
    """Build a request to continue a prompt. ``prediction`` is the output that the caller expects."""
    request = pb.GenerateRequest(sampling_params=sampling, prediction=prediction_of(prediction), **options)
    if isinstance(prompt, str):
        request.text = prompt
    elif (mixed := _mixed(prompt)) is not None:
        request.mixed.CopyFrom(mixed)
    else:
        request.token_ids.ids.extend(prompt)  # type: ignore[arg-type]  # _mixed has checked the type
        request.token_ids.SetInParent()  # set the field even if it is empty, so that the server's error names token_ids
    return request


def prediction_of(given: Prompt | None) -> pb.Prediction | None:
    """Build the message for the output that the caller expects."""
    if given is None or isinstance(given, str):
        return None if given is None else pb.Prediction(text=given)
    return pb.Prediction(token_ids=pb.TokenIds(ids=given))


def pooling_input(given: MixedPrompt) -> pb.PoolingInput:
    """Build the message for one input to embed, classify or score."""
    if isinstance(given, str):
        return pb.PoolingInput(text=given)
    if (mixed := _mixed(given)) is not None:
        return pb.PoolingInput(mixed=mixed)
    return pb.PoolingInput(token_ids=pb.TokenIds(ids=given))  # type: ignore[arg-type]  # _mixed has checked the type


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
    """Return an audio item in WAV, FLAC, Ogg or MP3 format."""
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
        raise ValueError(f"timestamps has {len(times)} entries, but there are {len(pictures)} frames")
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
