"""Weights of experts on their way to other ranks."""

import zlib
from collections.abc import Sequence

import torch

from penstock_enginecore.experts.balance import Move, moves_between
from penstock_enginecore.experts.placement import Placement
from penstock_enginecore.experts.spread import SpreadExperts


class ExpertMoves:
    """From the placement that ``experts`` have to ``after``, layer by layer. All ranks call ``step`` between the same steps.

    What arrives is kept aside until a layer is complete, and steps go on with the old placement. Then all ranks write it into
    their slots and change over, between the same two steps.
    """

    def __init__(self, experts: SpreadExperts, after: Placement, bytes_per_step: int) -> None:
        """Raises ValueError where ranks have weights in different layouts, which cannot be exchanged."""
        self._experts, self._after, self._budget = experts, after, bytes_per_step
        _check_layouts(experts)
        before = experts.placement
        moves = [moves_between(before, after, layer.layer) for layer in experts.layers]
        self._left = [(layer, queue) for layer, queue in enumerate(moves) if queue]
        self._arrived: dict[int, torch.Tensor] = {}
        self.num_moves = sum(map(len, moves))

    @property
    def done(self) -> bool:
        """Whether all layers have changed over."""
        return not self._left

    def step(self) -> int:
        """Exchange some experts of a layer. Returns how many this rank computes from now on. Raises CollectiveBroken, after which
        the old placement of that layer still stands.
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
            f"ranks keep the weights of experts in different layouts; rank {experts.group.rank}: {said.decode()}"
        )
