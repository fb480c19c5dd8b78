"""Faster builds of a model, or of parts of it, and the proof that they compute what its own modules do.

A prompt of a few tokens runs by the modules and by each candidate, on caches of their own. The first candidate whose results
are the same takes over; what the others failed at is told.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import torch

from penstock_enginecore.models.errors import UnsuitableError

# Faster builds of a model, or of parts of it, and the proof that they compute what its own modules do.
#
# A prompt of a few tokens runs by the modules and by each candidate, on caches of their own. The first candidate whose results
# are the same takes over; what the others failed at is told.

T_co = TypeVar("T_co", covariant=True)

TOLERANCES = {torch.float32: 1e-3, torch.float16: 0.02, torch.bfloat16: 0.1}
"""Differences, as shares of the length of the whole as a vector, that another order of summation does not make: by the dtype
in which the model's own modules compute.
"""

_ELSEWHERE = "another worker cannot use it"


class SpentError(Exception):
    """The candidate ``name`` is refuted and the weights that it was made of are gone: load the model again, without it. The
    message says why.
    """

    def __init__(self, name: str, reasons: str) -> None:
        super().__init__(reasons)
        self.name = name


class Replacement(Protocol[T_co]):
    """Computes what modules did. Until it has taken over, ``undo`` leaves the model as it was."""

    def probe(self) -> torch.Tensor:
        """What it makes of the probe: float32, of the shape of what the modules make of it."""

    def where(self) -> str:
        """Which part of the model it computes otherwise, to follow what its results differ by; empty where it cannot tell."""

    def take_over(self) -> T_co:
        """Free the weights it stands for, and return what serves from now on.

        Adapters need more than the numbers: the linear layers stay in the model, under their names, with ``in_features`` and
        ``out_features``. Only their weights are empty, so an adapter can add to a layer's product, but not to its weight.
        """

    def undo(self) -> None:
        """Put back what making it has changed. Not called where that has spent the weights."""


@dataclass(frozen=True, slots=True)
class Candidate(Generic[T_co]):
    """``build`` makes the replacement called ``name``; UnsuitableError where that cannot be. ``rounds_to``: what it rounds inputs
    of products to, None where it rounds no more than the modules do. ``spends``: building it lets go of the model's own weights,
    so that nothing can be undone.
    """

    name: str
    build: Callable[[], Replacement[T_co]]
    rounds_to: torch.dtype | None = None
    spends: bool = False

    def tolerance(self, expected: torch.dtype) -> float:
        """How far its results may be from those of modules that compute in ``expected``."""
        return max(TOLERANCES[expected], TOLERANCES[self.rounds_to or expected])


@dataclass(frozen=True, slots=True)
class Proven(Generic[T_co]):
    """``serves`` has taken over, by the candidate ``name``; both None where none was proved."""

    name: str | None
    serves: T_co | None
    unsuitable: dict[str, str]
    """By candidate, why it was not made."""
    refuted: dict[str, str]
    """By candidate, what its results were like."""

    @property
    def reasons(self) -> str:
        """Why candidates before ``name`` do not serve, to follow what computes in a line of a log."""
        return "".join(f"; {name} not used: {reason}" for name, reason in {**self.unsuitable, **self.refuted}.items())


def alone(ok: bool) -> bool:
    """What a rank that shares its model with no others agrees to."""
    return ok


def first_proven(
    candidates: Sequence[Candidate[T_co]], run: Callable[[], torch.Tensor], agree: Callable[[bool], bool] = alone
) -> Proven[T_co]:
    """Try ``candidates`` in order until one makes of the probe what ``run``, the model's own modules, makes of it, and let that
    one take over. ``agree``: whether it is so on all ranks of the model, which take the same one. Raises SpentError, on all of
    them.
    """
    unsuitable: dict[str, str] = {}
    refuted: dict[str, str] = {}
    expected = run() if candidates else torch.empty(0)
    for candidate in candidates:
        replacement, why = _built(candidate)
        spent = candidate.spends and not agree(replacement is None)
        if not agree(replacement is not None) or replacement is None:
            unsuitable[candidate.name] = why or _ELSEWHERE
        else:
            difference = _difference(replacement, expected, candidate.tolerance(expected.dtype))
            if agree(difference is None):
                return Proven(candidate.name, replacement.take_over(), unsuitable, refuted)
            refuted[candidate.name] = difference or _ELSEWHERE
        if spent:
            raise SpentError(candidate.name, Proven(None, None, unsuitable, refuted).reasons.removeprefix("; "))
        if replacement is not None:
            replacement.undo()
    return Proven(None, None, unsuitable, refuted)


def _built(candidate: Candidate[T_co]) -> tuple[Replacement[T_co] | None, str]:
    """The replacement, or why there is none."""
    try:
        return candidate.build(), ""
    except UnsuitableError as e:
        return None, str(e)


def _difference(replacement: Replacement[object], expected: torch.Tensor, tolerance: float) -> str | None:
    """How the results of ``replacement`` differ by more than ``tolerance``, None where they do not."""
    try:
        result = replacement.probe()
    except Exception as e:  # a model may read the weight of a layer that is packed
        return f"{type(e).__name__}: {e}"
    difference = distance(result, expected)
    if difference <= tolerance:  # which no NaN is
        return None
    return f"its results differ by {difference:.3g}{replacement.where()}"


def distance(result: torch.Tensor, expected: torch.Tensor) -> float:
    """How far ``result`` is from ``expected``, as a share of the length of ``expected`` as a vector."""
    return float((result.float() - expected.float()).norm() / expected.float().norm().clamp(min=1e-30))
