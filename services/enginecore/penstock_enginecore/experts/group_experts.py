"""Experts that a rank keeps when the members of its data-parallel group change."""

import logging
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from penstock_common.errors import ConfigError
from penstock_enginecore.config import ExpertParallelConfig
from penstock_enginecore.core.collective_errors import CollectiveBroken, UnpreparedError
from penstock_enginecore.data_parallel.core.group_channels import GroupLink
from penstock_enginecore.experts.balancer import ExpertBalancer
from penstock_enginecore.experts.layer import EMPTY, DispatchedExperts, SpreadExperts
from penstock_enginecore.experts.loading import ExpertReader
from penstock_enginecore.experts.placement import Placement, check_slots
from penstock_enginecore.models.errors import ModelLoadError
from penstock_enginecore.parallel.group_collectives import GroupCollectives

# Placement of experts in a new group. The placement is a pure function of the experts that the group's ranks already
# have.


def regrouped(held: Sequence[Sequence[Sequence[int]]], num_experts: int) -> Placement:
    """Return a placement that leaves experts in their current slots where possible.

    ``held`` has the expert in each slot of each rank, by layer, or ``EMPTY``. An expert that no rank has is placed in
    an empty slot, or replaces an expert that has replicas. Then the experts with the fewest replicas are placed in the
    remaining empty slots. Raises ConfigError if there are more ranks than experts, or too few slots.
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
        """Return a sort key. Empty slots are first, in order. Next are the slots of the experts with the most replicas;
        among these, the slots on the rank with the fewest new experts are first.
        """
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
    """Return a rank's experts. If an expert occurs more than once, all its slots except the first become ``EMPTY``."""
    return [EMPTY if expert in rank[:slot] else expert for slot, expert in enumerate(rank)]


logger = logging.getLogger(__name__)

_AT_ONCE = 8
"""Number of experts that are read from the checkpoint at a time. While these experts are copied into slots, they are in
memory twice.
"""


@dataclass(slots=True)
class _Prepared:
    """Placement for the next group.

    ``aside`` is the buffer with packed experts, by layer and expert, which only need to be copied into slots. These
    experts were read while another group served, or were replaced in their slots during that time.
    """

    placement: Placement
    rank: int
    aside: dict[tuple[int, int], list[torch.Tensor]] = field(default_factory=dict)


