"""What every sampler is, what it gets and what it gives, and random numbers without state."""

from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch

from penstock_enginecore.sample.rules import LogitRules

# Random numbers without state: Philox4x32-10, the counter-based generator of Salmon et al., "Parallel random numbers:
# as easy as 1, 2, 3" (SC 2011).

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


FloatArray = npt.NDArray[np.float64]

_INT32_MAX = 2**31 - 1
TEMPERATURE_MIN, TEMPERATURE_MAX = 1e-30, 1e30
"""Keeps temperatures that are no float32 from dividing by zero or infinity."""


class DrawSettings(NamedTuple):
    """How each row of a batch is drawn, ``[rows]`` each, on the host. ``temperature`` 0 is greedy; ``top_k`` 0, ``top_p`` 1 and
    ``min_p`` 0 are off. A new filter is a column here.
    """

    temperature: FloatArray
    top_k: npt.NDArray[np.int64]
    top_p: FloatArray
    min_p: FloatArray

    @classmethod
    def off(cls, rows: int) -> "DrawSettings":
        """Return settings of greedy rows without filters."""
        return cls(np.zeros(rows), np.zeros(rows, dtype=np.int64), np.ones(rows), np.zeros(rows))

    def of(self, rows: npt.NDArray[np.int64] | slice) -> "DrawSettings":
        """Return the settings of some rows."""
        return DrawSettings._make(column[rows] for column in self)

    @property
    def drawn(self) -> npt.NDArray[np.bool_]:
        """Which rows are drawn at random, bool ``[rows]``."""
        return self.temperature > 0

    @property
    def filtered(self) -> npt.NDArray[np.bool_]:
        """Which rows are drawn from what filters leave, bool ``[rows]``."""
        return self.drawn & ((self.top_k > 0) | (self.top_p < 1) | (self.min_p > 0))

    @property
    def clipped_temperature(self) -> npt.NDArray[np.float32]:
        """The temperature as a divisor, float32 ``[rows]``: neither 0 nor infinite."""
        return self.temperature.clip(TEMPERATURE_MIN, TEMPERATURE_MAX).astype(np.float32)

    @property
    def max_distance(self) -> FloatArray:
        """How far below the peak a logit may be with ``min_p``, after division by the temperature; infinity where it is off."""
        with np.errstate(divide="ignore"):
            return (-np.log(self.min_p)).clip(min=0.0)


@dataclass(frozen=True, slots=True)
class RowKinds:
    """What the rows of a batch ask for, which stays the same from step to step. Bool ``[rows]``: ``drawn`` and ``filtered`` of
    ``DrawSettings``. ``plain_temperature`` float32: of rows that are drawn without filters, else 0.
    """

    drawn: npt.NDArray[np.bool_]
    filtered: npt.NDArray[np.bool_]
    plain_temperature: npt.NDArray[np.float32]
    any_drawn: bool
    any_filtered: bool

    @classmethod
    def of(cls, settings: DrawSettings) -> "RowKinds":
        """Return the kinds of rows with these settings."""
        drawn, filtered, plain = settings.drawn, settings.filtered, settings.clipped_temperature
        plain[filtered | ~drawn] = 0.0
        return cls(drawn, filtered, plain, bool(drawn.any()), bool(filtered.any()))


@dataclass(frozen=True, slots=True)
class SamplingInputs:
    """How to choose a token for each row of logits. ``uniforms`` ``[rows]`` in [0, 1), on the host. ``known_kinds``: those of the
    settings, if they are known from a step before.
    """

    settings: DrawSettings
    uniforms: FloatArray
    rules: LogitRules = field(default_factory=LogitRules)
    known_kinds: RowKinds | None = None

    @property
    def kinds(self) -> RowKinds:
        """The kinds of the rows."""
        return self.known_kinds or RowKinds.of(self.settings)


@dataclass(frozen=True, slots=True)
class PlainDraws:
    """How rows without rules are drawn, on the host, ``[rows]`` each: the settings in the types that kernels read, and what the
    random number follows from. ``temperature`` float32, 0 is greedy; ``max_distance`` float32, see ``DrawSettings``; ``top_k``
    int32, 0 is off; ``top_p`` float64, 1 is off. ``seeds`` uint64, ``output_indices`` int64.
    """

    temperature: npt.NDArray[np.float32]
    max_distance: npt.NDArray[np.float32]
    top_k: npt.NDArray[np.int32]
    top_p: FloatArray
    seeds: UInt64Array
    output_indices: npt.NDArray[np.int64]
    any_drawn: bool
    any_filtered: bool

    @classmethod
    def of(cls, settings: DrawSettings, seeds: UInt64Array, output_indices: npt.NDArray[np.int64]) -> "PlainDraws":
        """Return the draws of rows with these settings."""
        drawn = settings.drawn
        return cls(
            np.where(drawn, settings.clipped_temperature, np.float32(0)),
            settings.max_distance.astype(np.float32),
            settings.top_k.clip(0, _INT32_MAX).astype(np.int32),
            settings.top_p,
            seeds,
            output_indices,
            bool(drawn.any()),
            bool(settings.filtered.any()),
        )


@dataclass(frozen=True, slots=True)
class LaunchedTokens:
    """What a device was told to choose: ``results`` int32 ``[2, num_rows and more]`` on it, the token of each row, and how
    many of its logits are NaN or infinity, or 1 if all are minus infinity.
    """

    results: torch.Tensor
    num_rows: int

    @property
    def token_ids(self) -> torch.Tensor:
        """int32 ``[num_rows]``."""
        return self.results[0, : self.num_rows]


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """``token_ids`` int64 ``[rows]``. ``num_nans`` int64 ``[rows]``: how many logits are NaN or infinity, and all of them in rows
    without rules that are minus infinity throughout; None when no row has any. Only logits that might be chosen count.
    """

    token_ids: npt.NDArray[np.int64]
    num_nans: npt.NDArray[np.int64] | None


class Sampler(Protocol):
    """From logits to tokens. A row's token is a function of its logits, settings and uniform number alone."""

    def sample(self, logits: torch.Tensor, inputs: SamplingInputs) -> SampledTokens:
        """One token per row of ``logits`` ``[rows, vocab]``, any float dtype, on the sampler's device. Rules overwrite logits
        that are float32: what is to be known of them must be copied before.
        """


class TokenLauncher(Protocol):
    """What has a device choose tokens without anybody's waiting for them."""

    def launch(self, logits: torch.Tensor, draws: PlainDraws) -> LaunchedTokens:
        """The tokens that a ``Sampler`` would give for ``logits`` ``[rows, vocab]``, to be chosen behind the work that is under
        way. What overwrites ``logits`` may be launched at once.
        """
