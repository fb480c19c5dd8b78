"""Scripted speech model: replaces the engine, and the media workers, in tests of transcription calls."""

import asyncio
import contextlib
import itertools
import math
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import Any

from penstock_common.errors import RequestFailed, ResourceExhausted
from penstock_common.types.outputs import FinishReason, Logprobs
from penstock_frontend.call_types import Finish, GenerateRequest, MediaPart, RequestOutput, Usage
from penstock_frontend.calls.admission import Demand
from penstock_frontend.metrics import FrontendMetrics, SpeechMetrics
from penstock_frontend.processing.media.split_speech import SpeechWindow, SplitSpeech
from penstock_frontend.processing.prompts.tokenizer import Tokenizer
from penstock_frontend.speech.calls import SpeechCalls
from penstock_frontend.speech.prompts import SpeechTokens, load_tokens
from tests.fakes.models.whisper_tokenizer import END, whisper_tokenizer

TOKENIZER = Tokenizer(whisper_tokenizer())
CONFIG = {"model_type": "whisper", "vocab_size": 51865, "max_target_positions": 448}

Reply = tuple[str, float]
"""Text of an output, with control tokens, and the log probability of each of its tokens."""


class Live:
    """Request that the scripted model has accepted."""

    def __init__(self) -> None:
        self.released = False


class ScriptedSpeech:
    """Part of ``AsyncLLM`` that transcription calls use. The file of a window is its number as text.

    Attributes:
        says: Returns the reply for the number of a window and a temperature. It may raise an error.
        no_speech: Probability of no speech for each window. Missing windows have 0.01.
        language: Language that the model detects.
        room: Maximum number of requests at once.
        holds: Numbers of windows whose transcription never ends.
        requests: Requests that the model received, with the number of the window.
        prompts: Decoder prompts that the model received, with the number of the window.
    """

    def __init__(self) -> None:
        self.tokenizer = TOKENIZER
        self.inputs = self
        self.says: Callable[[str, float], Reply] = lambda window, temperature: (f" Window {window}.", -0.2)
        self.no_speech: dict[str, float] = {}
        self.language = "de"
        self.room = 100
        self.holds: set[str] = set()
        self.requests: list[tuple[str, GenerateRequest]] = []
        self.prompts: list[tuple[str, list[int]]] = []
        self.lives: list[Live] = []
        self.most_running = 0

    @property
    def running(self) -> int:
        """Number of requests that are accepted and not released."""
        return sum(not live.released for live in self.lives)

    def request_id(self, given: str) -> str:
        return given or "made"

    def check_model(self, name: str, lora: str = "") -> str:
        return name or lora

    def check_tenant(self, tenant: str) -> None:
        del tenant

    def check_length(self, text: str, *, field: str) -> None:
        del text, field

    def check_room(self, demands: Sequence[Demand]) -> None:
        if self.running + len(demands) > self.room:
            raise ResourceExhausted("no room", retry_after=0.001)

    def accept(self, given_id: str, demand: Demand) -> Live:
        del given_id
        self.check_room([demand])
        self.lives.append(Live())
        self.most_running = max(self.most_running, self.running)
        return self.lives[-1]

    def release(self, live: Live) -> None:
        live.released = True

    async def generate(self, request: GenerateRequest, live: Live) -> AsyncIterator[RequestOutput]:
        part, prompt = request.prompt.parts  # type: ignore[union-attr]
        assert isinstance(part, MediaPart)
        assert isinstance(prompt, list)
        number = part.source.data.decode()  # type: ignore[union-attr]
        self.requests.append((number, request))
        self.prompts.append((number, prompt))
        await asyncio.sleep(0)
        if prompt == [TOKENIZER.token_id("<|startoftranscript|>")]:
            yield self._detected(number, request.sampling["logprob_token_ids"])
            return
        text, logprob = self.says(number, request.sampling["temperature"])
        if number in self.holds:
            await asyncio.Event().wait()
        ids = TOKENIZER.literal(text + END)
        logprobs = Logprobs()
        for each in ids:
            logprobs.add([each], [logprob], [1])
        yield _output(ids, logprobs)
        self.release(live)

    def _detected(self, number: str, watched: Sequence[int]) -> RequestOutput:
        chances = {f"<|{self.language}|>": 0.9, "<|nospeech|>": self.no_speech.get(number, 0.01)}
        known = {TOKENIZER.token_id(name): math.log(chance) for name, chance in chances.items()}
        chosen = TOKENIZER.token_id("<|0.00|>")
        assert chosen is not None
        logprobs = Logprobs()
        logprobs.add(
            [chosen, *watched], [-0.1, *(known.get(each, -50.0) for each in watched)], [1] * (1 + len(watched))
        )
        return _output([chosen], logprobs)


def _output(ids: list[int], logprobs: Logprobs) -> RequestOutput:
    finish = Finish(FinishReason.STOP, None, Usage(completion_tokens=len(ids)))
    return RequestOutput(text="", token_ids=ids, logprobs=logprobs, finish=finish)


class ScriptedSplit:
    """Media service whose files have these windows, as pairs of start and length in seconds."""

    def __init__(self, seconds: float, places: Sequence[tuple[float, float]]) -> None:
        self.seconds = seconds
        self.places = places
        self.splits: list[SplitSpeech] = []
        self.error: RequestFailed | None = None

    async def split(self, part: MediaPart, *, deadline: float | None, tenant: str) -> SplitSpeech:
        del part, deadline, tenant
        if self.error is not None:
            raise self.error
        windows = [SpeechWindow(start, seconds, str(i).encode()) for i, (start, seconds) in enumerate(self.places)]
        self.splits.append(SplitSpeech(self.seconds, windows, None))
        return self.splits[-1]


class SpeechRig:
    """Transcription calls with a scripted model."""

    def __init__(self, num_windows: int = 3, *, english: bool = False, max_windows: int = 8) -> None:
        self.model = ScriptedSpeech()
        places = list(itertools.islice(_places(), num_windows))
        self.media = ScriptedSplit(num_windows * 25.0 + 1.0, places)
        self.address = ""
        self.metrics = FrontendMetrics("m")
        self.tokens: SpeechTokens = load_tokens(TOKENIZER, CONFIG, {"is_multilingual": not english})
        llm: Any = self.model
        media: Any = self.media
        metrics = SpeechMetrics(self.metrics.registry, "m")
        self.calls = SpeechCalls(llm, media, self.tokens, metrics, max_windows=max_windows)

    async def until_running(self, count: int) -> None:
        """Wait until the model runs this many requests."""
        while self.model.running != count:
            await asyncio.sleep(0)


def _places() -> Iterator[tuple[float, float]]:
    for index in itertools.count():
        yield index * 25.0, 25.0


@contextlib.contextmanager
def no_leak(rig: SpeechRig) -> Iterator[None]:
    """Check that all requests of the model are released at the end."""
    yield
    assert rig.model.running == 0
