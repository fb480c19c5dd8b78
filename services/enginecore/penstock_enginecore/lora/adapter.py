"""Adapters in memory: their matrices, the part of an adapter on one worker, and the tokens of a step that use each
adapter.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Protocol, TypeAlias, cast, runtime_checkable

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from torch.utils.hooks import RemovableHandle

from penstock_enginecore.attention.base import IntArray

TakeAdapter: TypeAlias = Callable[[], None]
"""Function that adds a prepared adapter to a forward pass. After the call, steps may have segments of the adapter. The
call only registers the adapter, so it takes little time. Call the function between steps, at most once.
"""
BLANK = b""
"""Digest that stands for no adapter, in segments of forward passes that replay captured steps. Segments with this
digest launch the same kernels as segments with an adapter.
"""


@dataclass(frozen=True, slots=True)
class LowRankUpdate:
    """Low-rank update of a layer: the adapter adds ``x @ a.T @ b.T`` to the layer's output (LoRA; Hu et al., 2021).

    Attributes:
        a: float32 ``[rank, in features]``.
        b: float32 ``[out features, rank]``, already multiplied by the adapter's scale.
    """

    a: torch.Tensor
    b: torch.Tensor

    @property
    def rank(self) -> int:
        """Rank of this layer's update, at least 1. The layers of one adapter may have different ranks."""
        return self.a.shape[0]


@dataclass(frozen=True, slots=True)
class LoraAdapter:
    """The updates of an adapter, or the part of the updates that one worker computes.

    Attributes:
        digest: BLAKE2b-128 of the adapter's canonical config and tensors. The digest identifies the adapter; names are
            only labels.
        updates: Updates by module name in transformers' model, such as ``model.layers.0.self_attn.q_proj`` or
            ``lm_head``. Empty only on a worker that has no layer of the adapter.
    """

    digest: bytes
    updates: Mapping[str, LowRankUpdate]

    @property
    def max_rank(self) -> int:
        """Largest rank of the updates, or 0 if there are no updates."""
        return max((update.rank for update in self.updates.values()), default=0)

    @property
    def num_bytes(self) -> int:
        """Size of all matrices in bytes."""
        return sum(update.a.nbytes + update.b.nbytes for update in self.updates.values())


@dataclass(frozen=True, slots=True)
class LoraSegment:
    """Consecutive tokens of a step whose requests use the same adapter. The segment has the tokens from ``first`` to
    ``end - 1``, at least one.

    Segments of a step are in order and do not overlap. Tokens outside all segments use the base model.
    """

    digest: bytes
    first: int
    end: int


@runtime_checkable
class AdaptedForward(Protocol):
    """A forward pass that supports adapters."""

    def prepare_adapter(self, adapter: LoraAdapter) -> TakeAdapter:
        """Convert the adapter's matrices to the format that the forward pass uses, and return a function that adds the
        adapter. May run on any thread while steps run.

        Raises ValueError if the adapter does not fit the model's layers.
        """

    def add_adapter(self, adapter: LoraAdapter) -> None:
        """Prepare and add an adapter, between steps. Raises the errors of ``prepare_adapter``."""

    def remove_adapter(self, digest: bytes) -> None:
        """Free the memory of an adapter, between steps. Raises KeyError if the adapter is unknown."""


# Parts of adapters, for models that are split among several workers.


@dataclass(frozen=True, slots=True)
class OwnFeatures:
    """The part of a linear layer that one rank computes.

    Attributes:
        outputs: Indices of this rank's output features, in this order, or None for all output features. Features with
            an index beyond the layer's size are zeros.
        inputs: Indices of this rank's input features, or None for all input features. If ``inputs`` is not None, the
            outputs of all ranks are summed.
    """

    outputs: tuple[range, ...] | None = None
    inputs: range | None = None

    def of(self, update: LowRankUpdate) -> LowRankUpdate:
        """Return the update with only the rows of B for ``outputs`` or only the columns of A for ``inputs``, as
        copies.
        """
        a, b = update.a, update.b
        if self.inputs is not None:
            a = a[:, self.inputs.start : self.inputs.stop]
        if self.outputs is not None:
            b = torch.cat([b[own.start : own.stop] for own in self.outputs])
            b = F.pad(b, (0, 0, 0, sum(map(len, self.outputs)) - len(b)))
        return LowRankUpdate(_copy(a), _copy(b))


@dataclass(frozen=True, slots=True)
class AdapterPart:
    """The part of every adapter that a worker computes.

    Attributes:
        features: This rank's features of each layer that is split among ranks, by the layer's name.
        linears: Names of the layers on the worker's stage, or None for all layers.
    """

    features: Mapping[str, OwnFeatures] = field(default_factory=dict)
    linears: frozenset[str] | None = None

    def of(self, adapter: LoraAdapter) -> LoraAdapter:
        """Return the worker's part of ``adapter``, with the digest of the complete adapter. The part may be empty. The
        result shares memory with ``adapter`` only if the worker computes the complete adapter.
        """
        if not self.features and self.linears is None:
            return adapter
        whole = OwnFeatures()
        own = {
            name: self.features.get(name, whole).of(update)
            for name, update in adapter.updates.items()
            if self.linears is None or name in self.linears
        }
        return LoraAdapter(adapter.digest, own)


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.clone(memory_format=torch.contiguous_format)


