"""Where experts are in a new group: a pure function of what its ranks hold."""

from collections import Counter
from collections.abc import Sequence

from penstock_enginecore.experts.layer import EMPTY
from penstock_enginecore.experts.placement import Placement, check_slots


def regrouped(held: Sequence[Sequence[Sequence[int]]], num_experts: int) -> Placement:
    """Of what each rank holds by layer and slot, ``EMPTY`` some, a placement in which what is held stays where it can.

    An expert that nobody holds comes to an empty slot, else to one whose expert is elsewhere too. Slots that are empty then get
    the experts that are in the fewest. Raises ConfigError where there are more ranks than experts, or too few slots.
    """
    slots = len(held[0][0])
    check_slots(num_experts, len(held), slots)
    layers = tuple(_layer([rank[layer] for rank in held], num_experts) for layer in range(len(held[0])))
    return Placement(num_experts, len(held), slots, layers)


def _layer(held: Sequence[Sequence[int]], num_experts: int) -> tuple[int, ...]:
    slots = len(held[0])
    placed = [expert for rank in held for expert in _once_each(rank)]
    replicas = Counter(placed)
    num_new = [0] * len(held)

    def put(expert: int, slot: int) -> None:
        replicas[placed[slot]] -= 1
        replicas[expert] += 1
        placed[slot] = expert
        num_new[slot // slots] += 1

    def reluctance(slot: int) -> tuple[int, int, int]:
        """Empty slots first, in order; else where an expert is most often, of the rank that has to read least."""
        if placed[slot] == EMPTY:
            return -len(placed) - 1, 0, slot
        return -replicas[placed[slot]], num_new[slot // slots], slot

    for expert in range(num_experts):
        if not replicas[expert]:
            room = [slot for slot, other in enumerate(placed) if other == EMPTY or replicas[other] > 1]
            put(expert, min(room, key=reluctance))
    for slot in [slot for slot, expert in enumerate(placed) if expert == EMPTY]:
        first = slot // slots * slots
        own = set(placed[first : first + slots])
        put(min(set(range(num_experts)) - own, key=lambda expert: (replicas[expert], expert)), slot)
    return tuple(placed)


def _once_each(rank: Sequence[int]) -> list[int]:
    """What is in two slots of a rank counts in the first."""
    return [EMPTY if expert in rank[:slot] else expert for slot, expert in enumerate(rank)]
