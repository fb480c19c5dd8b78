"""Any media from clients is accepted or refused with the field at fault. The error quotes nothing of the media."""

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from smg_grpc_proto.generated import vllm_engine_pb2

from penstock.common.v1 import media_pb2
from penstock_common.errors import InvalidArgument, RequestFailed, Unimplemented
from penstock_frontend.api.anthropic.protocol import ConversationBody
from penstock_frontend.api.anthropic.turns import turns_of
from penstock_frontend.api.grpc.message_parts import media_part
from penstock_frontend.api.openai.body_fields import decode
from penstock_frontend.api.openai.chat_completions import ChatCompletionRequest
from penstock_frontend.api.openai.conversation import messages_of, options_of
from penstock_frontend.api.openai.responses import input_items
from penstock_frontend.api.openai.responses.response import ResponseBody
from penstock_frontend.api.vllm.messages import generate_request

SECRET = "c2VjcmV0"
URLS = st.sampled_from(
    [
        "",
        "x",
        f"data:image/png;base64,{SECRET}",
        f"data:video/jpeg;base64,{SECRET},{SECRET}",
        f"data:video/jpeg;base64,{SECRET},,",
        f"data:video/mp4;base64,{SECRET}",
        f"https://127.0.0.1/?{SECRET}",
        f"file:///{SECRET}",
        "\0",
    ]
)
ANYTHING = st.one_of(st.none(), st.booleans(), st.integers(-1, 3), st.text(max_size=3), URLS)
JSON = st.recursive(
    ANYTHING, lambda each: st.lists(each, max_size=2) | st.dictionaries(st.text(max_size=3), each, max_size=2)
)
TYPES = st.sampled_from(
    [
        "text", "image_url", "input_image", "input_audio", "audio_url", "video_url", "image_embeds", "image_pil", "file",
        "input_file", "image", "refusal", "tool_result", "thinking", "",
    ]
)  # fmt: skip
URL_BODY = st.one_of(
    URLS,
    st.fixed_dictionaries({"url": URLS}, optional={"detail": st.one_of(st.sampled_from(["low", "x", None]), URLS)}),
    JSON,
)
AUDIO = st.one_of(
    st.fixed_dictionaries({"data": URLS, "format": st.one_of(st.sampled_from(["wav", "x", "mp3"]), URLS)}), JSON
)
SOURCE = st.one_of(
    st.fixed_dictionaries(
        {"type": st.sampled_from(["base64", "url", "file", "x"])},
        optional={"media_type": st.sampled_from(["image/png", "x"]), "data": URLS, "url": URLS},
    ),
    JSON,
)
PART = st.fixed_dictionaries(
    {"type": TYPES},
    optional={
        "text": st.text(max_size=3),
        "image_url": URL_BODY,
        "input_audio": AUDIO,
        "audio_url": URL_BODY,
        "video_url": URL_BODY,
        "uuid": ANYTHING,
        "file_id": ANYTHING,
        "detail": ANYTHING,
        "source": SOURCE,
        "content": JSON,
        "tool_use_id": st.text(max_size=2),
    },
)
TURN = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "assistant", "tool"]), "content": st.lists(PART, max_size=3)}
)
OPTIONS = st.fixed_dictionaries(
    {}, optional={"mm_processor_kwargs": JSON, "media_io_kwargs": st.one_of(JSON, st.just({"video": {"fps": 2}}))}
)


def refused(call: Any) -> RequestFailed | None:
    try:
        call()
    except (InvalidArgument, Unimplemented) as e:
        return e
    return None


def check(error: RequestFailed | None) -> None:
    """Check that the error names its field, and quotes nothing of the media."""
    if error is not None:
        assert error.field
        assert error.message.startswith(("a key of ", error.field.removesuffix(".inline")))
        assert SECRET not in error.message


@settings(max_examples=400, deadline=None)
@given(st.lists(TURN, max_size=2), OPTIONS)
def test_any_parts_of_http(turns: list[Any], options: dict[str, Any]) -> None:
    def chat() -> None:
        body = decode(text({"messages": turns, **options}), ChatCompletionRequest)
        messages_of(body.messages, options_of(body.mm_processor_kwargs, body.media_io_kwargs))

    def respond() -> None:
        body = decode(text({"input": turns, **options}), ResponseBody)
        assert body.input is not None
        input_items.turns_of(body.input, options_of(body.mm_processor_kwargs, body.media_io_kwargs))

    def message() -> None:
        turns_of(decode(text({"messages": turns}), ConversationBody))

    for call in (chat, respond, message):
        check(refused(call))


def text(body: Any) -> bytes:
    """Return the body as JSON."""
    return json.dumps(body).encode()


