"""Windows of speech: their places, silence, and the files and errors of a file that is split."""

import asyncio
import time
from io import BytesIO

import numpy as np
import numpy.typing as npt
import pytest
import soundfile
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock_common.errors import DeadlineExceeded, InvalidArgument, ResourceExhausted
from penstock_common.in_flight import BytesInFlight
from penstock_frontend.call_types import EncodedFile, MediaPart
from penstock_frontend.config import LimitsConfig
from penstock_frontend.processing.media.families.base import ProcessedItem
from penstock_frontend.processing.media.split_speech import SpeechWindow, split_speech
from penstock_frontend.processing.media.windows import split, wav, windows
from penstock_frontend.processing.media.worker_messages import Unreadable
from tests.fakes.media_files import sound_file
from tests.unit.frontend.processing.media.test_service import Make, make

__all__ = ["make"]
RATE = 16_000
Samples = npt.NDArray[np.float32]


def noise(seconds: float, seed: int = 0, level: float = 0.1) -> Samples:
    return (np.random.default_rng(seed).standard_normal(round(seconds * RATE)) * level).astype(np.float32)


def tone(seconds: float) -> Samples:
    return np.sin(2 * np.pi * 440 / RATE * np.arange(round(seconds * RATE))).astype(np.float32)


def check(samples: Samples) -> None:
    found = windows(samples, RATE)
    assert [w.start for w in found] == [0, *(w.end for w in found)][: len(found)]
    assert (found[-1].end if found else 0) == len(samples)
    assert all(0 < w.end - w.start <= 30 * RATE for w in found)
    assert all(w.end - w.start >= 20 * RATE for w in found[:-1])
    assert all(w.start % 160 == 0 for w in found)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 95 * RATE), st.sampled_from(["noise", "tone", "silence", "impulse"]), st.integers(0, 9))
