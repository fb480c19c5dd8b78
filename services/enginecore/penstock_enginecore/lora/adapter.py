"""What an adapter is once it has been read, what a worker keeps of it, and which tokens of a step have one."""

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
"""Has a forward pass take segments of an adapter from then on, and does little. Called between steps, once at most."""
BLANK = b""
"""The digest of segments whose tokens have no adapter, for passes that replay steps: they launch what steps with adapters do."""


@dataclass(frozen=True, slots=True)
class LowRankUpdate:
    """What an adapter adds to ``x`` times a layer's weight: ``x @ a.T @ b.T`` (LoRA; Hu et al., 2021). ``a`` float32
    ``[rank, in features]``; ``b`` float32 ``[out features, rank]``, with the adapter's scale in it.
    """

    a: torch.Tensor
    b: torch.Tensor

    @property
    def rank(self) -> int:
        """One at least; layers of an adapter may differ."""
        return self.a.shape[0]


@dataclass(frozen=True, slots=True)
class LoraAdapter:
    """``digest``: BLAKE2b-128 of its canonical config and tensors, by which it is known; names are labels. ``updates`` by name of
    the module in transformers' model, such as ``model.layers.0.self_attn.q_proj`` or ``lm_head``; empty in a worker that has none
    of its layers alone.
    """

    digest: bytes
    updates: Mapping[str, LowRankUpdate]

    @property
    def max_rank(self) -> int:
        """The largest of its layers'; 0 where there are none."""
        return max((update.rank for update in self.updates.values()), default=0)

    @property
    def num_bytes(self) -> int:
        """Of its matrices."""
        return sum(update.a.nbytes + update.b.nbytes for update in self.updates.values())


@dataclass(frozen=True, slots=True)
class LoraSegment:
    """The tokens of a step from ``first`` to before ``end``, one at least, whose requests have the adapter of ``digest``.
    Segments of a step are in order and have no tokens in common; tokens in none of them are the base model's.
    """

    digest: bytes
    first: int
    end: int


@runtime_checkable
class AdaptedForward(Protocol):
    """A forward pass whose steps may have adapters."""

    def prepare_adapter(self, adapter: LoraAdapter) -> TakeAdapter:
        """Convert the adapter's matrices to the form that the pass reads, while steps run, on any thread.

        Raises ValueError when the adapter does not update the model's layers.
        """

    def add_adapter(self, adapter: LoraAdapter) -> None:
        """Prepare and take an adapter, between steps. Raises as ``prepare_adapter``."""

    def remove_adapter(self, digest: bytes) -> None:
        """Free the memory of an adapter, between steps. KeyError for one that is not there."""


# Where several workers share the model.


@dataclass(frozen=True, slots=True)
class OwnFeatures:
    """What a rank has of a linear layer: the ``outputs``, which are zeros behind the layer's last, or the ``inputs``, over which
    the ranks' outputs are summed. None for all of them.
    """

    outputs: range | None = None
    inputs: range | None = None

    def of(self, update: LowRankUpdate) -> LowRankUpdate:
        """The rows of B that give these outputs, or the columns of A that take these inputs, in memory of their own."""
        a, b = update.a, update.b
        if self.inputs is not None:
            a = a[:, self.inputs.start : self.inputs.stop]
        if self.outputs is not None:
            b = b[self.outputs.start : self.outputs.stop]
            b = F.pad(b, (0, 0, 0, len(self.outputs) - len(b)))
        return LowRankUpdate(_copy(a), _copy(b))


