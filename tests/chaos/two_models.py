"""Transcriptions and embeddings from one frontend with two models, while engines of both models are killed.

The answers are deterministic: greedy, or sampled with a seed.
"""

import asyncio
import functools
import json
import random
import time
import urllib.request
from collections.abc import Awaitable, Callable, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

import grpc
import httpx
import msgspec
import numpy as np
import soundfile

from penstock.enginecore.v1 import messages_pb2 as engine_pb
from penstock.enginecore.v1 import service_pb2_grpc as engine_rpc
from penstock.inference.v1 import messages_pb2
from penstock.inference.v1 import service_pb2_grpc as rpc
from penstock_common.rpc.channel import make_channel
from tests.chaos.requests import prompt
from tests.fakes.models.pooling_models import MINILM
from tests.fakes.models.speech_models import save_speech_model
from tests.fakes.patience import PATIENCE
from tests.fakes.processes import Service
from tests.fakes.systems.cluster import Cluster

pb: Any = messages_pb2  # messages are built from dictionaries here

SPEECH, TEXT = "whisper", "minilm"
ENGINES = 2
"""Number of engines of each model."""
TOLERANCE = 1e-6
"""Largest difference of a number, such as an element of an embedding, from the number without faults."""
RATE = 16_000
MOVED = "penstock:requests_moved_total"


class TwoModels(Cluster):
    """Cluster whose frontend serves a small Whisper checkpoint and MiniLM, with two engines each."""

    def __init__(self, folder: Path, *, positions: int) -> None:
        """Write the checkpoint to ``folder``. ``positions`` limits the prompt and the output of a window, in tokens."""
        save_speech_model(folder / SPEECH, max_target_positions=positions)
        model = {"path": str(MINILM), "served_model_name": TEXT}
        super().__init__(
            folder / SPEECH,
            engines=2 * ENGINES,
            frontend_flags={
                "coordinator__pools": json.dumps([SPEECH]),
                "models": json.dumps([{"model": model, "pools": [TEXT]}]),
                "media__workers": 1,
            },
        )
        for name in (SPEECH, TEXT):
            for engine in self.engines_of(name):
                engine.add_flag("pool", name)
        for engine in self.engines_of(TEXT):
            engine.add_flag("model.path", MINILM)
            engine.add_flag("model.served-model-name", TEXT)

    def engines_of(self, model: str) -> list[Service]:
        """Return the engines of a model."""
        return self.engines[:ENGINES] if model == SPEECH else self.engines[ENGINES:]

    async def _engines_seen(self, stub: "rpc.InferenceServiceAsyncStub") -> int:
        models = (await stub.ListModels(messages_pb2.ListModelsRequest())).models
        return sum(model.num_engines for model in models)

    async def until_served_by(self, model: str, count: int) -> None:
        """Wait until the frontend routes the requests of a model to ``count`` engines."""
        async with asyncio.timeout(PATIENCE):
            while True:
                models = (await self.stub.ListModels(messages_pb2.ListModelsRequest())).models
                if next(each.num_engines for each in models if each.name == model) == count:
                    return
                await asyncio.sleep(0.05)

    async def metric(self, name: str, model: str) -> int:
        """Return the sum of the frontend's series of a metric for a model."""
        return await asyncio.to_thread(self._metric, name, model)

    def _metric(self, name: str, model: str) -> int:
        url = f"http://127.0.0.1:{self.frontend.metrics_port}/metrics"
        with urllib.request.urlopen(url) as response:
            lines = response.read().decode().splitlines()
        found = [each for each in lines if each.startswith(f"{name}{{") and f'model_name="{model}"' in each]
        return round(sum(float(each.rpartition(" ")[2]) for each in found))


async def unfinished(engine: Service) -> int:
    """Return the number of running and waiting requests of an engine."""
    async with make_channel(engine.address) as channel:
        stub = engine_rpc.EngineCoreServiceStub(channel)
        stats = (await stub.GetEngineInfo(engine_pb.GetEngineInfoRequest())).scheduler_stats
    return stats.num_running_reqs + stats.num_waiting_reqs


