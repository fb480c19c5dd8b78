"""Dispatch of tokens to the ranks with their experts, selected by name."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F  # noqa: N812

from penstock_common.errors import ConfigError
from penstock_enginecore.native.experts import weighted_sum
from penstock_enginecore.parallel.group_collectives import GroupCollectives

Compute = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Function that returns the outputs ``[pairs, hidden]`` for states ``[pairs, hidden]`` and slots of this rank, int64
``[pairs]``.

A row depends only on its own state and slot.
"""


@dataclass(frozen=True, slots=True)
class Routed:
    """Tokens of one rank at a layer.

    Attributes:
        states: ``[tokens, hidden]``.
        slots: int64 ``[tokens, top]``, physical experts, numbered over all ranks.
        weights: ``[tokens, top]``, weights of these experts in the sum.
    """

    states: torch.Tensor
    slots: torch.Tensor
    weights: torch.Tensor


@dataclass(frozen=True, slots=True)
class Ranks:
    """Ranks of a group. ``counts`` are the tokens of each rank, ``slots`` the physical experts of each rank."""

    group: GroupCollectives
    counts: Sequence[int]
    slots: int


class Dispatch(Protocol):
    """Dispatch method. All ranks call it together."""

    def __call__(self, routed: Routed, ranks: Ranks, compute: Compute) -> torch.Tensor:
        """Return the weighted sums of this rank's tokens, ``[tokens, hidden]``. ``compute`` is called once, for pairs
        of all ranks.
        """


_DISPATCHES: dict[str, Callable[[], Dispatch]] = {}


def register_dispatch(name: str, make: Callable[[], Dispatch]) -> None:
    """Register a value of ``expert_parallel.dispatch``, replacing an existing one. Called by plugins."""
    _DISPATCHES[name] = make


def make_dispatch(name: str) -> Dispatch:
    """Return the dispatch of this name. Raises ConfigError for an unknown name."""
    if name not in _DISPATCHES:
        raise ConfigError(f"expert_parallel.dispatch is {name!r}; known: {', '.join(sorted(_DISPATCHES))}")
    return _DISPATCHES[name]()


def in_routing_order(received: torch.Tensor, ranks_of_pairs: torch.Tensor) -> torch.Tensor:
    """Return the received outputs ``[pairs, hidden]`` as ``[tokens, top, hidden]``.

    Outputs arrive rank by rank, in the order of tokens and routing. ``ranks_of_pairs`` is int64 ``[tokens, top]``.
    """
    outputs = torch.empty_like(received)
    outputs[torch.argsort(ranks_of_pairs.flatten(), stable=True)] = received
    return outputs.view(*ranks_of_pairs.shape, received.shape[-1])


# Dispatch methods in which every rank receives the tokens of all ranks.

_WORD = 8
"""Rows are padded to a multiple of this many bytes, so that each part is aligned."""


class AllGather:
    """Dispatch that gathers states and routing of all tokens.

    A pair's output returns unchanged, and the token's own rank weights and sums the outputs. Therefore results are
    bit-identical to those of a single rank with all experts.
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
    """Dispatch that gathers states, routing and weights of all tokens.

    A rank sums the outputs of its experts per token, and the token's own rank adds the ranks' sums. One row per
    token and rank returns. Results are equal up to rounding.
    """

    def __call__(self, routed: Routed, ranks: Ranks, compute: Compute) -> torch.Tensor:
        group, counts = ranks.group, ranks.counts
        slots, weights, states = gathered(ranks, routed.slots, routed.weights, routed.states)
        own = slots // ranks.slots == group.rank
        tokens, positions = own.nonzero(as_tuple=True)
        outputs = compute(states[tokens], slots[tokens, positions] % ranks.slots)
        sums = states.new_zeros(states.shape)
        for position in range(slots.shape[1]):  # a token occurs at most once per position
            here = positions == position
            sums[tokens[here]] += (outputs[here] * weights[tokens[here], position, None]).to(sums.dtype)
        count = counts[group.rank]
        parts = group.all_to_all_rows(sums, counts, [count] * group.size).view(group.size, count, sums.shape[-1])
        total = parts[0].clone()
        for part in parts[1:]:
            total += part
        return total


def gathered(ranks: Ranks, *parts: torch.Tensor) -> list[torch.Tensor]:
    """Gather each of ``parts`` ``[tokens, n]``, of any dtypes, from all ranks in one message. Returns views of the
    message.
    """
    rows = [part.contiguous().view(torch.uint8) for part in parts]
    rows = [F.pad(row, (0, -row.shape[1] % _WORD)) if row.shape[1] % _WORD else row for row in rows]
    whole = ranks.group.all_gather_rows(torch.cat(rows, dim=1), ranks.counts)
    columns = torch.split(whole, [row.shape[1] for row in rows], dim=1)
    return [
        column[:, : part.shape[1] * part.itemsize].view(part.dtype) for column, part in zip(columns, parts, strict=True)
    ]


register_dispatch("allgather", AllGather)
register_dispatch("reduce_scatter", ReduceScatter)


# Dispatch method that sends each token only to ranks with its experts.


class AllToAll:
    """Dispatch that gathers only the routing, and sends each token's state once to each rank that computes it.

    Outputs return unchanged, as with ``AllGather``, so results are bit-identical.
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
        rows = comes.cumsum(0) - 1  # row of each token among the received states
        outputs = compute(states[rows[tokens]], slots[tokens, positions] % ranks.slots)
        back = [int(part.sum()) for part in torch.split(here, list(counts))]
        come = torch.bincount(holders.flatten(), minlength=group.size).tolist()
        received = group.all_to_all_rows(outputs, back, come)
        return weighted_sum(in_routing_order(received, holders), routed.weights)


register_dispatch("alltoall", AllToAll)
