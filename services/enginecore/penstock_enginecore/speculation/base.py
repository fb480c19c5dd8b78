"""What every drafter is, what it gets and what it gives. Drafters run on the device thread, behind a step's sampling."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from penstock_enginecore.attention.base import IntArray
from penstock_enginecore.attention.kv_cache import KVMemory, LayerCaches, num_groups
from penstock_enginecore.core.kv_cache.spec import DRAFT_PREFIX, KVCacheConfig, KVCacheSpec
from penstock_enginecore.core.scheduler.output import NewRequestData
from penstock_enginecore.forward.base import ForwardBatch
from penstock_enginecore.sample.base import SamplingInputs


@dataclass(frozen=True, slots=True)
class DraftRequest:
    """A request of the step that is over, whose tokens are final. ``token_ids`` int32 ``[tokens]``: prompt and output, the newest
    included; a view that is overwritten later. ``num_drafts``: tokens to draft, at most; 0 for none.
    """

    request_id: str
    token_ids: npt.NDArray[np.int32]
    num_prompt_tokens: int
    num_drafts: int


class DraftStep(Protocol):
    """The step that is over, as drafters see it."""

    requests: Sequence[DraftRequest]
    """All that had tokens in it, in the order of the batch."""

    def lay_out(
        self, requests: Sequence[int], first: IntArray, tokens: Sequence[IntArray], *, ahead: int = 0
    ) -> ForwardBatch:
        """Lay out ``tokens[i]`` of the request at index ``requests[i]`` from position ``first[i]`` on, one request at least.
        There are blocks for ``num_drafts - 1`` positions behind the newest token; block tables go on for ``ahead`` positions.
        """

    def sampling(self, requests: Sequence[int], place: int | IntArray) -> SamplingInputs:
        """How these requests, by index, draw the draft at ``place``, the first is at 0, without rules. ``place`` int64
        ``[requests]``: each its own; a request may come several times then.
        """


class Drafter(Protocol):
    """Guesses tokens. What it gives is verified: it may be wrong, and costs time then, never a token.

    A request is begun once, may be followed by any number of steps, and is ended once. Whatever it raises switches it off.
    """

    name: str
    state_layers: Sequence[int]
    """Hidden states that it gets, as ``ForwardPass.keep_hidden`` counts them."""

    @property
    def specs(self) -> Mapping[str, KVCacheSpec]:
        """What its attention layers ask of the KV cache, by layer name, ``draft.`` first; on the requests' block tables."""

    @property
    def weight_bytes(self) -> int:
        """Bytes of its weights."""

    @property
    def caches(self) -> LayerCaches:
        """Its keys and values, by the names of ``specs``; empty while there are none."""

    def allocate(self, config: KVCacheConfig) -> None:
        """Take memory for the keys and values of its layers among those of ``config``, and know nothing of what is in it."""

    def release(self) -> None:
        """Let go of it."""

    def begin(self, request: NewRequestData) -> None:
        """A request that steps will have, maybe again behind a preemption."""

    def end(self, request_id: str, token_ids: npt.NDArray[np.int32], *, num_prompt_tokens: int) -> None:
        """A request that steps have no more, for now or for good, with its tokens."""

    def observe(self, step: DraftStep, first: IntArray, states: Sequence[torch.Tensor]) -> None:
        """Hidden states of a step, where it asked for some, before tokens are chosen: ``states[i]`` ``[tokens, width]`` of the
        request at index i from position ``first[i]`` on, drafts included. Tokens that are not known here are negative.
        """

    def propose(self, step: DraftStep) -> list[list[int]]:
        """Draft behind a step: a list per request of it, of ``num_drafts`` tokens at most."""

    def to(self, device: torch.device) -> None:
        """Move the weights."""


class Stateless:
    """The part of a ``Drafter`` that concerns hidden states, for one that has no use for them."""

    state_layers: Sequence[int] = ()

    def observe(self, step: DraftStep, first: IntArray, states: Sequence[torch.Tensor]) -> None:
        """Nothing is asked for."""


# The attention layers of a drafter among those of the model: the same block tables, memory of their own.


def model_layers(config: KVCacheConfig) -> KVCacheConfig:
    """The groups with the layers of the model alone; one may have none left."""
    return _with(config, lambda name: None if name.startswith(DRAFT_PREFIX) else name)


def draft_layers(config: KVCacheConfig) -> KVCacheConfig:
    """The groups with the layers of the drafter alone, by the names that these have themselves; one may have none."""
    return _with(config, lambda name: name.removeprefix(DRAFT_PREFIX) if name.startswith(DRAFT_PREFIX) else None)


def _with(config: KVCacheConfig, name_of: Callable[[str], str | None]) -> KVCacheConfig:
    groups = [
        msgspec.structs.replace(
            group, layer_names=tuple(own for name in group.layer_names if (own := name_of(name)) is not None)
        )
        for group in config.groups
    ]
    return msgspec.structs.replace(config, groups=tuple(groups))


class Layers(Protocol):
    """What runs a drafter's layers; see ``ForwardPass``."""

    @property
    def specs(self) -> Mapping[str, KVCacheSpec]:
        """By the layers' own names."""

    @property
    def memory(self) -> KVMemory:
        """Allocates caches for ``bind``."""

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights."""

    def bind(self, caches: LayerCaches) -> None:
        """Run on this KV cache from now on."""


class WithLayers:
    """The part of a ``Drafter`` that concerns its weights and the keys and values of its layers, which ``layers`` runs.
    ``num_groups``: of the KV cache, up to the last that has some of them.
    """

    def __init__(self, layers: Layers) -> None:
        self._layers = layers
        self.caches: LayerCaches = {}
        self.num_groups = 0

    @property
    def specs(self) -> Mapping[str, KVCacheSpec]:
        """Its layers, behind the prefix that tells them from the model's."""
        return {DRAFT_PREFIX + name: spec for name, spec in self._layers.specs.items()}

    @property
    def weight_bytes(self) -> int:
        """Those of what runs them."""
        return self._layers.weight_bytes

    def allocate(self, config: KVCacheConfig) -> None:
        """Keys and values of its own layers."""
        caches = self._layers.memory.allocate(draft_layers(config))
        for layer in caches.values():
            if (
                layer.cache.keys.device.type != "cpu"
            ):  # a host's fresh memory is zeros; what nobody computed may be attended over
                layer.cache.keys.zero_()
                layer.cache.values.zero_()
        self._layers.bind(caches)
        self.caches = {DRAFT_PREFIX + name: layer for name, layer in caches.items()}
        self.num_groups = num_groups(caches)

    def release(self) -> None:
        """Let go of them."""
        self._layers.bind({})
        self.caches = {}