BYTES = st.sampled_from([b"", b"1", SECRET.encode(), bytes(8)])
TENSOR = st.fixed_dictionaries(
    {},
    optional={
        "dtype": st.integers(0, 12),
        "shape": st.lists(st.sampled_from([0, 1, 8, 2**63]), max_size=10),
        "inline": BYTES,
    },
)
FRAME = st.fixed_dictionaries({}, optional={"data": BYTES, "timestamp": st.floats()})
SOURCES = st.one_of(
    st.fixed_dictionaries({"data": BYTES}),
    st.fixed_dictionaries({"url": URLS}),
    st.fixed_dictionaries({"frames": st.fixed_dictionaries({"frames": st.lists(FRAME, max_size=3)})}),
    st.fixed_dictionaries(
        {
            "features": st.fixed_dictionaries(
                {"tensors": st.dictionaries(st.text(st.sampled_from("ab"), max_size=2), TENSOR)}
            )
        }
    ),
    st.fixed_dictionaries({"embeds": TENSOR}),
    st.just({}),
)


@settings(max_examples=400, deadline=None)
@given(
    st.sampled_from(["image", "audio", "video", "", "x"]), SOURCES, st.sampled_from(["", "{}", "[", "3", '{"a": 1}'])
)
def test_any_media_of_grpc(modality: str, source: dict[str, Any], kwargs: str) -> None:
    message: Any = media_pb2.Media
    check(refused(lambda: media_part(message(modality=modality, processor_kwargs=kwargs, **source), "m")))


NAMES = st.sampled_from(["pixel_values", "a", "sizes"])
VLLM_TENSOR = st.fixed_dictionaries(
    {},
    optional={
        "dtype": st.sampled_from(["uint8", "uint32", "int64", "float32", "x", ""]),
        "shape": st.lists(st.sampled_from([0, 1, 2, 2**32 - 1]), max_size=4),
        "inline": st.sampled_from([b"", b"12", bytes(8), bytes([1, 0, 0, 0, 1, 0, 0, 0]), bytes(16)]),
    },
)
PLACE = st.fixed_dictionaries(
    {"offset": st.sampled_from([0, 1, 2, 2**32 - 1]), "length": st.sampled_from([0, 1, 2, 2**32 - 1])}
)
BATCH = st.fixed_dictionaries(
    {},
    optional={
        "pixel_values": VLLM_TENSOR,
        "model_specific_tensors": st.dictionaries(NAMES, VLLM_TENSOR, max_size=2),
        "mm_placeholders": st.lists(PLACE, max_size=2),
        "batched_keys": st.lists(NAMES, max_size=2),
        "flat_keys": st.dictionaries(NAMES, NAMES, max_size=2),
        "encoder_input_key": NAMES,
        "modality": st.integers(0, 5),
    },
)
REFS = st.fixed_dictionaries(
    {
        "items": st.lists(
            st.fixed_dictionaries({"modality": st.integers(0, 5), "url": st.sampled_from(["", "x"])}), max_size=3
        )
    }
)


@settings(max_examples=400, deadline=None)
@given(
    st.fixed_dictionaries(
        {}, optional={"mm_inputs": BATCH, "extra_mm_inputs": st.lists(BATCH, max_size=2), "media_refs": REFS}
    ),
    st.lists(st.integers(7, 9), max_size=4),
)
def test_any_media_of_gateways(fields: dict[str, Any], ids: list[int]) -> None:
    message: Any = vllm_engine_pb2.GenerateRequest
    anchors = {"image": 9, "audio": 8, "video": 7}
    request = message(tokenized={"input_ids": ids}, **fields)
    check(refused(lambda: generate_request(request, metadata={}, time_left=None, anchor=anchors.__getitem__)))


def test_the_strategies_find_what_is_right() -> None:
    body = decode(msgspec.json.encode({"messages": [{"role": "user", "content": []}]}), ChatCompletionRequest)
    assert refused(lambda: messages_of(body.messages)) is None


@pytest.mark.parametrize("place", ["detail", "image_url.detail", "format", "type", "media_type", "role"])
@pytest.mark.parametrize(
    "value", [f"data:image/png;base64,{SECRET}", f"https://127.0.0.1/?{SECRET}", "x" * 9999 + SECRET]
)
def test_no_error_quotes_media_that_stand_at_a_wrong_place(place: str, value: str) -> None:
    url = f"data:image/png;base64,{SECRET}"
    image: dict[str, Any] = {"type": "image_url", "image_url": {"url": url}}
    parts: dict[str, dict[str, Any]] = {
        "detail": {**image, "detail": value},
        "image_url.detail": {"type": "image_url", "image_url": {"url": url, "detail": value}},
        "format": {"type": "input_audio", "input_audio": {"data": SECRET, "format": value}},
        "type": {"type": value},
        "media_type": {"type": "image", "source": {"type": "base64", "media_type": value, "data": SECRET}},
    }
    part = parts.get(place, {"type": "text", "text": "x"})
    turns = [{"role": value if place == "role" else "user", "content": [part]}]
    decoder, reader = (
        (ConversationBody, turns_of) if place in ("media_type", "role", "type") else (ChatCompletionRequest, None)
    )

    def call() -> None:
        body: Any = decode(text({"messages": turns}), decoder)
        turns_of(body) if reader is not None else messages_of(body.messages)

    error = refused(call)
    assert error is not None
    check(error)
    assert len(error.message) < 500