@dataclass(frozen=True, slots=True)
class AdapterPart:
    """``features``: of the layers that are split among ranks, by name. ``linears``: names of the layers that the worker's stage
    has, None for all.
    """

    features: Mapping[str, OwnFeatures] = field(default_factory=dict)
    linears: frozenset[str] | None = None

    def of(self, adapter: LoraAdapter) -> LoraAdapter:
        """``adapter`` with what the worker computes of it, under the digest of the whole. It keeps none of the whole's memory,
        unless it is the whole; it may be empty.
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


# The order of a step's requests by adapter, and where in the batch each adapter's tokens are.


def ordered_by_adapter(request_ids: Iterable[str], digests: Mapping[str, bytes]) -> list[str]:
    """Requests without an adapter first, in their order; then those of each adapter, by digest: the same in all workers.
    ``digests``: of the requests that have one.
    """
    if not digests:
        return list(request_ids)
    return sorted(request_ids, key=lambda request_id: digests.get(request_id, b""))


def segments_of(
    request_ids: Sequence[str], digests: Mapping[str, bytes], query_start_loc: IntArray
) -> tuple[LoraSegment, ...]:
    """Of requests in the order of ``ordered_by_adapter``, whose tokens begin at ``query_start_loc`` int64 ``[requests + 1]``."""
    if not digests:
        return ()
    of_requests = [digests.get(request_id, b"") for request_id in request_ids]
    starts = [i for i, digest in enumerate(of_requests) if digest and (i == 0 or of_requests[i - 1] != digest)]
    return tuple(
        LoraSegment(of_requests[first], int(query_start_loc[first]), int(query_start_loc[end]))
        for first, end in pairwise([*starts, len(of_requests)])
    )


# Which rows that were taken from a step's tokens have an adapter.


def segments_of_rows(segments: Sequence[LoraSegment], rows: IntArray) -> list[LoraSegment]:
    """Those of ``rows`` int64 ``[n]``, tokens in any order, one behind the other: ``first`` and ``end`` count rows."""
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


# Adapters on a model's own modules, whatever their family. The products in plain torch are what those of kernels are compared
# with.

Addition = Callable[[torch.Tensor, torch.Tensor], None]
"""Adds to what a layer has made of ``x`` ``[rows, in features]``, in place: ``[rows, out features]``."""


@runtime_checkable
class AdaptedLayer(Protocol):
    """A linear layer that knows how to add updates."""

    def addition(self, update: LowRankUpdate) -> Addition:
        """What adds ``update``."""


@dataclass(frozen=True, slots=True)
class PlainAddition:
    """By torch, in float32. ``a`` and ``b`` are those of an update, on the layer's device."""

    a: torch.Tensor
    b: torch.Tensor

    @classmethod
    def of(cls, layer: torch.nn.Module, update: LowRankUpdate) -> Addition:
        """For ``layer``, by its own way to add where it has one."""
        if isinstance(layer, AdaptedLayer):
            return layer.addition(update)
        device = next((parameter.device for parameter in layer.parameters()), torch.device("cpu"))
        return cls(update.a.to(device), update.b.to(device))

    def __call__(self, x: torch.Tensor, out: torch.Tensor) -> None:
        """See ``Addition``."""
        out += F.linear(F.linear(x.float(), self.a), self.b).to(out.dtype)


