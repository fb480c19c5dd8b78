"""Conversion of the parts of messages that several calls of ``penstock.inference.v1`` share: context, media,
predictions and usage.
"""

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import msgspec

from penstock.common.v1 import finish_pb2, media_pb2, stats_pb2
from penstock.inference.v1 import messages_pb2 as pb
from penstock_common.errors import InvalidArgument, Unimplemented, quoted
from penstock_common.rpc.by_field import to_message
from penstock_common.rpc.outputs import prompt_embeds_from_proto
from penstock_common.rpc.request import modality_from_proto, tensor_from_proto
from penstock_common.types.media import EMBEDS, Modality, TensorData
from penstock_common.types.request import RequestContext
from penstock_frontend.api.call_context import context_of_call, deadline_after
from penstock_frontend.api.media_sources import MAX_FRAMES, source_of_url
from penstock_frontend.call_types import (
    EncodedFile,
    Features,
    Finish,
    Frame,
    Frames,
    MediaPart,
    MixedPrompt,
    Part,
    Prediction,
    Source,
)
from penstock_frontend.config import LimitsConfig
from penstock_frontend.processing.prompts.sampling_params import check_count


def add_finish(message: pb.GenerateResponse | pb.ChatResponse, finish: Finish) -> None:
    """Set the fields about the end of a sequence in the last message of the sequence."""
    message.finish_reason = finish_pb2.FinishReason.ValueType(finish.reason)
    if isinstance(finish.stop_reason, str):
        message.stop_reason.text = finish.stop_reason
    elif finish.stop_reason is not None:
        message.stop_reason.token_id = finish.stop_reason
    message.usage.CopyFrom(to_message(finish.usage, stats_pb2.Usage))


def prediction_of(message: pb.GenerateRequest | pb.ChatRequest) -> Prediction | None:
    """Return the predicted output in a message, or None if there is none. Raises InvalidArgument for an empty
    prediction.
    """
    if not message.HasField("prediction"):
        return None
    match message.prediction.WhichOneof("content"):
        case "text":
            return message.prediction.text
        case "token_ids":
            return message.prediction.token_ids.ids
        case _:
            raise InvalidArgument("prediction is not set: give text or token_ids", field="prediction")


def object_of(text: str, field: str) -> dict[str, Any] | None:
    """Return the JSON object that a field contains as text, or None if the field is empty. Raises InvalidArgument if
    the text is not a JSON object.
    """
    if not text:
        return None
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as e:
        raise InvalidArgument(f"{field} is not valid JSON: {e}", field=field) from None
    if not isinstance(value, dict):
        raise InvalidArgument(f"{field} is not a JSON object", field=field)
    return value


# The code below converts media of requests, and mixed prompts.

MAX_TENSORS = 64
"""Maximum number of tensors of one preprocessed media item."""


def media_part(message: media_pb2.Media, path: str) -> MediaPart:
    """Return the media item of the message at ``path`` in the request. Nothing is downloaded or decoded.

    Raises InvalidArgument if a field is missing or wrong. Raises Unimplemented for video files, and for tensors that
    are not in the message.
    """
    modality = modality_from_proto(message.modality, path=f"{path}.modality")
    kind = message.WhichOneof("source")
    if kind is None:
        raise InvalidArgument(
            f"{path}.source is not set: give data, url, frames, features or embeds", field=f"{path}.source"
        )
    field = f"{path}.{kind}"
    return MediaPart(
        modality=modality,
        source=_source(message, kind, modality, field),
        field=field,
        processor_kwargs=object_of(message.processor_kwargs, f"{path}.processor_kwargs") or {},
    )


def mixed_prompt(message: pb.MixedPrompt, path: str, limits: LimitsConfig) -> MixedPrompt:
    """Return the mixed prompt in a message. Raises InvalidArgument if there are too many parts, or a part is not valid.
    Raises the errors of ``media_part``.
    """
    check_count(f"{path}.parts", len(message.parts), limits, "max_prompt_parts")
    parts = [_prompt_part(part, f"{path}.parts[{i}]") for i, part in enumerate(message.parts)]
    return MixedPrompt(tuple(part for part, _ in parts), tuple(field for _, field in parts))


