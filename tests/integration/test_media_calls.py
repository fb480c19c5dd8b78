"""Images over every public protocol, through a frontend's media workers, in front of an engine without a model."""

import base64
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai
import pytest
import pytest_asyncio
from smg_grpc_proto.generated import vllm_engine_pb2

from penstock.inference.v1 import messages_pb2
from penstock_client import SamplingParams
from penstock_common.errors import InvalidArgument, PermissionDenied, RequestFailed, Unimplemented
from penstock_frontend.config import LimitsConfig, MaxMediaConfig, MediaConfig
from penstock_local.bench.dataset import Prompt
from penstock_local.bench.load import Load
from penstock_local.bench.options import BenchOptions
from penstock_local.commands.chat import Turn
from penstock_local.media_files import MediaFile
from penstock_local.rpc.client import client_of, with_media
from tests.fakes.clients.vllm_client import VllmClient
from tests.fakes.engines.fake_engine import FakeEngine
from tests.fakes.frontends.frontend_server import collect, failure
from tests.fakes.frontends.openai_server import OpenAIServer, openai_server
from tests.fakes.media_files import image_file, png, sound_file
from tests.fakes.models.small_tokenizers import byte_level
from tests.fakes.multimodal_models import PATCH, SIDE, VOCAB_SIZE, save_multimodal_model

ROWS = (SIDE // PATCH) ** 2
IMAGE = image_file()
pb: Any = messages_pb2  # messages are built from dictionaries here
vllm: Any = vllm_engine_pb2

pytestmark = pytest.mark.asyncio(loop_scope="module")


def url_of(data: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


PART: Any = {"type": "image_url", "image_url": {"url": url_of(IMAGE)}}


def turn(*parts: Any) -> list[Any]:
    return [{"role": "user", "content": [each if isinstance(each, dict) else text(each) for each in parts]}]


def text(content: str) -> dict[str, str]:
    return {"type": "text", "text": content}


class Served:
    """A frontend, its engine, and the id of the placeholder token for a row of an image."""

    def __init__(self, api: OpenAIServer, engine: FakeEngine, token_id: int) -> None:
        self.api = api
        self.engine = engine
        self.token_id = token_id
        self.http = api.http
        self.client = api.client

    def last_prompt(self) -> list[int]:
        return list(self.engine.requests[-1].prompt_token_ids)

    def rows_of_last(self) -> int:
        return self.last_prompt().count(self.token_id)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Served]:
    folder = tmp_path_factory.mktemp("models") / "llava"
    save_multimodal_model("llava", folder)
    media = MediaConfig(workers=1, allowed_domains=("localhost",), max_bytes=256 * 1024)
    limits = LimitsConfig(max_media=MaxMediaConfig(image=3))
    async with (
        FakeEngine(vocab_size=VOCAB_SIZE, max_model_len=1024).serve_media() as engine,
        openai_server(folder, engines=[engine.address], media=media, limits=limits) as api,
    ):
        token_id = api.server.frontend._models[0].assembly.llm.tokenizer.token_id("<image>")
        assert token_id is not None
        yield Served(api, engine, token_id)


async def test_a_chat_has_an_image_where_its_part_stands(served: Served) -> None:
    answer = await served.client.chat.completions.create(
        model="model", messages=turn("what is", PART, "?"), max_tokens=2
    )
    assert served.rows_of_last() == ROWS
    prompt = served.last_prompt()
    start = prompt.index(served.token_id)
    assert prompt[start : start + ROWS] == [served.token_id] * ROWS
    before, after = byte_level().encode("what is", add_special_tokens=False).ids, byte_level().encode("?").ids
    assert prompt[start - len(before) : start] == before
    assert prompt[start + ROWS] == after[-1]
    assert answer.usage is not None
    details = answer.usage.model_dump()["prompt_tokens_details"]
    assert (answer.usage.prompt_tokens, details["image_tokens"]) == (len(prompt), ROWS)


async def test_the_model_says_which_media_requests_may_have(served: Served) -> None:
    (model,) = (await served.api.server.stub.ListModels(pb.ListModelsRequest())).models
    assert [(limit.modality, limit.max_items, limit.max_tokens) for limit in model.media] == [("image", 3, 1024)]


async def test_text_that_looks_like_an_image_is_text(served: Served) -> None:
    await served.client.chat.completions.create(model="model", messages=turn("<image>", PART), max_tokens=1)
    assert served.rows_of_last() == ROWS
    await served.client.chat.completions.create(
        model="model", messages=[{"role": "user", "content": "<image>"}], max_tokens=1
    )
    assert served.rows_of_last() == 0


async def test_a_response_and_the_next_one_have_the_image(served: Served) -> None:
    item: Any = {"role": "user", "content": [{"type": "input_image", "image_url": url_of(IMAGE), "detail": "auto"}]}
    first = await served.client.responses.create(model="model", input=[item], max_output_tokens=2)
    assert served.rows_of_last() == ROWS
    await served.client.responses.create(
        model="model", input="and now?", previous_response_id=first.id, max_output_tokens=2
    )
    assert served.rows_of_last() == ROWS


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens"])
async def test_anthropics_messages_have_images(served: Served, path: str) -> None:
    source = {"type": "base64", "media_type": "image/png", "data": base64.b64encode(IMAGE).decode()}
    image = {"type": "image", "source": source}
    tool = {"type": "tool_result", "tool_use_id": "t", "content": [text("seen"), image]}
    for block in (image, tool):
        body = {"model": "model", "max_tokens": 2, "messages": turn(block, "what is it?")}
        answer = await served.http.post(path, json=body)
        assert answer.status_code == 200, answer.text
        if path.endswith("count_tokens"):
            assert answer.json()["input_tokens"] > ROWS
        else:
            assert served.rows_of_last() == ROWS


async def test_a_conversation_with_images_is_tokenized(served: Served) -> None:
    answer = await served.http.post("/tokenize", json={"messages": turn("a", PART)})
    assert answer.json()["tokens"].count(served.token_id) == ROWS
    refused = await served.http.post("/tokenize", json={"messages": turn("a", PART), "return_token_strs": True})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "return_token_strs")


