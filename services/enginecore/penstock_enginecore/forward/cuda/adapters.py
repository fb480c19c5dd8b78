"""Adapters of a model on a GPU: in host memory as many as there are, in slots of device memory those of the steps.

A step's rows are laid out in tiles of one adapter, in tensors that never move where the step is of a padded shape. An adapter
that is in no slot when its step comes is copied on a stream of its own; that step waits for it on the device, others do not.
"""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from transformers import PreTrainedModel

from penstock_enginecore.attention.base import IntArray
from penstock_enginecore.forward.cuda.buffers import CAPTURED, HostSlots, StepShape, VectorLayout
from penstock_enginecore.forward.cuda.linear import Held, Linear, Product
from penstock_enginecore.forward.equivalence_check import TOLERANCES, distance
from penstock_enginecore.lora.adapter import (
    BLANK,
    LoraAdapter,
    LoraSegment,
    LowRankUpdate,
    PlainAddition,
    expect_known,
    head_of,
    pooling_layer,
    segments_of_rows,
)
from penstock_enginecore.lora.device_slots import (
    TILE_ROWS,
    AtOnce,
    Copies,
    DeviceSlots,
    Image,
    Place,
    RowTiles,
    SideStream,
    SlotLimits,
    SlotMemory,
    lay_out,
    most_tiles,
)
from penstock_enginecore.lora.target import AdapterTarget
from penstock_enginecore.models.quantization.layers import QuantizedLinear

if TYPE_CHECKING:  # Triton is imported where there is a device for its kernels
    from penstock_enginecore.forward.cuda.triton_kernels import TritonKernels


class StepTiles:
    """Tiles of a step's tokens, and of its rows that get logits, up to ``max_shape``, and what kernels need between them."""

    def __init__(self, max_shape: StepShape, memory: SlotMemory, max_loras: int, device: torch.device) -> None:
        self.max_shape = max_shape
        self._max_loras = max_loras
        self._host = HostSlots.on(device)
        counts = [most_tiles(rows, max_loras) for rows in (max_shape.tokens, max_shape.requests)]
        self._layout = VectorLayout([(size, torch.int32) for count in counts for size in (count, count * TILE_ROWS)])
        with torch.inference_mode(False):
            self._flat = torch.zeros(self._layout.num_bytes, dtype=torch.uint8, device=device)
            self.scratch = torch.zeros(memory.scratch_numbers(max(counts), TILE_ROWS), device=device)
        self._views = self._layout.views(self._flat)

    def of(self, shape: StepShape) -> tuple[RowTiles, RowTiles]:
        """Those of tokens and of rows in a step of ``shape``: the same memory each time."""
        counts = [most_tiles(rows, self._max_loras) for rows in (shape.tokens, shape.requests)]
        slots, rows = self._views[::2], self._views[1::2]
        of_tokens, of_rows = (
            RowTiles(own[:count], each.view(-1, TILE_ROWS)[:count])
            for own, each, count in zip(slots, rows, counts, strict=True)
        )
        return of_tokens, of_rows

    def load(self, segments: Sequence[LoraSegment], of_rows: Sequence[LoraSegment], slots: DeviceSlots) -> None:
        """Bring those of a step to the device. Begins the copy, and does not wait for it."""
        host = self._host.take(self._layout.num_bytes)
        views = [view.numpy() for view in self._layout.views(host.memory)]
        for own, tile_slots, tile_rows in zip((segments, of_rows), views[::2], views[1::2], strict=True):
            known = {segment.digest: slots[segment.digest] for segment in own}
            lay_out(own, known, tile_slots, tile_rows.reshape(-1, TILE_ROWS))
        self._flat.copy_(host.send(self._layout.num_bytes))


