"""Transcription calls with a scripted model: windows, fallback, silence, streams, cancellation and errors."""

import asyncio
import gc
import math
import time
from typing import Any

import pytest

from penstock_common.errors import (
    DeadlineExceeded,
    InvalidArgument,
    RequestFailed,
    ResourceExhausted,
    Unavailable,
    Unimplemented,
)
from penstock_common.types.request import RequestContext
from penstock_frontend.speech.types import SpeechTask, TextDelta, Transcript, TranscriptionRequest
from tests.fakes.frontends.speech_model import TOKENIZER, SpeechRig, no_leak
from tests.fakes.patience import PATIENCE

GOOD, UNLIKELY = -0.2, -1.5


def request(**fields: Any) -> TranscriptionRequest:
    return TranscriptionRequest(audio=b"audio", **fields)


def prompts(rig: SpeechRig) -> list[tuple[str, str]]:
    """Return the number of the window and the decoder prompt of each request."""
    return [(number, TOKENIZER.decode(ids)) for number, ids in rig.model.prompts]


async def test_windows_are_joined_in_their_order() -> None:
    rig = SpeechRig(3)
    with no_leak(rig):
        transcript = await rig.calls.transcribe(request(context=RequestContext(external_request_id="mine")))
    assert transcript.text == "Window 0. Window 1. Window 2."
    assert transcript.language == "german"
    assert transcript.duration == 76.0
    assert transcript.request_id == "mine"
    assert transcript.segments == []
    assert transcript.output_tokens == 1 + 3 * len(" Window 0.E")
    assert prompts(rig) == [
        ("0", "<|startoftranscript|>"),
        *((str(i), "<|startoftranscript|><|de|><|transcribe|><|notimestamps|>") for i in range(3)),
    ]
    assert rig.metrics.registry.get_sample_value("penstock:speech_audio_seconds_total", {"model_name": "m"}) == 76.0


async def test_a_given_language_needs_no_detection() -> None:
    rig = SpeechRig(1)
    transcript = await rig.calls.transcribe(
        request(language="French", task=SpeechTask.TRANSLATE, prompt="Names: Ada.", seed=7)
    )
    assert transcript.language == "french"
    assert prompts(rig) == [
        ("0", "<|startofprev|> Names: Ada.<|startoftranscript|><|fr|><|translate|><|notimestamps|>")
    ]
    sampling = rig.model.requests[0][1].sampling
    assert sampling["max_tokens"] == 448 - len(rig.model.prompts[0][1])
    assert (sampling["seed"], sampling["temperature"]) == (7, 0.0)


async def test_segments_have_true_offsets() -> None:
    rig = SpeechRig(2)
    rig.model.says = lambda window, _: (f"<|0.00|> A{window}<|1.50|><|2.00|> B<|24.00|>", GOOD)
    rig.model.no_speech = {"1": 0.25}
    transcript = await rig.calls.transcribe(request(segments=True))
    assert [(s.start, s.end, s.seek, s.text) for s in transcript.segments] == [
        (0.0, 1.5, 0, " A0"),
        (2.0, 24.0, 0, " B"),
        (25.0, 26.5, 2500, " A1"),
        (27.0, 49.0, 2500, " B"),
    ]
    assert transcript.text == "A0 B A1 B"
    first, last = transcript.segments[0], transcript.segments[-1]
    assert TOKENIZER.decode(first.token_ids) == "<|0.00|> A0<|1.50|>"
    assert first.no_speech_prob == pytest.approx(0.01)
    assert first.avg_logprob == pytest.approx(GOOD)
    assert first.temperature == 0.0
    assert first.compression_ratio == pytest.approx(5 / 13, abs=0.1)
    assert last.no_speech_prob == pytest.approx(0.25)


