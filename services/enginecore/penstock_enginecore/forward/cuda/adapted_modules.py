"""Adapters in slots of device memory, on a model's own modules."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch

from penstock_enginecore.attention.base import IntArray
from penstock_enginecore.forward.cuda.adapters import DeviceAdapters
from penstock_enginecore.forward.cuda.buffers import StepShape
from penstock_enginecore.forward.cuda.kernel_api import LowRankKernels
from penstock_enginecore.lora.adapter import LoraAdapter, LoraSegment
from penstock_enginecore.lora.device_slots import SlotLimits
from penstock_enginecore.lora.segments import segments_of_rows
from penstock_enginecore.lora.slot_memory import Place


class SlotModules:
    """What adapters add to linear ``layers`` of ``module``, ``(out, in)`` features by name, behind their bias. ``head``: the name
    of the layer that gets rows whose logits are wanted, empty where there is none.

    Layers have hooks in steps with adapters alone: others compute as without. As ``AdaptedModules``, with memory that is taken
    by ``allocate`` and does not grow.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        layers: Mapping[str, tuple[int, int]],
        head: str,
        limits: SlotLimits,
        dtype: torch.dtype,
        device: torch.device,
        kernels: LowRankKernels,
    ) -> None:
        self._module = module
        self._names = list(layers)
        self._head = head
        places = [Place({name: features}, name == head) for name, features in layers.items()]
        self._adapters = DeviceAdapters(places, limits, dtype, device, kernels)
        self._expected: tuple[int, int] = (0, 0)
        self._odd: set[str] = set()
        """Layers that get other rows than those of the step."""
        self.allocate, self.release = self._adapters.allocate, self._adapters.release

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._adapters

    def prepare(self, adapter: LoraAdapter) -> Callable[[], None]:
        if odd := self._odd & adapter.updates.keys():
            raise ValueError(f"{min(odd)} computes other rows than a step's tokens, and takes no update on this device")
        return self._adapters.prepare(adapter)

    def add(self, adapter: LoraAdapter) -> None:
        """Between steps. Raises ValueError for an update whose layer is not there or has other features."""
        self.prepare(adapter)()

    def remove(self, digest: bytes) -> None:
        """Between steps. KeyError where it is not there."""
        self._adapters.remove(digest)

    @contextmanager
    def step(self, segments: Sequence[LoraSegment], rows: IntArray, num_tokens: int) -> Iterator[None]:
        """What the model computes within is a step of ``segments``, and ``rows`` int64 are those of its ``num_tokens`` tokens
        whose logits are wanted; without tokens the head alone. Raises LookupError for an adapter that is not there.
        """
        shape = StepShape(num_tokens, len(rows))
        if not segments:
            if shape.is_large:
                self._adapters.reserve(shape)
            yield
            return
        with self.tiles(segments, rows, shape), self.hooked():
            yield

    @contextmanager
    def tiles(self, segments: Sequence[LoraSegment], rows: IntArray, shape: StepShape) -> Iterator[None]:
        """As ``step``, of what runs or replays work that was launched within ``hooked``, in a step padded to ``shape``."""
        self._expected = shape.tokens, shape.requests
        of_tokens = segments if shape.tokens else ()
        with self._adapters.step(of_tokens, segments_of_rows(segments, rows), shape):
            yield

    @contextmanager
    def hooked(self) -> Iterator[None]:
        """Layers have their hooks."""
        with ExitStack() as hooks:
            for place, name in enumerate(self._names):
                layer = self._module.get_submodule(name)
                hooks.callback(layer.register_forward_hook(partial(self._add, place, name)).remove)
            yield

    def _add(self, place: int, name: str, layer: torch.nn.Module, args: Any, output: torch.Tensor) -> None:  # noqa: ARG002
        """A forward hook."""
        x, out = args[0].reshape(-1, args[0].shape[-1]).contiguous(), output.view(-1, output.shape[-1])
        expected = self._expected[name == self._head]
        if name == self._head and not expected:
            return  # a pooler within the layers, whose output nobody reads
        if len(x) != expected:
            self._odd.add(name)
            if self._adapters.updates(place):
                raise ValueError(f"{name} gets {len(x)} rows of a step with {expected}, and an adapter has it")
            return
        self._adapters.add_to(place, x, 1.0, out)
