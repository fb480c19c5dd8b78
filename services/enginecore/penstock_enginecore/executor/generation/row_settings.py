"""How rows of logits are sampled."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from penstock_common.types.sampling import SamplingParams
from penstock_enginecore.attention.base import IntArray
from penstock_enginecore.core.scheduler.output import GrammarBitmask
from penstock_enginecore.sample.base import DrawSettings, RowKinds
from penstock_enginecore.sample.random import UniformsAhead
from penstock_enginecore.sample.rules import GrammarRows

_INT64_MAX = 2**63 - 1
_T = TypeVar("_T", bound=np.generic)


@dataclass(frozen=True, slots=True)
class RowSettings:
    """How requests sample: the parts of ``SamplingInputs`` that stay the same from step to step."""

    request_ids: list[str]
    rows: IntArray
    draw: DrawSettings
    kinds: RowKinds
    uniforms: UniformsAhead
    """Of the rows that are drawn."""


class SamplingColumns:
    """How requests sample, by row of the batch: ``draw`` and ``seed``, ``[rows]`` each."""

    def __init__(self) -> None:
        self.draw = DrawSettings.off(0)
        self.seed = np.zeros(0, dtype=np.uint64)

    def grow(self, rows: int) -> None:
        """Have so many rows."""
        self.draw = DrawSettings._make(grown(column, rows) for column in self.draw)
        self.seed = grown(self.seed, rows)

    def set(self, row: int, params: SamplingParams) -> None:
        """ValueError for a request that is drawn and has no seed."""
        if params.seed is None and not params.greedy:
            raise ValueError("sampling_params.seed must be set by the time a request reaches a worker")
        for name, column in zip(DrawSettings._fields, self.draw, strict=True):
            column[row] = min(getattr(params, name), _INT64_MAX)
        self.seed[row] = (params.seed or 0) % 2**64


def grown(array: npt.NDArray[_T], rows: int) -> npt.NDArray[_T]:
    """The array with so many rows, those behind its own 0."""
    larger = np.zeros((rows, *array.shape[1:]), dtype=array.dtype)
    larger[: len(array)] = array
    return larger


def named_rows(grammar: GrammarBitmask, request_ids: Sequence[str]) -> GrammarRows | None:
    """The masks of ``grammar`` by row of ``request_ids``, those of a request one behind the other; None for none."""
    if not grammar.request_ids:
        return None
    first = {request_id: i for i, request_id in reversed(list(enumerate(request_ids)))}
    named = np.array([first[request_id] for request_id in grammar.request_ids], dtype=np.int64)
    return GrammarRows(named + grammar.offsets if grammar.offsets else named, grammar.bitmask)
