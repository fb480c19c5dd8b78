"""How tokens come to the ranks that hold their experts: by name."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from penstock_common.errors import ConfigError
from penstock_enginecore.parallel.group_collectives import GroupCollectives

Compute = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Of states ``[pairs, hidden]`` and each one's slot of this rank, int64 ``[pairs]``, what the expert there makes of them,
``[pairs, hidden]``. A row depends on nothing but its own state and slot.
"""


@dataclass(frozen=True, slots=True)
class Routed:
    """Tokens of one rank at a layer: ``states`` ``[tokens, hidden]``; ``slots`` int64 ``[tokens, top]``, which of all ranks'
    physical experts compute each, and ``weights`` ``[tokens, top]``, how much these count.
    """

    states: torch.Tensor
    slots: torch.Tensor
    weights: torch.Tensor


@dataclass(frozen=True, slots=True)
class Ranks:
    """``counts``: tokens of each rank. ``slots``: physical experts of each."""

    group: GroupCollectives
    counts: Sequence[int]
    slots: int


class Dispatch(Protocol):
    """All ranks call it together."""

    def __call__(self, routed: Routed, ranks: Ranks, compute: Compute) -> torch.Tensor:
        """The weighted sums of this rank's tokens, ``[tokens, hidden]``. ``compute`` is called once, for pairs of all ranks."""


_DISPATCHES: dict[str, Callable[[], Dispatch]] = {}


def register_dispatch(name: str, make: Callable[[], Dispatch]) -> None:
    """Have ``expert_parallel.dispatch`` know a name, in place of what had it. Plugins call it."""
    _DISPATCHES[name] = make


def make_dispatch(name: str) -> Dispatch:
    """Raises ConfigError for a name that nobody has registered."""
    if name not in _DISPATCHES:
        raise ConfigError(f"expert_parallel.dispatch is {name!r}; known: {', '.join(sorted(_DISPATCHES))}")
    return _DISPATCHES[name]()


def in_routing_order(received: torch.Tensor, ranks_of_pairs: torch.Tensor) -> torch.Tensor:
    """``[tokens, top, hidden]`` of the outputs that came back, ``[pairs, hidden]``: those of each rank in the order of tokens and
    routing, rank by rank. ``ranks_of_pairs`` int64 ``[tokens, top]``.
    """
    outputs = torch.empty_like(received)
    outputs[torch.argsort(ranks_of_pairs.flatten(), stable=True)] = received
    return outputs.view(*ranks_of_pairs.shape, received.shape[-1])