async def test_an_implausible_text_is_replaced_by_that_of_a_higher_temperature() -> None:
    rig = SpeechRig(1)
    rig.model.says = lambda _, temperature: {
        0.0: (" so" * 60, GOOD),
        0.2: (" Hm", UNLIKELY),
        0.4: (" Good.", GOOD),
    }[temperature]
    assert (await rig.calls.transcribe(request(language="en"))).text == "Good."
    temperatures = [each.sampling["temperature"] for _, each in rig.model.requests]
    assert temperatures == [0.0, 0.2, 0.0, 0.4]  # the third request asks whether there is speech
    transcript = await rig.calls.transcribe(request(language="en", segments=True))
    assert transcript.segments[0].temperature == 0.4


async def test_the_last_temperature_is_final() -> None:
    rig = SpeechRig(1)
    rig.model.says = lambda _, temperature: (f" {temperature}", UNLIKELY)
    assert (await rig.calls.transcribe(request(language="en"))).text == "1.0"
    assert (await rig.calls.transcribe(request(language="en", temperatures=(0.3,)))).text == "0.3"


async def test_windows_without_speech_have_no_text() -> None:
    rig = SpeechRig(3)
    rig.model.no_speech = {"0": 0.9, "1": 0.9}
    rig.model.says = lambda window, _: (" Thanks for watching!", UNLIKELY if window == "0" else GOOD)
    transcript = await rig.calls.transcribe(request())
    assert transcript.text == "Thanks for watching! Thanks for watching!"
    assert len(rig.model.requests) == 4


async def test_silence_reaches_no_engine() -> None:
    rig = SpeechRig(0)
    transcript = await rig.calls.transcribe(request())
    assert (transcript.text, transcript.language, transcript.duration) == ("", "", 1.0)
    assert (await rig.calls.transcribe(request(language="de"))).language == "german"
    assert [item async for item in rig.calls.stream(request())][:-1] == []
    assert rig.model.requests == []


async def test_a_stream_has_the_texts_of_windows_in_order_and_then_the_transcript() -> None:
    rig = SpeechRig(3)
    delays = {"0": asyncio.Event(), "1": asyncio.Event()}
    generate = rig.model.generate

    async def late(given: Any, live: Any) -> Any:
        async for output in generate(given, live):
            number = given.prompt.parts[0].source.data.decode()
            if number in delays and given.sampling.get("max_tokens") != 1:
                await delays[number].wait()
            yield output

    rig.model.generate = late  # type: ignore[method-assign,assignment]
    stream = rig.calls.stream(request())
    first = asyncio.ensure_future(anext(stream))
    while len(rig.model.requests) < 4:
        await asyncio.sleep(0)
    delays["1"].set()
    await asyncio.sleep(0)
    assert not first.done()
    delays["0"].set()
    items = [await first, *[item async for item in stream]]
    assert items[:-1] == [TextDelta("Window 0."), TextDelta(" Window 1."), TextDelta(" Window 2.")]
    assert isinstance(items[-1], Transcript)
    assert "".join(item.text for item in items[:-1]) == items[-1].text
    with pytest.raises(StopAsyncIteration):
        await anext(stream)


async def test_the_number_of_windows_at_once_is_bounded() -> None:
    rig = SpeechRig(9, max_windows=2)
    await rig.calls.transcribe(request())
    assert rig.model.most_running == 2


@pytest.mark.parametrize("end", ["close", "aclose", "cancel"])
async def test_a_stream_that_is_left_aborts_its_requests(end: str) -> None:
    rig = SpeechRig(4)
    rig.model.holds = {"1", "2", "3"}
    stream = rig.calls.stream(request())
    assert await anext(stream) == TextDelta("Window 0.")
    reader = asyncio.ensure_future(anext(stream))
    async with asyncio.timeout(PATIENCE):
        await rig.until_running(3)
        await asyncio.sleep(0)  # the reader's task has started
        reader.cancel()
        if end == "close":
            stream.close()
        elif end == "aclose":
            await stream.aclose()
        await asyncio.gather(reader, return_exceptions=True)
        await rig.until_running(0)


