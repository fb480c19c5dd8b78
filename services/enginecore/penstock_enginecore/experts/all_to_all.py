"""A dispatch that sends each token only to ranks that hold experts of it."""

import struct

import torch

from penstock_enginecore.experts.dispatch import Compute, Ranks, Routed, in_routing_order, register_dispatch
from penstock_enginecore.native.experts import weighted_sum

_NONE = -1


class AllToAll:
    """A token's state goes once to each rank that computes it, with its slots there. Outputs come back as they are, as with
    ``AllGather``: the bits are the same.
    """

    def __call__(self, routed: Routed, ranks: Ranks, compute: Compute) -> torch.Tensor:
        """See ``Dispatch``."""
        group = ranks.group
        holders = routed.slots // ranks.slots
        goes = torch.zeros(len(holders), group.size, dtype=torch.bool)
        goes.scatter_(1, holders, True)
        to, tokens = goes.T.nonzero(as_tuple=True)
        send = goes.sum(0).tolist()
        row = struct.Struct(f"<{group.size}q")
        receive = [row.unpack(each)[group.rank] for each in group.exchange(row.pack(*send))]
        states = group.all_to_all_rows(routed.states[tokens], send, receive)
        there = holders[tokens] == to[:, None]
        wanted = torch.where(there, routed.slots[tokens] % ranks.slots, _NONE)
        slots = group.all_to_all_rows(wanted, send, receive)
        rows, positions = (slots != _NONE).nonzero(as_tuple=True)
        outputs = compute(states[rows], slots[rows, positions])
        back = [int((part != _NONE).sum()) for part in torch.split(slots, receive)]
        come = torch.bincount(holders.flatten(), minlength=group.size).tolist()
        received = group.all_to_all_rows(outputs, back, come)
        return weighted_sum(in_routing_order(received, holders), routed.weights)


register_dispatch("alltoall", AllToAll)
