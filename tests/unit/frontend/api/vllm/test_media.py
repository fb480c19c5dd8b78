import struct
from typing import Any

import pytest
from smg_grpc_proto.generated import vllm_engine_pb2

from penstock_common.errors import InvalidArgument, RequestFailed, Unimplemented
from penstock_common.types.media import Modality, TensorData
from penstock_frontend.api.vllm.messages import generate_request
from penstock_frontend.call_types import Features, Frame, Frames, MediaPart, MixedPrompt, Url

pb: Any = vllm_engine_pb2  # messages are built from dictionaries here
IDS = [1, 9, 9, 9, 2, 9, 9, 3]
PLACES = [{"offset": 1, "length": 3}, {"offset": 5, "length": 2}]


def tensor(*shape: int, dtype: str = "uint8", data: bytes | None = None) -> Any:
    size = {"uint8": 1, "float32": 4, "int64": 8, "uint32": 4}[dtype]
    for length in shape:
        size *= length
    return pb.TensorData(shape=shape, dtype=dtype, inline=bytes(range(size)) if data is None else data)


def anchor(modality: Modality) -> int:
    return {"image": 9, "audio": 8, "video": 7}[modality]


def converted(ids: list[int] = IDS, **fields: Any) -> MixedPrompt:
    fields = {"tokenized": {"input_ids": ids}, **fields} if "text" not in fields else fields
    message = pb.GenerateRequest(**fields)
    prompt = generate_request(message, metadata={}, time_left=None, anchor=anchor).prompt
    assert isinstance(prompt, MixedPrompt)
    return prompt


def shape_of(prompt: MixedPrompt) -> list[Any]:
    """Return the prompt's parts. Media are given as their tensors, other parts are unchanged."""
    found: list[Any] = []
    for part in prompt.parts:
        if isinstance(part, MediaPart):
            assert isinstance(part.source, Features)
            found.append(dict(part.source.tensors))
        else:
            assert not isinstance(part, str)
            found.append(list(part))  # type: ignore[arg-type]
    return found


def test_batched_tensors_are_one_for_each_placeholder() -> None:
    inputs = {"pixel_values": tensor(2, 3), "batched_keys": ["pixel_values"], "mm_placeholders": PLACES}
    first, second = TensorData("uint8", (1, 3), b"\0\1\2"), TensorData("uint8", (1, 3), b"\3\4\5")
    prompt = converted(mm_inputs=inputs)
    assert shape_of(prompt) == [[1], {"pixel_values": first}, [2], {"pixel_values": second}, [3]]
    assert prompt.fields == (
        "tokenized.input_ids",
        "mm_inputs.mm_placeholders[0]",
        "tokenized.input_ids",
        "mm_inputs.mm_placeholders[1]",
        "tokenized.input_ids",
    )
    assert [part.field for part in prompt.media] == ["mm_inputs", "mm_inputs"]


def test_flat_tensors_are_cut_by_their_sizes_which_are_not_passed_on() -> None:
    inputs = {
        "pixel_values": tensor(3, 2),
        "model_specific_tensors": {
            "patches": tensor(2, dtype="uint32", data=struct.pack("<2I", 1, 2)),
            "image_grid_thw": tensor(2, 3, dtype="uint32", data=struct.pack("<6I", 1, 1, 1, 1, 1, 2)),
            "shared": tensor(1),
        },
        "flat_keys": {"pixel_values": "patches"},
        "batched_keys": ["image_grid_thw", "patches"],
        "mm_placeholders": PLACES,
    }
    _, first, _, second, _ = shape_of(converted(mm_inputs=inputs))
    shared = TensorData("uint8", (1,), b"\0")
    assert first == {
        "pixel_values": TensorData("uint8", (1, 2), b"\0\1"),
        "image_grid_thw": TensorData("int64", (1, 3), struct.pack("<3q", 1, 1, 1)),
        "shared": shared,
    }
    assert second == {
        "pixel_values": TensorData("uint8", (2, 2), b"\2\3\4\5"),
        "image_grid_thw": TensorData("int64", (1, 3), struct.pack("<3q", 1, 1, 2)),
        "shared": shared,
    }


