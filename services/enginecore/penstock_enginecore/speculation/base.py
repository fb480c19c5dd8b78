"""Interface of drafters, with their inputs and outputs. Drafters run on the device thread, after a step has sampled
tokens.
"""

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
    """A request of the completed step, as a drafter sees it. The request's tokens are final.

    Attributes:
        token_ids: int32 ``[tokens]``: prompt and output, including the newest token. The array is a view that later
            steps overwrite.
        num_drafts: Maximum number of tokens to draft for this request, or 0 for none.
    """

    request_id: str
    token_ids: npt.NDArray[np.int32]
    num_prompt_tokens: int
    num_drafts: int


class DraftStep(Protocol):
    """Completed step, with the functions that a drafter needs to compute drafts."""

    requests: Sequence[DraftRequest]
    """Requests that had tokens in the step, in batch order."""

    def lay_out(
        self, requests: Sequence[int], first: IntArray, tokens: Sequence[IntArray], *, ahead: int = 0
    ) -> ForwardBatch:
        """Build the batch for a forward pass of the drafter. At least one request is required. For each request, blocks
        are allocated for ``num_drafts - 1`` positions after the newest token.

        Args:
            requests: Indices of requests.
            first: Position of the first token of ``tokens``, for each request.
            tokens: Tokens to compute, for each request.
            ahead: Number of positions after these tokens that block tables must also cover.
        """

    def sampling(self, requests: Sequence[int], place: int | IntArray) -> SamplingInputs:
        """Return the sampling inputs for drafts of these requests. The inputs do not contain rules that change logits,
        such as penalties.

        Args:
            requests: Indices of requests.
            place: Index of the draft in a request's chain of drafts, from 0. An int64 tensor ``[requests]`` gives a
                separate index for each entry of ``requests``. In that case, a request may occur several times.
        """


class Drafter(Protocol):
    """Proposes draft tokens. The model verifies the drafts, so a wrong draft costs time but never changes the output.

    For each request, ``begin`` is called once before its steps, and ``end`` once after its steps. If a drafter raises
    any error, the drafter is switched off.
    """

    name: str
    state_layers: Sequence[int]
    """Numbers of the layers whose hidden states the drafter needs, counted as in ``ForwardPass.keep_hidden``."""

    @property
    def specs(self) -> Mapping[str, KVCacheSpec]:
        """KV cache needs of the drafter's attention layers, by layer name with the prefix ``draft.``. These layers use
        the block tables of the requests.
        """

    @property
    def weight_bytes(self) -> int:
        """Size of the drafter's weights in bytes."""

    @property
    def caches(self) -> LayerCaches:
        """The drafter's keys and values, by the names of ``specs``. Empty while they are not allocated."""

    def allocate(self, config: KVCacheConfig) -> None:
        """Allocate memory for keys and values of the drafter's layers, as ``config`` describes. The drafter must not
        rely on the earlier content of this memory.
        """

    def release(self) -> None:
        """Free the memory for keys and values."""

    def begin(self, request: NewRequestData) -> None:
        """Add a request that later steps will contain. A preempted request is added again when it resumes."""

    def end(self, request_id: str, token_ids: npt.NDArray[np.int32], *, num_prompt_tokens: int) -> None:
        """Remove a request. ``token_ids`` are its tokens. The request may be added again after a preemption."""

    def observe(self, step: DraftStep, first: IntArray, states: Sequence[torch.Tensor]) -> None:
        """Receive the hidden states of ``state_layers``, before the step samples tokens.

        Args:
            step: The step that is being computed.
            first: Position of the first state in ``states``, for each request.
            states: ``[tokens, width]`` for each request of the step, including drafts. In ``token_ids``, tokens that
                are not known yet are negative.
        """

    def propose(self, step: DraftStep) -> list[list[int]]:
        """Draft tokens after a step. Returns one list for each request of the step, with at most ``num_drafts`` tokens."""

    def to(self, device: torch.device) -> None:
        """Move the weights to ``device``."""


class Stateless:
    """Base of drafters that do not use the model's hidden states."""

    state_layers: Sequence[int] = ()

    def observe(self, step: DraftStep, first: IntArray, states: Sequence[torch.Tensor]) -> None:
        """Do nothing, because this drafter uses no hidden states."""


# Separation of the drafter's attention layers from the model's layers. Both use the same block tables, but separate
# memory.


def model_layers(config: KVCacheConfig) -> KVCacheConfig:
    """Return the KV cache groups with only the model's layers. A group may be empty."""
    return _with(config, lambda name: None if name.startswith(DRAFT_PREFIX) else name)


def num_model_groups(config: KVCacheConfig) -> int:
    """Return the number of KV cache groups up to the last group with layers of the model. The groups behind it have
    only layers of the drafter.
    """
    groups = model_layers(config).groups
    return max((number for number, group in enumerate(groups, 1) if group.layer_names), default=0)


def draft_layers(config: KVCacheConfig) -> KVCacheConfig:
    """Return the KV cache groups with only the drafter's layers, whose names have no prefix in the result. A group may
    be empty.
    """
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
    """Runs a drafter's layers. The docstrings of ``ForwardPass`` describe these methods."""

    @property
    def specs(self) -> Mapping[str, KVCacheSpec]:
        """KV cache needs by layer name, without the prefix ``draft.``."""

    @property
    def memory(self) -> KVMemory:
        """Memory that allocates caches for ``bind``."""

    @property
    def weight_bytes(self) -> int:
        """Size of all weights in bytes."""

    def bind(self, caches: LayerCaches) -> None:
        """Use this KV cache from now on."""


class WithLayers:
    """Base of drafters that have weights and a KV cache. ``layers`` runs the drafter's layers.

    Attributes:
        num_groups: Number of KV cache groups, up to the last group that contains a layer of the drafter.
    """

    def __init__(self, layers: Layers) -> None:
        self._layers = layers
        self.caches: LayerCaches = {}
        self.num_groups = 0

    @property
    def specs(self) -> Mapping[str, KVCacheSpec]:
        """KV cache needs of the drafter's layers, by layer name with the prefix ``draft.``."""
        return {DRAFT_PREFIX + name: spec for name, spec in self._layers.specs.items()}

    @property
    def weight_bytes(self) -> int:
        """Size of the drafter's weights in bytes."""
        return self._layers.weight_bytes

    def allocate(self, config: KVCacheConfig) -> None:
        """Allocate keys and values of the drafter's layers."""
        caches = self._layers.memory.allocate(draft_layers(config))
        for layer in caches.values():
            if (
                layer.cache.keys.device.type != "cpu"
                # Zero the memory, because attention may read entries that were never computed. On a CPU, new memory is
                # already zero.
            ):
                layer.cache.keys.zero_()
                layer.cache.values.zero_()
        self._layers.bind(caches)
        self.caches = {DRAFT_PREFIX + name: layer for name, layer in caches.items()}
        self.num_groups = num_groups(caches)

    def release(self) -> None:
        """Free the memory for keys and values."""
        self._layers.bind({})
        self.caches = {}
