"""How tokens come to the ranks that hold their experts: by name."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F  # noqa: N812

from penstock_common.errors import ConfigError
from penstock_enginecore.native.experts import weighted_sum
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


# Dispatches for which every rank sees the tokens of all.

_WORD = 8
"""Bytes of which rows are multiples, so that each part of one is aligned."""


class AllGather:
    """States and routing of all tokens are gathered. Each pair's output goes back as it is, and its token's own rank weights and
    sums: the bits are those of one rank that holds everything.
    """

    def __call__(self, routed: Routed, ranks: Ranks, compute: Compute) -> torch.Tensor:
        group, counts = ranks.group, ranks.counts
        slots, states = gathered(ranks, routed.slots, routed.states)
        own = slots // ranks.slots == group.rank
        tokens, positions = own.nonzero(as_tuple=True)
        outputs = compute(states[tokens], slots[tokens, positions] % ranks.slots)
        send = [int(part.sum()) for part in torch.split(own, list(counts))]
        holders = routed.slots // ranks.slots
        receive = torch.bincount(holders.flatten(), minlength=group.size).tolist()
        received = group.all_to_all_rows(outputs, send, receive)
        return weighted_sum(in_routing_order(received, holders), routed.weights)


class ReduceScatter:
    """States, routing and weights are gathered. Each rank sums what its experts make of a token, and the token's own rank adds up
    the ranks' sums: a row per token and rank goes back, and results are equal up to rounding.
    """

    def __call__(self, routed: Routed, ranks: Ranks, compute: Compute) -> torch.Tensor:
        group, counts = ranks.group, ranks.counts
        slots, weights, states = gathered(ranks, routed.slots, routed.weights, routed.states)
        own = slots // ranks.slots == group.rank
        tokens, positions = own.nonzero(as_tuple=True)
        outputs = compute(states[tokens], slots[tokens, positions] % ranks.slots)
        sums = states.new_zeros(states.shape)
        for position in range(slots.shape[1]):  # a token is at most once at a position
            here = positions == position
            sums[tokens[here]] += (outputs[here] * weights[tokens[here], position, None]).to(sums.dtype)
        count = counts[group.rank]
        parts = group.all_to_all_rows(sums, counts, [count] * group.size).view(group.size, count, sums.shape[-1])
        total = parts[0].clone()
        for part in parts[1:]:
            total += part
        return total


def gathered(ranks: Ranks, *parts: torch.Tensor) -> list[torch.Tensor]:
    """Each of ``parts`` ``[tokens, n]``, of any dtypes, of the tokens of all ranks, in one message: views of its rows."""
    rows = [part.contiguous().view(torch.uint8) for part in parts]
    rows = [F.pad(row, (0, -row.shape[1] % _WORD)) if row.shape[1] % _WORD else row for row in rows]
    whole = ranks.group.all_gather_rows(torch.cat(rows, dim=1), ranks.counts)
    columns = torch.split(whole, [row.shape[1] for row in rows], dim=1)
    return [
        column[:, : part.shape[1] * part.itemsize].view(part.dtype) for column, part in zip(columns, parts, strict=True)
    ]


register_dispatch("allgather", AllGather)
register_dispatch("reduce_scatter", ReduceScatter)


# A dispatch that sends each token only to ranks that hold experts of it.


class AllToAll:
    """All ranks are told where tokens go, and a token's state goes once to each rank that computes it. Outputs come back as they
    are, as with ``AllGather``: the bits are the same.
    """

    def __call__(self, routed: Routed, ranks: Ranks, compute: Compute) -> torch.Tensor:
        group, counts = ranks.group, ranks.counts
        slots = group.all_gather_rows(routed.slots, counts)
        here = slots // ranks.slots == group.rank
        comes = here.any(dim=1)
        holders = routed.slots // ranks.slots
        goes = torch.zeros(len(holders), group.size, dtype=torch.bool).scatter_(1, holders, True)
        send = goes.sum(0).tolist()
        receive = [int(part.sum()) for part in torch.split(comes, list(counts))]
        states = group.all_to_all_rows(routed.states[goes.T.nonzero()[:, 1]], send, receive)
        tokens, positions = here.nonzero(as_tuple=True)
        rows = comes.cumsum(0) - 1  # of the states that came, by token
        outputs = compute(states[rows[tokens]], slots[tokens, positions] % ranks.slots)
        back = [int(part.sum()) for part in torch.split(here, list(counts))]
        come = torch.bincount(holders.flatten(), minlength=group.size).tolist()
        received = group.all_to_all_rows(outputs, back, come)
        return weighted_sum(in_routing_order(received, holders), routed.weights)


register_dispatch("alltoall", AllToAll)