class DeviceAdapters:
    """Those of a model whose products are ``places``. Steps run one at a time; the methods are called between them, but for
    ``prepare``. ``copies``: to the device.
    """

    def __init__(
        self,
        places: Sequence[Place],
        limits: SlotLimits,
        dtype: torch.dtype,
        device: torch.device,
        kernels: "TritonKernels",
        copies: Copies | None = None,
    ) -> None:
        self.memory = SlotMemory(places, limits, dtype, device)
        self._limits = limits
        self._device = device
        self._kernels = kernels
        self._copies: Copies = copies or (SideStream(device) if device.type == "cuda" else AtOnce())
        self._images: dict[bytes, Image] = {}
        self._slots = DeviceSlots(limits.max_loras)
        self._coming: dict[bytes, Any] = {}
        self._captured: StepTiles | None = None
        self._large: StepTiles | None = None
        self._step: tuple[StepTiles, RowTiles, RowTiles] | None = None

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._images

    def allocate(self) -> None:
        """Take the memory of slots, and of steps of padded shapes, if it is not there. Raises ModelLoadError."""
        if self._captured is None:
            self.memory.allocate()
            self._captured = StepTiles(CAPTURED, self.memory, self._limits.max_loras, self._device)

    def release(self) -> None:
        """Let go of the device's memory. Adapters stay in host memory, and get into slots again."""
        self._captured = self._large = None
        self._slots.clear()
        self._coming.clear()
        self.memory.release()

    def reserve(self, shape: StepShape) -> None:
        """Have what a step of ``shape`` would need if it had adapters."""
        self._tiles_for(shape)

    def prepare(self, adapter: LoraAdapter) -> Callable[[], None]:
        """Have its matrices as slots do, on any thread, and return what takes it, between steps. Raises ValueError for what is no
        update of the places' layers.
        """
        return partial(self._add, adapter.digest, self.memory.image(adapter))

    def _add(self, digest: bytes, image: Image) -> None:
        """It is copied ahead of its first step, where a slot is to spare."""
        self._images[digest] = image
        if self._captured is not None and (slot := self._slots.offer(digest)) is not None:
            self._begin_copy(digest, slot)

    def remove(self, digest: bytes) -> None:
        """KeyError where it is not there."""
        del self._images[digest]
        self._slots.remove(digest)
        self._coming.pop(digest, None)

    @contextmanager
    def step(self, segments: Sequence[LoraSegment], of_rows: Sequence[LoraSegment], shape: StepShape) -> Iterator[None]:
        """Within, ``add_to`` adds what the adapters of ``segments``, and of the rows that get logits, add in a step of ``shape``.
        Raises LookupError for an adapter that is not there, ValueError for more than there are slots.
        """
        segments, of_rows = ([each for each in own if each.digest != BLANK] for own in (segments, of_rows))
        expect_known([*segments, *of_rows], self._images)
        tiles = self._tiles_for(shape)
        for digest, slot in self._slots.begin_step([each.digest for each in (*segments, *of_rows)]).items():
            self._begin_copy(digest, slot)
        for digest in {each.digest for each in (*segments, *of_rows)} & self._coming.keys():
            self._copies.await_end(self._coming.pop(digest))
        tiles.load(segments, of_rows, self._slots)
        self._step = tiles, *tiles.of(shape)
        try:
            yield
        finally:
            self._step = None

    def updates(self, place: int) -> bool:
        """Whether an adapter that is here has an update in the place of this number."""
        return any(image.updates[place] for image in self._images.values())

    def add_to(self, place: int, x: torch.Tensor, scale: float, out: torch.Tensor) -> None:
        """Add to what the product of the place of this number has made of ``x``; nothing outside of a step with adapters."""
        if self._step is None:
            return
        tiles, of_tokens, of_rows = self._step
        own = of_rows if self.memory.places[place].of_rows else of_tokens
        self._kernels.add_low_rank(x, self.memory.matrices[place], own, tiles.scratch, scale, out)

    def _begin_copy(self, digest: bytes, slot: int) -> None:
        self._coming[digest] = self._copies.begin(partial(self.memory.copy, self._images[digest], slot))

    def _tiles_for(self, shape: StepShape) -> StepTiles:
        """Those of padded shapes never move; others are allocated when a step first needs so many."""
        if self._captured is None:
            raise RuntimeError("allocate must come before the first step")
        if not shape.is_large:
            return self._captured
        held = StepShape(0, 0) if self._large is None else self._large.max_shape
        if self._large is None or shape.tokens > held.tokens or shape.requests > held.requests:
            self._large = None
            wanted = StepShape(max(shape.tokens, held.tokens), max(shape.requests, held.requests))
            self._large = StepTiles(wanted, self.memory, self._limits.max_loras, self._device)
        return self._large


