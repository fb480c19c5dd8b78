"""Segments of a window, compared with transformers, and the quality of its text."""

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers.models.whisper.generation_whisper import WhisperGenerationMixin

from penstock_frontend.speech.segments import quality, spans, unread_from

FIRST = 1000
TEXT = st.lists(st.integers(1, 99), min_size=1, max_size=3)


def at(seconds: float) -> int:
    return FIRST + round(seconds / 0.02)


def oracle(token_ids: Sequence[int]) -> list[tuple[float, float, list[int]]]:
    """Return the segments that transformers finds, without the second timestamp of a pair."""
    segments, _ = WhisperGenerationMixin._retrieve_segment(  # type: ignore[no-untyped-call]
        seek_sequence=torch.tensor(token_ids),
        seek_outputs=[{"sequences": None}],
        time_offset=torch.zeros(1),
        timestamp_begin=FIRST,
        seek_num_frames=torch.tensor([3000]),
        time_precision=0.02,
        time_precision_features=0.01,
        input_stride=2,
        prev_idx=0,
        idx=0,
        return_token_timestamps=False,
        decoder_input_ids=torch.zeros(1, 0),
    )
    return [(float(s["start"]), float(s["end"]), s["tokens"].tolist()) for s in segments]


def found(token_ids: Sequence[int], seconds: float = 30.0) -> list[tuple[float, float, list[int]]]:
    return [(span.start, span.end, list(span.token_ids)) for span in spans(token_ids, FIRST, seconds)]


@given(st.lists(TEXT, min_size=1, max_size=5), st.data())
def test_complete_segments_are_those_of_transformers(texts: list[list[int]], data: st.DataObject) -> None:
    times = sorted(data.draw(st.lists(st.integers(1, 1500), min_size=2 * len(texts), max_size=2 * len(texts))))
    ids = [token for i, text in enumerate(texts) for token in (FIRST + times[2 * i], *text, FIRST + times[2 * i + 1])]
    for token_ids in (ids, [*ids, ids[-1]]):
        want, got = oracle(token_ids), found(token_ids)
        assert [tokens for *_, tokens in got] == [ids_of(tokens) for *_, tokens in want]
        assert [end for _, end, _ in got] == pytest.approx([end for _, end, _ in want], abs=1e-3)
        if len(want) > 1 or token_ids is not ids:  # for a single pair of timestamps, transformers ignores the first one
            assert [start for start, *_ in got] == pytest.approx([start for start, *_ in want], abs=1e-3)


def ids_of(tokens: list[int]) -> list[int]:
    return tokens[:-1] if len(tokens) > 1 and min(tokens[-2:]) >= FIRST else tokens


def test_text_after_the_last_pair_ends_with_the_window() -> None:
    ids = [at(0), 5, at(4), at(4), 6, 7]
    assert found(ids, 12.5) == [(0.0, 4.0, ids[:3]), (4.0, 12.5, ids[3:])]


@pytest.mark.parametrize(
    ("ids", "want"),
    [
        ([], []),
        ([5, 6], [(0.0, 9.0)]),
        ([at(1), 5], [(1.0, 9.0)]),
        ([5, at(2)], [(0.0, 2.0)]),
        ([at(0), at(0)], []),
        ([at(1), 5, at(29)], [(1.0, 9.0)]),
        ([at(12), 5, at(29)], [(9.0, 9.0)]),
        ([at(5), 6, at(3)], [(5.0, 5.0)]),
    ],
)
def test_segments_stay_in_the_window(ids: list[int], want: list[tuple[float, float]]) -> None:
    assert [(round(start, 6), round(end, 6)) for start, end, _ in found(ids, 9.0)] == want


@pytest.mark.parametrize(
    ("ids", "time"),
    [
        ([at(0), 5, at(4), at(4)], 4.0),
        ([at(0), 5, at(4)], None),
        ([at(0), 5, at(4), at(4), 6], None),
        ([at(0), 5, at(8.5), at(8.5)], None),
        ([at(0), at(0.4)], None),
        ([], None),
    ],
)
def test_two_timestamps_at_the_end_leave_speech_unread(ids: list[int], time: float | None) -> None:
    assert unread_from(ids, FIRST, 9.0) == time


def test_quality_has_the_thresholds_of_whisper() -> None:
    good = quality(" A sentence.", [-0.5, -0.3])
    assert good.avg_logprob == pytest.approx(-0.4)
    assert not good.implausible
    assert quality("so " * 100, [-0.1]).implausible
    unlikely = quality("a", [-1.2])
    assert unlikely.implausible
    assert unlikely.silent(0.7)
    assert not unlikely.silent(0.5)
    assert not good.silent(0.99)
    assert quality("", []).compression_ratio == 0.0
