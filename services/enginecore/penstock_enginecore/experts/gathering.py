"""Dispatches for which every rank sees the tokens of all."""

import torch

from penstock_enginecore.experts.dispatch import Compute, Ranks, Routed, in_routing_order, register_dispatch
from penstock_enginecore.native.experts import weighted_sum


class AllGather:
    """States and routing of all tokens are gathered. Each pair's output goes back as it is, and its token's own rank weights and
    sums: the bits are those of one rank that holds everything.
    """

    def __call__(self, routed: Routed, ranks: Ranks, compute: Compute) -> torch.Tensor:
        """See ``Dispatch``."""
        group, counts = ranks.group, ranks.counts
        states = group.all_gather_rows(routed.states, counts)
        slots = group.all_gather_rows(routed.slots, counts)
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
        """See ``Dispatch``."""
        group, counts = ranks.group, ranks.counts
        states = group.all_gather_rows(routed.states, counts)
        slots = group.all_gather_rows(routed.slots, counts)
        weights = group.all_gather_rows(routed.weights, counts)
        own = slots // ranks.slots == group.rank
        tokens, positions = own.nonzero(as_tuple=True)
        outputs = compute(states[tokens], slots[tokens, positions] % ranks.slots)
        sums = torch.zeros_like(states)
        for position in range(slots.shape[1]):  # a token is at most once at a position
            here = positions == position
            sums[tokens[here]] += (outputs[here] * weights[tokens[here], position, None]).to(sums.dtype)
        count = counts[group.rank]
        parts = group.all_to_all_rows(sums, counts, [count] * group.size).view(group.size, count, sums.shape[-1])
        total = parts[0].clone()
        for part in parts[1:]:
            total += part
        return total


register_dispatch("allgather", AllGather)
register_dispatch("reduce_scatter", ReduceScatter)
