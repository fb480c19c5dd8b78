import math
from typing import Any

import pytest

from penstock.common.v1 import media_pb2 as media_messages
from penstock.common.v1 import tensor_pb2
from penstock.inference.v1 import messages_pb2
from penstock_common.errors import InvalidArgument, RequestFailed, Unimplemented
from penstock_common.types.media import TensorData
from penstock_frontend.api.grpc.message_parts import MAX_TENSORS, media_part
from penstock_frontend.api.grpc.messages import chat_request, embed_request, generate_request, score_request
from penstock_frontend.api.media_sources import MAX_FRAMES
from penstock_frontend.call_types import ContentPart, EncodedFile, Features, Frame, Frames, MediaPart, MixedPrompt, Url
from penstock_frontend.config import LimitsConfig
from penstock_frontend.processing.prompts.named_prompts import NamedPrompts

pb: Any = messages_pb2  # messages are built from dictionaries here
media_pb2: Any = media_messages
PNG = b"\x89PNG secret"
IMAGE = {"modality": "image", "data": PNG}
CALL: dict[str, Any] = {"metadata": {}, "time_left": None, "limits": LimitsConfig()}


def tensor(*shape: int, dtype: Any = tensor_pb2.DATA_TYPE_UINT8, **payload: Any) -> Any:
    return tensor_pb2.Tensor(dtype=dtype, shape=shape, **(payload or {"inline": bytes(math.prod(shape))}))


def frames(*timestamps: float, data: bytes = PNG) -> Any:
    return media_pb2.MediaFrames(frames=[media_pb2.MediaFrame(data=data, timestamp=each) for each in timestamps])


@pytest.mark.parametrize(
    ("fields", "source", "field"),
    [
        (IMAGE, EncodedFile(PNG), "data"),
        ({"modality": "audio", "data": b"RIFF"}, EncodedFile(b"RIFF"), "data"),
        ({"modality": "image", "url": "https://a/b"}, Url("https://a/b"), "url"),
        ({"modality": "video", "url": "data:video/jpeg;base64,AA==,AQ=="}, None, "url"),
        ({"modality": "video", "frames": frames(0.5, 0.5, 2)}, None, "frames"),
        ({"modality": "image", "embeds": tensor(2, 3)}, None, "embeds"),
        ({"modality": "image", "features": {"tensors": {"pixel_values": tensor(1, 3)}}}, None, "features"),
    ],
)
def test_media_are_the_domains(fields: dict[str, Any], source: Any, field: str) -> None:
    expected: dict[str, Any] = {
        "url": Frames([Frame(b"\0", 0.0), Frame(b"\1", 1.0)]),
        "frames": Frames([Frame(PNG, 0.5), Frame(PNG, 0.5), Frame(PNG, 2.0)]),
        "embeds": Features({"embeds": TensorData("uint8", (2, 3), bytes(6))}),
        "features": Features({"pixel_values": TensorData("uint8", (1, 3), bytes(3))}),
    }
    found = media_part(media_pb2.Media(**fields), "m")
    assert found == MediaPart(modality=fields["modality"], source=source or expected[field], field=f"m.{field}")


def test_arguments_of_the_processor_are_a_json_object() -> None:
    part = media_part(media_pb2.Media(**IMAGE, processor_kwargs='{"min_pixels": 9}'), "m")
    assert part.processor_kwargs == {"min_pixels": 9}


BROKEN: list[tuple[dict[str, Any], str, str]] = [
    ({}, "modality", "is ''; known: image, audio, video"),
    ({"modality": "smell", "data": PNG}, "modality", "is 'smell'; known: image, audio, video"),
    ({"modality": "IMAGE", "data": PNG}, "modality", "is 'IMAGE'"),
    ({"modality": "image"}, "source", "is not set: give data, url, frames, features or embeds"),
    ({"modality": "image", "data": b""}, "data", "is empty"),
    ({"modality": "image", "url": ""}, "url", "is empty"),
    (
        {"modality": "video", "data": b"\0\0\0 ftyp"},
        "data",
        "is a video file, but this server reads no video files; set frames instead",
    ),
    ({"modality": "video", "url": "https://a/b.mp4"}, "url", "this server reads no video files"),
    ({"modality": "video", "url": "data:video/mp4;base64,AA=="}, "url", "this server reads no video files"),
    ({"modality": "video", "url": "data:video/jpeg;base64,A"}, "url", "frame 0 has 1 base64 characters"),
    ({"modality": "image", "frames": frames(0)}, "frames", "is set, but modality is 'image'; only a video has frames"),
    ({"modality": "video", "frames": frames()}, "frames.frames", "is empty; at least one frame is required"),
    ({"modality": "video", "frames": frames(0, data=b"")}, "frames.frames[0].data", "is empty"),
    ({"modality": "video", "frames": frames(-0.5)}, "frames.frames[0].timestamp", "is -0.5; it must be finite"),
    (
        {"modality": "video", "frames": frames(1, 0.5)},
        "frames.frames[1].timestamp",
        "at least 1.0, the timestamp of the",
    ),
    ({"modality": "video", "frames": frames(math.nan)}, "frames.frames[0].timestamp", "is nan"),
    ({"modality": "video", "frames": frames(0, math.inf)}, "frames.frames[1].timestamp", "is inf"),
    ({"modality": "video", "frames": frames(*[0] * (MAX_FRAMES + 1))}, "frames.frames", f"the limit is {MAX_FRAMES}"),
    ({"modality": "image", "features": {}}, "features.tensors", "is empty"),
    (
        {"modality": "image", "features": {"tensors": {f"t{i}": tensor(1) for i in range(MAX_TENSORS + 1)}}},
        "features.tensors",
        f"has {MAX_TENSORS + 1} entries; the limit is {MAX_TENSORS}",
    ),
    (
        {"modality": "image", "features": {"tensors": {"embeds": tensor(1)}}},
        "features.tensors['embeds']",
        "send embeddings in the field embeds instead",
    ),
    (
        {"modality": "image", "features": {"tensors": {"a": tensor(2, inline=b"1")}}},
        "features.tensors['a'].inline",
        "has 1 bytes; the tensor's shape and type require 2 bytes",
    ),
    ({"modality": "image", "embeds": {}}, "embeds.dtype", "is 0; known: float32"),
    ({"modality": "image", "embeds": tensor(2, dtype=99)}, "embeds.dtype", "is 99; known: float32"),
    ({"modality": "image", "embeds": tensor(*[1] * 9)}, "embeds.shape", "has 9 dimensions; the limit is 8"),
    ({"modality": "image", "embeds": tensor(2**62, 2**62, inline=b"")}, "embeds.inline", "has 0 bytes"),
    (
        {"modality": "image", "embeds": tensor(1, shared_memory={"name": "/x"})},
        "embeds.inline",
        "embeds.shared_memory is not supported here",
    ),
    (
        {"modality": "image", "embeds": tensor(1, chunks={"size": 1})},
        "embeds.inline",
        "embeds.chunks is not supported here",
    ),
    ({**IMAGE, "processor_kwargs": "{"}, "processor_kwargs", "is not valid JSON"),
    ({**IMAGE, "processor_kwargs": "3"}, "processor_kwargs", "is not a JSON object"),
    ({**IMAGE, "processor_kwargs": "[" * 100_000}, "processor_kwargs", "is not valid JSON"),
]


