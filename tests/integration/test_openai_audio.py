"""``/v1/audio/transcriptions`` and ``/v1/audio/translations`` with OpenAI's published client, over a real HTTP server."""

import asyncio
import gzip
import json
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import pytest_asyncio

from penstock_common.errors import Internal, InvalidArgument
from penstock_frontend.app import running_model
from penstock_frontend.app.assembly import assemble
from penstock_frontend.speech.types import TEMPERATURES, SpeechTask
from tests.fakes.engines.fake_engine import FakeEngine
from tests.fakes.frontends.frontend_server import eventually
from tests.fakes.frontends.openai_server import OpenAIServer, openai_server
from tests.fakes.media_files import sound_file
from tests.fakes.models.small_tokenizers import byte_level, save_model
from tests.fakes.patience import PATIENCE
from tests.fakes.scripted_speech import TEXTS, ScriptedSpeech

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.filterwarnings("ignore:deprecated:DeprecationWarning"),  # OpenAI's client deprecates translations
]

TEXT = "".join(TEXTS).strip()
PATHS = ("/v1/audio/transcriptions", "/v1/audio/translations")
FILE = ("speech.wav", b"RIFF....", "audio/wav")
LIMIT = 64 * 1024
SEGMENT_OF_API = {"seek": 0, "tokens": [50364, 7, 50414], "temperature": 0.2, "avg_logprob": -0.25}


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def served(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[tuple[OpenAIServer, ScriptedSpeech]]:
    """Yield a frontend whose speech component is scripted."""
    speech = ScriptedSpeech()
    engine = FakeEngine(vocab_size=byte_level().get_vocab_size())
    folder = save_model(tmp_path_factory.mktemp("model") / "model")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            running_model, "assemble", lambda *args, **kwargs: assemble(*args, **kwargs)._replace(speech=speech)
        )
        async with engine, openai_server(folder, engines=[engine.address], http={"max_body_bytes": LIMIT}) as api:
            yield api, speech


@pytest.fixture
def api(served: tuple[OpenAIServer, ScriptedSpeech]) -> OpenAIServer:
    return served[0]


@pytest.fixture
def speech(served: tuple[OpenAIServer, ScriptedSpeech]) -> ScriptedSpeech:
    """Return the scripted component in its first state."""
    served[1].__init__()  # type: ignore[misc]
    return served[1]


async def post(api: OpenAIServer, path: str = PATHS[0], **fields: Any) -> httpx.Response:
    file = fields.pop("file", FILE)
    return await api.http.post(path, files={"file": file} if file else {"x": b""}, data=fields)


async def refusal(api: OpenAIServer, path: str = PATHS[0], **fields: Any) -> tuple[int, str, str]:
    response = await post(api, path, **fields)
    error = response.json()["error"]
    return response.status_code, error["param"], error["message"]


async def test_the_default_answer_is_json_with_the_text(api: OpenAIServer, speech: ScriptedSpeech) -> None:
    answer = await api.client.audio.transcriptions.create(model="model", file=FILE)
    assert answer.text == TEXT
    assert answer.usage is not None
    assert (answer.usage.type, answer.usage.seconds) == ("duration", 9)  # type: ignore[union-attr]
    (request,) = speech.requests
    assert request.audio == FILE[1]
    assert (request.field, request.task, request.language, request.prompt) == ("file", SpeechTask.TRANSCRIBE, "", "")
    assert (request.temperatures, request.segments, request.words, request.seed) == (TEMPERATURES, False, False, None)
    assert request.context.model == "model"


async def test_all_fields_arrive(api: OpenAIServer, speech: ScriptedSpeech) -> None:
    await api.client.audio.transcriptions.create(
        model="model",
        file=sound_file(),
        language="de",
        prompt="Grüße, Penstock",
        temperature=0.4,
        response_format="verbose_json",
        timestamp_granularities=["word", "segment"],
        chunking_strategy="auto",
        extra_body={"seed": 7, "priority": 3},
        extra_headers={"x-request-id": "abc"},
    )
    (request,) = speech.requests
    assert request.audio == sound_file()
    assert (request.language, request.prompt, request.temperatures) == ("de", "Grüße, Penstock", (0.4,))
    assert (request.segments, request.words, request.seed, request.context.priority) == (True, True, 7, 3)
    assert request.context.external_request_id == "transcription-abc"


