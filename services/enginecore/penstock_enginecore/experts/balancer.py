"""Load balancing of experts: computes new placements from measured load, and transfers weights between ranks."""

import heapq
import zlib
from collections.abc import Sequence
from statistics import fmean

import msgspec
import torch

from penstock_enginecore.config import ExpertParallelConfig
from penstock_enginecore.experts.layer import SpreadExperts
from penstock_enginecore.experts.placement import Placement

# Placement policy that balances the load of ranks. The policy is stateless and deterministic. First, the experts with
# the highest load get the spare slots, with at most one replica on each rank. Then replicas are assigned to ranks,
# highest load first. A replica stays on its rank, except if that rank would be overloaded. In that case, the replica is
# assigned to the rank with the least load. Finally, the rank with the highest load swaps experts with other ranks.
# DeepSeek's EPLB (expert parallelism load balancer) replicates and assigns experts in the same way, but ignores the
# current placement.

_SLACK = 1.04
"""Limit for the load of a rank, as a multiple of the mean load. Up to this limit, the rank keeps its current
experts.
"""
_WORTH = 0.05
"""Minimum increase of the balance (mean load divided by highest load). If the increase is smaller, no weights are
moved.
"""


class Move(msgspec.Struct, frozen=True):
    """Move of ``expert`` in ``layer`` from rank ``source`` to ``slot``. Slots are numbered over all ranks."""

    layer: int
    expert: int
    source: int
    slot: int


def balance(counts: Sequence[int], experts: Sequence[int], size: int) -> float:
    """Return the balance: the mean load of all ranks divided by the highest load of a rank. Return 1 if there are no
    tokens.

    ``counts`` has the number of tokens of each expert. ``experts`` has the expert in each slot of ``size`` ranks. The
    load of an expert is divided equally among its replicas.
    """
    loads = _rank_loads(counts, experts, size)
    return sum(loads) / size / max(loads) if max(loads) else 1.0


def rebalanced(counts: Sequence[int], experts: Sequence[int], size: int) -> tuple[int, ...]:
    """Return a new placement of experts in the slots of ``size`` ranks, based on the experts' token counts. If the
    improvement would be small, return the current placement.
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
    """Return the moves of a layer, in order of slots.

    If the receiving rank already has the expert in another slot, the receiving rank itself is the source. If several
    other ranks have the expert, they are used as sources in turn.
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
    """Return the number of slots that each expert gets. Each spare slot goes to the expert with the most tokens per
    replica.
    """
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
    """Assign the replicas of experts to ranks, and return the experts of each rank."""
    size = len(held)
    limit = _SLACK * sum(counts) / size
    loads, packed = [0.0] * size, [[] for _ in range(size)]  # type: tuple[list[float], list[list[int]]]
    order = sorted(range(len(counts)), key=lambda expert: (-counts[expert] / replicas[expert], expert))
    for expert in order:
        load = counts[expert] / replicas[expert]
        for _ in range(replicas[expert]):
            room = [rank for rank in range(size) if len(packed[rank]) < slots and expert not in packed[rank]]
            # If every rank with a free slot already has the expert, one of these ranks gets it twice.
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
    """Swap an expert of the rank with the highest load with an expert of another rank, so that the higher load of the
    two ranks falls. Returns whether such a swap was found.
    """
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
    """Return a rank's experts in slot order. Experts that the rank already had stay in their slots."""
    left = list(own)
    placed: list[int | None] = []
    for expert in before:
        stays = expert in left
        placed.append(expert if stays else None)
        if stays:
            left.remove(expert)
    return [left.pop(0) if expert is None else expert for expert in placed]


# Transfer of the weights of experts between ranks.


