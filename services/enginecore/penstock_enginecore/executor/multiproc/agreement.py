"""What all workers must say alike."""

from collections.abc import Sequence
from typing import Any, TypeVar

import msgspec

from penstock_enginecore.worker.failures import WorkersGone

T = TypeVar("T")


def agreed(what: str, answers: Sequence[T], first_rank: int = 0) -> T:
    """The answer of all workers, which are those from ``first_rank`` on. Raises WorkersGone, naming a worker and what differs,
    where they are not the same.
    """
    first = answers[0]
    for rank, other in enumerate(answers, first_rank):
        if other != first:
            name, ours, theirs = _difference(msgspec.to_builtins(first), msgspec.to_builtins(other))
            raise WorkersGone(
                f"worker {rank} differs from worker {first_rank} in {what}: {name} is {theirs!r} and not {ours!r}"
            )
    return first


def _difference(one: Any, other: Any, name: str = "") -> tuple[str, Any, Any]:
    """Where two values differ first."""
    if isinstance(one, dict) and isinstance(other, dict):
        for key in [*one, *(key for key in other if key not in one)]:
            if one.get(key) != other.get(key):
                return _difference(one.get(key), other.get(key), f"{name}.{key}" if name else str(key))
    return name or "it", one, other