async def test_an_answer_tells_the_prompts_token_ids(served: Served) -> None:
    body = {"model": "model", "messages": turn("a", PART), "max_tokens": 1, "return_token_ids": True}
    answer = (await served.http.post("/v1/chat/completions", json=body)).json()
    assert answer["prompt_token_ids"] == served.last_prompt()


REFUSED: list[tuple[Any, int, str, str]] = [
    # fields that differ from a valid body, then status, param and code
    ({"messages": turn(PART, PART, PART, PART)}, 400, "messages[0].content[3].image_url.url", "media_too_many"),
    ({"prompt_logprobs": 1}, 400, "prompt_logprobs", "unsupported"),
    ({"truncate_prompt_tokens": 5}, 400, "truncate_prompt_tokens", "unsupported"),
    ({"mm_processor_kwargs": {"size": 3}}, 400, "messages[0].content[0].image_url.url", "media_unreadable"),
    (
        {"messages": [{"role": "user", "content": [{**PART, "uuid": "a"}]}]},
        400,
        "messages[0].content[0].uuid",
        "unsupported",
    ),
]
URLS: list[tuple[str, int, str]] = [
    ("https://127.0.0.1/cat.png", 403, "media_not_allowed"),
    ("http://example.org/cat.png?sig=secret", 403, "media_not_allowed"),
    ("http://localhost/cat.png", 403, "media_not_allowed"),
    ("file:///etc/passwd", 403, "media_not_allowed"),
    ("ftp://localhost/x", 403, "media_not_allowed"),
    ("cat.png", 403, "media_not_allowed"),
    ("data:image/png;base64,secret==", 400, "media_unreadable"),
    (url_of(b"secret"), 400, "media_unreadable"),
    (url_of(sound_file()), 400, "media_unreadable"),
    (url_of(IMAGE[:40]), 400, "media_unreadable"),
    (url_of(png(60_000, 60_000, b"")), 413, "media_too_large"),
    (url_of(b"\x89PNG\r\n\x1a\n" + bytes(300 * 1024)), 413, "media_too_large"),
]