class ExpertMoves:
    """Moves experts from their current placement to ``after``, layer by layer. All ranks call ``step`` between the same
    steps.

    Received weights stay in a buffer until all weights of a layer have arrived. Until then, steps use the old
    placement. Then all ranks write the weights into their slots and switch to the new placement between the same two
    steps.
    """

    def __init__(self, experts: SpreadExperts, after: Placement, bytes_per_step: int) -> None:
        """Plan the moves. Raises ValueError if ranks store weights in different layouts, because such weights cannot be
        exchanged.
        """
        self._experts, self._after, self._budget = experts, after, bytes_per_step
        _check_layouts(experts)
        before = experts.placement
        moves = [moves_between(before, after, layer.layer) for layer in experts.layers]
        self._left = [(layer, queue) for layer, queue in enumerate(moves) if queue]
        self._arrived: dict[int, torch.Tensor] = {}
        self.num_moves = sum(map(len, moves))

    @property
    def done(self) -> bool:
        """Whether all layers have switched to the new placement."""
        return not self._left

    def step(self) -> int:
        """Transfer some experts of a layer. Returns the number of new experts that this rank computes from the next
        step on. If CollectiveBroken is raised, the old placement of the layer stays valid.
        """
        if self.done:
            return 0
        layer, queue = self._left[0]
        size = sum(map(len, self._experts.layers[layer].slot_memory(0)))
        count = max(self._budget // size, 1)
        now, rest = queue[:count], queue[count:]
        self._exchange(layer, now, size)
        if rest:
            self._left[0] = layer, rest
            return 0
        self._left.pop(0)
        return self._change_over(layer)

    def _exchange(self, layer: int, moves: Sequence[Move], size: int) -> None:
        group, placement = self._experts.group, self._experts.placement
        held = placement.held(group.rank, layer)

        def rank_of(move: Move) -> int:
            return move.slot // placement.slots

        sent = sorted((move for move in moves if move.source == group.rank), key=rank_of)
        received = sorted((move for move in moves if rank_of(move) == group.rank), key=lambda move: move.source)
        rows = [self._read(layer, held.index(move.expert)) for move in sent]
        arrived = group.all_to_all_rows(
            torch.stack(rows) if rows else torch.empty(0, size, dtype=torch.uint8),
            [sum(rank_of(move) == rank for move in sent) for rank in range(group.size)],
            [sum(move.source == rank for move in received) for rank in range(group.size)],
        )
        for move, row in zip(received, arrived, strict=True):
            self._arrived[move.slot % placement.slots] = row.clone()

    def _read(self, layer: int, slot: int) -> torch.Tensor:
        return torch.cat(self._experts.layers[layer].slot_memory(slot))

    def _change_over(self, layer: int) -> int:
        for slot, row in self._arrived.items():
            self._experts.leaving(self._experts.layers[layer], slot)
            memory = self._experts.layers[layer].slot_memory(slot)
            for part, values in zip(memory, torch.split(row, [len(part) for part in memory]), strict=True):
                part.copy_(values)
        num_arrived, self._arrived = len(self._arrived), {}
        self._experts.place(layer, self._after.physical[layer])
        return num_arrived


def _check_layouts(experts: SpreadExperts) -> None:
    said = "; ".join(layer.layout for layer in experts.layers).encode()
    rows = experts.group.exchange(zlib.crc32(said).to_bytes(4, "little"))
    if len(set(rows)) > 1:
        raise ValueError(
            f"ranks store the weights of experts in different layouts; rank {experts.group.rank} has the layout {said.decode()}"
        )


class ExpertBalancer:
    """Counts the tokens of ``config.window`` steps, and moves experts if that improves the balance.

    All ranks call ``after_step`` after the same steps. All ranks compute the same placement, because the placement is a
    pure function of the combined counts of all ranks.
    """

    def __init__(self, experts: SpreadExperts, config: ExpertParallelConfig) -> None:
        self._experts, self._config = experts, config
        self._steps = 0
        self._moves: ExpertMoves | None = None
        self.balance = 1.0
        """Mean number of tokens per rank divided by the highest number of a rank, averaged over layers, in the last
        window of steps.
        """

    def after_step(self) -> int:
        """Count the tokens of a step, and move experts if necessary. Return the number of experts that moved to this
        rank, which computes them from the next step on. Raises CollectiveBroken if the connection to another rank is
        lost.
        """
        if not self._config.window:
            return 0
        if self._moves is not None:
            num_arrived = self._moves.step()
            if self._moves.done:
                self._moves = None
                # Drop the token counts of this window, because some of them belong to the old placement.
                self._experts.routed()
            return num_arrived
        self._steps += 1
        if self._steps % self._config.window == 0:
            self._place_anew()
        return 0

    def _place_anew(self) -> None:
        group, placement = self._experts.group, self._experts.placement
        own = self._experts.routed()
        counted = group.all_gather_rows(own[None], [1] * group.size).sum(0).tolist()
        layers = list(zip(counted, placement.physical, strict=True))
        self.balance = fmean(balance(counts, layer, group.size) for counts, layer in layers)
        after = placement
        for layer, (counts, experts) in enumerate(layers):
            after = after.with_layer(layer, rebalanced(counts, experts, group.size))
        if after != placement:
            self._moves = ExpertMoves(self._experts, after, self._config.move_bytes_per_step)
