"""Which rank holds which experts of which layer."""

from collections.abc import Sequence
from typing import Self

import msgspec

from penstock_common.errors import ConfigError


class Placement(msgspec.Struct, frozen=True):
    """``physical``: by layer, the expert in each slot of all ranks: those of rank r from ``r * slots`` on. An expert may be in
    several slots: any of them computes the same.
    """

    num_experts: int
    size: int
    slots: int
    """Physical experts of a rank in a layer."""
    physical: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        check_slots(self.num_experts, self.size, self.slots)
        for layer, experts in enumerate(self.physical):
            if len(experts) != self.size * self.slots:
                raise ValueError(
                    f"layer {layer} has {len(experts)} slots, {self.size} ranks have {self.size * self.slots}"
                )
            if set(experts) != set(range(self.num_experts)):
                raise ValueError(f"layer {layer} does not hold each of {self.num_experts} experts, and no others")

    @classmethod
    def even(cls, num_layers: int, num_experts: int, size: int, slots: int) -> Self:
        """Experts in turn over all slots of the ranks. Raises ConfigError."""
        check_slots(num_experts, size, slots)
        layer = tuple(slot % num_experts for slot in range(size * slots))
        return cls(num_experts, size, slots, (layer,) * num_layers)

    def held(self, rank: int, layer: int) -> tuple[int, ...]:
        """Experts in a rank's slots of a layer."""
        return self.physical[layer][rank * self.slots : (rank + 1) * self.slots]

    def replicas(self, layer: int) -> list[list[int]]:
        """By expert, the slots of all ranks that it is in."""
        found: list[list[int]] = [[] for _ in range(self.num_experts)]
        for slot, expert in enumerate(self.physical[layer]):
            found[expert].append(slot)
        return found

    def with_layer(self, layer: int, experts: Sequence[int]) -> Self:
        """Another placement of one layer."""
        layers = (*self.physical[:layer], tuple(experts), *self.physical[layer + 1 :])
        return msgspec.structs.replace(self, physical=layers)


def fewest_slots(num_experts: int, size: int) -> int:
    """Of a rank, with which ``size`` ranks hold all experts."""
    return -(-num_experts // size)


def check_slots(num_experts: int, size: int, slots: int) -> None:
    """Raise ConfigError, with the limit, unless ``size`` ranks of so many slots hold every expert, and none twice on a rank for
    want of others.
    """
    if size > num_experts:
        raise ConfigError(
            f"expert_parallel: the group has {size} ranks; the model's {num_experts} experts go to at most as many"
        )
    if slots < fewest_slots(num_experts, size):
        raise ConfigError(
            f"expert_parallel.slots is {slots}; {size} ranks hold the model's {num_experts} experts with at least "
            f"{fewest_slots(num_experts, size)}"
        )
    if slots > num_experts:
        raise ConfigError(f"expert_parallel.slots is {slots}; the model has {num_experts} experts per layer")