async def test_the_headers_of_a_call_hold_for_forms_too(api: OpenAIServer, speech: ScriptedSpeech) -> None:
    headers = {"x-request-id": "my-call", "x-penstock-tenant": "alice", "x-request-timeout": "30"}
    response = await api.http.post(PATHS[0], files={"file": FILE}, headers=headers)
    assert response.headers["x-request-id"] == "my-call"
    (request,) = speech.requests
    assert request.context.tenant == "alice"
    assert request.context.deadline is not None
    response = await api.http.post(PATHS[0], files={"file": FILE}, headers={"x-request-timeout": "-1"})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "x-request-timeout")


async def test_a_compressed_form_is_read(api: OpenAIServer, speech: ScriptedSpeech) -> None:
    request = api.http.build_request("POST", PATHS[0], files={"file": FILE})
    headers = {"content-type": request.headers["content-type"], "content-encoding": "gzip"}
    response = await api.http.post(PATHS[0], content=gzip.compress(request.read()), headers=headers)
    assert response.json()["text"] == TEXT
    assert speech.requests[0].audio == FILE[1]


async def test_temperature_0_means_all_temperatures(api: OpenAIServer, speech: ScriptedSpeech) -> None:
    await api.client.audio.transcriptions.create(model="model", file=FILE, temperature=0)
    assert speech.requests[0].temperatures == TEMPERATURES


async def test_verbose_json_has_segments_unless_only_words_are_asked_for(
    api: OpenAIServer, speech: ScriptedSpeech
) -> None:
    create: Any = api.client.audio.transcriptions.create
    answer = await create(model="model", file=FILE, response_format="verbose_json")
    assert (answer.language, answer.duration, answer.text) == ("german", 8.47, TEXT)
    assert answer.words is None
    assert [each.id for each in answer.segments] == [0, 1]
    assert [(each.start, each.end, each.text) for each in answer.segments] == [
        (0.0, 1.0, TEXTS[0]),
        (1.0, 2.0, TEXTS[1]),
    ]
    first = answer.segments[0].model_dump()
    assert first | SEGMENT_OF_API == first
    assert (first["compression_ratio"], first["no_speech_prob"]) == (1.5, 0.01)
    words = {"response_format": "verbose_json", "timestamp_granularities": ["word"]}
    answer = await create(model="model", file=FILE, **words)
    assert answer.segments is None
    assert [(each.word, each.start, each.end) for each in answer.words] == [("Hello", 0.0, 0.5), ("there.", 0.5, 1.0)]


async def test_text_srt_and_vtt_are_texts(api: OpenAIServer, speech: ScriptedSpeech) -> None:
    create: Any = api.client.audio.transcriptions.create
    assert await create(model="model", file=FILE, response_format="text") == f"{TEXT}\n"
    assert await create(model="model", file=FILE, response_format="srt") == (
        "1\n00:00:00,000 --> 00:00:01,000\nHello there.\n\n"
        "2\n00:00:01,000 --> 00:00:02,000\nGeneral -> Kenobi & <co>.\n\n"
    )
    assert await create(model="model", file=FILE, response_format="vtt") == (
        "WEBVTT\n\n00:00:00.000 --> 00:00:01.000\nHello there.\n\n"
        "00:00:01.000 --> 00:00:02.000\nGeneral --&gt; Kenobi &amp; &lt;co&gt;.\n\n"
    )
    assert [each.segments for each in speech.requests] == [False, True, True]
    speech.texts = ()
    assert await create(model="model", file=FILE, response_format="text") == "\n"
    assert await create(model="model", file=FILE, response_format="srt") == ""
    assert await create(model="model", file=FILE, response_format="vtt") == "WEBVTT\n\n"
    response = await post(api, response_format="srt")
    assert response.headers["content-type"] == "text/plain; charset=utf-8"


