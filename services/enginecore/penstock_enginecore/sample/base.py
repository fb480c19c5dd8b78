"""What every sampler is, what it gets and what it gives."""

from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from penstock_enginecore.sample.random import UInt64Array
from penstock_enginecore.sample.rules import LogitRules

FloatArray = npt.NDArray[np.float64]

_INT32_MAX = 2**31 - 1
TEMPERATURE_MIN, TEMPERATURE_MAX = 1e-30, 1e30
"""Keeps temperatures that are no float32 from dividing by zero or infinity."""


@dataclass(frozen=True, slots=True)
class RowKinds:
    """What the rows of a batch ask for, which stays the same from step to step. Bool ``[rows]``: ``drawn`` at random, and
    ``filtered``: drawn from what filters leave. ``plain_temperature`` float32: of rows that are drawn without filters, else 0.
    """

    drawn: npt.NDArray[np.bool_]
    filtered: npt.NDArray[np.bool_]
    plain_temperature: npt.NDArray[np.float32]
    any_drawn: bool
    any_filtered: bool

    @classmethod
    def of(
        cls, temperature: FloatArray, top_k: npt.NDArray[np.int64], top_p: FloatArray, min_p: FloatArray
    ) -> "RowKinds":
        """From the fields of ``SamplingInputs`` of the same names, ``[rows]`` each."""
        drawn = temperature > 0
        filtered = drawn & ((top_k > 0) | (top_p < 1) | (min_p > 0))
        plain = temperature.clip(TEMPERATURE_MIN, TEMPERATURE_MAX).astype(np.float32)
        plain[filtered | ~drawn] = 0.0
        return cls(drawn, filtered, plain, bool(drawn.any()), bool(filtered.any()))


@dataclass(frozen=True, slots=True)
class SamplingInputs:
    """Per row of logits, on the host. ``uniforms`` in [0, 1); temperature 0 is greedy; ``top_k`` 0 and ``top_p`` 1 are
    off. ``kinds`` follows from the others.
    """

    temperature: FloatArray
    top_k: npt.NDArray[np.int64]
    top_p: FloatArray
    min_p: FloatArray
    uniforms: FloatArray
    rules: LogitRules = field(default_factory=LogitRules)
    kinds: RowKinds | None = None


@dataclass(frozen=True, slots=True)
class PlainDraws:
    """How rows without rules are drawn, on the host, ``[rows]`` each: the settings in the types that kernels read, and what the
    random number follows from. ``temperature`` float32, 0 is greedy; ``max_distance`` float32 is ``-log(min_p)``, infinity where
    that is off; ``top_k`` int32, 0 is off; ``top_p`` float64, 1 is off. ``seeds`` uint64, ``output_indices`` int64.
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
    def of(
        cls,
        temperature: FloatArray,
        top_k: npt.NDArray[np.int64],
        top_p: FloatArray,
        min_p: FloatArray,
        seeds: UInt64Array,
        output_indices: npt.NDArray[np.int64],
    ) -> "PlainDraws":
        """From the fields of ``SamplingInputs`` of the same names."""
        drawn = temperature > 0
        clipped = temperature.clip(TEMPERATURE_MIN, TEMPERATURE_MAX).astype(np.float32)
        with np.errstate(divide="ignore"):
            max_distance = (-np.log(min_p)).clip(min=0.0).astype(np.float32)
        filtered = drawn & ((top_k > 0) | (top_p < 1) | (min_p > 0))
        return cls(
            np.where(drawn, clipped, np.float32(0)),
            max_distance,
            top_k.clip(0, _INT32_MAX).astype(np.int32),
            top_p,
            seeds,
            output_indices,
            bool(drawn.any()),
            bool(filtered.any()),
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