def _prompt_part(message: pb.PromptPart, path: str) -> tuple[Part, str]:
    """Return a part of a mixed prompt, and the path of the field that contains it."""
    match message.WhichOneof("part"):
        case "text":
            return message.text, f"{path}.text"
        case "token_ids":
            return message.token_ids.ids, f"{path}.token_ids.ids"
        case "embeds":
            return prompt_embeds_from_proto(message.embeds, path=f"{path}.embeds"), f"{path}.embeds"
        case "media":
            return media_part(message.media, f"{path}.media"), f"{path}.media"
        case _:
            raise InvalidArgument(f"{path} is not set: give text, token_ids, embeds or media", field=path)


def _source(message: media_pb2.Media, kind: str, modality: Modality, field: str) -> Source:
    match kind:
        case "data":
            if modality == "video":
                raise Unimplemented(
                    f"{field} is a video file, but this server reads no video files; set frames instead", field=field
                )
            if not message.data:
                raise InvalidArgument(f"{field} is empty", field=field)
            return EncodedFile(message.data)
        case "url":
            return source_of_url(modality, message.url, field=field)
        case "frames":
            if modality != "video":
                raise InvalidArgument(
                    f"{field} is set, but modality is {quoted(modality)}; only a video has frames", field=field
                )
            return Frames(_frames(message.frames.frames, f"{field}.frames"))
        case "embeds":
            return Features({EMBEDS: tensor_from_proto(message.embeds, path=field)})
        case _:
            return Features(_tensors(message.features, f"{field}.tensors"))


def _frames(messages: Sequence[media_pb2.MediaFrame], path: str) -> list[Frame]:
    if not messages:
        raise InvalidArgument(f"{path} is empty; at least one frame is required", field=path)
    if len(messages) > MAX_FRAMES:
        raise InvalidArgument(
            f"{path} has {len(messages)} entries; the limit is {MAX_FRAMES}", field=path, reason="MEDIA_TOO_LARGE"
        )
    frames: list[Frame] = []
    before = 0.0
    for index, each in enumerate(messages):
        if not each.data:
            raise InvalidArgument(f"{path}[{index}].data is empty", field=f"{path}[{index}].data")
        if not (math.isfinite(each.timestamp) and each.timestamp >= before):
            field = f"{path}[{index}].timestamp"
            raise InvalidArgument(
                f"{field} is {each.timestamp}; it must be finite and at least {before}, the timestamp of the "
                "previous frame",
                field=field,
            )
        before = each.timestamp
        frames.append(Frame(each.data, each.timestamp))
    return frames


def _tensors(message: media_pb2.MediaFeatures, path: str) -> dict[str, TensorData]:
    if not message.tensors:
        raise InvalidArgument(f"{path} is empty", field=path)
    if len(message.tensors) > MAX_TENSORS:
        raise InvalidArgument(f"{path} has {len(message.tensors)} entries; the limit is {MAX_TENSORS}", field=path)
    if EMBEDS in message.tensors:
        raise InvalidArgument(
            f"{path}[{EMBEDS!r}] is set; send embeddings in the field embeds instead", field=f"{path}[{EMBEDS!r}]"
        )
    return {
        name: tensor_from_proto(tensor, path=f"{path}[{name[:64]!r}]")
        for name, tensor in sorted(message.tensors.items())
    }


_Salted = pb.GenerateRequest | pb.ChatRequest | pb.TranscribeRequest
Message: TypeAlias = _Salted | pb.EmbedRequest | pb.ClassifyRequest | pb.ScoreRequest


def context_of(message: Message, metadata: Mapping[str, str], time_left: float | None) -> RequestContext:
    """Return the request context of a message and its call. Raises InvalidArgument if a field or a header of the call
    is not valid.

    ``time_left`` is the number of seconds until the deadline of the call.
    """
    return msgspec.structs.replace(
        context_of_call(metadata, deadline=deadline_after(time_left), hints=message.routing),
        external_request_id=message.request_id,
        model=message.model,
        lora=message.lora,
        cache_salt=message.cache_salt if isinstance(message, _Salted) else "",
    )