class Found(msgspec.Struct):
    """Answer to a request.

    Attributes:
        exact: Parts that must be equal, such as texts and tokens.
        numbers: Parts that may differ by ``TOLERANCE``, such as embeddings and log-probabilities.
        error: Error of the request; empty if it succeeded.
    """

    exact: list[Any] = []
    numbers: list[float] = []
    error: str = ""
    seconds: float = 0.0

    def difference(self, other: "Found") -> float:
        """Return the largest difference of the numbers, or infinity if other parts differ."""
        if self.exact != other.exact or len(self.numbers) != len(other.numbers):
            return float("inf")
        return float(np.abs(np.subtract(self.numbers, other.numbers)).max(initial=0.0))


class Connection:
    """Client of a frontend over gRPC and HTTP: ``async with Connection(frontend)``."""

    def __init__(self, frontend: Service) -> None:
        self.channel = make_channel(frontend.address)
        self.stub: Any = rpc.InferenceServiceStub(self.channel)
        url = f"http://127.0.0.1:{frontend.metrics_port}"
        self.http = httpx.AsyncClient(base_url=url, timeout=None, trust_env=False)

    async def __aenter__(self) -> "Connection":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.channel.close()
        await self.http.aclose()


class TwoModelsRequest(msgspec.Struct, frozen=True):
    """A request to ``model``. ``send`` sends it and returns the answer without time and error."""

    kind: str
    model: str
    send: Callable[[Connection], Awaitable[Found]]


def sound(seconds: float, seed: int) -> bytes:
    """Return a FLAC file with noise and pauses, different for each ``seed``."""
    at = np.arange(round(seconds * RATE)) / RATE
    loud = 0.5 + 0.5 * np.sin(2 * np.pi * at / 7.0 + seed)
    file = BytesIO()
    samples = np.random.default_rng(seed).standard_normal(len(at)) * 0.1 * loud
    soundfile.write(file, samples, RATE, format="FLAC", subtype="PCM_16")
    return file.getvalue()


def _form(**fields: object) -> dict[str, str]:
    return {"model": SPEECH, "language": "en", **{name: str(value) for name, value in fields.items()}}


async def _transcribe(connection: Connection, audio: bytes, **fields: Any) -> Found:
    """Transcribe with segments over gRPC."""
    pieces, last = [], None
    async for answer in connection.stub.Transcribe(pb.TranscribeRequest(model=SPEECH, audio=audio, **fields)):
        if answer.HasField("transcript"):
            last = answer.transcript
        else:
            pieces.append(answer.text)
    if last is None:
        return Found(error="the stream ended without a transcript")
    parts = [(s.start, s.end, s.seek, s.text, list(s.token_ids), s.temperature) for s in last.segments]
    numbers = [each for s in last.segments for each in (s.avg_logprob, s.compression_ratio, s.no_speech_prob)]
    return Found([last.language, last.text, last.output_tokens, "".join(pieces), *parts], numbers)


async def _transcribe_http(connection: Connection, audio: bytes, **fields: object) -> Found:
    """Transcribe with segments over HTTP."""
    form = _form(response_format="verbose_json", **fields)
    response = await connection.http.post("/v1/audio/transcriptions", files={"file": ("a.flac", audio)}, data=form)
    if response.status_code != 200:
        return Found(error=f"{response.status_code} {response.text}")
    body = response.json()
    numbers = []
    for segment in body["segments"]:
        numbers += [segment.pop(name) for name in ("avg_logprob", "compression_ratio", "no_speech_prob")]
    return Found([body], numbers)


async def _stream_http(connection: Connection, audio: bytes, **fields: object) -> Found:
    """Transcribe as a stream of events over HTTP."""
    form, deltas, text = _form(stream="true", **fields), "", None
    async with connection.http.stream(
        "POST", "/v1/audio/transcriptions", files={"file": ("a.flac", audio)}, data=form
    ) as response:
        async for line in response.aiter_lines():
            event = json.loads(line.removeprefix("data: ")) if line.startswith("data: {") else {}
            if response.status_code != 200 or "error" in event:
                return Found(error=f"{response.status_code} {line}")
            deltas += event.get("delta", "")
            text = event.get("text", text)
    return Found([deltas, text]) if text is not None else Found(error="the stream ended without the complete text")