# Adapters in slots of device memory, on a model's own modules.


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
        kernels: "TritonKernels",
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


# Products of the fused decoder to which adapters add.

Adapt = Callable[[Sequence[Linear], Product], Product]
"""What computes in place of a product of linear layers."""


def unadapted(linears: Sequence[Linear], product: Product) -> Product:  # noqa: ARG001 - an ``Adapt``
    """The product itself."""
    return product


class AdaptedProduct(Held):
    """A ``Product``. In a step with adapters it adds theirs behind the product with its bias and scale: a row that has none keeps
    its bits.
    """

    def __init__(self, product: Product, add_to: Callable[[torch.Tensor, float, torch.Tensor], None]) -> None:
        self._product = product
        self._add_to = add_to

    @property
    def bias(self) -> torch.Tensor | None:
        """That of the product."""
        return self._product.bias

    @property
    def out_features(self) -> int:
        """Those of the product."""
        return self._product.out_features

    @property
    def in_features(self) -> int:
        """Those of the product."""
        return self._product.in_features

    @property
    def tensors(self) -> list[torch.Tensor]:
        """Those of the product."""
        return self._product.tensors

    def product(self, x: torch.Tensor, out: torch.Tensor) -> None:
        self._product.product(x, out)
        self._add_to(x, 1.0, out)

    def affine(self, x: torch.Tensor, out: torch.Tensor, scale: float = 1.0) -> None:
        self._product.affine(x, out, scale)
        self._add_to(x, scale, out)

    def to(self, device: torch.device) -> None:
        """Move the weights of the product."""
        self._product.to(device)