class GroupExperts:
    """Experts that this rank keeps from one group to the next (see ``SharedExperts``). Before the first group, the rank
    has no experts.

    Ranks exchange lists of the experts that they have. Therefore no rank needs to know how the previous group ended,
    even if the group was moving experts at that time or some ranks are new. A rank reads missing experts from the
    checkpoint. If no group serves, the rank reads the experts into its slots. While a group serves, the slots belong to
    that group, so the rank reads the experts into a buffer. If an expert is replaced in a slot, but the next group
    needs it in that slot, the rank also copies the expert to the buffer.
    """

    def __init__(self, experts: SpreadExperts, reader: ExpertReader, config: ExpertParallelConfig) -> None:
        self.spread, self._reader, self._config = experts, reader, config
        experts.leaving = self._keep
        for layer in experts.layers:
            layer.hold((EMPTY,) * len(layer.held))
        self._reading = threading.Lock()
        self._prepared: dict[int, _Prepared] = {}
        self._serving = 0
        """Epoch of the group that this rank joined last."""
        self._balancer: ExpertBalancer | None = None
        self.balance = 1.0
        """See ``SharedExperts``."""
        self.num_moved = 0
        """See ``SharedExperts``."""
        self.num_read = 0
        """Number of experts read from the checkpoint so far, over all layers."""

    @property
    def num_experts(self) -> int:
        return len(self.spread.layers[0].routed)

    @property
    def layout(self) -> str:
        layers = self.spread.layers
        return f"{len(layers[0].held)} slots; {'; '.join(dict.fromkeys(layer.layout for layer in layers))}"

    @torch.inference_mode()
    def prepare(self, epoch: int, link: GroupLink, given_up: Callable[[], bool]) -> None:
        group: GroupCollectives = link.collectives
        try:
            prepared = _Prepared(self._agree(group), group.rank)
            with self._reading:
                if epoch < max(self._prepared, default=0):
                    raise CollectiveBroken("a later group is already being prepared")
                before, serving = self.num_read, self.spread.joined
                self._prepared[epoch] = (
                    prepared  # Set this first, so that ``_keep`` saves experts that are replaced from now on.
                )
                try:
                    for layer in self.spread.layers:
                        self._fetch(prepared, layer, given_up, aside=serving)
                except BaseException:
                    del self._prepared[epoch]
                    raise
                logger.info(
                    "this rank read the weights of experts from the checkpoint, to prepare a data-parallel group "
                    "epoch=%d experts=%d",
                    epoch,
                    self.num_read - before,
                )
        except (ConfigError, ModelLoadError, ValueError) as e:
            raise UnpreparedError(str(e)) from e

    def leave(self) -> None:
        self.spread.leave()
        self._balancer = None

    @torch.inference_mode()
    def join(self, epoch: int, link: GroupLink) -> None:
        group: GroupCollectives = link.collectives
        with self._reading:
            prepared = self._prepared[epoch]
            try:
                for layer in self.spread.layers:
                    self._fetch(prepared, layer, lambda: False, aside=False)
            except (ModelLoadError, ValueError) as e:
                raise UnpreparedError(str(e)) from e
            prepared.aside.clear()
            self._prepared = {later: each for later, each in self._prepared.items() if later >= epoch}
            self.spread.join(group, prepared.placement)
            self._serving = epoch
        self._balancer = ExpertBalancer(self.spread, self._config)

    @torch.inference_mode()
    def after_step(self) -> None:
        if self._balancer is not None:
            self.num_moved += self._balancer.after_step()
            self.balance = self._balancer.balance

    def _agree(self, group: GroupCollectives) -> Placement:
        layers = self.spread.layers
        own = torch.tensor([[layer.held for layer in layers]], dtype=torch.int32)
        held = group.all_gather_rows(own, [1] * group.size)
        return regrouped(held.tolist(), self.num_experts)

    def _keep(self, layer: DispatchedExperts, slot: int) -> None:
        """Copy a slot's expert to the buffer, if a later group needs the expert in this slot. Runs on the busy loop's
        thread, even while a group is being prepared.
        """
        for epoch, prepared in list(self._prepared.items()):
            expert = layer.held[slot]
            if epoch > self._serving and prepared.placement.held(prepared.rank, layer.layer)[slot] == expert:
                prepared.aside[layer.layer, expert] = [memory.clone() for memory in layer.slot_memory(slot)]

    def _fetch(
        self, prepared: _Prepared, layer: DispatchedExperts, given_up: Callable[[], bool], *, aside: bool
    ) -> None:
        """Read the experts that are missing in the layer's slots. If ``aside``, read these experts into the buffer
        instead of the slots.
        """
        wanted = prepared.placement.held(prepared.rank, layer.layer)
        lacking = [(slot, expert) for slot, expert in enumerate(wanted) if layer.held[slot] != expert]
        ready = prepared.aside
        for slot, expert in lacking:
            if not aside and (packed := ready.pop((layer.layer, expert), None)) is not None:
                layer.put(slot, expert, packed)
        lacking = [(slot, expert) for slot, expert in lacking if layer.held[slot] != expert]
        for first in range(0, len(lacking), _AT_ONCE):
            if given_up():
                raise CollectiveBroken("the group was given up while experts were read")
            some = lacking[first : first + _AT_ONCE]
            read = self._reader.read(layer.layer, [expert for _, expert in some])
            self.num_read += len(some)
            for index, (slot, expert) in enumerate(some):
                weights = {name: each[index] for name, each in read.items()}
                if aside:
                    ready[layer.layer, expert] = layer.packed(weights)
                else:
                    layer.write(slot, expert, weights)
