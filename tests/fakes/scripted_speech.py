"""Speech component that answers with a script, for tests of the protocols."""

import asyncio
from collections.abc import AsyncGenerator, Sequence

from penstock_common.errors import RequestFailed
from penstock_frontend.speech.types import Segment, TextDelta, Transcript, TranscriptionRequest, Word

TEXTS = (" Hello there.", " General --> Kenobi & <co>.")
WORDS = (Word(text=" Hello", start=0.0, end=0.5), Word(text=" there.", start=0.5, end=1.0))


def segment(text: str, start: float, end: float) -> Segment:
    """Return a segment with these times, and with distinct other numbers."""
    return Segment(
        start=start,
        end=end,
        seek=int(start * 100),
        text=text,
        token_ids=[50364, 7, 50414],
        temperature=0.2,
        avg_logprob=-0.25,
        compression_ratio=1.5,
        no_speech_prob=0.01,
    )


class ScriptedSpeech:
    """Implementation of the port ``Speech``.

    Attributes:
        texts: Texts of the segments of the next answers. Segment ``i`` begins at second ``i``.
        error: Error that calls raise, or None.
        error_after: Number of deltas of a stream before ``error``.
        hold: Whether calls wait forever before their end.
        requests: Received requests.
        ended: Number of calls that have ended, also by cancellation.
    """

    def __init__(self) -> None:
        self.texts: Sequence[str] = TEXTS
        self.error: RequestFailed | Exception | None = None
        self.error_after = 0
        self.hold = False
        self.requests: list[TranscriptionRequest] = []
        self.ended = 0

    async def transcribe(self, request: TranscriptionRequest) -> Transcript:
        """Return the scripted transcript."""
        self.requests.append(request)
        try:
            if self.hold:
                await asyncio.Event().wait()
            if self.error is not None:
                raise self.error
            return self._transcript(request)
        finally:
            self.ended += 1

    async def stream(self, request: TranscriptionRequest) -> AsyncGenerator[TextDelta | Transcript, None]:
        """Yield each text, and then the transcript."""
        self.requests.append(request)
        try:
            for index, text in enumerate(self.texts):
                if self.error is not None and index == self.error_after:
                    raise self.error
                yield TextDelta(text)
            if self.hold:
                await asyncio.Event().wait()
            yield self._transcript(request)
        finally:
            self.ended += 1

    def _transcript(self, request: TranscriptionRequest) -> Transcript:
        segments = [segment(text, float(i), i + 1.0) for i, text in enumerate(self.texts)]
        return Transcript(
            request_id=request.context.external_request_id,
            task=request.task,
            language="german",
            duration=8.47,
            text="".join(self.texts),
            segments=segments if request.segments else (),
            words=WORDS if request.words else (),
            output_tokens=9,
        )
