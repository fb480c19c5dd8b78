"""Request messages, built from Python values with images, audio and video."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, TypedDict

from penstock.common.v1.media_pb2 import Media, MediaFrame, MediaFrames
from penstock.common.v1.sampling_pb2 import OUTPUT_KIND_FINAL, SamplingParams
from penstock.inference.v1 import messages_pb2 as pb
from penstock.inference.v1.messages_pb2 import ChatMessage, ContentPart

Prompt = str | Sequence[int]
"""Prompt as text, or as token ids that are used unchanged."""
MixedPrompt = Prompt | Sequence[str | Sequence[int] | Media]
"""Prompt, or a sequence of texts, token ids and media."""


class CallOptions(TypedDict, total=False):
    """Fields of every request. The server chooses missing fields."""

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
    """Return the same parameters, with a single message at the end."""
    final = SamplingParams()
    if sampling is not None:
        final.CopyFrom(sampling)
    final.output_kind = OUTPUT_KIND_FINAL
    return final


def generate_request(
    prompt: MixedPrompt, sampling: SamplingParams | None, prediction: Prompt | None, options: GenerateOptions
) -> pb.GenerateRequest:
    """Build a request to continue a prompt. ``prediction`` is the expected output."""
    request = pb.GenerateRequest(sampling_params=sampling, prediction=prediction_of(prediction), **options)
    if isinstance(prompt, str):
        request.text = prompt
    elif (mixed := _mixed(prompt)) is not None:
        request.mixed.CopyFrom(mixed)
    else:
        request.token_ids.ids.extend(prompt)  # type: ignore[arg-type]  # _mixed has looked
        request.token_ids.SetInParent()  # The server refuses an empty list with the field name token_ids.
    return request


def prediction_of(given: Prompt | None) -> pb.Prediction | None:
    """Build the message for an expected output."""
    if given is None or isinstance(given, str):
        return None if given is None else pb.Prediction(text=given)
    return pb.Prediction(token_ids=pb.TokenIds(ids=given))


def pooling_input(given: MixedPrompt) -> pb.PoolingInput:
    """Build an input to embed, classify or score."""
    if isinstance(given, str):
        return pb.PoolingInput(text=given)
    if (mixed := _mixed(given)) is not None:
        return pb.PoolingInput(mixed=mixed)
    return pb.PoolingInput(token_ids=pb.TokenIds(ids=given))  # type: ignore[arg-type]  # _mixed has looked


def _mixed(given: Sequence[int] | Sequence[str | Sequence[int] | Media]) -> pb.MixedPrompt | None:
    """Return a prompt of texts, token ids and media, or None if the value is only token ids."""
    if not given or isinstance(given[0], int):
        return None
    return pb.MixedPrompt(parts=map(_part, given))


def _part(given: Any) -> pb.PromptPart:
    if isinstance(given, Media):
        return pb.PromptPart(media=given)
    return pb.PromptPart(text=given) if isinstance(given, str) else pb.PromptPart(token_ids=pb.TokenIds(ids=given))


# Images, audio and video of prompts and messages.

Source = bytes | Path | str
"""Bytes of an encoded file, a file to read, or a URL: ``data:``, ``https:`` or ``http:``."""


def image(source: Source, *, processor_kwargs: str = "") -> Media:
    """Return an image in JPEG, PNG, WebP or GIF format.

    ``processor_kwargs`` has extra arguments for the model's processor, as a JSON object.
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
    """Return a video from its frames, image files of equal size, shown at ``fps`` or at ``timestamps`` in seconds.

    Raises ValueError if the numbers of timestamps and frames differ.
    """
    pictures = [_read(frame) for frame in frames]
    times = [index / fps for index in range(len(pictures))] if timestamps is None else list(timestamps)
    if len(times) != len(pictures):
        raise ValueError(f"timestamps has {len(times)} entries for {len(pictures)} frames")
    each = [MediaFrame(data=data, timestamp=time) for data, time in zip(pictures, times, strict=True)]
    return Media(modality="video", frames=MediaFrames(frames=each), processor_kwargs=processor_kwargs)


def message(role: str, *parts: str | Media) -> ChatMessage:
    """Return a chat message of texts and media, in order."""
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