@pytest.mark.parametrize(("fields", "field", "message"), BROKEN)
def test_errors_name_the_invalid_field(fields: dict[str, Any], field: str, message: str) -> None:
    with pytest.raises(RequestFailed) as raised:
        media_part(media_pb2.Media(**fields), "messages[0].parts[1].media")
    path = f"messages[0].parts[1].media.{field}"
    assert isinstance(raised.value, (InvalidArgument, Unimplemented))
    assert message in raised.value.message
    assert raised.value.field == path
    assert raised.value.message.startswith(path.removesuffix(".inline"))
    assert "secret" not in raised.value.message


def test_parts_of_a_message_keep_their_order() -> None:
    parts = [pb.ContentPart(text="a"), pb.ContentPart(media=IMAGE), pb.ContentPart(text="")]
    request = chat_request(pb.ChatRequest(messages=[pb.ChatMessage(role="user", parts=parts)]), **CALL)
    assert request.messages[0].content == [
        ContentPart(type="text", text="a"),
        ContentPart(
            type="media",
            media=MediaPart(modality="image", source=EncodedFile(PNG), field="messages[0].parts[1].media.data"),
        ),
        ContentPart(type="text", text=""),
    ]


@pytest.mark.parametrize(
    ("message", "field", "text"),
    [
        ({"content": "a", "parts": [{"text": "b"}]}, "messages[0].parts", "and content are both set; set only one"),
        ({"parts": [{"text": "b"}, {}]}, "messages[0].parts[1]", "is not set: give text or media"),
        ({"parts": [{"media": {}}]}, "messages[0].parts[0].media.modality", "is ''"),
        ({"parts": [{"text": ""}] * 1025}, "messages[0].parts", "limits.max_content_parts is 1024"),
    ],
)
def test_broken_parts_of_messages_are_refused(message: dict[str, Any], field: str, text: str) -> None:
    with pytest.raises(InvalidArgument) as raised:
        chat_request(pb.ChatRequest(messages=[pb.ChatMessage(role="user", **message)]), **CALL)
    assert raised.value.field == field
    assert text in raised.value.message


def test_media_stand_between_the_parts_of_prompts_and_inputs() -> None:
    parts = [pb.PromptPart(text="a"), pb.PromptPart(media=IMAGE), pb.PromptPart(token_ids={"ids": [1, 2]})]
    mixed = pb.MixedPrompt(parts=parts)
    prompt = generate_request(pb.GenerateRequest(mixed=mixed), **CALL).prompt
    assert isinstance(prompt, MixedPrompt)
    assert prompt.fields == ("mixed.parts[0].text", "mixed.parts[1].media", "mixed.parts[2].token_ids.ids")
    assert [part.field for part in prompt.media] == ["mixed.parts[1].media.data"]
    request = embed_request(pb.EmbedRequest(inputs=[{"text": "x"}, {"mixed": mixed}]), **CALL, prompts=NamedPrompts())
    assert request.fields == ["inputs[0].text", "inputs[1].mixed"]
    assert isinstance(request.inputs[1], MixedPrompt)
    assert [part.field for part in request.inputs[1].media] == ["inputs[1].mixed.parts[1].media.data"]


def test_vectors_are_no_inputs_and_scores_are_of_texts() -> None:
    vectors = pb.PoolingInput(mixed={"parts": [{"embeds": tensor(1, 1, dtype=1, inline=bytes(4))}]})
    with pytest.raises(Unimplemented) as raised:
        embed_request(pb.EmbedRequest(inputs=[vectors]), **CALL, prompts=NamedPrompts())
    assert raised.value.field == "inputs[0].mixed.parts[0].embeds"
    with pytest.raises(Unimplemented) as raised:
        message = pb.ScoreRequest(query={"text": "a"}, documents=[{"mixed": {}}])
        score_request(message, metadata={}, time_left=None, prompts=NamedPrompts())
    assert raised.value.field == "documents[0].mixed"
