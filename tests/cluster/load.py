"""Load from typical clients on a release. Each call's answer is compared with the answer without disruptions."""

import asyncio
import itertools
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from types import TracebackType
from typing import Any

import grpc
import msgspec
import openai

from penstock.common.v1.sampling_pb2 import SamplingParams
from penstock.inference.v1 import messages_pb2 as pb
from penstock.inference.v1 import service_pb2_grpc
from penstock_client import AsyncClient
from tests.cluster.ghz import Ghz

PROMPTS = tuple(
    f"Once upon a time there were {count} bears" for count in ("two", "three", "four", "five", "six", "seven")
)
CALL_SECONDS = 300.0


class Answer(msgspec.Struct):
    """Answer of one call. ``error`` is the client's error as text; empty when the stream was complete."""

    client: str
    prompt: str
    began: float
    tokens: list[int] = []
    text: str = ""
    error: str = ""
    seconds: float = 0.0


class Target(msgspec.Struct, frozen=True):
    """Address of the release's Service, and the DNS name with one address per frontend."""

    service: str
    headless: str
    model: str
    grpc_port: int = 50051
    http_port: int = 8000


def seed(prompt: str) -> int:
    """Return the seed that makes the tokens of a prompt the same each time."""
    return PROMPTS.index(prompt) + 1


async def over_grpc(stub: Any, answer: Answer, max_tokens: int) -> None:
    """Receive a stream of ``max_tokens`` tokens, sampled with a seed for each prompt."""
    params = SamplingParams(seed=seed(answer.prompt), max_tokens=max_tokens, ignore_eos=True)
    request = pb.GenerateRequest(text=answer.prompt, sampling_params=params)
    finished = False
    async for response in stub.Generate(request, timeout=CALL_SECONDS):
        answer.tokens += response.token_ids
        answer.text += response.text
        finished = finished or bool(response.finish_reason)
    if not finished:
        answer.error = "the stream ended without a finish reason"


async def over_http(client: openai.AsyncOpenAI, model: str, answer: Answer, max_tokens: int) -> None:
    """Receive a stream with OpenAI's client and its default retries."""
    stream = await client.completions.create(
        model=model,
        prompt=answer.prompt,
        max_tokens=max_tokens,
        seed=seed(answer.prompt),
        stream=True,
        extra_body={"ignore_eos": True, "return_token_ids": True},
    )
    finished = False
    async for chunk in stream:
        for choice in chunk.choices:
            answer.text += choice.text
            answer.tokens += getattr(choice, "token_ids", None) or []
            finished = finished or bool(choice.finish_reason)
    if not finished:
        answer.error = "the stream ended without a finish reason"


Send = Callable[[Answer, int], Any]


class Clients:
    """Clients of all kinds: ``async with Clients(target) as clients``. All streams of a kind use one connection."""

    def __init__(self, target: Target) -> None:
        self.target = target
        self.kinds: dict[str, Send] = {}

    async def __aenter__(self) -> "Clients":
        target = self.target
        self._plain = grpc.aio.insecure_channel(f"{target.service}:{target.grpc_port}")
        self._published = AsyncClient(f"dns:///{target.headless}:50051")
        self._openai = openai.AsyncOpenAI(
            base_url=f"http://{target.service}:{target.http_port}/v1", api_key="none", timeout=CALL_SECONDS
        )
        plain = service_pb2_grpc.InferenceServiceStub(self._plain)
        balanced = self._published.stub
        self.kinds = {
            "plain": lambda answer, count: over_grpc(plain, answer, count),
            "published": lambda answer, count: over_grpc(balanced, answer, count),
            "openai": lambda answer, count: over_http(self._openai, target.model, answer, count),
        }
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await asyncio.gather(self._plain.close(), self._published.close(), self._openai.close())

    async def send(self, kind: str, prompt: str, max_tokens: int) -> Answer:
        """Send one call with the client of that kind. The client's exception becomes the answer's error."""
        answer = Answer(client=kind, prompt=prompt, began=time.monotonic())
        try:
            await self.kinds[kind](answer, max_tokens)
        except grpc.aio.AioRpcError as error:
            answer.error = f"{error.code().name}: {error.details()}"
        except openai.OpenAIError as error:
            answer.error = f"{type(error).__name__}: {error}"
        answer.seconds = time.monotonic() - answer.began
        return answer


