"""Transcription calls, each of which divides an audio file into windows and transcribes the windows at the same time."""

import asyncio
import contextlib
import functools
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

from penstock_common.errors import WRONG_MODEL_KIND, InvalidArgument, Unimplemented, quoted
from penstock_common.types.sampling import Bounds
from penstock_frontend.call_types import EncodedFile, MediaPart
from penstock_frontend.calls.admission import Demand, check_deadline
from penstock_frontend.calls.generate import AsyncLLM
from penstock_frontend.metrics import SpeechMetrics
from penstock_frontend.processing.media.service import MediaService
from penstock_frontend.processing.media.split_speech import SpeechWindow, SplitSpeech
from penstock_frontend.speech.languages import NAMES
from penstock_frontend.speech.prompts import SpeechTokens
from penstock_frontend.speech.types import Segment, Speech, TextDelta, Transcript, TranscriptionRequest
from penstock_frontend.speech.window_calls import Detected, Spoken, WindowCalls

_TEMPERATURE = Bounds(0.0, 1.0)
_MAX_TEMPERATURES = 16


class SpeechCalls:
    """Runs transcription calls: the implementation of ``Speech``.

    The text of a window is not part of the prompt of the next window. So the windows of a file run at the same time,
    and a wrong text in one window does not spread to later windows.
    """

    def __init__(
        self, llm: AsyncLLM, media: MediaService, tokens: SpeechTokens, metrics: SpeechMetrics, *, max_windows: int
    ) -> None:
        """Create the component. At most ``max_windows`` windows of one file run at the same time."""
        self._llm = llm
        self._media = media
        self._tokens = tokens
        self._metrics = metrics
        self._max_windows = max_windows

    async def transcribe(self, request: TranscriptionRequest) -> Transcript:
        """Return the complete transcript. Raises RequestFailed if the request is refused or fails."""
        return await self._run(request, lambda _: None)

    def stream(self, request: TranscriptionRequest) -> "TranscriptStream":
        """Return a stream of the text of each window, in order. The last item is the transcript.

        The stream has the text of a window once the window is complete, because a higher temperature may replace an
        implausible text. Reading the stream raises RequestFailed as ``transcribe`` does.
        """
        return TranscriptStream(lambda send: self._run(request, send))

    async def _run(self, request: TranscriptionRequest, send: Callable[[TextDelta], None]) -> Transcript:
        started = time.monotonic()
        language = self._check(request)
        previous = await self._tokens.previous_ids(request.prompt, self._llm.tokenizer)
        context = request.context
        request_id = self._llm.inputs.request_id(context.external_request_id)
        self._llm.check_room([Demand(context.tenant, len(request.audio))])
        part = MediaPart(modality="audio", source=EncodedFile(request.audio), field=request.field)
        split = await self._media.split(part, deadline=context.deadline, tenant=context.tenant)
        calls = WindowCalls(self._llm, self._tokens, request, request_id=request_id, previous=previous)
        try:
            joined = _Joined(send)
            language = await self._windows(calls, split, language, joined)
        finally:
            split.release()
        self._metrics.transcribed(split.seconds, time.monotonic() - started)
        return Transcript(
            request_id=request_id,
            task=request.task,
            language=NAMES.get(language, language),
            duration=split.seconds,
            text=joined.text,
            segments=joined.segments,
            output_tokens=calls.output_tokens,
        )

    def _check(self, request: TranscriptionRequest) -> str:
        """Check a request before its audio is decoded. Return the code of its language, or an empty text."""
        self._llm.inputs.check_model(request.context.model, request.context.lora)
        self._llm.inputs.check_tenant(request.context.tenant)
        check_deadline(request.context.deadline)
        if request.words:
            raise Unimplemented(
                "timestamp_granularities has 'word', but timestamps of words are not supported; use 'segment'",
                field="timestamp_granularities",
            )
        self._llm.inputs.check_length(request.prompt, field="prompt")
        if not 0 < len(request.temperatures) <= _MAX_TEMPERATURES:
            raise InvalidArgument(
                f"temperatures has {len(request.temperatures)} numbers; it must have from 1 to {_MAX_TEMPERATURES}",
                field="temperatures",
            )
        for temperature in request.temperatures:
            if not _TEMPERATURE.allow(temperature):
                raise InvalidArgument(f"temperature is {temperature}; it must be {_TEMPERATURE}", field="temperature")
        self._tokens.check_task(request.task)
        return self._tokens.language(request.language)

    async def _windows(self, calls: WindowCalls, split: SplitSpeech, language: str, joined: "_Joined") -> str:
        """Transcribe all windows. Return the code of the language, or an empty text if there are no windows."""
        if not split.windows:
            return language
        detected: Detected | None = None
        if not language:
            detected = await calls.detect(split.windows[0])
            language = detected.language
        room = asyncio.Semaphore(self._max_windows)
        index = 0
        try:
            async with asyncio.TaskGroup() as tasks:
                while split.windows:
                    await room.acquire()
                    known = detected if index == 0 else None
                    work = _window(calls, split.windows.popleft(), language, known, joined.place(index))
                    tasks.create_task(work).add_done_callback(lambda _: room.release())
                    index += 1
        except ExceptionGroup as e:
            raise e.exceptions[0] from None
        return language


