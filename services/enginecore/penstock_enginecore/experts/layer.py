"""Layer that has only some of a model's experts on this rank, and models whose experts are distributed over ranks."""

import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import PreTrainedModel

from penstock_enginecore.experts import dispatch as all_to_all  # noqa: F401 - registers dispatches
from penstock_enginecore.experts import dispatch as gathering  # noqa: F401 - registers dispatches
from penstock_enginecore.experts.dispatch import Dispatch, Ranks, Routed, make_dispatch
from penstock_enginecore.experts.placement import Placement
from penstock_enginecore.parallel.group_collectives import GroupCollectives

# Group of ranks that compute experts, and the placement of experts on these ranks.


@dataclass(slots=True)
class Membership:
    """Membership of this rank in a group: the group's collectives, the placement of experts, and the dispatch method.
    ``counts`` has the number of tokens of each rank in the current step.
    """

    group: GroupCollectives
    placement: Placement
    dispatch: Dispatch
    counts: Sequence[int] = ()
    _tables: dict[int, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)

    def slots_of(self, layer: int, chosen: torch.Tensor) -> torch.Tensor:
        """Return the slots, numbered over all ranks, that compute the experts ``chosen``, int64 ``[tokens, top]``.

        If an expert has several replicas, its tokens are assigned to the replicas in turn. Ranks start with different
        replicas.
        """
        slots, number = self._table(layer)
        turns = torch.arange(self.group.rank, self.group.rank + len(chosen))[:, None]
        return slots[chosen, turns % number[chosen]]

    def place(self, layer: int, experts: Sequence[int]) -> None:
        """Set which experts are in the slots of a layer from now on."""
        self.placement = self.placement.with_layer(layer, experts)
        self._tables.pop(layer, None)

    def _table(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a table with the slots of each expert ``[experts, most replicas]``, and the number of slots of each
        expert ``[experts]``.
        """
        if layer not in self._tables:
            replicas = self.placement.replicas(layer)
            most = max(map(len, replicas))
            slots = torch.tensor([each + each[:1] * (most - len(each)) for each in replicas])
            self._tables[layer] = slots, torch.tensor([len(each) for each in replicas])
        return self._tables[layer]


MAX_TOKENS = 2048
"""Maximum number of tokens of a rank in one dispatch. Longer steps are split, to limit the size of gathered tensors."""
EMPTY = -1
"""Value that stands for no expert in lists of the experts in slots."""


class DispatchedExperts(torch.nn.Module):
    """Replacement for a model's experts module, which dispatches tokens to ranks.

    Without a group, the layer computes only the experts in its own slots, and all other experts contribute zero. A
    model can therefore be loaded and checked before a group exists.

    Args:
        layer: Number of the layer of experts.
        num_experts: Number of experts in the model's layer.
        experts: Module of the replaced class, with one expert per slot of this rank.
        held: Number of the expert in each slot, or ``EMPTY``.

    Attributes:
        routed: Number of this rank's tokens that were routed to each expert, since the last reset.
    """

    has_routed_experts = True

    def __init__(self, layer: int, num_experts: int, experts: torch.nn.Module, held: Sequence[int]) -> None:
        super().__init__()
        self.layer = layer
        self.experts = experts
        self.routed = torch.zeros(num_experts, dtype=torch.int64)
        self._num_experts = num_experts
        self._membership: Membership | None = None
        self._none: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None
        self.hold(held)

    def hold(self, held: Sequence[int]) -> None:
        """Record which expert is in each slot, without changing weights. ``held`` has an expert number for each slot,
        or ``EMPTY`` for an unused slot.
        """
        self.held = tuple(held)
        self._own_slots = torch.full((self._num_experts,), EMPTY)
        for slot, expert in enumerate(held):
            if expert != EMPTY:
                self._own_slots[expert] = slot

    def write(self, slot: int, expert: int, weights: Mapping[str, torch.Tensor]) -> None:
        """Write an expert into a slot. ``weights`` has the parameter names of ``experts``.

        Raises ValueError if the weights do not fit. In that case, the slot becomes empty.
        """
        self._hold(slot, EMPTY)
        experts: Any = self.experts
        if hasattr(experts, "write"):
            experts.write(slot, weights)
        else:
            for name, weight in experts.named_parameters(recurse=False):
                weight.data[slot].copy_(weights[name])
        self._hold(slot, expert)

    def packed(self, weights: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
        """Return an expert with these weights as new tensors in the format of ``slot_memory``, for use with ``put``.
        Raises the errors of ``write``.

        Steps may run during this call.
        """
        experts: Any = self.experts
        if hasattr(experts, "packed"):
            memory: list[torch.Tensor] = experts.packed(weights)
            return memory
        copies = [
            torch.empty_like(weight.data[0]).copy_(weights[name])
            for name, weight in experts.named_parameters(recurse=False)
        ]
        return [copy.flatten().view(torch.uint8) for copy in copies]

    def put(self, slot: int, expert: int, packed: Sequence[torch.Tensor]) -> None:
        """Put a ``packed`` expert into a slot."""
        for memory, values in zip(self.slot_memory(slot), packed, strict=True):
            memory.copy_(values)
        self._hold(slot, expert)

    def _hold(self, slot: int, expert: int) -> None:
        self.hold([*self.held[:slot], expert, *self.held[slot + 1 :]])

    def join(self, membership: Membership | None) -> None:
        """Use this group for later steps. If ``membership`` is None, later steps compute without a group."""
        self._membership = membership

    def slot_memory(self, slot: int) -> list[torch.Tensor]:
        """Return the memory of a slot of this rank as tensors of writable bytes, uint8 ``[n]``."""
        experts: Any = self.experts
        if hasattr(experts, "slot_memory"):
            memory: list[torch.Tensor] = experts.slot_memory(slot)
            return memory
        return [weight.data[slot].flatten().view(torch.uint8) for weight in experts.parameters()]

    @property
    def layout(self) -> str:
        """Name of the memory format of an expert. Ranks with equal layouts can exchange experts."""
        experts: Any = self.experts
        return getattr(experts, "layout", "") or ", ".join(str(weight.dtype) for weight in experts.parameters())

    def take_part(self) -> None:
        """Compute tokens of other ranks in a step in which this rank has no tokens. Raises RuntimeError if the layer
        has never run.
        """
        if self._none is None:
            raise RuntimeError(f"expert layer {self.layer} has not run yet, so the shape of its inputs is unknown")
        self._dispatch(*self._none)

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """Return the weighted sum of the outputs of each token's experts, ``[tokens, hidden]``. The inputs are the
        states ``[tokens, hidden]``, and the chosen experts and their weights, each ``[tokens, top]``. Raises
        CollectiveBroken.
        """
        if self._none is None:
            self._none = hidden_states[:0], top_k_index[:0], top_k_weights[:0]
        if self._membership is None:
            return self._alone(hidden_states, top_k_index, top_k_weights)
        self.routed += torch.bincount(top_k_index.flatten(), minlength=self._num_experts)
        return self._dispatch(hidden_states, top_k_index, top_k_weights)

    def _alone(self, states: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        slots = self._own_slots[chosen]
        summed: torch.Tensor = self.experts(states, slots.clamp(min=0), weights.masked_fill(slots < 0, 0.0))
        return summed

    def _dispatch(self, states: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        membership: Any = self._membership
        group, counts = membership.group, membership.counts
        if counts[group.rank] != len(states):
            raise RuntimeError(
                f"rank {group.rank} announced {counts[group.rank]} tokens for this step, but has {len(states)}"
            )
        slots = membership.slots_of(self.layer, chosen)
        pieces = []
        for first in range(0, max(counts), MAX_TOKENS):
            part = slice(first, first + MAX_TOKENS)
            routed = Routed(states[part], slots[part], weights[part])
            own_counts = [min(max(count - first, 0), MAX_TOKENS) for count in counts]
            ranks = Ranks(group, own_counts, membership.placement.slots)
            pieces.append(membership.dispatch(routed, ranks, self._compute))
        return torch.cat(pieces) if pieces else torch.zeros_like(states)

    def _compute(self, states: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.experts(states, slots[:, None], states.new_ones(len(slots), 1))
        return outputs


# Model whose experts are distributed over the ranks of a group.

_COUNT = struct.Struct("<q")


class SpreadExperts:
    """All layers of a model whose experts are distributed over ranks, in order. All ranks of a group call the same
    methods between the same steps.
    """

    def __init__(self, layers: Sequence[DispatchedExperts], dispatch: str) -> None:
        """Prepare the layers for the dispatch method ``dispatch``. Raises ConfigError if this method is unknown."""
        self.layers = tuple(layers)
        self._dispatch = make_dispatch(dispatch)
        self._membership: Membership | None = None
        self.leaving: Callable[[DispatchedExperts, int], None] = lambda *_: None
        """Function that is called with a layer and a slot before the expert in this slot is replaced while the group
        serves.
        """

    def join(self, group: GroupCollectives, placement: Placement) -> None:
        """Use this group from the next step on. The slots must already have the experts that ``placement`` assigns to
        this rank. Raises ValueError otherwise.
        """
        for layer in self.layers:
            wanted = placement.held(group.rank, layer.layer)
            if layer.held != wanted:
                raise ValueError(
                    f"layer {layer.layer} of rank {group.rank} has the experts {layer.held}, but the placement "
                    f"assigns the experts {wanted}"
                )
        self._set(Membership(group, placement, self._dispatch))

    def leave(self) -> None:
        """Leave the group. From now on, the layers compute without a group."""
        self._set(None)

    @property
    def group(self) -> GroupCollectives:
        """The current group. Raises RuntimeError if there is no group."""
        return self._in_group().group

    def place(self, layer: int, experts: Sequence[int]) -> None:
        """Set the placement of a layer's experts, from the next step on. This rank's slots must already have these
        experts.
        """
        membership = self._in_group()
        membership.place(layer, experts)
        self.layers[layer].hold(membership.placement.held(membership.group.rank, layer))

    @property
    def placement(self) -> Placement:
        """Placement of experts in the current group. Raises RuntimeError without a group."""
        return self._in_group().placement

    @property
    def joined(self) -> bool:
        """Whether this rank is in a group."""
        return self._membership is not None

    def begin_step(self, num_tokens: int) -> Sequence[int]:
        """Exchange token counts before all ranks compute a step, and return the count of each rank.

        Raises CollectiveBroken, and RuntimeError without a group.
        """
        membership = self._in_group()
        rows = membership.group.exchange(_COUNT.pack(num_tokens))
        membership.counts = counts = [_COUNT.unpack(row)[0] for row in rows]
        return counts

    def take_part(self) -> Sequence[int]:
        """Compute tokens of other ranks in a step in which this rank has no tokens. Call this method instead of
        ``begin_step`` and the layers. Returns the token count of each rank.

        Raises CollectiveBroken if the connection to another rank is lost.
        """
        counts = self.begin_step(0)
        if any(counts):
            for layer in self.layers:
                layer.take_part()
        return counts

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Return a context in which this rank computes without the group, for steps that the other ranks do not
        compute.
        """
        membership = self._membership
        self._set(None)
        try:
            yield
        finally:
            self._set(membership)

    def routed(self) -> torch.Tensor:
        """Return the number of this rank's tokens by layer and expert, int64 ``[layers, experts]``, and reset these
        numbers to 0.
        """
        counts = torch.stack([layer.routed for layer in self.layers])
        for layer in self.layers:
            layer.routed = torch.zeros_like(layer.routed)
        return counts

    def _in_group(self) -> Membership:
        if self._membership is None:
            raise RuntimeError(
                "the experts are distributed over ranks, but this rank is in no data-parallel group; join a group first"
            )
        return self._membership

    def _set(self, membership: Membership | None) -> None:
        self._membership = membership
        for layer in self.layers:
            layer.join(membership)


def dispatched_layers(module: PreTrainedModel) -> list[DispatchedExperts]:
    """Return the layers of a model that dispatch tokens to ranks. The model must have been loaded for a group."""
    return [child for child in module.modules() if isinstance(child, DispatchedExperts)]
