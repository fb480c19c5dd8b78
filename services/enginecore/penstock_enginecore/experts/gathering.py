"""Dispatches for which every rank sees the tokens of all."""

import torch
import torch.nn.functional as F  # noqa: N812

from penstock_enginecore.experts.dispatch import Compute, Ranks, Routed, in_routing_order, register_dispatch
from penstock_enginecore.native.experts import weighted_sum

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