def required(speech: Speech | None, model: str) -> Speech:
    """Return ``speech``. Raises InvalidArgument with the reason WRONG_MODEL_KIND if it is None, because the model does
    not transcribe speech.
    """
    if speech is None:
        raise InvalidArgument(
            f"the model {quoted(model)} does not transcribe speech; serve a Whisper model, with media.enabled true",
            field="model",
            reason=WRONG_MODEL_KIND,
        )
    return speech


async def _window(
    calls: WindowCalls, window: SpeechWindow, language: str, detected: Detected | None, put: Callable[[Spoken], None]
) -> None:
    put(await calls.transcribe(window, language, detected))


class _Joined:
    """Texts of windows, joined in the order of the windows. ``send`` gets each text once all texts before it are there."""

    def __init__(self, send: Callable[[TextDelta], None]) -> None:
        self._send = send
        self._waiting: dict[int, Spoken] = {}
        self._next = 0
        self.text = ""
        self.segments: list[Segment] = []

    def place(self, index: int) -> Callable[[Spoken], None]:
        """Return the function that adds the result of the window with this index."""
        return functools.partial(self._put, index)

    def _put(self, index: int, spoken: Spoken) -> None:
        self._waiting[index] = spoken
        while (first := self._waiting.pop(self._next, None)) is not None:
            self._next += 1
            self.segments += first.segments
            text = first.text.rstrip() if self.text else first.text.strip()
            if text:
                self.text += text
                self._send(TextDelta(text))


Run = Callable[[Callable[[TextDelta], None]], Coroutine[Any, Any, Transcript]]


class TranscriptStream(AsyncIterator[TextDelta | Transcript]):
    """Stream of a transcription call. The call runs from the first read until it is complete, or until ``close``.

    If the reader deletes the stream, or if the reader's task is cancelled, the call is cancelled too.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self._items: asyncio.Queue[TextDelta | None] = asyncio.Queue()
        self._task: asyncio.Task[Transcript] | None = None
        self._ended = False

    async def __anext__(self) -> TextDelta | Transcript:
        """Return the next text, and at the end the transcript."""
        if self._ended:
            raise StopAsyncIteration
        if self._task is None:
            self._task = asyncio.create_task(self._run(self._items.put_nowait), name="transcription")
            items = self._items
            self._task.add_done_callback(lambda _: items.put_nowait(None))
        try:
            if (item := await self._items.get()) is not None:
                return item
            self._ended = True
            return await self._task
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Cancel the call if it has not ended. Idempotent."""
        self._ended = True
        if self._task is not None:
            self._task.cancel()

    async def aclose(self) -> None:
        """Cancel the call if it has not ended, and wait until its requests are aborted. Idempotent."""
        self.close()
        if self._task is not None:
            await asyncio.gather(self._task, return_exceptions=True)

    def __del__(self) -> None:
        if self._task is not None and not self._task.done():
            with contextlib.suppress(RuntimeError):  # the event loop may already be closed
                self._task.cancel()
