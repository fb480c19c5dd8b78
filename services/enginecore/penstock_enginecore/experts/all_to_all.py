"""A dispatch that sends each token only to ranks that hold experts of it."""

import torch

from penstock_enginecore.experts.dispatch import Compute, Ranks, Routed, in_routing_order, register_dispatch
from penstock_enginecore.native.experts import weighted_sum


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