def test_several_batches_stand_in_the_order_of_their_placeholders() -> None:
    video = {"pixel_values": tensor(1, 2), "modality": 3, "mm_placeholders": PLACES[:1]}
    image = {"pixel_values": tensor(1, 2), "modality": 1, "mm_placeholders": PLACES[1:]}
    prompt = converted(mm_inputs=image, extra_mm_inputs=[video])
    assert [part.modality for part in prompt.media] == ["video", "image"]
    assert [part.field for part in prompt.media] == ["extra_mm_inputs[0]", "mm_inputs"]
    names = [list(part.source.tensors) for part in prompt.media if isinstance(part.source, Features)]
    assert names == [["pixel_values_videos"], ["pixel_values"]]


def test_the_main_tensor_may_have_a_name_of_the_models() -> None:
    inputs = {"pixel_values": tensor(1), "encoder_input_key": "patches", "mm_placeholders": PLACES[:1]}
    assert shape_of(converted(mm_inputs=inputs))[1] == {"patches": TensorData("uint8", (1,), b"\0")}


def test_references_stand_at_their_anchors() -> None:
    items = [{"modality": 1, "url": "data:a"}, {"modality": 3, "url": "data:video/jpeg;base64,AA=="}]
    prompt = converted([5, 9, 6, 7, 9], media_refs={"items": items})
    image, video = prompt.media
    assert (image.source, image.field) == (Url("data:a"), "media_refs.items[0].url")
    assert video.source == Frames([Frame(b"\0", 0.0)])
    assert [list(part) for part in prompt.parts if not isinstance(part, MediaPart)] == [[5], [6], [9]]  # type: ignore[arg-type]


