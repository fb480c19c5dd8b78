"""Dispatch methods, which send tokens to the ranks that have the tokens' experts. A setting selects the method by
name.
"""

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

A row of the output depends only on its own state and slot.
"""


@dataclass(frozen=True, slots=True)
class Routed:
    """Tokens of one rank at the input of a layer of experts, with the experts that the router chose.

    Attributes:
        states: ``[tokens, hidden]``: hidden states.
        slots: int64 ``[tokens, top]``: slots of the ``top`` chosen experts, numbered over all ranks.
        weights: ``[tokens, top]``: weights with which the outputs of the chosen experts are summed.
    """

    states: torch.Tensor
    slots: torch.Tensor
    weights: torch.Tensor


@dataclass(frozen=True, slots=True)
class Ranks:
    """Ranks of a group. ``counts`` has the number of tokens of each rank in this step, and ``slots`` is the number of
    slots per rank.
    """

    group: GroupCollectives
    counts: Sequence[int]
    slots: int


class Dispatch(Protocol):
    """Method that sends tokens to the ranks with their experts. All ranks call the method for the same layers of the
    same steps.
    """

    def __call__(self, routed: Routed, ranks: Ranks, compute: Compute) -> torch.Tensor:
        """Return the weighted sum of the experts' outputs for each token of this rank, ``[tokens, hidden]``.
        ``compute`` is called once, with pairs of tokens and experts from all ranks.
        """


_DISPATCHES: dict[str, Callable[[], Dispatch]] = {}


def register_dispatch(name: str, make: Callable[[], Dispatch]) -> None:
    """Register a dispatch method under a name, which is then a value of ``expert_parallel.dispatch``. A method with the
    same name is replaced. Plugins call this function.
    """
    _DISPATCHES[name] = make


def make_dispatch(name: str) -> Dispatch:
    """Return the dispatch method with this name. Raises ConfigError if the name is unknown."""
    if name not in _DISPATCHES:
        raise ConfigError(f"expert_parallel.dispatch is {name!r}; registered methods: {', '.join(sorted(_DISPATCHES))}")
    return _DISPATCHES[name]()


def in_routing_order(received: torch.Tensor, ranks_of_pairs: torch.Tensor) -> torch.Tensor:
    """Return the received outputs ``[pairs, hidden]`` as ``[tokens, top, hidden]``.

    The received outputs are sorted by rank, and for each rank they are in the order of tokens and chosen experts.
    ``ranks_of_pairs``, int64 ``[tokens, top]``, has the rank that computed each pair.
    """
    outputs = torch.empty_like(received)
    outputs[torch.argsort(ranks_of_pairs.flatten(), stable=True)] = received
    return outputs.view(*ranks_of_pairs.shape, received.shape[-1])


# Dispatch methods in which every rank receives the tokens of all ranks.

_WORD = 8
"""Alignment in bytes. Rows are padded to a multiple of this number, so that each part of a row is aligned."""


class AllGather:
    """Dispatch method in which every rank gathers the states and routing of all tokens. The output of each pair of
    token and expert is sent back unchanged to the token's rank. The rank of the token computes the weighted sum of the
    outputs. Results are therefore bit-identical to those of a single rank with all experts.
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
    """Dispatch method in which every rank gathers the states, routing and weights of all tokens.

    Each rank computes the weighted sum of its experts' outputs for each token, and sends back one row per token. The
    rank of the token adds the rows of all ranks. Results equal those of a single rank up to rounding.
    """

    def __call__(self, routed: Routed, ranks: Ranks, compute: Compute) -> torch.Tensor:
        group, counts = ranks.group, ranks.counts
        slots, weights, states = gathered(ranks, routed.slots, routed.weights, routed.states)
        own = slots // ranks.slots == group.rank
        tokens, positions = own.nonzero(as_tuple=True)
        outputs = compute(states[tokens], slots[tokens, positions] % ranks.slots)
        sums = states.new_zeros(states.shape)
        for position in range(slots.shape[1]):  # In one column of the routing, each token occurs at most once.
            here = positions == position
            sums[tokens[here]] += (outputs[here] * weights[tokens[here], position, None]).to(sums.dtype)
        count = counts[group.rank]
        parts = group.all_to_all_rows(sums, counts, [count] * group.size).view(group.size, count, sums.shape[-1])
        total = parts[0].clone()
        for part in parts[1:]:
            total += part
        return total


def gathered(ranks: Ranks, *parts: torch.Tensor) -> list[torch.Tensor]:
    """Gather each tensor of ``parts`` from all ranks in one message. The tensors are ``[tokens, n]`` and may have
    different dtypes. Returns views of the message.
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
    """Dispatch method in which every rank gathers only the routing of all tokens, and sends each token's state once to
    each rank that has one of the token's experts. As with ``AllGather``, outputs are sent back unchanged, so results
    are bit-identical to those of a single rank.
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
        rows = comes.cumsum(0) - 1  # Index of each token's row among the received states.
        outputs = compute(states[rows[tokens]], slots[tokens, positions] % ranks.slots)
        back = [int(part.sum()) for part in torch.split(here, list(counts))]
        come = torch.bincount(holders.flatten(), minlength=group.size).tolist()
        received = group.all_to_all_rows(outputs, back, come)
        return weighted_sum(in_routing_order(received, holders), routed.weights)


register_dispatch("alltoall", AllToAll)
