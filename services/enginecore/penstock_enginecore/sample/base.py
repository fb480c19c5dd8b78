"""Interface of samplers, the data types of this interface, and stateless random numbers."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch

from penstock_enginecore.sample.rules import LogitRules

# Stateless random numbers with Philox4x32-10, the counter-based generator of Salmon et al., "Parallel random numbers:
# as easy as 1, 2, 3" (SC 2011).

_ROUNDS = 10
_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_WEYL = (np.uint64(0x9E3779B9), np.uint64(0xBB67AE85))
_LOW = np.uint64(0xFFFFFFFF)
_32 = np.uint64(32)

_AHEAD = 16
"""Number of steps for which random numbers are computed in advance."""

UInt64Array = npt.NDArray[np.uint64]


def philox4x32(counter: UInt64Array, key: UInt64Array) -> UInt64Array:
    """Return four random 32-bit words for each row.

    ``counter`` ``[rows, 4]`` and ``key`` ``[rows, 2]`` contain 32-bit words, the lowest word first.
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
    """Return one number in [0, 1) with 53 random bits for each row. The number depends only on the row's 64-bit seed
    and output index.
    """
    index = indices.astype(np.uint64)
    counter = np.zeros((len(index), 4), dtype=np.uint64)
    counter[:, 0], counter[:, 1] = index & _LOW, index >> _32
    key = np.stack([seeds & _LOW, seeds >> _32], axis=1)
    words = philox4x32(counter, key)
    bits = (words[:, 0] << np.uint64(21)) | (words[:, 1] >> np.uint64(11))
    return bits.astype(np.float64) * 2.0**-53