def transcription(number: int, seconds: float) -> TwoModelsRequest:
    """Return a request to transcribe ``seconds`` seconds: one of seven kinds, and each ``number`` has its own sound."""
    audio = sound(seconds, number)
    kinds: list[tuple[str, Callable[[Connection], Awaitable[Found]]]] = [
        ("gRPC, greedy", lambda c: _transcribe(c, audio, language="en", temperatures=[0.0])),
        ("HTTP, sampled", lambda c: _transcribe_http(c, audio, temperature=0.7, seed=number)),
        ("gRPC, sampled, segments", lambda c: _transcribe(c, audio, temperatures=[0.6], seed=number, segments=True)),
        ("HTTP stream, sampled", lambda c: _stream_http(c, audio, temperature=0.4, seed=number)),
        ("gRPC, greedy, segments", lambda c: _transcribe(c, audio, temperatures=[0.0], segments=True)),
        ("HTTP, several temperatures", lambda c: _transcribe_http(c, audio, seed=number)),
        ("gRPC, two temperatures", lambda c: _transcribe(c, audio, temperatures=[0.0, 1.0], seed=number)),
    ]
    kind, send = kinds[number % len(kinds)]
    return TwoModelsRequest(kind, SPEECH, send)


def transcriptions(count: int, shortest: float, longest: float) -> list[TwoModelsRequest]:
    """Return requests with sounds of ``shortest`` to ``longest`` seconds."""
    lengths: list[float] = np.linspace(shortest, longest, count).tolist()
    random.Random(count).shuffle(lengths)
    return [transcription(number, seconds) for number, seconds in enumerate(lengths)]


async def _embed(connection: Connection, texts: Sequence[str]) -> Found:
    request = pb.EmbedRequest(model=TEXT, inputs=[{"text": text} for text in texts])
    answer = await connection.stub.Embed(request)
    found = [np.frombuffer(tensor.inline, "<f4") for tensor in answer.embeddings]
    return Found([answer.usage.prompt_tokens, *map(len, found)], np.concatenate(found).tolist())


async def _embed_http(connection: Connection, texts: Sequence[str]) -> Found:
    response = await connection.http.post("/v1/embeddings", json={"model": TEXT, "input": texts})
    if response.status_code != 200:
        return Found(error=f"{response.status_code} {response.text}")
    body = response.json()
    found = [each["embedding"] for each in body["data"]]
    return Found([body["usage"], [each["index"] for each in body["data"]]], np.concatenate(found).tolist())


def embeddings(count: int, texts: int) -> list[TwoModelsRequest]:
    """Return requests with ``texts`` texts each, of up to eight sentences. All texts of all requests differ."""
    found = []
    for number in range(count):
        rng = random.Random(number)
        inputs = [
            f"Text {number}-{at}. " + " ".join(prompt(rng.randrange(40)) for _ in range(rng.randint(1, 8)))
            for at in range(texts)
        ]
        kind, send = [("gRPC", _embed), ("HTTP", _embed_http)][number % 2]
        found.append(TwoModelsRequest(f"{kind}, {texts} texts", TEXT, functools.partial(send, texts=inputs)))
    return found


class EngineKill(msgspec.Struct, frozen=True):
    """Record of a kill.

    Attributes:
        after: Number of requests of the model that had ended.
        requests: Number of running and waiting requests of the engine.
        seconds_away: Time until all engines served again.
    """

    model: str
    engine: str
    after: int
    requests: int
    seconds_away: float