# Order of a step's requests by adapter, and the positions of each adapter's tokens in the batch.


def ordered_by_adapter(request_ids: Iterable[str], digests: Mapping[str, bytes]) -> list[str]:
    """Return the requests in batch order. All workers compute the same order.

    Requests without an adapter are first, in the given order. Requests with an adapter are next, grouped by digest.

    Args:
        request_ids: IDs of the step's requests.
        digests: Digests of the requests that have an adapter, by request ID.
    """
    if not digests:
        return list(request_ids)
    return sorted(request_ids, key=lambda request_id: digests.get(request_id, b""))


def segments_of(
    request_ids: Sequence[str], digests: Mapping[str, bytes], query_start_loc: IntArray
) -> tuple[LoraSegment, ...]:
    """Return the segments of a step whose requests are in the order of ``ordered_by_adapter``. ``query_start_loc`` is
    int64 ``[requests + 1]``: the index of each request's first token, then the number of tokens.
    """
    if not digests:
        return ()
    of_requests = [digests.get(request_id, b"") for request_id in request_ids]
    starts = [i for i, digest in enumerate(of_requests) if digest and (i == 0 or of_requests[i - 1] != digest)]
    return tuple(
        LoraSegment(of_requests[first], int(query_start_loc[first]), int(query_start_loc[end]))
        for first, end in pairwise([*starts, len(of_requests)])
    )


# Segments for a selection of a step's tokens, for example those whose logits are needed.


def segments_of_rows(segments: Sequence[LoraSegment], rows: IntArray) -> list[LoraSegment]:
    """Return the segments for the selected tokens. ``rows`` are the indices of these tokens, int64 ``[n]``, in any
    order. In the result, ``first`` and ``end`` are indices into ``rows``.
    """
    if not segments or not len(rows):
        return []
    firsts = np.array([segment.first for segment in segments])
    ends = np.array([segment.end for segment in segments])
    of = np.minimum(np.searchsorted(ends, rows, side="right"), len(segments) - 1)
    of[(rows < firsts[of]) | (rows >= ends[of])] = -1
    starts = np.flatnonzero(np.diff(of, prepend=-2))
    return [
        LoraSegment(segments[of[first]].digest, int(first), int(end))
        for first, end in zip(starts, [*starts[1:], len(rows)], strict=True)
        if of[first] >= 0
    ]


# Plain torch implementation of adapters, for the modules of any transformers model. Kernels are compared with this
# implementation.

Addition = Callable[[torch.Tensor, torch.Tensor], None]
"""Function that adds an update in place to a layer's output ``[rows, out features]``. Arguments: the layer's input
``x`` ``[rows, in features]`` and the output.
"""


@runtime_checkable
class AdaptedLayer(Protocol):
    """A linear layer with its own implementation of low-rank updates."""

    def addition(self, update: LowRankUpdate) -> Addition:
        """Return a function that adds ``update`` to the layer's output."""


@dataclass(frozen=True, slots=True)
class PlainAddition:
    """Adds an update with torch, in float32. ``a`` and ``b`` are the update's matrices on the layer's device."""

    a: torch.Tensor
    b: torch.Tensor

    @classmethod
    def of(cls, layer: torch.nn.Module, update: LowRankUpdate) -> Addition:
        """Return a function that adds ``update`` to the output of ``layer``. Uses the layer's own implementation if the
        layer has one.
        """
        if isinstance(layer, AdaptedLayer):
            return layer.addition(update)
        device = next((parameter.device for parameter in layer.parameters()), torch.device("cpu"))
        return cls(update.a.to(device), update.b.to(device))

    def __call__(self, x: torch.Tensor, out: torch.Tensor) -> None:
        """Add the update to ``out`` in place, see ``Addition``."""
        out += F.linear(F.linear(x.float(), self.a), self.b).to(out.dtype)


