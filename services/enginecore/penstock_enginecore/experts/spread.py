"""A model whose experts are spread over the ranks of a group."""

import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from transformers import PreTrainedModel

from penstock_enginecore.experts import dispatch as all_to_all  # noqa: F401 - they register
from penstock_enginecore.experts import dispatch as gathering  # noqa: F401 - they register
from penstock_enginecore.experts.dispatch import make_dispatch
from penstock_enginecore.experts.layer import DispatchedExperts, Membership
from penstock_enginecore.experts.placement import Placement
from penstock_enginecore.parallel.group_collectives import GroupCollectives

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
