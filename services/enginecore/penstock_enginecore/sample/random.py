"""Random numbers without state: Philox4x32-10, the counter-based generator of Salmon et al., "Parallel random numbers:
as easy as 1, 2, 3" (SC 2011).
"""

import numpy as np
import numpy.typing as npt

_ROUNDS = 10
_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_WEYL = (np.uint64(0x9E3779B9), np.uint64(0xBB67AE85))
_LOW = np.uint64(0xFFFFFFFF)
_32 = np.uint64(32)

_AHEAD = 16
"""Steps."""

UInt64Array = npt.NDArray[np.uint64]


def philox4x32(counter: UInt64Array, key: UInt64Array) -> UInt64Array:
    """Four random 32-bit words per row. ``counter`` ``[rows, 4]`` and ``key`` ``[rows, 2]`` hold 32-bit words, low word
    first.
    """
    c0, c1, c2, c3 = (counter[:, i] for i in range(4))
    k0, k1 = key[:, 0], key[:, 1]
    for _ in range(_ROUNDS):
        product0 = _MULTIPLIERS[0] * c0
        product1 = _MULTIPLIERS[1] * c2
        c0, c2 = (product1 >> _32) ^ c1 ^ k0, (product0 >> _32) ^ c3 ^ k1
        c1, c3 = product1 & _LOW, product0 & _LOW
        k0, k1 = (k0 + _WEYL[0]) & _LOW, (k1 + _WEYL[1]) & _LOW
    return np.stack([c0, c1, c2, c3], axis=1)


def uniforms(seeds: UInt64Array, indices: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """One number in [0, 1) per row, a function of its 64-bit seed and its output index alone. 53 random bits."""
    index = indices.astype(np.uint64)
    counter = np.zeros((len(index), 4), dtype=np.uint64)
    counter[:, 0], counter[:, 1] = index & _LOW, index >> _32
    key = np.stack([seeds & _LOW, seeds >> _32], axis=1)
    words = philox4x32(counter, key)
    bits = (words[:, 0] << np.uint64(21)) | (words[:, 1] >> np.uint64(11))
    return bits.astype(np.float64) * 2.0**-53


class UniformsAhead:
    """``uniforms`` of the same rows, step after step. They are made for several steps at once, since numpy takes as long for one
    number as for hundreds.
    """

    def __init__(self, seeds: UInt64Array) -> None:
        """``seeds`` ``[rows]``."""
        self._seeds = np.repeat(seeds, _AHEAD)
        self._first: npt.NDArray[np.int64] | None = None
        self._made: npt.NDArray[np.float64] = np.zeros((len(seeds), 0))

    def at(self, indices: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
        """float64 ``[rows]`` for output ``indices`` ``[rows]``: fastest where each is one more than the time before."""
        if self._first is not None and len(indices):
            step = int(indices[0] - self._first[0])
            if 0 <= step < _AHEAD and np.array_equal(indices, self._first + step):
                return self._made[:, step].copy()
        self._first = indices.copy()
        self._made = uniforms(self._seeds, (indices[:, None] + np.arange(_AHEAD)).ravel()).reshape(-1, _AHEAD)
        return self._made[:, 0].copy()
