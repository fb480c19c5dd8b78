"""A layer's experts, of which this rank holds some, and models whose experts are spread over ranks."""

import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import PreTrainedModel

from penstock_enginecore.experts import dispatch as all_to_all  # noqa: F401 - they register
from penstock_enginecore.experts import dispatch as gathering  # noqa: F401 - they register
from penstock_enginecore.experts.dispatch import Dispatch, Ranks, Routed, make_dispatch
from penstock_enginecore.experts.placement import Placement
from penstock_enginecore.parallel.group_collectives import GroupCollectives

# The group that a rank's experts compute with, and what is where in it.


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


MAX_TOKENS = 2048
"""Of a rank at a time: longer steps are dispatched in pieces, so that what is gathered has a bound."""
EMPTY = -1
"""What a slot holds that no expert has come to."""


class DispatchedExperts(torch.nn.Module):
    """Stands for experts of a model. ``experts``: a module like those it stands for, of as many as a rank has slots. ``held``:
    what these are, ``EMPTY`` some.

    In no group it computes what it holds, and takes what other experts would add for zero: so a model is loaded and looked at
    before there is a group. ``routed``: tokens of this rank by expert, since somebody set it to zero.
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
        """The slots of ``experts`` have these now."""
        self.held = tuple(held)
        self._own_slots = torch.full((self._num_experts,), EMPTY)
        for slot, expert in enumerate(held):
            if expert != EMPTY:
                self._own_slots[expert] = slot

    def write(self, slot: int, expert: int, weights: Mapping[str, torch.Tensor]) -> None:
        """Have ``expert`` in a slot: ``weights`` by the names that they have in ``experts``. Raises ValueError, after which
        nothing is there, where they do not fit.
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
        """What ``slot_memory`` is of an expert with these weights, in memory of its own, for ``put``. Steps may be computed
        meanwhile. Raises as ``write``.
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
        """Have ``expert``, which was ``packed``, in a slot."""
        for memory, values in zip(self.slot_memory(slot), packed, strict=True):
            memory.copy_(values)
        self._hold(slot, expert)

    def _hold(self, slot: int, expert: int) -> None:
        self.hold([*self.held[:slot], expert, *self.held[slot + 1 :]])

    def join(self, membership: Membership | None) -> None:
        """Compute with this group from now on; None: alone."""
        self._membership = membership

    def slot_memory(self, slot: int) -> list[torch.Tensor]:
        """What the expert in a slot of this rank is made of, as bytes uint8 ``[n]`` that may be written to."""
        experts: Any = self.experts
        if hasattr(experts, "slot_memory"):
            memory: list[torch.Tensor] = experts.slot_memory(slot)
            return memory
        return [weight.data[slot].flatten().view(torch.uint8) for weight in experts.parameters()]

    @property
    def layout(self) -> str:
        """Experts of ranks with the same layout can be exchanged."""
        experts: Any = self.experts
        return getattr(experts, "layout", "") or ", ".join(str(weight.dtype) for weight in experts.parameters())

    def take_part(self) -> None:
        """In a step of which this rank has no token. RuntimeError before the layer has computed anything."""
        if self._none is None:
            raise RuntimeError(f"layer {self.layer} of experts has never run: what its tokens look like is not known")
        self._dispatch(*self._none)

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """As the experts it stands for: ``[tokens, hidden]`` and twice ``[tokens, top]`` to ``[tokens, hidden]``. Raises
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
            raise RuntimeError(f"rank {group.rank} told of {counts[group.rank]} tokens and has {len(states)}")
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


# A model whose experts are spread over the ranks of a group.

_COUNT = struct.Struct("<q")


class SpreadExperts:
    """The layers of a model that are dispatched, in order. All ranks of a group call the same methods between the same steps."""

    def __init__(self, layers: Sequence[DispatchedExperts], dispatch: str) -> None:
        """Raises ConfigError for a ``dispatch`` that nobody has registered."""
        self.layers = tuple(layers)
        self._dispatch = make_dispatch(dispatch)
        self._membership: Membership | None = None
        self.leaving: Callable[[DispatchedExperts, int], None] = lambda *_: None
        """Called with a layer and a slot whose expert is about to give way to another one, while the group serves."""

    def join(self, group: GroupCollectives, placement: Placement) -> None:
        """Compute with this group from the next step on. Its slots hold what ``placement`` says of this rank. Raises ValueError
        where a layer holds something else.
        """
        for layer in self.layers:
            wanted = placement.held(group.rank, layer.layer)
            if layer.held != wanted:
                raise ValueError(
                    f"layer {layer.layer} of rank {group.rank} holds {layer.held}, its placement says {wanted}"
                )
        self._set(Membership(group, placement, self._dispatch))

    def leave(self) -> None:
        """Compute alone."""
        self._set(None)

    @property
    def group(self) -> GroupCollectives:
        """RuntimeError in none."""
        return self._in_group().group

    def place(self, layer: int, experts: Sequence[int]) -> None:
        """From the next step on the slots of all ranks have these in a layer; this rank's have them already."""
        membership = self._in_group()
        membership.place(layer, experts)
        self.layers[layer].hold(membership.placement.held(membership.group.rank, layer))

    @property
    def placement(self) -> Placement:
        """That of the group. RuntimeError in none."""
        return self._in_group().placement

    @property
    def joined(self) -> bool:
        """Whether it computes with a group."""
        return self._membership is not None

    def begin_step(self, num_tokens: int) -> Sequence[int]:
        """All ranks are about to compute a step, in which this one has so many tokens. Returns those of each. Raises
        CollectiveBroken; RuntimeError in no group.
        """
        membership = self._in_group()
        rows = membership.group.exchange(_COUNT.pack(num_tokens))
        membership.counts = counts = [_COUNT.unpack(row)[0] for row in rows]
        return counts

    def take_part(self) -> Sequence[int]:
        """A step of which this rank has no tokens, in place of ``begin_step`` and the layers. Returns as that. Raises
        CollectiveBroken.
        """
        counts = self.begin_step(0)
        if any(counts):
            for layer in self.layers:
                layer.take_part()
        return counts

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Compute without the group within the ``with`` block, where others do not come along."""
        membership = self._membership
        self._set(None)
        try:
            yield
        finally:
            self._set(membership)

    def routed(self) -> torch.Tensor:
        """Tokens of this rank by layer and expert since the last call, int64 ``[layers, experts]``."""
        counts = torch.stack([layer.routed for layer in self.layers])
        for layer in self.layers:
            layer.routed = torch.zeros_like(layer.routed)
        return counts

    def _in_group(self) -> Membership:
        if self._membership is None:
            raise RuntimeError("the experts are in no group")
        return self._membership

    def _set(self, membership: Membership | None) -> None:
        self._membership = membership
        for layer in self.layers:
            layer.join(membership)


def dispatched_layers(module: PreTrainedModel) -> list[DispatchedExperts]:
    """Those of a model that was loaded for a group."""
    return [child for child in module.modules() if isinstance(child, DispatchedExperts)]