class _Load:
    """Sends the requests of one model from ``clients`` clients, each of which sends one after the other.

    If kills are left when all requests have been sent, the load sends them again, until ``kills`` engines of the model
    were killed. So the machine's speed does not matter.
    """

    def __init__(
        self, cluster: TwoModels, connection: Connection, requests: Sequence[TwoModelsRequest], clients: int, kills: int
    ) -> None:
        self._cluster = cluster
        self._connection = connection
        self._requests = requests
        self._clients = clients
        self._marks = [len(requests) * (number + 1) // (kills + 1) for number in range(kills)]
        self._sent = 0
        self._killed = 0
        self._ended = asyncio.Condition()
        self.found: list[tuple[int, Found]] = []
        self.kills: list[EngineKill] = []

    async def run(self) -> None:
        """Send the requests and kill the engines."""
        async with asyncio.TaskGroup() as group:
            for _ in range(self._clients):
                group.create_task(self._client())
            if self._marks:
                group.create_task(self._kill())

    async def _client(self) -> None:
        while self._sent < len(self._requests) or self._killed < len(self._marks):
            number = self._sent % len(self._requests)
            self._sent += 1
            began = time.monotonic()
            try:
                answer = await self._requests[number].send(self._connection)
            except (grpc.aio.AioRpcError, httpx.HTTPError) as e:
                answer = Found(error=repr(e))
            answer.seconds = time.monotonic() - began
            async with self._ended:
                self.found.append((number, answer))
                self._ended.notify_all()

    async def _kill(self) -> None:
        model = self._requests[0].model
        for number, mark in enumerate(self._marks):
            async with self._ended:
                while len(self.found) < mark:
                    await self._ended.wait()
            engines = self._cluster.engines_of(model)
            engine = engines[number % len(engines)]
            while (requests := await unfinished(engine)) < 2:
                await asyncio.sleep(0.005)
            after, killed = len(self.found), time.monotonic()
            await engine.kill()
            self._killed += 1
            await engine.restart()
            await self._cluster.until_served_by(model, ENGINES)
            name = f"engine-{self._cluster.engines.index(engine)}"
            kill = EngineKill(model, name, after, requests, round(time.monotonic() - killed, 1))
            self.kills.append(kill)


class Result(msgspec.Struct):
    """Result of a load with both models.

    Attributes:
        found: Number of each request, and its answer, for each model.
        moved: Number of sequences that resumed on another engine, for each model.
    """

    found: dict[str, list[tuple[int, Found]]]
    kills: list[EngineKill]
    moved: dict[str, int]
    seconds: float

    def errors(self) -> list[str]:
        """Return the errors of failed requests."""
        return [answer.error for answers in self.found.values() for _, answer in answers if answer.error]

    def differences(self, calm: "Result") -> dict[str, float]:
        """Return the largest difference of each model's successful answers from those of ``calm``."""
        expected = {model: dict(answers) for model, answers in calm.found.items()}
        return {
            model: max(expected[model][number].difference(each) for number, each in answers if not each.error)
            for model, answers in self.found.items()
        }

    def differing(self, calm: "Result") -> list[tuple[str, int]]:
        """Return model and number of each successful request whose answer differs by more than ``TOLERANCE``."""
        expected = {model: dict(answers) for model, answers in calm.found.items()}
        return [
            (model, number)
            for model, answers in self.found.items()
            for number, each in answers
            if not each.error and expected[model][number].difference(each) > TOLERANCE
        ]


async def run(
    cluster: TwoModels, load: dict[str, Sequence[TwoModelsRequest]], *, clients: int = 8, kills: int = 0
) -> Result:
    """Send the requests of both models at the same time, and kill ``kills`` engines of each model meanwhile.

    The other engine of the model serves until the killed engine has restarted.
    """
    before = {model: await cluster.metric(MOVED, model) for model in load}
    began = time.monotonic()
    async with Connection(cluster.frontend) as connection, asyncio.TaskGroup() as group:
        loads = {model: _Load(cluster, connection, each, clients, kills) for model, each in load.items()}
        for each in loads.values():
            group.create_task(each.run())
    return Result(
        found={model: each.found for model, each in loads.items()},
        kills=[kill for each in loads.values() for kill in each.kills],
        moved={model: await cluster.metric(MOVED, model) - before[model] for model in load},
        seconds=time.monotonic() - began,
    )