class ProductAdapters:
    """Adapters of the products of a decoder of ``module``, which are named to ``adapt`` and ``adapt_head`` while it is built."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._names = {id(part): name for name, part in module.named_modules()}
        self._places: list[Place] = []
        self._adapters: DeviceAdapters | None = None

    def adapt(self, linears: Sequence[Linear], product: Product) -> Product:
        """An ``Adapt``."""
        return self._adapted(linears, product, of_rows=False)

    def adapt_head(self, head: Linear, product: Product) -> Product:
        """As ``adapt``, of the head."""
        return self._adapted([head], product, of_rows=True)

    def open(
        self, limits: SlotLimits, dtype: torch.dtype, device: torch.device, kernels: "TritonKernels"
    ) -> DeviceAdapters:
        """All of them, once the decoder is built."""
        self._adapters = DeviceAdapters(self._places, limits, dtype, device, kernels)
        return self._adapters

    def _adapted(self, linears: Sequence[Linear], product: Product, *, of_rows: bool) -> Product:
        layers = {self._names[id(linear)]: (linear.out_features, linear.in_features) for linear in linears}
        place = len(self._places)
        self._places.append(Place(layers, of_rows))

        def add_to(x: torch.Tensor, scale: float, out: torch.Tensor) -> None:
            if self._adapters is not None:
                self._adapters.add_to(place, x, scale, out)

        return AdaptedProduct(product, add_to)


# The kernels of adapters: proved on their device before they serve, and on a model's modules where they do.

logger = logging.getLogger(__name__)

_PROVED = Place({"one": (160, 1152), "other": (48, 1152)})
_LIMITS = SlotLimits(max_loras=2, max_rank=24)
_ROWS = 21


def why_not(kernels: "TritonKernels", dtype: torch.dtype, device: torch.device) -> str:
    """Why ``kernels`` do not add for adapters of a model in ``dtype`` on ``device``; empty where they are proved: they add to
    some rows what plain torch does, and leave others as they were.
    """
    try:
        difference, untouched = _prove(kernels, dtype, device)
    except Exception as e:  # of a compiler, or of a driver
        return f"its kernels for adapters fail: {type(e).__name__}: {e}"
    if not untouched:
        return "its kernels for adapters change rows without one"
    if difference <= TOLERANCES[dtype]:
        return ""
    return f"what its kernels add for adapters differs by {difference:.3g}"


@torch.inference_mode()
def _prove(kernels: "TritonKernels", dtype: torch.dtype, device: torch.device) -> tuple[float, bool]:
    """How far what two adapters add is from plain torch, and whether rows between theirs are what they were."""
    generator = torch.Generator().manual_seed(0)

    def random(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=generator).div_(size[-1] ** 0.5)

    updates = [
        {name: LowRankUpdate(random(rank, width), random(out, rank)) for name, (out, width) in _PROVED.layers.items()}
        for rank in (8, 24)
    ]
    adapters = DeviceAdapters([_PROVED], _LIMITS, dtype, device, kernels)
    adapters.allocate()
    for number, own in enumerate(updates):
        adapters.prepare(LoraAdapter(bytes([number]), own))()
    x = (30 * random(_ROWS, 1152)).to(device=device, dtype=dtype)
    found = random(_ROWS, 208).to(device=device, dtype=dtype)
    before, expected = found.clone(), found.clone()
    segments = [LoraSegment(b"\0", 1, 18), LoraSegment(b"\1", 19, 20)]
    with adapters.step(segments, (), StepShape(_ROWS, 1)):
        adapters.add_to(0, x, 1.0, found)
    for segment, own in zip(segments, updates, strict=True):
        rows = slice(segment.first, segment.end)
        for update, out in zip(own.values(), torch.split(expected, [160, 48], dim=1), strict=True):
            PlainAddition(update.a.to(device), update.b.to(device))(x[rows], out[rows])
    untouched = all(torch.equal(found[row], before[row]) for row in (0, 18, 20))
    return distance(found - before, expected - before), untouched


def slot_modules(
    module: PreTrainedModel, dtype: torch.dtype, device: torch.device, limits: SlotLimits | None
) -> SlotModules | None:
    """Slots for adapters of the linear layers of a model in ``dtype`` that runs by its own modules. None where there are no
    ``limits`` or the device is no GPU, and where kernels cannot be had or fail their proof: plain torch adds for adapters
    there, which is slow.
    """
    if device.type != "cuda" or limits is None:
        return None
    try:
        kernels = _kernels()
    except ModuleNotFoundError as e:
        reason = f"kernels cannot be compiled: {e}"
    else:
        if not (reason := why_not(kernels, dtype, device)):
            return adapted_modules(module, dtype, device, limits, kernels)
    logger.warning("adapters are added by plain torch, which is slower: %s", reason)
    return None


def adapted_modules(
    module: PreTrainedModel, dtype: torch.dtype, device: torch.device, limits: SlotLimits, kernels: "TritonKernels"
) -> SlotModules:
    """Slots for adapters of all layers that ``AdapterTarget`` names and that compute in the model's dtype, as quantized ones will
    once they are dequantized.
    """
    named = dict(module.named_modules())
    last = head_of(module) or pooling_layer(module)
    head = next((name for name, part in named.items() if part is last), "")

    def computes(name: str) -> bool:
        layer = named[name]
        return isinstance(layer, QuantizedLinear) or layer.get_parameter("weight").dtype == dtype

    layers = {name: size for name, size in AdapterTarget.of(module).linears.items() if computes(name)}
    return SlotModules(module, layers, head, limits, dtype, device, kernels)


def _kernels() -> "TritonKernels":
    # Triton is imported where there is a device for its kernels.
    from penstock_enginecore.forward.cuda.triton_kernels import TritonKernels

    return TritonKernels()