async def test_a_stream_that_is_deleted_aborts_its_requests() -> None:
    rig = SpeechRig(4)
    rig.model.holds = {"1", "2", "3"}
    stream = rig.calls.stream(request())
    assert await anext(stream) == TextDelta("Window 0.")
    async with asyncio.timeout(PATIENCE):
        await rig.until_running(3)
        del stream
        gc.collect()
        await rig.until_running(0)


async def test_a_cancelled_call_aborts_its_requests() -> None:
    rig = SpeechRig(3)
    rig.model.holds = {"0", "1", "2"}
    task = asyncio.create_task(rig.calls.transcribe(request(language="en")))
    async with asyncio.timeout(PATIENCE):
        await rig.until_running(3)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert rig.model.running == 0


async def test_an_error_of_a_window_fails_the_call_with_its_place() -> None:
    rig = SpeechRig(3)
    rig.model.holds = {"0"}

    def says(window: str, _: float) -> tuple[str, float]:
        if window == "2":
            raise Unavailable("the engine was lost", reason="ENGINE_LOST", retry_after=2.0)
        return " A", GOOD

    rig.model.says = says
    with no_leak(rig), pytest.raises(Unavailable) as error:
        await rig.calls.transcribe(request(language="en"))
    assert str(error.value) == "file at 50.00 s: the engine was lost"
    assert (error.value.reason, error.value.retry_after) == ("ENGINE_LOST", 2.0)


async def test_an_accepted_call_waits_for_room() -> None:
    rig = SpeechRig(6)
    rig.model.room = 2
    with no_leak(rig):
        transcript = await rig.calls.transcribe(request())
    assert transcript.text.count("Window") == 6
    rig.model.room = 0
    with pytest.raises(ResourceExhausted):
        await rig.calls.transcribe(request())
    assert len(rig.media.splits) == 1


async def test_the_wait_for_room_ends_at_the_deadline() -> None:
    rig = SpeechRig(2)
    rig.model.room = 1
    rig.model.holds = {"0"}
    context = RequestContext(deadline=time.time() + 0.05)
    with no_leak(rig), pytest.raises(DeadlineExceeded):
        await rig.calls.transcribe(request(language="en", context=context))


@pytest.mark.parametrize(
    ("fields", "kind", "field", "text"),
    [
        ({"words": True}, Unimplemented, "timestamp_granularities", "words are not supported"),
        ({"language": "klingon"}, InvalidArgument, "language", "language is 'klingon'"),
        ({"temperatures": ()}, InvalidArgument, "temperatures", "has 0 numbers"),
        ({"temperatures": (0.0,) * 17}, InvalidArgument, "temperatures", "has 17 numbers"),
        ({"temperatures": (1.5,)}, InvalidArgument, "temperature", "temperature is 1.5; it must be from 0 to 1"),
        ({"temperatures": (math.nan,)}, InvalidArgument, "temperature", "temperature is nan"),
        ({"prompt": "<|endoftext|>"}, InvalidArgument, "prompt", "control token"),
    ],
)
async def test_wrong_fields_are_refused_before_the_audio_is_decoded(
    fields: dict[str, Any], kind: type[RequestFailed], field: str, text: str
) -> None:
    rig = SpeechRig(1)
    with pytest.raises(kind, match=text) as error:
        await rig.calls.transcribe(request(**fields))
    assert error.value.field == field
    assert rig.media.splits == []


async def test_an_english_model_does_not_translate() -> None:
    rig = SpeechRig(1, english=True)
    with pytest.raises(InvalidArgument, match="the model knows only English"):
        await rig.calls.transcribe(request(task=SpeechTask.TRANSLATE))
    assert (await rig.calls.transcribe(request())).language == "english"
    assert prompts(rig) == [("0", "<|startoftranscript|><|notimestamps|>")]


async def test_a_broken_file_fails_the_call() -> None:
    rig = SpeechRig(1)
    rig.media.error = InvalidArgument("file is broken", field="file")
    with pytest.raises(InvalidArgument, match="file is broken"):
        await rig.calls.transcribe(request())