def test_windows_cover_the_audio_without_overlap(length: int, kind: str, seed: int) -> None:
    samples = np.zeros(length, np.float32)
    if kind == "noise":
        samples = noise(length / RATE, seed)
    elif kind == "tone":
        samples = tone(length / RATE)
    elif kind == "impulse":
        samples[length // 2 : length // 2 + 1] = 1.0
    check(samples)


@pytest.mark.parametrize("seconds", [29.99, 30.0, 30.001, 30.05, 31.0, 50.0, 60.0, 60.0001, 7200.0])
def test_windows_cover_audio_of_special_lengths(seconds: float) -> None:
    check(np.tile(noise(1.0), int(seconds) + 1)[: round(seconds * RATE)])


def test_no_samples_have_no_window() -> None:
    assert windows(np.zeros(0, np.float32), RATE) == []


def test_a_window_ends_in_the_middle_of_the_pause() -> None:
    samples = noise(70.0)
    for pause in (22.0, 47.5):
        samples[int(pause * RATE) : int((pause + 0.4) * RATE)] *= 0.01
    assert [w.end / RATE for w in windows(samples, RATE)] == pytest.approx([22.2, 47.7, 70.0], abs=0.11)


def test_equally_quiet_places_give_the_longest_window() -> None:
    samples = np.ones(61 * RATE, np.float32)
    assert [w.end for w in windows(samples, RATE)] == [30 * RATE, 60 * RATE, 61 * RATE]


def test_only_windows_without_any_sound_are_silent() -> None:
    samples = np.concatenate([np.zeros(30 * RATE, np.float32), noise(1.0), np.zeros(62 * RATE, np.float32)])
    assert [w.silent for w in windows(samples, RATE)] == [True, False, True, True]
    assert windows(noise(5.0, level=0.00005), RATE)[0].silent
    assert not windows(np.array([0.1], np.float32), RATE)[0].silent


def test_files_have_the_samples_and_the_true_offsets() -> None:
    samples = np.concatenate([noise(25.0), np.zeros(40 * RATE, np.float32), noise(7.0, seed=1)])
    item = split(samples, RATE)
    found = split_speech(item, RATE, BytesInFlight(lambda: 1, "limit"))
    assert found.seconds == 72.0
    assert len(found.windows) == 2
    for window in found.windows:
        read, rate = soundfile.read(BytesIO(window.file), dtype="float32")
        start = round(window.start * RATE)
        assert rate == RATE
        np.testing.assert_array_equal(read, samples[start : start + round(window.seconds * RATE)])


def test_the_rest_of_a_window_has_the_last_samples() -> None:
    samples = noise(3.0)
    window = SpeechWindow(10.0, 3.0, wav(samples, RATE)).rest(1.5)
    assert (window.start, window.seconds) == (11.5, 1.5)
    np.testing.assert_array_equal(soundfile.read(BytesIO(window.file), dtype="float32")[0], samples[24_000:])


def test_a_wav_file_keeps_numbers_above_one() -> None:
    samples = np.array([1.5, -2.25, 1e-30], np.float32)
    np.testing.assert_array_equal(soundfile.read(BytesIO(wav(samples, RATE)), dtype="float32")[0], samples)


@pytest.mark.parametrize("layout", [(), (10,), (10, 0, 11), (10, 0, 0), (10, -1, 5), (10, 0, 5, 5, 5), (10, 0, 10_000)])
def test_a_wrong_answer_of_a_worker_is_refused(layout: tuple[int, ...]) -> None:
    good = split(np.ones(10, np.float32), RATE)
    item = ProcessedItem(modality="audio", data=good.data, num_embeds=0, layout=layout)
    with pytest.raises(Unreadable):
        split_speech(item, RATE, BytesInFlight(lambda: 1, "limit"))


def speech(data: bytes) -> MediaPart:
    return MediaPart(modality="audio", source=EncodedFile(data), field="file")


async def test_a_worker_splits_a_file(make: Make) -> None:
    made = make(max_audio_seconds=1.0)
    found = await made.service.split(speech(sound_file("FLAC", seconds=61.0, rate=8000)), deadline=None)
    assert found.seconds == 61.0
    assert found.windows[0].start == 0.0
    assert sum(window.seconds for window in found.windows) == pytest.approx(61.0)
    with pytest.raises(DeadlineExceeded):
        await made.service.split(speech(sound_file(seconds=1.0)), deadline=time.time() - 1)


async def test_a_file_that_takes_too_long_is_refused(make: Make) -> None:
    with pytest.raises(InvalidArgument, match=r"takes too long .*; media\.speech_timeout is 0\.001"):
        await make(speech_timeout=0.001).service.split(speech(sound_file(seconds=20.0)), deadline=None)


async def test_files_beyond_a_limit_are_refused(make: Make) -> None:
    made = make(LimitsConfig(max_media_bytes_in_flight=4_000_000), max_speech_seconds=40.0, max_bytes=3_000_000)
    with pytest.raises(InvalidArgument, match=r"file has at least 41\.0 s of sound; media\.max_speech_seconds is 40"):
        await made.service.split(speech(sound_file(seconds=41.0)), deadline=None)
    with pytest.raises(InvalidArgument, match=r"file has 3000001 bytes; media\.max_bytes is 3000000"):
        await made.service.split(speech(b"RIFF" + bytes(2_999_997)), deadline=None)
    with pytest.raises(InvalidArgument, match="file is not a"):
        await made.service.split(speech(b"no sound at all"), deadline=None)
    first = await made.service.split(speech(sound_file(seconds=39.0)), deadline=None)
    with pytest.raises(ResourceExhausted, match=r"limits\.max_media_bytes_in_flight is 4000000"):
        await made.service.split(speech(sound_file(seconds=39.0)), deadline=None)
    first.release()
    await asyncio.gather(*(made.service.split(speech(sound_file(seconds=20.0)), deadline=None) for _ in range(2)))