async def test_translations(api: OpenAIServer, speech: ScriptedSpeech) -> None:
    create: Any = api.client.audio.translations.create
    assert (await create(model="model", file=FILE, prompt="x")).text == TEXT
    verbose = await create(model="model", file=FILE, response_format="verbose_json")
    assert (verbose.language, verbose.duration, len(verbose.segments)) == ("english", 8.47, 2)
    assert await create(model="model", file=FILE, response_format="text") == f"{TEXT}\n"
    assert [each.task for each in speech.requests] == [SpeechTask.TRANSLATE] * 3
    assert (await post(api, PATHS[1], response_format="verbose_json")).json()["task"] == "translate"


async def test_a_stream_has_deltas_and_the_whole_text(api: OpenAIServer, speech: ScriptedSpeech) -> None:
    stream = await api.client.audio.transcriptions.create(model="model", file=FILE, stream=True)
    events: list[Any] = [event async for event in stream]
    assert [event.type for event in events] == ["transcript.text.delta"] * 2 + ["transcript.text.done"]
    assert [event.delta for event in events[:2]] == list(TEXTS)
    assert events[-1].text == TEXT
    assert events[-1].usage.seconds == 9
    response = await post(api, stream="true")
    assert response.headers["content-type"].startswith("text/event-stream")
    first, *_, last = response.text.split("\n\n")
    assert json.loads(first.removeprefix("data: ")) == {"type": "transcript.text.delta", "delta": TEXTS[0]}
    assert last == ""
    assert speech.ended == 2


async def test_a_silent_file_streams_only_the_last_event(api: OpenAIServer, speech: ScriptedSpeech) -> None:
    speech.texts = ()
    stream = await api.client.audio.transcriptions.create(model="model", file=FILE, stream=True)
    assert [event.type async for event in stream] == ["transcript.text.done"]


async def test_the_synchronous_client_works_too(api: OpenAIServer, speech: ScriptedSpeech, tmp_path: Path) -> None:
    path = tmp_path / "speech.wav"
    path.write_bytes(sound_file())

    def call() -> list[Any]:
        url = f"http://127.0.0.1:{api.port}/v1"
        http = openai.DefaultHttpxClient(verify=False)
        with openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=PATIENCE, http_client=http) as client:
            create: Any = client.audio.transcriptions.create
            with path.open("rb") as file:
                plain = create(model="model", file=file)
            subtitles = create(model="model", file=path, response_format="srt")
            deltas = [event.type for event in create(model="model", file=path, stream=True)]
            translation = client.audio.translations.create(model="model", file=path)
            return [plain.text, subtitles[:3], len(deltas), translation.text]

    assert await asyncio.to_thread(call) == [TEXT, "1\n0", 3, TEXT]
    assert {each.audio for each in speech.requests} == {sound_file()}


async def test_an_error_before_the_first_event_is_a_status_and_later_an_event(
    api: OpenAIServer, speech: ScriptedSpeech
) -> None:
    speech.error = InvalidArgument("file is not a readable WAV file", field="file", reason="MEDIA_UNREADABLE")
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError) as error:
            await api.client.audio.transcriptions.create(model="model", file=FILE, stream=stream)
        assert (error.value.param, error.value.code) == ("file", "media_unreadable")
    speech.error_after = 1
    got: list[str] = []
    stream_: Any = await api.client.audio.transcriptions.create(model="model", file=FILE, stream=True)
    with pytest.raises(openai.APIError, match="not a readable WAV"):
        async for event in stream_:
            got.append(event.type)
    assert got == ["transcript.text.delta"]
    assert speech.ended == 3


async def test_a_defect_is_an_incident_without_its_text(api: OpenAIServer, speech: ScriptedSpeech) -> None:
    for speech.error in (Internal("lost"), RuntimeError("secret")):
        response = await post(api)
        assert response.status_code == 500
        assert "secret" not in response.text