class UniformsAhead:
    """Random numbers of ``uniforms`` for the same rows in one step after another.

    The numbers for several steps are computed in one call, because numpy takes as long for one number as for hundreds
    of numbers.
    """

    def __init__(self, seeds: UInt64Array) -> None:
        """Prepare random numbers for rows with the seeds ``seeds`` ``[rows]``."""
        self._seeds = np.repeat(seeds, _AHEAD)
        self._first: npt.NDArray[np.int64] | None = None
        self._made: npt.NDArray[np.float64] = np.zeros((len(seeds), 0))

    def at(self, indices: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
        """Return the random numbers, float64 ``[rows]``, for the output indices ``indices`` ``[rows]``. The call is
        fastest if each index is one more than in the last call.
        """
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
"""Lower and upper limit of temperatures. They prevent division by zero or infinity in float32."""


class DrawSettings(NamedTuple):
    """Sampling parameters of the rows in a batch, as arrays ``[rows]`` on the host. A new filter needs a new array in
    this class.

    A ``temperature`` of 0 means greedy sampling. A ``top_k`` of 0, a ``top_p`` of 1 and a ``min_p`` of 0 disable the
    respective filter.
    """

    temperature: FloatArray
    top_k: npt.NDArray[np.int64]
    top_p: FloatArray
    min_p: FloatArray

    @classmethod
    def off(cls, rows: int) -> "DrawSettings":
        """Return the settings of ``rows`` greedy rows without filters."""
        return cls(np.zeros(rows), np.zeros(rows, dtype=np.int64), np.ones(rows), np.zeros(rows))

    def of(self, rows: npt.NDArray[np.int64] | slice) -> "DrawSettings":
        """Return the settings of the rows with indices ``rows``."""
        return DrawSettings._make(column[rows] for column in self)

    @property
    def drawn(self) -> npt.NDArray[np.bool_]:
        """Whether each row is sampled randomly, bool ``[rows]``."""
        return self.temperature > 0

    @property
    def filtered(self) -> npt.NDArray[np.bool_]:
        """Whether each row is sampled randomly and with filters, bool ``[rows]``."""
        return self.drawn & ((self.top_k > 0) | (self.top_p < 1) | (self.min_p > 0))

    @property
    def clipped_temperature(self) -> npt.NDArray[np.float32]:
        """Temperature of each row as a divisor, float32 ``[rows]``. The values are neither 0 nor infinite."""
        return self.temperature.clip(TEMPERATURE_MIN, TEMPERATURE_MAX).astype(np.float32)

    @property
    def max_distance(self) -> FloatArray:
        """Maximum distance that ``min_p`` allows between a logit and the largest logit of the row, after division by
        the temperature. The value is infinity if ``min_p`` is 0.
        """
        with np.errstate(divide="ignore"):
            return (-np.log(self.min_p)).clip(min=0.0)


@dataclass(frozen=True, slots=True)
class RowKinds:
    """Properties of the rows in a batch that stay the same from step to step.

    Attributes:
        drawn: bool ``[rows]``, as in ``DrawSettings``.
        filtered: bool ``[rows]``, as in ``DrawSettings``.
        plain_temperature: float32 ``[rows]``, the temperature of rows sampled randomly without filters, otherwise 0.
    """

    drawn: npt.NDArray[np.bool_]
    filtered: npt.NDArray[np.bool_]
    plain_temperature: npt.NDArray[np.float32]
    any_drawn: bool
    any_filtered: bool

    @classmethod
    def of(cls, settings: DrawSettings) -> "RowKinds":
        """Return the properties of rows with these settings."""
        drawn, filtered, plain = settings.drawn, settings.filtered, settings.clipped_temperature
        plain[filtered | ~drawn] = 0.0
        return cls(drawn, filtered, plain, bool(drawn.any()), bool(filtered.any()))


@dataclass(frozen=True, slots=True)
class SamplingInputs:
    """Inputs for sampling one token from each row of logits.

    Attributes:
        settings: Sampling parameters of the rows.
        uniforms: Random numbers ``[rows]`` in [0, 1), on the host.
        rules: Rules that change logits.
        known_kinds: Properties of the rows, if they are known from an earlier step.
    """

    settings: DrawSettings
    uniforms: FloatArray
    rules: LogitRules = field(default_factory=LogitRules)
    known_kinds: RowKinds | None = None

    @property
    def kinds(self) -> RowKinds:
        """Properties of the rows, which are computed if ``known_kinds`` is not set."""
        return self.known_kinds or RowKinds.of(self.settings)


@dataclass(frozen=True, slots=True)
class PlainDraws:
    """Sampling parameters of rows except their rules, as arrays ``[rows]`` on the host: the settings in the dtypes that
    kernels need, and the inputs of the random numbers.

    Attributes:
        temperature: float32, 0 for greedy sampling.
        max_distance: float32, see ``DrawSettings``.
        top_k: int32, 0 for no limit.
        top_p: float64, 1 for no limit.
        seeds: uint64.
        output_indices: int64.
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
        """Return the sampling parameters of rows with these settings."""
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

    def rows(self, rows: Sequence[int]) -> "PlainDraws":
        """Return the parameters of the rows with the indices ``rows``."""
        index = np.array(rows, dtype=np.int64)
        temperature, max_distance = self.temperature[index], self.max_distance[index]
        top_k, top_p = self.top_k[index], self.top_p[index]
        drawn = temperature > 0
        filtered = drawn & ((top_k > 0) | (top_p < 1) | np.isfinite(max_distance))
        seeds, output_indices = self.seeds[index], self.output_indices[index]
        return PlainDraws(
            temperature, max_distance, top_k, top_p, seeds, output_indices, bool(drawn.any()), bool(filtered.any())
        )

    def greedy_in(self, rows: Sequence[int]) -> "PlainDraws":
        """Return these parameters, but with greedy sampling in the rows with the indices ``rows``."""
        temperature = self.temperature.copy()
        temperature[np.array(rows, dtype=np.int64)] = 0
        return replace(self, temperature=temperature, any_drawn=bool((temperature > 0).any()))


@dataclass(frozen=True, slots=True)
class LaunchedTokens:
    """Tokens that a device is sampling.

    ``results`` is int32 ``[2, at least num_rows]`` on the device. ``results[0]`` has the sampled tokens. ``results[1]``
    has, for each row of logits, the number of logits that are NaN or infinity, or 1 if all logits are minus infinity.
    Logits of tokens that rules exclude do not count, as in ``SampledTokens``.
    """

    results: torch.Tensor
    num_rows: int

    @property
    def token_ids(self) -> torch.Tensor:
        """The sampled tokens, int32 ``[num_rows]``, on the device."""
        return self.results[0, : self.num_rows]

    def wait(self) -> "SampledTokens":
        """Wait for the tokens, and return them on the host."""
        token_ids, num_nans = self.results[:, : self.num_rows].numpy(force=True).astype(np.int64)
        return SampledTokens(token_ids, num_nans if num_nans.any() else None)


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """Sampled tokens.

    Attributes:
        token_ids: int64 ``[rows]``.
        num_nans: int64 ``[rows]``, number of each row's logits that are NaN or infinity, or None if no row has such
            logits. In rows without rules whose logits are all minus infinity, all logits count. Logits of tokens that
            rules exclude do not count.
    """

    token_ids: npt.NDArray[np.int64]
    num_nans: npt.NDArray[np.int64] | None


class Sampler(Protocol):
    """Interface of objects that sample tokens from logits. The token of a row depends only on the row's logits,
    settings and random number.
    """

    def sample(self, logits: torch.Tensor, inputs: SamplingInputs) -> SampledTokens:
        """Return one token for each row of ``logits`` ``[rows, vocab]``. ``logits`` may have any float dtype, and is on
        the sampler's device.

        If ``logits`` is float32, rules overwrite it, so callers that need the original logits must copy them first.
        """


class TokenLauncher(Protocol):
    """Interface of objects that start sampling on a device without waiting for the tokens."""

    def launch(self, logits: torch.Tensor, draws: PlainDraws, rules: LogitRules | None = None) -> LaunchedTokens:
        """Start to sample the tokens that a ``Sampler`` would return for ``logits`` ``[rows, vocab]``, after the work
        that is already queued on the device.

        ``logits`` is not changed, also if there are rules. The caller may immediately launch later work that overwrites
        ``logits``.
        """

    def score(self, logits: torch.Tensor, token_ids: torch.Tensor, count: int) -> torch.Tensor:
        """Start to compute the result of ``sampler.pack_logprobs`` for ``token_ids`` int64 ``[rows]``."""