class Load:
    """Sends calls while its block runs: ``async with Load(clients, known, streams=16) as load``.

    Every kind of client has ``streams`` streams, and each stream sends calls one after the other. At the end, each
    stream finishes its current call. ghz has one stream. ``resize`` changes the number of streams.

    Args:
        known: Answer of each prompt without disruptions.
        kinds: Kinds of clients to use; all if empty.
    """

    def __init__(
        self, clients: Clients, known: dict[str, list[int]], *, streams: int, max_tokens: int, kinds: Sequence[str] = ()
    ) -> None:
        self._clients = clients
        self._known = known
        self._max_tokens = max_tokens
        self._kinds = tuple(kinds or clients.kinds)
        self._prompts = itertools.cycle(PROMPTS)
        self._wanted = streams
        address = f"{clients.target.service}:{clients.target.grpc_port}"
        self._ghz = None if kinds else Ghz(address, text=PROMPTS[0], max_tokens=max_tokens)
        self._tasks: set[asyncio.Task[None]] = set()
        self.answers: list[Answer] = []

    async def __aenter__(self) -> "Load":
        self.resize(self._wanted)
        if self._ghz is not None:
            await self._ghz.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._wanted = 0
        if error is not None:
            for task in self._tasks:
                task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=error is not None)
        if self._ghz is not None:
            await self._ghz.stop()

    def resize(self, streams: int) -> None:
        """Change the number of streams of each kind. Surplus streams end after their current call."""
        self._wanted = streams
        have = Counter(task.get_name() for task in self._tasks)
        for kind in self._kinds:
            for number in range(streams):
                name = f"{kind}-{number}"
                if not have[name]:
                    task = asyncio.create_task(self._stream(kind, number), name=name)
                    self._tasks.add(task)
                    task.add_done_callback(self._tasks.discard)

    @property
    def wrong(self) -> list[str]:
        """Differences from the run without disruptions, as text."""
        words = list(self._ghz.wrong) if self._ghz is not None else []
        for answer in self.answers:
            if answer.error:
                words.append(f"{answer.client}: {answer.error}")
            elif answer.tokens != self._known[answer.prompt]:
                words.append(f"{answer.client}: other tokens, {len(answer.tokens)} of them")
        return words

    async def calls(self, count: int) -> None:
        """Wait until ``count`` more calls have ended."""
        target = len(self.answers) + count
        while len(self.answers) < target:
            await asyncio.sleep(0.05)

    async def _stream(self, kind: str, number: int) -> None:
        while number < self._wanted:
            self.answers.append(await self._clients.send(kind, next(self._prompts), self._max_tokens))
            if self.answers[-1].error:
                await asyncio.sleep(0.2)  # limits the rate of calls if a client fails immediately


async def undisturbed(clients: Clients, max_tokens: int) -> dict[str, list[int]]:
    """Return each prompt's answer without disruptions. All kinds of clients must agree."""
    known: dict[str, list[int]] = {}
    async for kind, answer in _one_by_one(clients, max_tokens):
        assert not answer.error, f"{kind}: {answer.error}"
        assert answer.tokens == known.setdefault(answer.prompt, answer.tokens), f"{kind} differs for {answer.prompt!r}"
    return known


async def _one_by_one(clients: Clients, max_tokens: int) -> AsyncIterator[tuple[str, Answer]]:
    for kind in clients.kinds:
        for answer in await asyncio.gather(*(clients.send(kind, prompt, max_tokens) for prompt in PROMPTS)):
            yield kind, answer