@pytest.mark.parametrize(("changes", "status", "param", "code"), REFUSED)
async def test_features_unsupported_with_images_are_named(
    served: Served, changes: dict[str, Any], status: int, param: str, code: str
) -> None:
    body = {"model": "model", "messages": turn(PART), "max_tokens": 1, **changes}
    answer = await served.http.post("/v1/chat/completions", json=body)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], error["code"]) == (status, param, code), error


@pytest.mark.parametrize(("url", "status", "code"), URLS, ids=lambda value: str(value)[:40])
async def test_a_bad_url_is_the_clients_error(served: Served, url: str, status: int, code: str) -> None:
    part = {"type": "image_url", "image_url": {"url": url}}
    body = {"model": "model", "messages": turn("a", part), "max_tokens": 1}
    answer = await served.http.post("/v1/chat/completions", json=body)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (status, "messages[0].content[1].image_url.url"), error
    assert error["code"] == code
    assert "secret" not in error["message"]


async def test_errors_of_other_protocols_name_their_own_fields(served: Served) -> None:
    item = {"role": "user", "content": [{"type": "input_image", "image_url": "file:///a"}]}
    body: dict[str, Any] = {"model": "model", "instructions": "be brief", "input": [item]}
    error = (await served.http.post("/v1/responses", json=body)).json()["error"]
    assert (error["param"], error["code"]) == ("input[0].content[0].image_url", "media_not_allowed")
    block = {"type": "image", "source": {"type": "url", "url": "file:///a"}}
    body = {"model": "model", "max_tokens": 1, "system": "be brief", "messages": turn("a", block)}
    answer = await served.http.post("/v1/messages", json=body)
    assert answer.status_code == 403
    assert answer.json()["error"]["message"].startswith("messages[0].content[1].source.url")


async def test_a_model_that_reads_text_says_so(model: Path) -> None:
    async with FakeEngine(vocab_size=VOCAB_SIZE) as engine, openai_server(model, engines=[engine.address]) as api:
        with pytest.raises(openai.BadRequestError) as raised:
            await api.client.chat.completions.create(model="model", messages=turn("a", PART))
    assert raised.value.param == "messages[0].content[1].image_url.url"
    assert "is an image; this model accepts text" in raised.value.message


_WHY = "is an image; this server accepts only text: media are disabled (media.enabled is false)"


async def test_a_server_without_media_says_why_in_every_protocol(served: Served) -> None:
    folder = Path(served.api.server.config.model.path)
    async with (
        FakeEngine(vocab_size=VOCAB_SIZE) as engine,
        openai_server(folder, engines=[engine.address], media=MediaConfig(enabled=False)) as api,
    ):
        with pytest.raises(openai.BadRequestError) as raised:
            await api.client.chat.completions.create(model="model", messages=turn("a", PART))
        assert raised.value.message.endswith(f"messages[0].content[1].image_url.url {_WHY}"), raised.value.message
        media = {"modality": "image", "data": IMAGE}
        request = pb.GenerateRequest(
            mixed={"parts": [{"text": "a"}, {"media": media}]}, sampling_params={"max_tokens": 1}
        )
        error = await failure(api.server.stub.Generate(request))
        assert (error.code, error.message) == ("INVALID_ARGUMENT", f"mixed.parts[1].media.data {_WHY}")
        answer = await api.client.chat.completions.create(model="model", messages=turn("a"), max_tokens=1)
        assert answer.choices[0].finish_reason == "length"


