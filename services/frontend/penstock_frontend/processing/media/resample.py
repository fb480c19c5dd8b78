"""Sound at another sampling rate, with numpy alone."""

import math

import numpy as np
import numpy.typing as npt

Samples = npt.NDArray[np.float32]

_ZERO_CROSSINGS = 32
"""Of the kernel, on each side."""
_BETA = 12.0
"""Of its Kaiser window: side lobes at -118 dB."""
_POINTS = 8192
_WINDOW = np.kaiser(2 * _POINTS + 1, _BETA)[_POINTS:]
"""Its right half, which is looked up: it falls to 0.00005 at the end."""
_ROLLOFF = 0.95
"""Where the kernel cuts off, as a part of the lower rate's Nyquist frequency."""


def resampled(samples: Samples, rate: int, wanted: int) -> Samples:
    """``samples``, [n] at ``rate`` Hz, at ``wanted`` Hz: [ceil(n * wanted / rate)].

    Band-limited interpolation: a sum of sinc functions under a Kaiser window (Smith and Gossett, 1984), a filter for each phase
    that outputs have between inputs.
    """
    if rate == wanted:
        return samples
    up, down = wanted // math.gcd(rate, wanted), rate // math.gcd(rate, wanted)
    cutoff = min(1.0, up / down) * _ROLLOFF
    half = math.ceil(_ZERO_CROSSINGS / cutoff)
    num_out = -(-len(samples) * up // down)
    padded = np.concatenate([np.zeros(half, np.float32), samples, np.zeros(half + down + 1, np.float32)])
    windows = np.lib.stride_tricks.sliding_window_view(padded, 2 * half + 1)
    out = np.empty(num_out, np.float32)
    taps = np.arange(-half, half + 1, dtype=np.float64)
    for phase in range(min(up, num_out)):  # output i * up + phase is at input i * down + phase * down / up
        start, fraction = divmod(phase * down, up)
        kernel = _kernel(taps - fraction / up, cutoff, half)
        rows = len(range(phase, num_out, up))
        out[phase::up] = windows[start::down][:rows] @ kernel
    return out


def _kernel(distance: npt.NDArray[np.float64], cutoff: float, half: int) -> Samples:
    window = np.interp(np.abs(distance) * (_POINTS / half), np.arange(len(_WINDOW)), _WINDOW)
    kernel = np.sinc(distance * cutoff) * window
    scaled: Samples = (kernel / kernel.sum()).astype(np.float32)
    return scaled