async def test_a_call_ends_when_its_client_leaves(api: OpenAIServer, speech: ScriptedSpeech) -> None:
    speech.hold = True
    for number, stream in enumerate(("false", "true"), start=1):
        task = asyncio.create_task(post(api, stream=stream))
        await eventually(lambda number=number: len(speech.requests) == number)
        task.cancel()
    await eventually(lambda: speech.ended == 2)


@pytest.mark.parametrize(
    ("fields", "status", "param", "says"),
    [
        ({"file": None}, 400, "file", "file is not set"),
        ({"model": "x"}, 404, "model", "model"),
        ({"response_format": "diarized_json"}, 400, "response_format", "known: json, text, srt, verbose_json, vtt"),
        ({"temperature": "1.5"}, 400, "temperature", "temperature is 1.5; it must be from 0.0 to 1.0"),
        ({"temperature": "-1"}, 400, "temperature", "must be"),
        ({"temperature": "nan"}, 400, "temperature", "temperature is nan"),
        ({"temperature": "warm"}, 400, "temperature", "temperature is 'warm'; it must be a number"),
        ({"stream": "perhaps"}, 400, "stream", "stream is 'perhaps'; it must be"),
        ({"seed": "1.5"}, 400, "seed", "seed is '1.5'; it must be an integer"),
        ({"seed": "9" * 30}, 400, "seed", "must be from"),
        ({"language": ["de", "en"]}, 400, "language", "language is set more than once"),
        ({"timestamp_granularities[]": "word"}, 400, "timestamp_granularities", "response_format is 'json'"),
        (
            {"timestamp_granularities[]": "line", "response_format": "verbose_json"},
            400,
            "timestamp_granularities[0]",
            "timestamp_granularities[0]",
        ),
        (
            {"stream": "true", "response_format": "srt"},
            400,
            "stream",
            "stream is not supported with response_format 'srt'",
        ),
        ({"include[]": "logprobs"}, 400, "include", "include is not supported; use response_format=verbose_json"),
        ({"hotwords": "Penstock"}, 400, "hotwords", "hotwords is not supported; use prompt"),
        ({"chunking_strategy[type]": "server_vad"}, 400, "chunking_strategy", "chunking_strategy is not supported"),
        ({"known_speaker_names[]": ["a", "b"]}, 400, "known_speaker_names", "is not supported; leave it out"),
        ({"no_speech_threshold": "0"}, 400, "no_speech_threshold", "is not supported"),
        ({"use_beam_search": "true"}, 400, "use_beam_search", "is not supported"),
        ({"prompt": b"\xff\xfe"}, 400, "prompt", "prompt is not valid UTF-8"),
        ({"priority": "x"}, 400, "priority", "priority is 'x'; it must be an integer"),
    ],
)
async def test_wrong_fields_are_refused_by_name(
    api: OpenAIServer, speech: ScriptedSpeech, fields: dict[str, Any], status: int, param: str, says: str
) -> None:
    given = await refusal(api, **fields)
    assert given[:2] == (status, param)
    assert says in given[2]
    assert not speech.requests


@pytest.mark.parametrize(
    "fields",
    [
        {"language": "", "prompt": "", "temperature": "", "stream": ""},
        {"stream": "False", "top_p": "1", "n": "1", "use_beam_search": "false", "stream_include_usage": "true"},
        {
            "timestamp_granularities": "segment",
            "response_format": "verbose_json",
            "user": "u",
            "chunking_strategy": "auto",
        },
        {
            "timestamp_granularities[0]": "word",
            "timestamp_granularities[1]": "segment",
            "response_format": "verbose_json",
        },
        {"something_new": "x"},
    ],
)
async def test_fields_without_effect_are_accepted(
    api: OpenAIServer, speech: ScriptedSpeech, fields: dict[str, Any]
) -> None:
    response = await post(api, **fields)
    assert response.status_code == 200, response.text
    assert response.json()["text"] == TEXT
    assert response.headers["x-request-id"]


