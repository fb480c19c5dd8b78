"""Choice among faster implementations of a model or its parts, and the check that their results match the results of
the model's own modules.

A short prompt, the probe, runs through the modules and through each candidate, each with a separate KV cache. The
engine serves requests with the first candidate whose results match. The log names the rejected candidates and the
reasons.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import torch

from penstock_enginecore.models.errors import UnsuitableError

T_co = TypeVar("T_co", covariant=True)

TOLERANCES = {torch.float32: 1e-3, torch.float16: 0.02, torch.bfloat16: 0.1}
"""Largest accepted norm of the difference, divided by the norm of the result, by the dtype in which the model's own
modules compute. Differences from another order of summation are smaller.
"""

_ELSEWHERE = "another worker cannot use it"


class SpentError(Exception):
    """Error raised if a candidate is rejected after the candidate has freed weights of the model.

    The model must be loaded again, without the candidate ``name``. The message gives the reason for the rejection.
    """

    def __init__(self, name: str, reasons: str) -> None:
        super().__init__(reasons)
        self.name = name


class Replacement(Protocol[T_co]):
    """Faster replacement of model modules. Before ``take_over``, ``undo`` can restore the model."""

    def probe(self) -> torch.Tensor:
        """Return the result for the probe: float32, in the shape of the modules' result."""

    def where(self) -> str:
        """Return text that names the first part of the model whose results differ. The text is appended to the reported
        difference, and is empty if the part is unknown.
        """

    def take_over(self) -> T_co:
        """Free the weights of the replaced modules and return the implementation that serves requests from now on.

        The replaced linear layers stay in the model for adapters, under their names, with ``in_features`` and
        ``out_features``. The weights of these layers are empty, so an adapter can add to a layer's output, but cannot
        change the layer's weight.
        """

    def undo(self) -> None:
        """Restore the model. ``first_proven`` does not call this method if building the replacement has freed the
        weights.
        """


@dataclass(frozen=True, slots=True)
class Candidate(Generic[T_co]):
    """Replacement that ``first_proven`` can try.

    Attributes:
        name: Name of the implementation in the log.
        build: Function that builds the replacement. Raises UnsuitableError if the replacement does not support the
            model.
        rounds_to: The dtype to which matrix inputs are rounded, or None if the candidate rounds them no more than the
            modules do.
        spends: Whether ``build`` frees the model's own weights, so that ``undo`` is impossible.
    """

    name: str
    build: Callable[[], Replacement[T_co]]
    rounds_to: torch.dtype | None = None
    spends: bool = False

    def tolerance(self, expected: torch.dtype) -> float:
        """Return the largest accepted difference from the results of modules that compute in the dtype ``expected``."""
        return max(TOLERANCES[expected], TOLERANCES[self.rounds_to or expected])


@dataclass(frozen=True, slots=True)
class Proven(Generic[T_co]):
    """Result of trying all candidates. ``name`` and ``serves`` belong to the accepted candidate. ``name`` and
    ``serves`` are None if no candidate was accepted.
    """

    name: str | None
    serves: T_co | None
    unsuitable: dict[str, str]
    """Reasons why candidates could not be built, by name of the candidate."""
    refuted: dict[str, str]
    """Differences of the results of rejected candidates, as text, by name of the candidate."""

    @property
    def reasons(self) -> str:
        """Text for the log: the reasons why the candidates before ``name`` are not used."""
        return "".join(f"; {name} not used: {reason}" for name, reason in {**self.unsuitable, **self.refuted}.items())


def alone(ok: bool) -> bool:
    """Return ``ok``. A rank that has the whole model uses this function as ``agree``, because no other rank needs to
    agree.
    """
    return ok


def first_proven(
    candidates: Sequence[Candidate[T_co]], run: Callable[[], torch.Tensor], agree: Callable[[bool], bool] = alone
) -> Proven[T_co]:
    """Try ``candidates`` in order. The first candidate whose result matches the result of ``run`` takes over.

    Args:
        candidates: The candidates, fastest first.
        run: Function that returns the result of the model's own modules for the probe.
        agree: Function that returns whether a condition holds on all ranks of the model, so that all ranks accept the
            same candidate.

    Raises:
        SpentError: A rejected candidate has freed weights of the model. All ranks raise this error.
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
    """Return the replacement and an empty text, or None and the reason why the replacement cannot be built."""
    try:
        return candidate.build(), ""
    except UnsuitableError as e:
        return None, str(e)


def _difference(replacement: Replacement[object], expected: torch.Tensor, tolerance: float) -> str | None:
    """Return text about the difference between the results of ``replacement`` and ``expected``, or None if the
    difference is at most ``tolerance``.
    """
    try:
        result = replacement.probe()
    except Exception as e:  # for example, the model reads the weight of a packed layer, which is empty
        return f"{type(e).__name__}: {e}"
    difference = distance(result, expected)
    if difference <= tolerance:  # false for NaN
        return None
    return f"its results differ by {difference:.3g}{replacement.where()}"


def distance(result: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the norm of the difference between ``result`` and ``expected``, divided by the norm of ``expected``."""
    return float((result.float() - expected.float()).norm() / expected.float().norm().clamp(min=1e-30))
