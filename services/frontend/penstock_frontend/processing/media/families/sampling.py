"""Which frames of a video are looked at, of those that a client has given."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from penstock_frontend.processing.media.families import arguments

_DEFAULT_SECONDS = 0.5
"""Between frames, where one alone does not say it."""
_LONGEST = 1_000_000
"""Seconds of a video."""


class Sampling(NamedTuple):
    """Which frames of a video are looked at."""

    min_frames: int
    max_frames: int

    def indices(self, timestamps: Sequence[float], kwargs: Mapping[str, Any]) -> list[int]:
        """All, or ``num_frames`` or ``fps`` of them spread evenly. Raises ValueError."""
        given = len(timestamps)
        if not timestamps or timestamps[-1] > _LONGEST:
            raise ValueError(f"it has {given} frames up to {timestamps[-1:]} s; a video has some, up to {_LONGEST} s")
        count = arguments.whole_number(kwargs, "num_frames", most=self.max_frames)
        if (fps := kwargs.get("fps")) is not None:
            if count is not None:
                raise ValueError(
                    "processor_kwargs.fps and processor_kwargs.num_frames are set; one says how many frames"
                )
            if isinstance(fps, bool) or not isinstance(fps, (int, float)) or not 0 < fps <= 1000:
                raise ValueError(f"processor_kwargs.fps is {str(fps)[:32]}; it must be above 0 and at most 1000")
            seconds = timestamps[-1] - timestamps[0] + interval(timestamps)
            count = max(int(seconds * fps), self.min_frames)
        count = min(given if count is None else count, given, self.max_frames)
        return [int(index) for index in np.linspace(0, given - 1, count).round()]


def interval(timestamps: Sequence[float]) -> float:
    """Seconds between frames, on average."""
    if len(timestamps) < 2 or timestamps[-1] <= timestamps[0]:
        return _DEFAULT_SECONDS
    return (timestamps[-1] - timestamps[0]) / (len(timestamps) - 1)
