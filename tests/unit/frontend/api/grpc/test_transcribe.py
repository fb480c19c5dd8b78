"""The call Transcribe with a scripted model: the client library, ``penstock transcribe``, errors and cancellation."""

import asyncio
import io
import json
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from penstock.inference.v1 import messages_pb2 as pb
from penstock_client import AsyncClient, InvalidArgument, Transcript
from penstock_common.config.sections import ServerConfig
from penstock_common.config.settings import Reread
from penstock_common.rpc.server import RpcServer
from penstock_frontend.api.grpc import inference
from penstock_frontend.api.grpc.speech_messages import transcription_request
from penstock_frontend.config import LimitsConfig, LoraConfig, ModelConfig
from penstock_frontend.served_models import ServedModel, ServedModels
from penstock_frontend.speech.types import TEMPERATURES, SpeechTask
from penstock_local.cli import build_parser, main
from penstock_local.commands.transcribe import TranscribeOptions, transcribe
from tests.fakes.frontends.speech_model import SpeechRig
from tests.fakes.patience import PATIENCE


class Served:
    """A server with a scripted speech model, or with a model that does not transcribe."""

    def __init__(self, rig: SpeechRig | None) -> None:
        self.rig = rig
        self.address = ""

    async def start(self) -> RpcServer:
        rpc = RpcServer(ServerConfig(host="127.0.0.1"), service_names=())
        unused: Any = None
        model = ServedModel(
            config=ModelConfig(path="m", served_model_name="m"),
            lora=LoraConfig(),
            llm=unused,
            chat=unused,
            scoring=unused,
            labels=(),
            speech=None if self.rig is None else self.rig.calls,
        )
        limits = Reread(LimitsConfig())
        servicer = inference.InferenceServicer(ServedModels([model]), limits, unused, max_response_bytes=1 << 20)
        inference.add_to_server(servicer, rpc.server)
        self.address = f"127.0.0.1:{await rpc.start()}"
        await rpc.set_serving(True)
        return rpc


@pytest.fixture
async def served() -> AsyncIterator[SpeechRig]:
    made = Served(SpeechRig(2))
    rpc = await made.start()
    assert made.rig is not None
    made.rig.address = made.address
    yield made.rig
    await rpc.stop(0)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "speech.wav"
    path.write_bytes(b"audio")
    return path


async def test_the_client_streams_texts_and_returns_the_transcript(served: SpeechRig, file: Path) -> None:
    async with AsyncClient(served.address, timeout=PATIENCE) as client:
        items = [item async for item in client.stream_transcript(file)]
        assert items[:-1] == ["Window 0.", " Window 1."]
        served.model.says = lambda window, _: (f"<|0.00|> W{window}<|2.00|>", -0.2)
        transcript = await client.transcribe(b"audio", language="fr", task="translate", segments=True, request_id="r")
    assert isinstance(items[-1], Transcript)
    assert items[-1].text == "Window 0. Window 1."
    assert items[-1].language == "german"
    assert (transcript.request_id, transcript.task, transcript.language) == ("r", "translate", "french")
    assert [(s.start, s.end, s.text) for s in transcript.segments] == [(0.0, 2.0, " W0"), (25.0, 27.0, " W1")]
    assert transcript.duration == 51.0
    assert transcript.output_tokens > 0


async def test_wrong_calls_are_refused(served: SpeechRig) -> None:
    async with AsyncClient(served.address, timeout=PATIENCE) as client:
        with pytest.raises(InvalidArgument, match="audio is empty") as empty:
            await client.transcribe(b"")
        assert empty.value.field == "audio"
        with pytest.raises(InvalidArgument, match="language is 'klingon'"):
            await client.transcribe(b"a", language="klingon")
        with pytest.raises(TypeError, match="pass the bytes of an audio file"):
            await client.transcribe("file.wav")  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="has no argument 'langage'; did you mean 'language'"):
            await client.transcribe(b"a", langage="de")  # type: ignore[call-arg]
        call = client.stub.Transcribe(pb.TranscribeRequest(audio=b"a", task=7))  # type: ignore[arg-type]
        with pytest.raises(Exception, match=r"task is 7; it must be 1 \(transcribe\) or 2 \(translate\)"):
            await call.read()


