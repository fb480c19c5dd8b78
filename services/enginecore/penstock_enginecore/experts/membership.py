"""The group that a rank's experts compute with, and what is where in it."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from penstock_enginecore.experts.dispatch import Dispatch
from penstock_enginecore.experts.placement import Placement
from penstock_enginecore.parallel.group_collectives import GroupCollectives


@dataclass(slots=True)
class Membership:
    """``counts``: tokens of each rank in the step that is computed."""

    group: GroupCollectives
    placement: Placement
    dispatch: Dispatch
    counts: Sequence[int] = ()
    _tables: dict[int, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)

    def slots_of(self, layer: int, chosen: torch.Tensor) -> torch.Tensor:
        """Which of all ranks' slots compute the experts ``chosen`` int64 ``[tokens, top]``: tokens take turns at replicas, those
        of another rank from another one on.
        """
        slots, number = self._table(layer)
        turns = torch.arange(self.group.rank, self.group.rank + len(chosen))[:, None]
        return slots[chosen, turns % number[chosen]]

    def place(self, layer: int, experts: Sequence[int]) -> None:
        """From now on the layer's slots hold these."""
        self.placement = self.placement.with_layer(layer, experts)
        self._tables.pop(layer, None)

    def _table(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The slots of each expert ``[experts, most replicas]``, and how many these are ``[experts]``."""
        if layer not in self._tables:
            replicas = self.placement.replicas(layer)
            most = max(map(len, replicas))
            slots = torch.tensor([each + each[:1] * (most - len(each)) for each in replicas])
            self._tables[layer] = slots, torch.tensor([len(each) for each in replicas])
        return self._tables[layer]
