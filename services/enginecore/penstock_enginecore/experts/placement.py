"""Placement of a model's experts in the slots of a group's ranks."""

from collections.abc import Sequence
from typing import Self

import msgspec

from penstock_common.errors import ConfigError


class Placement(msgspec.Struct, frozen=True):
    """Placement of experts on the ranks of a group.

    ``physical`` has, for each layer, the expert in each slot of all ranks. The slots of rank r begin at ``r * slots``.
    An expert may be in several slots, which compute equal results.
    """

    num_experts: int
    size: int
    slots: int
    """Number of slots that each rank has in a layer."""
    physical: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        check_slots(self.num_experts, self.size, self.slots)
        for layer, experts in enumerate(self.physical):
            if len(experts) != self.size * self.slots:
                raise ValueError(
                    f"layer {layer} is placed in {len(experts)} slots, but {self.size} ranks have "
                    f"{self.size * self.slots} slots together"
                )
            if set(experts) != set(range(self.num_experts)):
                raise ValueError(
                    f"the slots of layer {layer} must contain each of the model's {self.num_experts} experts, and no other expert"
                )

    @classmethod
    def even(cls, num_layers: int, num_experts: int, size: int, slots: int) -> Self:
        """Return a placement that assigns the experts in order to the slots of all ranks, and starts again with the
        first expert until all slots are used. Raises ConfigError if the number of slots is not valid.
        """
        check_slots(num_experts, size, slots)
        layer = tuple(slot % num_experts for slot in range(size * slots))
        return cls(num_experts, size, slots, (layer,) * num_layers)

    def held(self, rank: int, layer: int) -> tuple[int, ...]:
        """Return the experts in a rank's slots of a layer."""
        return self.physical[layer][rank * self.slots : (rank + 1) * self.slots]

    def replicas(self, layer: int) -> list[list[int]]:
        """Return the slots of each expert, numbered over all ranks."""
        found: list[list[int]] = [[] for _ in range(self.num_experts)]
        for slot, expert in enumerate(self.physical[layer]):
            found[expert].append(slot)
        return found

    def with_layer(self, layer: int, experts: Sequence[int]) -> Self:
        """Return a copy of the placement in which one layer is changed."""
        layers = (*self.physical[:layer], tuple(experts), *self.physical[layer + 1 :])
        return msgspec.structs.replace(self, physical=layers)


def fewest_slots(num_experts: int, size: int) -> int:
    """Return the smallest number of slots per rank with which ``size`` ranks can have all experts."""
    return -(-num_experts // size)


def check_slots(num_experts: int, size: int, slots: int) -> None:
    """Check that all experts fit into ``size`` ranks with ``slots`` slots each. Raises ConfigError, with the limit, if
    there are too few slots, or if a rank would need the same expert twice.
    """
    if size > num_experts:
        raise ConfigError(
            f"expert_parallel: the group has {size} ranks; the limit is {num_experts}, the model's number of experts"
        )
    if slots < fewest_slots(num_experts, size):
        raise ConfigError(
            f"expert_parallel.slots is {slots}; {size} ranks need at least {fewest_slots(num_experts, size)} slots each for "
            f"the model's {num_experts} experts"
        )
    if slots > num_experts:
        raise ConfigError(
            f"expert_parallel.slots is {slots}; it must be at most {num_experts}, the number of experts per layer"
        )
