"""Subtitles in SubRip's and WebVTT's formats."""

import re

import pytest

from penstock_frontend.speech.formats import subrip, webvtt
from tests.fakes.scripted_speech import segment


def test_an_empty_transcript_is_an_empty_file() -> None:
    assert subrip(()) == ""
    assert webvtt(()) == "WEBVTT\n\n"


def test_subtitles_are_numbered_and_have_one_line() -> None:
    segments = [segment(" One,", 0.0, 1.5), segment(" two ", 1.5, 3.25)]
    assert subrip(segments) == ("1\n00:00:00,000 --> 00:00:01,500\nOne,\n\n2\n00:00:01,500 --> 00:00:03,250\ntwo\n\n")
    assert webvtt(segments) == (
        "WEBVTT\n\n00:00:00.000 --> 00:00:01.500\nOne,\n\n00:00:01.500 --> 00:00:03.250\ntwo\n\n"
    )


@pytest.mark.parametrize(
    ("seconds", "written"),
    [
        (0.0, "00:00:00,000"),
        (0.0004, "00:00:00,000"),
        (0.0006, "00:00:00,001"),
        (1.9999, "00:00:02,000"),
        (59.9996, "00:01:00,000"),
        (3599.9999, "01:00:00,000"),
        (3661.234, "01:01:01,234"),
        (86_399.5, "23:59:59,500"),
        (360_000.0, "100:00:00,000"),
        (-0.5, "00:00:00,000"),
        (2.3999999, "00:00:02,400"),
    ],
)
def test_times_are_rounded_to_milliseconds(seconds: float, written: str) -> None:
    assert subrip([segment("x", seconds, seconds)]).split("\n")[1] == f"{written} --> {written}"
    dotted = written.replace(",", ".")
    assert webvtt([segment("x", seconds, seconds)]).split("\n")[2] == f"{dotted} --> {dotted}"


def test_a_subtitle_does_not_end_before_it_starts() -> None:
    assert "00:00:02,000 --> 00:00:02,000" in subrip([segment("x", 2.0, 1.0)])


def test_segments_without_text_are_left_out() -> None:
    segments = [segment(" ", 0.0, 1.0), segment("x", 1.0, 2.0), segment("\n\u2028\0", 2.0, 3.0)]
    assert subrip(segments) == "1\n00:00:01,000 --> 00:00:02,000\nx\n\n"
    assert webvtt(segments).count(" --> ") == 1


@pytest.mark.parametrize(
    "text",
    [
        "a\n\n2\n00:00:05,000 --> 00:00:06,000\nforged",
        "a --> b",
        "-----> <b>bold</b> &lt; {\\an8}",
        "a\r\rb\x0bc\x0cd\x85e\u2028f\u2029g",
        "NOTE x\n\nSTYLE\n::cue { color: red }",
        "WEBVTT\n\n",
    ],
)
def test_no_text_can_break_the_file(text: str) -> None:
    segments = [segment(text, 0.0, 1.0), segment("end", 1.0, 2.0)]
    numbered, plain = r"\d\n[\d:,]+ --> [\d:,]+\n(.+)\n\n", r"[\d:.]+ --> [\d:.]+\n(.+)\n\n"
    for file, cue in ((subrip(segments), numbered), (webvtt(segments), plain)):
        cues = re.findall(cue, file)
        assert len(cues) == 2
        assert cues[1] == "end"
        assert file.count("-->") == 2
        assert len(file.splitlines()) == file.count("\n")
    assert "<" not in webvtt(segments)


def test_words_keep_their_letters() -> None:
    text = "Grüße, 你好 & مرحبا \U0001f600 “quoted” it's"
    assert text in subrip([segment(text, 0.0, 1.0)])
    assert text.replace("&", "&amp;") in webvtt([segment(text, 0.0, 1.0)])
