"""Requests to engines for one window of speech: detection of the language, and transcription with fallback."""

import asyncio
import math
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from penstock_common.errors import DeadlineExceeded, RequestFailed, ResourceExhausted
from penstock_common.types.outputs import Logprobs
from penstock_common.types.sampling import OutputKind
from penstock_frontend.call_types import EncodedFile, GenerateRequest, MediaPart, MixedPrompt
from penstock_frontend.calls.admission import Demand, check_deadline
from penstock_frontend.calls.generate import AsyncLLM
from penstock_frontend.processing.media.split_speech import SpeechWindow
from penstock_frontend.speech.prompts import SpeechTokens
from penstock_frontend.speech.segments import Quality, quality, spans, unread_from
from penstock_frontend.speech.types import Segment, TranscriptionRequest


class Detected(NamedTuple):
    """Result of the detection for a window.

    Attributes:
        language: Code of the most likely language.
        no_speech_prob: Probability that the window contains no speech.
    """

    language: str
    no_speech_prob: float


class Spoken(NamedTuple):
    """Text of a window, which is empty if the window contains no speech."""

    text: str
    segments: Sequence[Segment]


class _Output(NamedTuple):
    """Complete output of one request. ``logprobs`` has the log probability of each token."""

    token_ids: Sequence[int]
    logprobs: Logprobs


class WindowCalls:
    """Sends the requests of one transcription call, and counts the tokens that the model generates.

    The first request is refused if a limit on requests in flight is reached. Later requests wait and try again, because
    the call was accepted.
    """

    def __init__(
        self,
        llm: AsyncLLM,
        tokens: SpeechTokens,
        request: TranscriptionRequest,
        *,
        request_id: str,
        previous: Sequence[int],
    ) -> None:
        """Prepare the call. ``previous`` are the token ids of the text before the speech."""
        self._llm = llm
        self._tokens = tokens
        self._request = request
        self._request_id = request_id
        self._previous = previous
        self._accepted = False
        self.output_tokens = 0
        """Number of tokens that the model has generated for the call."""

    async def detect(self, window: SpeechWindow) -> Detected:
        """Let the model read a window, and return the most likely language and whether the window contains speech.

        The model computes one token after ``<|startoftranscript|>``. For English-only models, the language is ``en``.
        """
        languages, no_speech = self._tokens.languages, self._tokens.no_speech
        watched = (no_speech, *languages.values())
        output = await self._generate(
            window, [self._tokens.start], {"temperature": 0.0, "max_tokens": 1, "logprob_token_ids": watched}
        )
        found = dict(zip(output.logprobs.token_ids, output.logprobs.logprobs, strict=True))
        best = max(languages, key=lambda code: found.get(languages[code], -math.inf), default="en")
        return Detected(best, math.exp(found[no_speech]))

    async def transcribe(self, window: SpeechWindow, language: str, detected: Detected | None) -> Spoken:
        """Return the text of a window, from the first temperature whose text is plausible, or else from the last.

        If ``detected`` is None, the model is asked whether the window contains speech if the text is unlikely, or if the
        result has segments.
        """
        request, tokens = self._request, self._tokens
        prompt = tokens.prompt(language, request.task, timestamps=request.segments, previous=self._previous)
        given: dict[str, Any] = {"max_tokens": tokens.max_positions - len(prompt)}
        if request.seed is not None:
            given["seed"] = request.seed
        if request.segments and detected is None:
            detected = await self.detect(window)
        for temperature in request.temperatures:
            output = await self._generate(window, prompt, {"temperature": temperature, **given})
            text = self._text(output.token_ids)
            found = quality(text, output.logprobs.logprobs)
            if found.unlikely:
                detected = detected or await self.detect(window)
                if found.silent(detected.no_speech_prob):
                    return Spoken("", ())
            if not found.implausible:
                break
        if not request.segments or detected is None:
            return Spoken(text, ())
        ids = [each for each in output.token_ids if self._is_spoken(each)]
        segments = self._segments(window, ids, temperature, found, detected)
        if (time := unread_from(ids, tokens.first_timestamp, window.seconds)) is None:
            return Spoken(text, segments)
        rest = await self.transcribe(window.rest(time), language, detected)
        return Spoken(text + rest.text, [*segments, *rest.segments])

    def _segments(
        self,
        window: SpeechWindow,
        token_ids: Sequence[int],
        temperature: float,
        found: Quality,
        detected: Detected,
    ) -> list[Segment]:
        """Return the segments of a window, whose text and timestamps are ``token_ids``."""
        return [
            Segment(
                start=window.start + span.start,
                end=window.start + span.end,
                seek=round(window.start * 100),
                text=self._text(span.token_ids),
                token_ids=span.token_ids,
                temperature=temperature,
                avg_logprob=found.avg_logprob,
                compression_ratio=found.compression_ratio,
                no_speech_prob=detected.no_speech_prob,
            )
            for span in spans(token_ids, self._tokens.first_timestamp, window.seconds)
        ]

    def _is_spoken(self, token_id: int) -> bool:
        """Return whether a token is text or a timestamp."""
        return token_id >= self._tokens.first_timestamp or self._tokens.is_text(token_id)

    def _text(self, token_ids: Sequence[int]) -> str:
        return self._llm.tokenizer.decode([each for each in token_ids if self._tokens.is_text(each)])

    async def _generate(self, window: SpeechWindow, prompt: list[int], sampling: Mapping[str, Any]) -> _Output:
        request = self._request
        part = MediaPart(modality="audio", source=EncodedFile(bytes(window.file)), field=request.field)
        generate = GenerateRequest(
            prompt=MixedPrompt((part, prompt), (request.field, "prompt")),
            sampling={"logprobs": 0, "detokenize": False, "output_kind": OutputKind.FINAL, **sampling},
            add_special_tokens=False,
            context=request.context,
        )
        demand = Demand(request.context.tenant, part.num_bytes + len(prompt))
        while True:
            try:
                return await self._run(generate, demand)
            except ResourceExhausted as e:
                if not self._accepted:
                    raise
                await self._wait(e.retry_after or 1.0)
            except RequestFailed as e:
                raise _located(e, request.field, window.start) from e

    async def _run(self, generate: GenerateRequest, demand: Demand) -> _Output:
        live = self._llm.accept(self._request_id, demand)
        try:
            self._accepted = True
            token_ids: list[int] = []
            logprobs = Logprobs()
            async for output in self._llm.generate(generate, live):
                token_ids += output.token_ids
                if output.logprobs is not None:
                    logprobs.extend(output.logprobs)
                if output.finish is not None:
                    self.output_tokens += output.finish.usage.completion_tokens
            return _Output(token_ids, logprobs)
        finally:
            self._llm.release(live)

    async def _wait(self, seconds: float) -> None:
        deadline = self._request.context.deadline
        check_deadline(deadline)
        if deadline is not None and time.time() + seconds >= deadline:
            await asyncio.sleep(max(0.0, deadline - time.time()))
            raise DeadlineExceeded("the request's deadline passed before all windows of the audio were transcribed")
        await asyncio.sleep(seconds)


def _located(error: RequestFailed, field: str, start: float) -> RequestFailed:
    """Return the error of a window with the place of the window in the file."""
    return type(error)(
        f"{field} at {start:.2f} s: {error.message}",
        field=error.field,
        reason=error.reason,
        retry_after=error.retry_after,
        quota_subject=error.quota_subject,
    )
