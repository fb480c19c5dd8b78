"""Routes ``/v1/audio/transcriptions`` and ``/v1/audio/translations``."""

from typing import Literal

from penstock_common.errors import WRONG_MODEL_KIND, InvalidArgument, Unimplemented, quoted
from penstock_frontend.api.http.endpoint import Answer, Call, PlainText
from penstock_frontend.api.http.model_switch import RequestedNames
from penstock_frontend.api.http.request_body import Body
from penstock_frontend.api.http.streaming import EventStream
from penstock_frontend.api.openai.audio import answers
from penstock_frontend.api.openai.body_fields import check_range
from penstock_frontend.api.openai.context import ContextFields, context_of
from penstock_frontend.calls.generate import AsyncLLM
from penstock_frontend.speech import formats
from penstock_frontend.speech.calls import required
from penstock_frontend.speech.types import TEMPERATURES, Speech, SpeechTask, Transcript, TranscriptionRequest

AudioFormat = Literal["json", "text", "srt", "verbose_json", "vtt"]
_STREAMED = ("json", "text")
"""Formats that can be streamed. The events of a stream are the same for both."""
_WITH_SEGMENTS = ("srt", "vtt", "verbose_json")
_MIN_SEED, _MAX_SEED = -(2**63), 2**63 - 1


class SpeechFields(ContextFields, kw_only=True):
    """Fields of the forms of both routes. ``stream``, ``language`` and ``seed`` are fields of vLLM for translations.

    A ``temperature`` of 0, which is the default, means that the temperature is raised until the text is plausible.
    """

    file: bytes
    language: str | None = None
    prompt: str | None = None
    response_format: AudioFormat | None = None
    temperature: float | None = None
    stream: bool | None = None
    seed: int | None = None


class TranscriptionBody(SpeechFields, kw_only=True):
    """Form of ``/v1/audio/transcriptions``."""

    timestamp_granularities: list[Literal["word", "segment"]] | None = None


class TranslationBody(SpeechFields, kw_only=True):
    """Form of ``/v1/audio/translations``. ``language`` is the language of the speech."""


class Transcriptions:
    """Handlers of the two routes. ``speech`` is None if the model does not transcribe."""

    def __init__(self, llm: AsyncLLM, speech: Speech | None) -> None:
        self._llm = llm
        self._speech = speech

    async def transcribe(self, call: Call, given: Body) -> Answer:
        """Return the text of an audio file. Raises RequestFailed if the request is refused or fails."""
        body = await given.decode_form(TranscriptionBody)
        wanted = body.timestamp_granularities or ()
        if wanted and body.response_format != "verbose_json":
            raise InvalidArgument(
                f"timestamp_granularities is set, and response_format is {quoted(body.response_format or 'json')}; it must be "
                "'verbose_json'",
                field="timestamp_granularities",
            )
        return await self._answer(
            call, given, body, SpeechTask.TRANSCRIBE, segments="segment" in wanted or not wanted, words="word" in wanted
        )

    async def translate(self, call: Call, given: Body) -> Answer:
        """Return the English text of an audio file. Raises RequestFailed if the request is refused or fails."""
        body = await given.decode_form(TranslationBody)
        return await self._answer(call, given, body, SpeechTask.TRANSLATE, segments=True, words=False)

    async def _answer(
        self, call: Call, given: Body, body: SpeechFields, task: SpeechTask, *, segments: bool, words: bool
    ) -> Answer:
        form = body.response_format or "json"
        check_range("temperature", body.temperature, 0.0, 1.0)
        check_range("seed", body.seed, _MIN_SEED, _MAX_SEED)
        if body.stream and form not in _STREAMED:
            raise Unimplemented(
                f"stream is not supported with response_format {quoted(form)}; leave it out, or use the format 'json' or "
                "'text'",
                field="stream",
            )
        context = context_of(call, "transcription", body)
        model = self._llm.inputs.check_model(context.model, context.lora)
        speech = required(self._speech, model)
        request = TranscriptionRequest(
            audio=body.file,
            task=task,
            language=body.language or "",
            prompt=body.prompt or "",
            temperatures=(body.temperature,) if body.temperature else TEMPERATURES,
            segments=form in _WITH_SEGMENTS,
            words=words,
            seed=body.seed,
            context=context,
        )
        given.close()  # from now on, the file counts as media in flight
        if body.stream:
            return await EventStream.started(answers.events(speech.stream(request)), answers.STREAM)
        return _written(await speech.transcribe(request), form, segments=segments, words=words)


def _written(transcript: Transcript, form: AudioFormat, *, segments: bool, words: bool) -> Answer:
    match form:
        case "json":
            return answers.plain(transcript)
        case "verbose_json":
            return answers.verbose(transcript, segments=segments, words=words)
        case "text":
            return PlainText(f"{transcript.text.strip()}\n")
        case "srt":
            return PlainText(formats.subrip(transcript.segments))
        case "vtt":
            return PlainText(formats.webvtt(transcript.segments))


async def form_names(given: Body) -> RequestedNames:
    """Read the names from the fields ``model`` and ``lora`` of a form. Raises InvalidArgument."""
    values = await given.peek_form(TranscriptionBody)
    model, lora = (value if isinstance(value := values.get(name), str) else "" for name in ("model", "lora"))
    return RequestedNames(model, lora)


async def refuse_text(call: Call, given: Body) -> Answer:
    """Handler of the routes that generate text, for a model that only transcribes. Raises InvalidArgument."""
    del call, given
    raise InvalidArgument(
        "the model transcribes audio files, and generates no other text; use /v1/audio/transcriptions",
        field="model",
        reason=WRONG_MODEL_KIND,
    )