async def test_media_that_no_engine_takes_are_no_reason_to_wait(served: Served) -> None:
    folder = Path(served.api.server.config.model.path)
    async with FakeEngine(vocab_size=VOCAB_SIZE) as engine, openai_server(folder, engines=[engine.address]) as api:
        with pytest.raises(openai.BadRequestError) as raised:
            await api.client.chat.completions.create(model="model", messages=turn("a", PART))
    assert (
        "is an image; the engines do not accept media of this modality, because their setting multimodal.enabled is false"
        in str(raised.value)
    )


async def test_grpc_takes_images_in_chats_and_prompts(served: Served) -> None:
    server = served.api.server
    media = {"modality": "image", "data": IMAGE}
    sampling = {"max_tokens": 1}
    message = {"role": "user", "parts": [{"text": "a"}, {"media": media}]}
    *_, last = await collect(server.stub.Chat(pb.ChatRequest(messages=[message], sampling_params=sampling)))
    assert served.rows_of_last() == ROWS
    assert dict(last.usage.media_tokens) == {"image": ROWS}
    mixed = {"parts": [{"text": "a"}, {"media": media}, {"text": "b"}]}
    request = pb.GenerateRequest(mixed=mixed, sampling_params=sampling)
    await collect(server.stub.Generate(request))
    assert served.rows_of_last() == ROWS
    request.request_id = "s"
    session = server.stub.GenerateSession(iter([pb.GenerateSessionRequest(generate=request)]))
    assert [each.output.usage.media_tokens["image"] for each in await collect(session)][-1] == ROWS


@pytest.mark.parametrize(
    ("media", "kind", "field", "reason"),
    [
        ({"url": "file:///a"}, PermissionDenied, "url", "MEDIA_NOT_ALLOWED"),
        ({"data": b"secret"}, InvalidArgument, "data", "MEDIA_UNREADABLE"),
        (
            {"embeds": {"dtype": 1, "shape": [1, 1], "inline": bytes(4)}},
            PermissionDenied,
            "embeds",
            "MEDIA_NOT_ALLOWED",
        ),
        (
            {"features": {"tensors": {"pixel_values": {"dtype": 6, "shape": [1], "inline": b"1"}}}},
            PermissionDenied,
            "features",
            "MEDIA_NOT_ALLOWED",
        ),
    ],
)
async def test_errors_of_grpc_have_field_and_reason(
    served: Served, media: dict[str, Any], kind: type[RequestFailed], field: str, reason: str
) -> None:
    message = {"role": "user", "parts": [{"media": {"modality": "image", **media}}]}
    error = await failure(served.api.server.stub.Chat(pb.ChatRequest(messages=[message])))
    assert isinstance(error, kind)
    assert (error.field, error.reason) == (f"messages[0].parts[0].media.{field}", reason)


async def test_a_gateways_references_stand_at_their_anchors(served: Served) -> None:
    client = VllmClient(served.api.server)
    ids = [*byte_level().encode("a", add_special_tokens=False).ids, served.token_id]
    refs = {"items": [{"modality": 1, "url": url_of(IMAGE)}]}
    await client.outputs(tokenized={"input_ids": ids}, media_refs=refs, max_tokens=1)
    assert served.last_prompt() == [ids[0], *[served.token_id] * ROWS]
    tensors = {"pixel_values": {"shape": [1], "dtype": "uint8", "inline": b"1"}}
    inputs = {**tensors, "mm_placeholders": [{"offset": 1, "length": 1}]}
    error = await failure(client.generate(tokenized={"input_ids": ids}, mm_inputs=inputs))
    assert (error.field, error.reason) == ("mm_inputs", "MEDIA_NOT_ALLOWED")
    error = await failure(
        client.generate(tokenized={"input_ids": ids}, media_refs={"items": [{"modality": 2, "url": "x"}]})
    )
    assert error.message == "media_refs has media of modality audio; this model accepts text, image"