class AdaptedModules:
    """Linear layers of ``module``, whose outputs get what adapters add. Rows of tokens without one are not touched. ``head``: the
    layer that gets rows whose logits are wanted in place of tokens, None where there is none.

    Layers that no adapter knows have no hook: without adapters the model is as it was.
    """

    def __init__(self, module: torch.nn.Module, head: torch.nn.Module | None = None) -> None:
        self._name = type(module).__name__
        self._head = head
        # Looked up once: adapters are prepared on other threads, while steps that compute the head alone take the layers out.
        self._named = dict(module.named_modules(remove_duplicate=False))
        self._added: dict[bytes, dict[torch.nn.Module, Addition]] = {}
        self._hooks: dict[torch.nn.Module, RemovableHandle] = {}
        self._tokens: Sequence[LoraSegment] = ()
        self._rows: Sequence[LoraSegment] = ()

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._added

    def prepare(self, adapter: LoraAdapter) -> TakeAdapter:
        """On any thread. Raises ValueError for an update whose layer is not there or has other features."""
        layers = {self._layer(name, update): update for name, update in adapter.updates.items()}
        on_host = all(parameter.device.type == "cpu" for layer in layers for parameter in layer.parameters())
        # What goes to a device must not come between the calls that a step is captured from.
        ready = _additions(layers) if on_host else None

        def take() -> None:
            self._added[adapter.digest] = _additions(layers) if ready is None else ready
            for layer in layers.keys() - self._hooks.keys():
                # Before the hook that adds up or puts together what ranks have.
                self._hooks[layer] = layer.register_forward_hook(self._add, prepend=True)

        return take

    def add(self, adapter: LoraAdapter) -> None:
        """Between steps. Raises as ``prepare``."""
        self.prepare(adapter)()

    def remove(self, digest: bytes) -> None:
        """Between steps. KeyError where it is not there."""
        del self._added[digest]
        for layer in self._hooks.keys() - {layer for layers in self._added.values() for layer in layers}:
            self._hooks.pop(layer).remove()

    @contextmanager
    def step(self, segments: Sequence[LoraSegment], rows: IntArray) -> Iterator[None]:
        """What the model computes within is a step of ``segments``, and ``rows`` int64 are its tokens whose logits are wanted.
        Raises LookupError for an adapter that is not there.
        """
        expect_known(segments, self._added)
        self._tokens, self._rows = segments, segments_of_rows(segments, rows)
        try:
            yield
        finally:
            self._tokens = self._rows = ()

    def _add(self, layer: torch.nn.Module, args: Any, output: torch.Tensor) -> None:
        """The forward hook of layers that an adapter knows."""
        segments = self._rows if layer is self._head else self._tokens
        if not segments:
            return
        x, out = args[0].reshape(-1, args[0].shape[-1]).contiguous(), output.view(-1, output.shape[-1])
        if segments[-1].end > len(x):
            raise ValueError(f"a {type(layer).__name__} gets {len(x)} rows of a step with {segments[-1].end} or more")
        for segment in segments:
            if addition := self._added[segment.digest].get(layer):
                addition(x[segment.first : segment.end], out[segment.first : segment.end])

    def _layer(self, name: str, update: LowRankUpdate) -> torch.nn.Module:
        layer = self._named.get(name)
        if layer is None:
            raise ValueError(f"{name} is no module of {self._name}")
        if not isinstance(layer, torch.nn.Linear):
            raise ValueError(f"{name} is {type(layer).__name__}, no linear layer")
        expect_features(name, update, layer.out_features, layer.in_features)
        return layer


def _additions(layers: Mapping[torch.nn.Module, LowRankUpdate]) -> dict[torch.nn.Module, Addition]:
    return {layer: PlainAddition.of(layer, update) for layer, update in layers.items()}


def head_of(module: torch.nn.Module) -> torch.nn.Module | None:
    """The output embedding of a transformers model."""
    return cast("torch.nn.Module | None", cast("Any", module).get_output_embeddings())


def pooling_layer(module: Any) -> torch.nn.Module | None:
    """That of BERT's pooler and its like: it gets one token of a prompt, of which a classifier's head makes what it reads. Hidden
    states do not depend on it.
    """
    return getattr(getattr(module, "pooler", None), "dense", None)


def expect_features(name: str, update: LowRankUpdate, out_features: int, in_features: int) -> None:
    """Raise ValueError where ``update`` is none of a layer ``[out_features, in_features]``."""
    a, b = tuple(update.a.shape), tuple(update.b.shape)
    if a[1:] != (in_features,) or b != (out_features, a[0]):
        raise ValueError(f"{name} takes [rank, {in_features}] and [{out_features}, rank], not {list(a)} and {list(b)}")


def expect_known(segments: Sequence[LoraSegment], known: Any) -> None:
    """Raise LookupError where the adapter of a segment is not in ``known``, digests."""
    for segment in segments:
        if segment.digest not in known:
            raise LookupError(f"there is no adapter {segment.digest.hex()}; it has not been added, or was removed")
