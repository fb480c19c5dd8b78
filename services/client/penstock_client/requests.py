"""Requests: the contract's messages from what callers give, with images, sound and video."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, TypedDict

from penstock.common.v1.media_pb2 import Media, MediaFrame, MediaFrames
from penstock.common.v1.sampling_pb2 import OUTPUT_KIND_FINAL, SamplingParams
from penstock.inference.v1 import messages_pb2 as pb
from penstock.inference.v1.messages_pb2 import ChatMessage, ContentPart

Prompt = str | Sequence[int]
"""A text, or token ids that are used as they are."""
MixedPrompt = Prompt | Sequence[str | Sequence[int] | Media]
"""The same, or texts, token ids and media one after the other."""


class CallOptions(TypedDict, total=False):
    """Fields of every request; what is left out the server decides."""

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
    """The same parameters, with one message at the end."""
    final = SamplingParams()
    if sampling is not None:
        final.CopyFrom(sampling)
    final.output_kind = OUTPUT_KIND_FINAL
    return final


def generate_request(
    prompt: MixedPrompt, sampling: SamplingParams | None, prediction: Prompt | None, options: GenerateOptions
) -> pb.GenerateRequest:
    """A prompt to continue. ``prediction``: what the output may turn out to be."""
    request = pb.GenerateRequest(sampling_params=sampling, prediction=prediction_of(prediction), **options)
    if isinstance(prompt, str):
        request.text = prompt
    elif (mixed := _mixed(prompt)) is not None:
        request.mixed.CopyFrom(mixed)
    else:
        request.token_ids.ids.extend(prompt)  # type: ignore[arg-type]  # _mixed has looked
        request.token_ids.SetInParent()  # an empty list is the server's to refuse, as token_ids
    return request


def prediction_of(given: Prompt | None) -> pb.Prediction | None:
    """What the output may turn out to be."""
    if given is None or isinstance(given, str):
        return None if given is None else pb.Prediction(text=given)
    return pb.Prediction(token_ids=pb.TokenIds(ids=given))


def pooling_input(given: MixedPrompt) -> pb.PoolingInput:
    """An input to embed, classify or score."""
    if isinstance(given, str):
        return pb.PoolingInput(text=given)
    if (mixed := _mixed(given)) is not None:
        return pb.PoolingInput(mixed=mixed)
    return pb.PoolingInput(token_ids=pb.TokenIds(ids=given))  # type: ignore[arg-type]  # _mixed has looked


def _mixed(given: Sequence[int] | Sequence[str | Sequence[int] | Media]) -> pb.MixedPrompt | None:
    """Texts, token ids and media as a prompt; None for token ids alone."""
    if not given or isinstance(given[0], int):
        return None
    return pb.MixedPrompt(parts=map(_part, given))


def _part(given: Any) -> pb.PromptPart:
    if isinstance(given, Media):
        return pb.PromptPart(media=given)
    return pb.PromptPart(text=given) if isinstance(given, str) else pb.PromptPart(token_ids=pb.TokenIds(ids=given))


# Images, sound and video of prompts and messages.

Source = bytes | Path | str
"""An encoded file's bytes, a file to read, or a URL: ``data:``, ``https:`` or ``http:``."""


def image(source: Source, *, processor_kwargs: str = "") -> Media:
    """An image: JPEG, PNG, WebP or GIF. ``processor_kwargs``: more arguments of the model's processor, as a JSON object."""
    return _media("image", source, processor_kwargs)


def audio(source: Source, *, processor_kwargs: str = "") -> Media:
    """A sound: WAV, FLAC, Ogg or MP3."""
    return _media("audio", source, processor_kwargs)


def video(
    frames: Iterable[bytes | Path],
    *,
    fps: float = 1.0,
    timestamps: Iterable[float] | None = None,
    processor_kwargs: str = "",
) -> Media:
    """A video as its pictures, files of one size: ``fps`` a second, or seen at ``timestamps``, in seconds. Raises ValueError
    where there are not as many of these as pictures.
    """
    pictures = [_read(frame) for frame in frames]
    times = [index / fps for index in range(len(pictures))] if timestamps is None else list(timestamps)
    if len(times) != len(pictures):
        raise ValueError(f"timestamps has {len(times)} entries for {len(pictures)} frames")
    each = [MediaFrame(data=data, timestamp=time) for data, time in zip(pictures, times, strict=True)]
    return Media(modality="video", frames=MediaFrames(frames=each), processor_kwargs=processor_kwargs)


def message(role: str, *parts: str | Media) -> ChatMessage:
    """A turn of texts and media, in order."""
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