class AdaptedModules:
    """Adds adapters to the linear layers of ``module``. The outputs of tokens without an adapter are not changed.
    Layers that no adapter updates have no hook, so a model without adapters is not changed at all.

    Args:
        head: The layer whose input has only the rows whose logits are needed, not all tokens. None if there is no such
            layer.
    """

    def __init__(self, module: torch.nn.Module, head: torch.nn.Module | None = None) -> None:
        self._name = type(module).__name__
        self._head = head
        # Look up the modules only once. Another thread may prepare an adapter while a step that computes only the head
        # has removed the layers.
        self._named = dict(module.named_modules(remove_duplicate=False))
        self._added: dict[bytes, dict[torch.nn.Module, Addition]] = {}
        self._hooks: dict[torch.nn.Module, RemovableHandle] = {}
        self._tokens: Sequence[LoraSegment] = ()
        self._rows: Sequence[LoraSegment] = ()

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._added

    def prepare(self, adapter: LoraAdapter) -> TakeAdapter:
        """Prepare an adapter, and return a function that adds the adapter between steps. Thread-safe. Raises ValueError
        if an update's layer does not exist or has another size than the update.
        """
        layers = {self._layer(name, update): update for name, update in adapter.updates.items()}
        on_host = all(parameter.device.type == "cpu" for layer in layers for parameter in layer.parameters())
        # While a step is captured into a CUDA graph, no other thread may copy to the device.
        ready = _additions(layers) if on_host else None

        def take() -> None:
            self._added[adapter.digest] = _additions(layers) if ready is None else ready
            for layer in layers.keys() - self._hooks.keys():
                # This hook must run before the hook that reduces or gathers the outputs of all ranks.
                self._hooks[layer] = layer.register_forward_hook(self._add, prepend=True)

        return take

    def add(self, adapter: LoraAdapter) -> None:
        """Add an adapter, between steps. Raises the errors of ``prepare``."""
        self.prepare(adapter)()

    def remove(self, digest: bytes) -> None:
        """Remove an adapter, between steps. Raises KeyError if the adapter is unknown."""
        del self._added[digest]
        for layer in self._hooks.keys() - {layer for layers in self._added.values() for layer in layers}:
            self._hooks.pop(layer).remove()

    @contextmanager
    def step(self, segments: Sequence[LoraSegment], rows: IntArray) -> Iterator[None]:
        """Apply the adapters of ``segments`` to the step that the model computes in the ``with`` block.

        Args:
            segments: Segments of the step's tokens.
            rows: int64 indices of the tokens whose logits are needed.

        Raises:
            LookupError: An adapter of a segment was not added.
        """
        expect_known(segments, self._added)
        self._tokens, self._rows = segments, segments_of_rows(segments, rows)
        try:
            yield
        finally:
            self._tokens = self._rows = ()

    def _add(self, layer: torch.nn.Module, args: Any, output: torch.Tensor) -> None:
        """Forward hook of the layers that adapters update: adds the updates of the current step's segments to the
        output.
        """
        segments = self._rows if layer is self._head else self._tokens
        if not segments:
            return
        x, out = args[0].reshape(-1, args[0].shape[-1]).contiguous(), output.view(-1, output.shape[-1])
        if segments[-1].end > len(x):
            raise ValueError(
                f"{type(layer).__name__} got {len(x)} input rows, but the step has at least {segments[-1].end} rows"
            )
        for segment in segments:
            if addition := self._added[segment.digest].get(layer):
                addition(x[segment.first : segment.end], out[segment.first : segment.end])

    def _layer(self, name: str, update: LowRankUpdate) -> torch.nn.Module:
        layer = self._named.get(name)
        if layer is None:
            raise ValueError(f"{name} is not a module of {self._name}")
        if not isinstance(layer, torch.nn.Linear):
            raise ValueError(f"{name} is {type(layer).__name__}, not a linear layer")
        expect_features(name, update, layer.out_features, layer.in_features)
        return layer


def _additions(layers: Mapping[torch.nn.Module, LowRankUpdate]) -> dict[torch.nn.Module, Addition]:
    return {layer: PlainAddition.of(layer, update) for layer, update in layers.items()}


def head_of(module: torch.nn.Module) -> torch.nn.Module | None:
    """Return the output embedding (lm_head) of a transformers model."""
    return cast("torch.nn.Module | None", cast("Any", module).get_output_embeddings())


def pooling_layer(module: Any) -> torch.nn.Module | None:
    """Return the dense layer in the pooler of BERT or of a similar model, the pooler itself if it is one layer, or None.

    This layer processes one token of each prompt, and a classifier's head uses the layer's output. The model's hidden
    states do not depend on this layer.
    """
    pooler = getattr(module, "pooler", None)
    return pooler if isinstance(pooler, torch.nn.Linear) else getattr(pooler, "dense", None)


def expect_features(name: str, update: LowRankUpdate, out_features: int, in_features: int) -> None:
    """Raise ValueError if the shapes of ``update`` do not match a layer with weight ``[out_features, in_features]``."""
    a, b = tuple(update.a.shape), tuple(update.b.shape)
    if a[1:] != (in_features,) or b != (out_features, a[0]):
        raise ValueError(
            f"{name}: expected shapes [rank, {in_features}] and [{out_features}, rank] for A and B, got {list(a)} and {list(b)}"
        )


def expect_known(segments: Sequence[LoraSegment], known: Any) -> None:
    """Raise LookupError if a segment's adapter is not one of the adapters whose digests are in ``known``."""
    for segment in segments:
        if segment.digest not in known:
            raise LookupError(f"there is no adapter {segment.digest.hex()}: it was not added, or was removed")