async def test_a_model_that_does_not_transcribe_refuses() -> None:
    made = Served(None)
    rpc = await made.start()
    async with AsyncClient(made.address, timeout=PATIENCE) as client:
        with pytest.raises(InvalidArgument, match="the model 'm' does not transcribe speech") as error:
            await client.transcribe(b"a")
    assert (error.value.field, error.value.reason) == ("model", "WRONG_MODEL_KIND")
    await rpc.stop(0)


async def test_a_cancelled_call_aborts_its_requests(served: SpeechRig) -> None:
    served.model.holds = {"0", "1"}
    async with AsyncClient(served.address, timeout=PATIENCE) as client, asyncio.timeout(PATIENCE):
        stream = client.stream_transcript(b"audio", language="en")
        reader = asyncio.ensure_future(anext(stream))
        await served.until_running(2)
        stream.close()
        await asyncio.gather(reader, return_exceptions=True)
        await served.until_running(0)


def test_fields_that_are_not_set_have_defaults() -> None:
    request = transcription_request(pb.TranscribeRequest(audio=b"a"), metadata={}, time_left=None)
    assert (request.task, request.temperatures, request.seed) == (SpeechTask.TRANSCRIBE, TEMPERATURES, None)
    full = pb.TranscribeRequest(audio=b"a", temperatures=[0.2], seed=0, cache_salt="s", lora="l", request_id="r")
    full.routing.priority = 3
    request = transcription_request(full, metadata={"x-penstock-tenant": "t"}, time_left=5.0)
    assert (request.temperatures, request.seed) == ((0.2,), 0)
    context = request.context
    assert (context.cache_salt, context.lora, context.external_request_id) == ("s", "l", "r")
    assert (context.priority, context.tenant) == (3, "t")
    assert context.deadline is not None


async def test_the_command_writes_the_text(served: SpeechRig, file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert await transcribe(TranscribeOptions(file=str(file), address=served.address)) == 0
    out, err = capsys.readouterr()
    assert out == "Window 0. Window 1.\n"
    assert err.startswith("[german · 51.0 s of audio · 23 tokens · ")


@pytest.mark.parametrize(
    ("form", "start"),
    [
        ("srt", "1\n00:00:00,000 --> 00:00:02,000\nW0\n\n2\n00:00:25,000 --> 00:00:27,000\nW1\n"),
        ("vtt", "WEBVTT\n\n00:00:00.000 --> 00:00:02.000\nW0\n"),
        ("json", '{\n  "request_id": "made",\n  "task": "translate"'),
    ],
)
async def test_the_command_writes_other_formats(
    served: SpeechRig, file: Path, capsys: pytest.CaptureFixture[str], form: Any, start: str
) -> None:
    served.model.says = lambda window, _: (f"<|0.00|> W{window}<|2.00|>", -0.2)
    options = TranscribeOptions(
        file=str(file), address=served.address, format=form, task="translate", temperature=0.4, prompt="Ada"
    )
    assert await transcribe(options) == 0
    out = capsys.readouterr().out
    assert out.startswith(start)
    if form == "json":
        assert len(json.loads(out)["segments"]) == 2
    assert {each.sampling["temperature"] for _, each in served.model.requests} == {0.0, 0.4}


async def test_the_command_reads_standard_input(
    served: SpeechRig, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"audio")))
    assert await transcribe(TranscribeOptions(file="-", address=served.address, language="en")) == 0
    assert capsys.readouterr().out == "Window 0. Window 1.\n"


async def test_the_command_shows_errors(served: SpeechRig, file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert await transcribe(TranscribeOptions(file=str(file), address=served.address, language="xx")) == 1
    assert "INVALID_ARGUMENT: language is 'xx'" in capsys.readouterr().err
    assert await transcribe(TranscribeOptions(file=str(file), address="127.0.0.1:1")) == 1
    assert "Is a server running?" in capsys.readouterr().err


def test_wrong_flags_end_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["transcribe", str(tmp_path / "missing.wav")]) == 2
    assert "missing.wav cannot be read: No such file or directory" in capsys.readouterr().err
    assert main(["transcribe", "a.wav", "--timeout", "0"]) == 2
    with pytest.raises(SystemExit):
        build_parser().parse_args(["transcribe", "a.wav", "--format", "docx"])
