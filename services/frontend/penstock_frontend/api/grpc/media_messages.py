"""Media of requests, and prompts that have some between their other parts: messages to the domain."""

import math
from collections.abc import Sequence

from penstock.common.v1 import media_pb2
from penstock.inference.v1 import messages_pb2 as pb
from penstock_common.errors import InvalidArgument, Unimplemented, quoted
from penstock_common.rpc.media import modality_from_proto, tensor_from_proto
from penstock_common.rpc.outputs import prompt_embeds_from_proto
from penstock_common.types.media import EMBEDS, Modality, TensorData
from penstock_frontend.api.grpc.json_fields import object_of
from penstock_frontend.api.media_sources import MAX_FRAMES, source_of_url
from penstock_frontend.call_types import MixedPrompt, Part
from penstock_frontend.config import LimitsConfig
from penstock_frontend.media_parts import EncodedFile, Features, Frame, Frames, MediaPart, Source
from penstock_frontend.processing.prompts.counts import check_count

MAX_TENSORS = 64
"""Of an item that its client has processed."""


def media_part(message: media_pb2.Media, path: str) -> MediaPart:
    """The medium of a message, whose path in the request is ``path``. Nothing is fetched or decoded here.

    Raises InvalidArgument for what is missing or wrong, Unimplemented for video files and tensors that are not inline.
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
    """The prompt of parts. Raises InvalidArgument for too many, or one that cannot be read, and what ``media_part`` raises."""
    check_count(f"{path}.parts", len(message.parts), limits, "max_prompt_parts")
    parts = [_prompt_part(part, f"{path}.parts[{i}]") for i, part in enumerate(message.parts)]
    return MixedPrompt(tuple(part for part, _ in parts), tuple(field for _, field in parts))


def _prompt_part(message: pb.PromptPart, path: str) -> tuple[Part, str]:
    """The part and the path of its field."""
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
                raise Unimplemented(f"{field} is a video file, which is not read: give its frames", field=field)
            if not message.data:
                raise InvalidArgument(f"{field} is empty", field=field)
            return EncodedFile(message.data)
        case "url":
            return source_of_url(modality, message.url, field=field)
        case "frames":
            if modality != "video":
                raise InvalidArgument(
                    f"{field} is set; they are of a video, and modality is {quoted(modality)}", field=field
                )
            return Frames(_frames(message.frames.frames, f"{field}.frames"))
        case "embeds":
            return Features({EMBEDS: tensor_from_proto(message.embeds, path=field)})
        case _:
            return Features(_tensors(message.features, f"{field}.tensors"))


def _frames(messages: Sequence[media_pb2.MediaFrame], path: str) -> list[Frame]:
    if not messages:
        raise InvalidArgument(f"{path} is empty: there is no picture", field=path)
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
                f"{field} is {each.timestamp}; it must be finite and at least {before}, as of the frame before",
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
            f"{path}[{EMBEDS!r}] is set; embeddings have a field of their own: embeds", field=f"{path}[{EMBEDS!r}]"
        )
    return {
        name: tensor_from_proto(tensor, path=f"{path}[{name[:64]!r}]")
        for name, tensor in sorted(message.tensors.items())
    }