async def test_words_of_translations_are_refused(api: OpenAIServer, speech: ScriptedSpeech) -> None:
    fields = {"response_format": "verbose_json", "timestamp_granularities[]": "word"}
    status, param, message = await refusal(api, PATHS[1], **fields)
    assert (status, param) == (400, "timestamp_granularities")
    assert message == "timestamp_granularities is not supported; use /v1/audio/transcriptions"


@pytest.mark.parametrize("path", PATHS)
async def test_other_bodies_are_refused(api: OpenAIServer, speech: ScriptedSpeech, path: str) -> None:
    response = await api.http.post(path, json={"model": "model"})
    assert (response.status_code, response.json()["error"]["code"]) == (415, "unsupported_content_type")
    assert "Content-Type is 'application/json'; it must be multipart/form-data" in response.text
    response = await api.http.post(path, content=b"")
    assert response.status_code == 415
    for content in (
        b"",
        b"--x\r\n",
        b"--x--\r\n",
        b"--x\r\nA: b\r\n\r\nfile\r\n--x--\r\n",
        b"\0" * 1000,
        b"--x\r\n" * 100,
    ):
        response = await api.http.post(
            path, content=content, headers={"content-type": "multipart/form-data; boundary=x"}
        )
        assert response.status_code == 400, content
        assert response.json()["error"]["message"]


async def test_a_file_that_is_too_large_is_refused_before_it_is_sent(api: OpenAIServer, speech: ScriptedSpeech) -> None:
    status, _, message = await refusal(api, file=("a.wav", bytes(LIMIT), "audio/wav"))
    assert status == 413
    assert f"http.max_body_bytes is {LIMIT}" in message

    def announce() -> bytes:
        with socket.create_connection(("127.0.0.1", api.port), timeout=PATIENCE) as connection:
            connection.sendall(
                b"POST /v1/audio/transcriptions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2147483648\r\n"
                b"Content-Type: multipart/form-data; boundary=x\r\n\r\n"
            )
            return connection.recv(4096)

    answer = await asyncio.to_thread(announce)
    assert answer.startswith(b"HTTP/1.1 413")
    assert not speech.requests


async def test_requests_are_counted_by_route(api: OpenAIServer, speech: ScriptedSpeech) -> None:
    await post(api)
    metrics = (await api.http.get("/metrics")).text
    assert 'http_requests_total{handler="/v1/audio/transcriptions",method="POST",status="2xx"}' in metrics


async def test_the_openapi_document_describes_the_forms(api: OpenAIServer) -> None:
    document = (await api.http.get("/openapi.json")).json()
    for path, name in zip(PATHS, ("TranscriptionBody", "TranslationBody"), strict=True):
        described = document["paths"][path]["post"]
        reference = described["requestBody"]["content"]["multipart/form-data"]["schema"]["$ref"]
        assert reference == f"#/components/schemas/{name}"
        schema = document["components"]["schemas"][name]
        assert schema["properties"]["file"] == {"type": "string", "format": "binary"}
        assert schema["required"] == ["file"]
        content = described["responses"]["200"]["content"]
        assert content.keys() == {"application/json", "text/plain; charset=utf-8", "text/event-stream"}


async def test_a_model_without_speech_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running_model, "assemble", assemble)
    engine = FakeEngine(vocab_size=byte_level().get_vocab_size())
    async with engine, openai_server(save_model(tmp_path / "model"), engines=[engine.address]) as api:
        for path in PATHS:
            status, param, message = await refusal(api, path)
            assert (status, param) == (400, "model")
            assert message == (
                "the model 'model' does not transcribe speech; serve a Whisper model, with media.enabled true"
            )


async def test_other_calls_to_a_model_with_speech_say_what_it_serves(api: OpenAIServer, speech: ScriptedSpeech) -> None:
    paths = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages")
    for path in paths:
        response = await api.http.post(path, json={"model": "model", "messages": [{"role": "user", "content": "hi"}]})
        assert (path, response.status_code) == (path, 400)
        assert "transcribes audio files, and generates no other text; use /v1/audio/transcriptions" in response.text
