"""Where experts go so that ranks have as much to do as each other: the policy, without state and without luck.

The hottest experts get the spare slots, one replica per rank at most. Then replicas go to ranks, the heaviest first, each where
it is already unless that rank would have too much, else to the one that has least. At last the rank that has most swaps with
others. (EPLB of DeepSeek replicates and packs likewise, without regard to where experts are.)
"""

import heapq
from collections.abc import Sequence

import msgspec

from penstock_enginecore.experts.placement import Placement

_SLACK = 1.04
"""A rank's load, as a multiple of the mean, up to which it keeps what it has."""
_WORTH = 0.05
"""Gain in balance for which weights are moved."""


class Move(msgspec.Struct, frozen=True):
    """``expert``, which rank ``source`` has, comes to ``slot`` (of all ranks) in ``layer``."""

    layer: int
    expert: int
    source: int
    slot: int


def balance(counts: Sequence[int], experts: Sequence[int], size: int) -> float:
    """The mean of the ranks' loads over the highest, where experts have ``counts`` tokens and ``experts`` are those in the slots
    of ``size`` ranks. Replicas have equal shares. 1 where there are no tokens.
    """
    loads = _rank_loads(counts, experts, size)
    return sum(loads) / size / max(loads) if max(loads) else 1.0


def rebalanced(counts: Sequence[int], experts: Sequence[int], size: int) -> tuple[int, ...]:
    """The ``experts`` that the slots of ``size`` ranks should have, by the tokens of each. As they are, where another placement
    gains little.
    """
    slots = len(experts) // size
    shares = _replicas(counts, len(experts), size)
    held = [set(experts[rank * slots : (rank + 1) * slots]) for rank in range(size)]
    packed = _pack(counts, shares, held, slots)
    placed = tuple(
        expert
        for rank, own in enumerate(packed)
        for expert in _in_their_slots(own, experts[rank * slots : (rank + 1) * slots])
    )
    gain = balance(counts, placed, size) - balance(counts, experts, size)
    return placed if gain >= _WORTH else tuple(experts)


def moves_between(before: Placement, after: Placement, layer: int) -> list[Move]:
    """What has to come where, in the order of slots. A rank that has an expert in another slot is its own source; several others
    take turns.
    """
    old, new = before.physical[layer], after.physical[layer]
    sources: dict[int, list[int]] = {}
    for slot, expert in enumerate(old):
        sources.setdefault(expert, []).append(slot // before.slots)
    found = []
    for slot, expert in enumerate(new):
        if old[slot] == expert:
            continue
        own, ranks = slot // before.slots, sources[expert]
        source = own if own in ranks else ranks[slot % len(ranks)]
        found.append(Move(layer, expert, source, slot))
    return found


def _rank_loads(counts: Sequence[int], experts: Sequence[int], size: int) -> list[float]:
    replicas = [0] * len(counts)
    for expert in experts:
        replicas[expert] += 1
    slots = len(experts) // size
    return [
        sum(counts[expert] / replicas[expert] for expert in experts[rank * slots : (rank + 1) * slots])
        for rank in range(size)
    ]


def _replicas(counts: Sequence[int], num_slots: int, size: int) -> list[int]:
    """How many slots each expert gets: the spare ones go where a replica has most tokens."""
    replicas = [1] * len(counts)
    heaviest = [(float(-count), expert) for expert, count in enumerate(counts)]
    heapq.heapify(heaviest)
    for _ in range(num_slots - len(counts)):
        _, expert = heapq.heappop(heaviest)
        replicas[expert] += 1
        if replicas[expert] < size:
            heapq.heappush(heaviest, (-counts[expert] / replicas[expert], expert))
    return replicas


def _pack(counts: Sequence[int], replicas: Sequence[int], held: Sequence[set[int]], slots: int) -> list[list[int]]:
    """Experts by rank."""
    size = len(held)
    limit = _SLACK * sum(counts) / size
    loads, packed = [0.0] * size, [[] for _ in range(size)]  # type: tuple[list[float], list[list[int]]]
    order = sorted(range(len(counts)), key=lambda expert: (-counts[expert] / replicas[expert], expert))
    for expert in order:
        load = counts[expert] / replicas[expert]
        for _ in range(replicas[expert]):
            room = [rank for rank in range(size) if len(packed[rank]) < slots and expert not in packed[rank]]
            # Where every rank with room has it already, twice on one is as good as once.
            room = room or [rank for rank in range(size) if len(packed[rank]) < slots]
            stays = [rank for rank in room if expert in held[rank] and loads[rank] + load <= limit]
            rank = min(stays or room, key=lambda rank: (loads[rank], rank))
            packed[rank].append(expert)
            loads[rank] += load
    weights = [count / number for count, number in zip(counts, replicas, strict=True)]
    while _swap(weights, loads, packed, limit):
        pass
    return packed


def _swap(weights: Sequence[float], loads: list[float], packed: list[list[int]], limit: float) -> bool:
    """Exchange an expert of the rank that has most for one of another, so that neither has as much; whether that was done."""
    heavy = max(range(len(loads)), key=lambda rank: (loads[rank], -rank))
    if loads[heavy] <= limit:
        return False
    best, found = loads[heavy], None
    for other, own in enumerate(packed):
        for i, expert in enumerate(packed[heavy]):
            for j, given in enumerate(own):
                less = weights[expert] - weights[given]
                higher = max(loads[heavy] - less, loads[other] + less)
                if less > 0 and higher < best and expert not in own and given not in packed[heavy]:
                    best, found = higher, (other, i, j, less)
    if found is None:
        return False
    other, i, j, less = found
    packed[heavy][i], packed[other][j] = packed[other][j], packed[heavy][i]
    loads[heavy] -= less
    loads[other] += less
    return True


def _in_their_slots(own: Sequence[int], before: Sequence[int]) -> list[int]:
    """Experts of a rank, those that it had in the slots where they were."""
    left = list(own)
    placed: list[int | None] = []
    for expert in before:
        stays = expert in left
        placed.append(expert if stays else None)
        if stays:
            left.remove(expert)
    return [left.pop(0) if expert is None else expert for expert in placed]
