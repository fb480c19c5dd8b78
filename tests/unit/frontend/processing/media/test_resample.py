import numpy as np
import pytest

from penstock_frontend.processing.media.decode import resampled

EDGE = 0.05
"""Seconds at either end, where silence begins."""


def tone(hertz: float, rate: int, seconds: float = 0.5) -> "np.ndarray[tuple[int], np.dtype[np.float32]]":
    return np.sin(2 * np.pi * hertz * np.arange(int(rate * seconds)) / rate).astype(np.float32)


def inner(
    samples: "np.ndarray[tuple[int], np.dtype[np.float32]]", rate: int
) -> "np.ndarray[tuple[int], np.dtype[np.float32]]":
    return samples[int(EDGE * rate) : -int(EDGE * rate)]


@pytest.mark.parametrize(
    ("rate", "wanted"),
    [(44_100, 16_000), (48_000, 16_000), (8000, 16_000), (22_050, 24_000), (16_000, 44_100), (44_101, 16_000)],
)
def test_a_tone_stays_the_tone_that_it_is(rate: int, wanted: int) -> None:
    out = resampled(tone(1000, rate), rate, wanted)
    assert out.dtype == np.float32
    assert np.abs(inner(out - tone(1000, wanted, len(out) / wanted), wanted)).max() < 1e-5


@pytest.mark.parametrize("rate", [44_100, 48_000])
def test_a_tone_that_the_lower_rate_cannot_have_is_gone(rate: int) -> None:
    assert np.abs(inner(resampled(tone(8800, rate), rate, 16_000), 16_000)).max() < 1e-5


@pytest.mark.parametrize("count", [1, 2, 3, 100, 441, 442])
@pytest.mark.parametrize(("rate", "wanted"), [(44_100, 16_000), (8000, 16_000), (7, 5)])
def test_there_are_as_many_samples_as_last_so_long(count: int, rate: int, wanted: int) -> None:
    assert len(resampled(np.ones(count, np.float32), rate, wanted)) == -(-count * wanted // rate)


def test_the_same_rate_changes_nothing() -> None:
    samples = tone(440, 16_000)
    assert resampled(samples, 16_000, 16_000) is samples
