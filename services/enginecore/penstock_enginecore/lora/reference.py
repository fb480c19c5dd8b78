"""Adapters on a model's own modules, whatever their family. The products in plain torch are what those of kernels are compared
with.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, cast, runtime_checkable

import torch
import torch.nn.functional as F  # noqa: N812
from torch.utils.hooks import RemovableHandle

from penstock_enginecore.attention.base import IntArray
from penstock_enginecore.lora.adapter import LoraAdapter, LoraSegment, LowRankUpdate, TakeAdapter, segments_of_rows

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