GOOD = {"pixel_values": tensor(2, 3), "batched_keys": ["pixel_values"], "mm_placeholders": PLACES}
BROKEN: list[tuple[dict[str, Any], str, str]] = [
    ({"text": "a", "mm_inputs": GOOD}, "mm_inputs", "is set, but the input is text; send tokenized input instead"),
    (
        {"text": "a", "media_refs": {"items": [{"url": "x"}]}},
        "media_refs",
        "is set, but the input is text; send tokenized input instead",
    ),
    (
        {"mm_inputs": GOOD, "media_refs": {"items": [{"url": "x"}]}},
        "media_refs",
        "and mm_inputs are both set; set only one",
    ),
    ({"mm_inputs": {}}, "mm_inputs.mm_placeholders", "is empty"),
    ({"extra_mm_inputs": [{}]}, "extra_mm_inputs[0].mm_placeholders", "is empty"),
    ({"mm_inputs": {**GOOD, "modality": 9}}, "mm_inputs.modality", "is 9; known: IMAGE, AUDIO, VIDEO"),
    (
        {"mm_inputs": {**GOOD, "mm_placeholders": [{"offset": 1, "length": 0}]}},
        "mm_inputs.mm_placeholders[0]",
        "has 0 tokens at offset 1; it must have at least 1 token",
    ),
    (
        {"mm_inputs": {**GOOD, "batched_keys": [], "mm_placeholders": [{"offset": 7, "length": 2}]}},
        "mm_inputs.mm_placeholders[0]",
        "has 2 tokens at offset 7; it must have at least 1 token and end within the 8",
    ),
    (
        {"mm_inputs": {**GOOD, "mm_placeholders": [PLACES[0], {"offset": 3, "length": 1}]}},
        "mm_inputs.mm_placeholders[1]",
        "begins before the end of mm_inputs.mm_placeholders[0]; ",
    ),
    (
        {"mm_inputs": GOOD, "extra_mm_inputs": [{**GOOD, "batched_keys": [], "mm_placeholders": PLACES[:1]}]},
        "extra_mm_inputs[0].mm_placeholders[0]",
        "begins before the end of mm_inputs.mm_placeholders[0]; ",
    ),
    (
        {"mm_inputs": {**GOOD, "mm_placeholders": [{"offset": 0, "length": 1}] * 1025}},
        "mm_inputs.mm_placeholders",
        "has 1025 entries; the limit is 1024",
    ),
    (
        {"mm_inputs": {**GOOD, "pixel_values": tensor(3, 1)}},
        "mm_inputs.pixel_values",
        "has shape [3, 1]; its first dimension must be 2, the sum of the sizes",
    ),
    (
        {"mm_inputs": {**GOOD, "pixel_values": tensor()}},
        "mm_inputs.pixel_values",
        "has shape []; its first dimension must be 2, the sum of the sizes",
    ),
    (
        {"mm_inputs": {**GOOD, "flat_keys": {"pixel_values": "n"}}},
        "mm_inputs.pixel_values",
        "is split by the sizes in 'n', which is not a tensor of integers",
    ),
    (
        {
            "mm_inputs": {
                **GOOD,
                "flat_keys": {"pixel_values": "n"},
                "model_specific_tensors": {"n": tensor(1, dtype="int64", data=struct.pack("<q", 2))},
            }
        },
        "mm_inputs.pixel_values",
        "has the sizes of 1 parts, but there are 2 placeholders; send one size per placeholder",
    ),
    (
        {
            "mm_inputs": {
                **GOOD,
                "flat_keys": {"pixel_values": "n"},
                "model_specific_tensors": {"n": tensor(2, dtype="int64", data=struct.pack("<2q", -1, 3))},
            }
        },
        "mm_inputs.pixel_values",
        "its first dimension must be 2, the sum of the sizes",
    ),
    (
        {"mm_inputs": {**GOOD, "pixel_values": {"shape": [2], "dtype": "uint8", "shm": {"name": "/x"}}}},
        "mm_inputs.pixel_values.shm",
        "is not supported; send tensors inline",
    ),
    (
        {"mm_inputs": {**GOOD, "pixel_values": {"shape": [2], "dtype": "uint8", "remote": {}}}},
        "mm_inputs.pixel_values.remote",
        "is not supported; send tensors inline",
    ),
    (
        {"mm_inputs": {**GOOD, "pixel_values": {"shape": [2], "dtype": "complex64"}}},
        "mm_inputs.pixel_values.dtype",
        "is 'complex64'; known: float32",
    ),
    (
        {"mm_inputs": {**GOOD, "pixel_values": {"shape": [2], "dtype": "uint32", "inline": b"123"}}},
        "mm_inputs.pixel_values.inline",
        "has 3 bytes; its shape and dtype require 8",
    ),
    (
        {"mm_inputs": {**GOOD, "model_specific_tensors": {"a": tensor(2, data=b"1")}}},
        "mm_inputs.model_specific_tensors['a'].inline",
        "has 1 bytes; its shape and dtype require 2",
    ),
    ({"media_refs": {"items": [{"modality": 9, "url": "x"}]}}, "media_refs.items[0].modality", "is 9"),
    ({"media_refs": {"items": [{"modality": 1}]}}, "media_refs.items[0].url", "is empty"),
    (
        {"media_refs": {"items": [{"modality": 2, "url": "x"}]}},
        "media_refs.items[0]",
        "has no token 8 at or after position 0",
    ),
    ({"media_refs": {"items": [{"url": "x"}] * 6}}, "media_refs.items[5]", "has no token 9 at or after position 7"),
    ({"media_refs": {"items": [{"url": "x"}] * 1025}}, "media_refs.items", "has 1025 entries; the limit is 1024"),
    (
        {"media_refs": {"items": [{"modality": 1, "url": "x"}] * 2 + [{"modality": 3, "url": "file:///etc/passwd"}]}},
        "media_refs.items[2]",
        "has no token 7 at or after position 3",
    ),
]


@pytest.mark.parametrize(("fields", "field", "message"), BROKEN)
def test_errors_name_the_invalid_field(fields: dict[str, Any], field: str, message: str) -> None:
    with pytest.raises(RequestFailed) as raised:
        converted(**fields)
    assert isinstance(raised.value, (InvalidArgument, Unimplemented))
    assert message in raised.value.message
    assert raised.value.field == field
    assert raised.value.message.startswith(field)


def test_a_request_without_media_is_as_it_was() -> None:
    message = pb.GenerateRequest(tokenized={"input_ids": IDS}, media_refs={})
    assert list(generate_request(message, metadata={}, time_left=None, anchor=anchor).prompt) == IDS  # type: ignore[arg-type]