async def test_a_video_or_a_sound_is_none_of_this_models(served: Served) -> None:
    sound = {"type": "input_audio", "input_audio": {"data": base64.b64encode(sound_file()).decode(), "format": "wav"}}
    answer = await served.http.post("/v1/chat/completions", json={"model": "model", "messages": turn(sound)})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, "messages[0].content[0].input_audio.data")
    assert "is a sound; this model accepts text, image" in error["message"]
    parts = [{"media": {"modality": "video", "data": b"x"}}]
    refused = await failure(served.api.server.stub.Chat(pb.ChatRequest(messages=[{"role": "user", "parts": parts}])))
    assert isinstance(refused, Unimplemented)


async def test_clients_are_told_what_is_taken(served: Served) -> None:
    server = served.api.server
    (model,) = (await server.stub.ListModels(pb.ListModelsRequest())).models
    assert [(each.modality, each.max_items, each.max_tokens) for each in model.media] == [("image", 3, 1024)]
    stub = VllmClient(server).stub
    assert (await stub.GetModelInfo(vllm.GetModelInfoRequest())).supports_vision
    info = await stub.GetServerInfo(vllm.GetServerInfoRequest())
    assert (info.mm_processor, info.mm_processor_source) == ("inprocess", "default")
    assert (info.mm_media_ref_schemes, info.mm_item_limits) == ("data,http,https", "image=3")
    assert (info.mm_encoder_budget, info.mm_device_do_normalize, info.shm_namespace_id) == (1024, True, "")


async def test_a_text_model_tells_of_no_media(model: Path) -> None:
    async with FakeEngine(vocab_size=VOCAB_SIZE) as engine, openai_server(model, engines=[engine.address]) as api:
        stub = VllmClient(api.server).stub
        info = await stub.GetServerInfo(vllm.GetServerInfoRequest())
        assert (info.mm_processor, info.mm_media_ref_schemes, info.mm_item_limits) == ("", "", "")
        assert not (await stub.GetModelInfo(vllm.GetModelInfoRequest())).supports_vision
        assert not (await api.server.stub.ListModels(pb.ListModelsRequest())).models[0].media


async def test_metrics_have_each_series_once(served: Served) -> None:
    text = (await served.http.get("/metrics")).text
    families = [line.split()[2] for line in text.splitlines() if line.startswith("# TYPE ")]
    assert len(families) == len(set(families))
    assert "vllm:mm_cache_queries_total" in families


async def test_the_command_sends_media_before_its_text(served: Served) -> None:
    file = MediaFile(modality="image", name="cat.png", data=IMAGE)
    address = f"127.0.0.1:{served.api.server.frontend.port}"
    async with client_of(address) as client:
        one = SamplingParams(max_tokens=1)
        pieces = [piece async for piece in client.stream(with_media("what is it?", [file]), one)]
        assert pieces[-1].usage is not None
        (start, *image) = served.last_prompt()[: ROWS + 1]
        assert (start, image) == (0, [served.token_id] * ROWS)  # after the special token at the beginning of a text
        message = Turn(role="user", content="what is it?", media=(file,)).message()
        assert [piece async for piece in client.stream_chat([message], one)]
        assert served.rows_of_last() == ROWS
        load = Load(
            BenchOptions(address=address, requests=1), [client], iter([Prompt([20, 21], 1, images=[IMAGE, IMAGE])])
        )
        await load.run()
        assert [record.prompt_tokens for record in load.records] == [2 * ROWS + 2]
    assert served.last_prompt() == [*[served.token_id] * 2 * ROWS, 20, 21]


async def test_a_large_body_with_frames_delays_no_other_request(served: Served) -> None:
    frame = base64.b64encode(bytes(200 * 1024)).decode()
    part = {"type": "video_url", "video_url": {"url": "data:video/jpeg;base64," + ",".join([frame] * 8)}}
    body = {"model": "model", "messages": turn(part), "max_tokens": 1}
    answer = await served.http.post("/v1/chat/completions", json=body)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, "messages[0].content[0].video_url.url")
    assert "is a video; this model accepts text, image" in error["message"]
