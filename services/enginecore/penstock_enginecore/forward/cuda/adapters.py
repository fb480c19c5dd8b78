"""LoRA adapters of a model on a GPU. Host memory holds all adapters. Slots of device memory also hold the adapters of
current steps.

A step's rows with adapters are arranged in tiles. Each tile has rows of one adapter. For steps of padded shapes, the
tensors with tiles never move. An adapter without a slot is copied on a separate stream and thread. A step with this
adapter waits for the copy, and other steps do not wait.
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
    DeviceSlots,
    Image,
    Place,
    RowTiles,
    SlotLimits,
    SlotMemory,
    lay_out,
    most_tiles,
)
from penstock_enginecore.lora.slot_copies import AtOnce, Copies, StagedCopies
from penstock_enginecore.lora.target import AdapterTarget
from penstock_enginecore.models.quantization.layers import QuantizedLinear

if TYPE_CHECKING:  # Triton is imported only if there is a device for its kernels
    from penstock_enginecore.forward.cuda.triton_kernels import TritonKernels


class StepTiles:
    """Tiles of rows with the same LoRA adapter: tiles of a step's tokens, and tiles of the rows that get logits. Also
    holds scratch memory of the kernels.

    The memory is large enough for steps up to ``max_shape``.
    """

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
        """Return the tiles of tokens, and the tiles of rows that get logits, for a step of ``shape``. Each call returns
        tensors in the same memory.
        """
        counts = [most_tiles(rows, self._max_loras) for rows in (shape.tokens, shape.requests)]
        slots, rows = self._views[::2], self._views[1::2]
        of_tokens, of_rows = (
            RowTiles(own[:count], each.view(-1, TILE_ROWS)[:count])
            for own, each, count in zip(slots, rows, counts, strict=True)
        )
        return of_tokens, of_rows

    def load(self, segments: Sequence[LoraSegment], of_rows: Sequence[LoraSegment], slots: DeviceSlots) -> None:
        """Start copying a step's tiles to the device. Does not wait for the copy."""
        host = self._host.take(self._layout.num_bytes)
        views = [view.numpy() for view in self._layout.views(host.memory)]
        for own, tile_slots, tile_rows in zip((segments, of_rows), views[::2], views[1::2], strict=True):
            known = {segment.digest: slots[segment.digest] for segment in own}
            lay_out(own, known, tile_slots, tile_rows.reshape(-1, TILE_ROWS))
        self._flat.copy_(host.send(self._layout.num_bytes))


class DeviceAdapters:
    """LoRA adapters of a model, in host memory and in device slots.

    Steps run one at a time. Methods other than ``prepare`` may be called only between steps.

    Args:
        places: The matrix products that adapters may update.
        limits: Limits on the number of slots and on the ranks of adapters.
        dtype: The model's dtype.
        copies: Copies adapters to the device. Defaults to ``StagedCopies`` on GPUs.
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
        self._copies: Copies = copies or (StagedCopies.on(device) if device.type == "cuda" else AtOnce())
        self._images: dict[bytes, Image] = {}
        self._slots = DeviceSlots(limits.max_loras)
        self._coming: dict[bytes, Any] = {}
        self._captured: StepTiles | None = None
        self._large: StepTiles | None = None
        self._step: tuple[StepTiles, RowTiles, RowTiles] | None = None

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._images

    def allocate(self) -> None:
        """Allocate memory for slots and for steps of padded shapes, unless it is already allocated. Raises
        ModelLoadError if the memory does not suffice.
        """
        if self._captured is None:
            self.memory.allocate()
            self._captured = StepTiles(CAPTURED, self.memory, self._limits.max_loras, self._device)

    def release(self) -> None:
        """Free the device memory of adapters. The adapters stay in host memory and are copied to slots again when steps
        need them.
        """
        self._copies.finish()
        self._captured = self._large = None
        self._slots.clear()
        self._coming.clear()
        self.memory.release()

    def reserve(self, shape: StepShape) -> None:
        """Allocate the memory that a step of ``shape`` would need if it had adapters."""
        self._tiles_for(shape)

    def prepare(self, adapter: LoraAdapter) -> Callable[[], None]:
        """Convert an adapter to the layout of the slots, and return a function that adds the adapter. Thread-safe.

        Call the returned function only between steps.

        Raises ValueError if an update matches no layer of ``places``.
        """
        return partial(self._add, adapter.digest, self.memory.image(adapter))

    def _add(self, digest: bytes, image: Image) -> None:
        """Add an adapter. If a slot is free, this call starts the copy of the adapter into the slot."""
        self._images[digest] = image
        if self._captured is not None and (slot := self._slots.offer(digest)) is not None:
            self._begin_copy(digest, slot)

    def remove(self, digest: bytes) -> None:
        """Remove an adapter. Raises KeyError if the adapter is not loaded."""
        del self._images[digest]
        self._slots.remove(digest)
        self._coming.pop(digest, None)

    @contextmanager
    def step(self, segments: Sequence[LoraSegment], of_rows: Sequence[LoraSegment], shape: StepShape) -> Iterator[None]:
        """Return a context in which ``add_to`` adds the adapters' outputs for a step of ``shape``.

        Args:
            segments: Ranges of tokens that use adapters.
            of_rows: Ranges of rows that get logits and use adapters.
            shape: Shape of the step.

        Raises:
            LookupError: An adapter is not loaded.
            ValueError: The step has more adapters than slots.
        """
        segments, of_rows = ([each for each in own if each.digest != BLANK] for own in (segments, of_rows))
        expect_known([*segments, *of_rows], self._images)
        tiles = self._tiles_for(shape)
        for digest, slot in self._slots.begin_step([each.digest for each in (*segments, *of_rows)]).items():
            self._begin_copy(digest, slot)
        for digest in {each.digest for each in (*segments, *of_rows)} & self._coming.keys():
            self._await_copy(digest)
        tiles.load(segments, of_rows, self._slots)
        self._step = tiles, *tiles.of(shape)
        try:
            yield
        finally:
            self._step = None

    def updates(self, place: int) -> bool:
        """Return whether any loaded adapter updates the matrix product with index ``place``."""
        return any(image.updates[place] for image in self._images.values())

    def add_to(self, place: int, x: torch.Tensor, scale: float, out: torch.Tensor) -> None:
        """Add the adapters' output for the input ``x`` to ``out``, the output of the matrix product with index
        ``place``.

        Does nothing in steps without adapters.
        """
        if self._step is None:
            return
        tiles, of_tokens, of_rows = self._step
        own = of_rows if self.memory.places[place].of_rows else of_tokens
        self._kernels.add_low_rank(x, self.memory.matrices[place], own, tiles.scratch, scale, out)

    def _begin_copy(self, digest: bytes, slot: int) -> None:
        self._coming[digest] = self._copies.begin(self.memory.pairs(self._images[digest], slot))

    def _await_copy(self, digest: bytes) -> None:
        try:
            self._copies.await_end(self._coming.pop(digest))
        except BaseException:  # The slot may contain a part of the adapter, so the next step must copy it again.
            self._slots.remove(digest)
            raise

    def _tiles_for(self, shape: StepShape) -> StepTiles:
        """Return the tiles for a step of ``shape``. Tiles for padded shapes never move. Tiles for larger shapes are
        allocated when a step first needs them.
        """
        if self._captured is None:
            raise RuntimeError("allocate must be called before the first step")
        if not shape.is_large:
            return self._captured
        held = StepShape(0, 0) if self._large is None else self._large.max_shape
        if self._large is None or shape.tokens > held.tokens or shape.requests > held.requests:
            self._large = None
            wanted = StepShape(max(shape.tokens, held.tokens), max(shape.requests, held.requests))
            self._large = StepTiles(wanted, self.memory, self._limits.max_loras, self._device)
        return self._large


# LoRA adapters in slots of device memory, whose outputs are added to the outputs of a model's own modules.


class SlotModules:
    """Adds outputs of LoRA adapters in device slots to the outputs of linear layers of ``module``, after the bias.

    Layers have hooks only in steps with adapters, so this class does not change other steps. The methods are the same
    as in ``AdaptedModules``, plus ``allocate``, which allocates the memory once.

    Args:
        layers: ``(out, in)`` features of the linear layers, by name.
        head: Name of the layer that gets only rows whose logits are needed, or empty if the model has no such layer.
        limits: Limits on the number of slots and on the ranks of adapters.
        dtype: The model's dtype.
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
        """Names of layers whose input rows are not the step's rows."""
        self.allocate, self.release = self._adapters.allocate, self._adapters.release

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._adapters

    def prepare(self, adapter: LoraAdapter) -> Callable[[], None]:
        if odd := self._odd & adapter.updates.keys():
            raise ValueError(
                f"layer {min(odd)} gets input rows other than a step's tokens, so adapters cannot update it on this device"
            )
        return self._adapters.prepare(adapter)

    def add(self, adapter: LoraAdapter) -> None:
        """Add an adapter. Call this method only between steps. Raises ValueError if the adapter updates a layer that
        does not exist or that has other sizes.
        """
        self.prepare(adapter)()

    def remove(self, digest: bytes) -> None:
        """Remove an adapter. Call this method only between steps. Raises KeyError if the adapter is not loaded."""
        self._adapters.remove(digest)

    @contextmanager
    def step(self, segments: Sequence[LoraSegment], rows: IntArray, num_tokens: int) -> Iterator[None]:
        """Return a context in which the model's layers add the outputs of adapters for one step.

        Args:
            segments: Ranges of tokens that use adapters.
            rows: int64, the rows whose logits are needed.
            num_tokens: Number of tokens of the step, or 0 to compute only the head.

        Raises:
            LookupError: An adapter is not loaded.
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
        """Return a context like ``step`` for work that is launched inside ``hooked`` and padded to ``shape``.

        In this context the work may be launched, or a graph of the work replayed.
        """
        self._expected = shape.tokens, shape.requests
        of_tokens = segments if shape.tokens else ()
        with self._adapters.step(of_tokens, segments_of_rows(segments, rows), shape):
            yield

    @contextmanager
    def hooked(self) -> Iterator[None]:
        """Return a context in which the layers have the forward hooks that add the adapters' outputs."""
        with ExitStack() as hooks:
            for place, name in enumerate(self._names):
                layer = self._module.get_submodule(name)
                hooks.callback(layer.register_forward_hook(partial(self._add, place, name)).remove)
            yield

    def _add(self, place: int, name: str, layer: torch.nn.Module, args: Any, output: torch.Tensor) -> None:  # noqa: ARG002
        """Add the adapters' output to the output of a layer. PyTorch calls this method as a forward hook."""
        x, out = args[0].reshape(-1, args[0].shape[-1]).contiguous(), output.view(-1, output.shape[-1])
        expected = self._expected[name == self._head]
        if name == self._head and not expected:
            return  # the layer belongs to a pooler inside the model, whose output is not used
        if len(x) != expected:
            self._odd.add(name)
            if self._adapters.updates(place):
                raise ValueError(
                    f"layer {name} gets {len(x)} input rows instead of {expected}, but an adapter updates it"
                )
            return
        self._adapters.add_to(place, x, 1.0, out)


# Matrix products of the fused decoder to which LoRA adapters are added.

Adapt = Callable[[Sequence[Linear], Product], Product]
"""Function that returns a replacement for the matrix product of linear layers, for example a product that adds LoRA
adapters.
"""


def unadapted(linears: Sequence[Linear], product: Product) -> Product:  # noqa: ARG001 - an ``Adapt``
    """Return the matrix product unchanged, without LoRA adapters."""
    return product


class AdaptedProduct(Held):
    """``Product`` that computes another product with its bias and scale, and then adds the outputs of LoRA adapters.

    Rows without an adapter are bit-identical to rows of that other product.
    """

    def __init__(self, product: Product, add_to: Callable[[torch.Tensor, float, torch.Tensor], None]) -> None:
        self._product = product
        self._add_to = add_to

    @property
    def bias(self) -> torch.Tensor | None:
        """Bias of the product."""
        return self._product.bias

    @property
    def out_features(self) -> int:
        """Output features of the product."""
        return self._product.out_features

    @property
    def in_features(self) -> int:
        """Input features of the product."""
        return self._product.in_features

    @property
    def tensors(self) -> list[torch.Tensor]:
        """Tensors of the product."""
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
    """Collects the matrix products of the fused decoder while the decoder is built, so that LoRA adapters can be added
    to the products.

    ``module`` is the model.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self._names = {id(part): name for name, part in module.named_modules()}
        self._places: list[Place] = []
        self._adapters: DeviceAdapters | None = None

    def adapt(self, linears: Sequence[Linear], product: Product) -> Product:
        """Return a product that also adds the outputs of LoRA adapters. The decoder uses this method as an ``Adapt``."""
        return self._adapted(linears, product, of_rows=False)

    def adapt_head(self, head: Linear, product: Product) -> Product:
        """Return a product for the head that also adds the outputs of LoRA adapters."""
        return self._adapted([head], product, of_rows=True)

    def open(
        self, limits: SlotLimits, dtype: torch.dtype, device: torch.device, kernels: "TritonKernels"
    ) -> DeviceAdapters:
        """Return the object that holds the adapters of all collected products. Call this method after the decoder is
        built.
        """
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


# Kernels for LoRA adapters: their comparison with PyTorch on the same device, and their use with a model's modules.

logger = logging.getLogger(__name__)

_PROVED = Place({"one": (160, 1152), "other": (48, 1152)})
_LIMITS = SlotLimits(max_loras=2, max_rank=24)
_ROWS = 21


def why_not(kernels: "TritonKernels", dtype: torch.dtype, device: torch.device) -> str:
    """Return why ``kernels`` cannot compute adapters of a model in ``dtype`` on ``device``, or an empty text if they
    can.

    The check compares rows with adapters to results of PyTorch, and requires that other rows stay unchanged.
    """
    try:
        difference, untouched = _prove(kernels, dtype, device)
    except Exception as e:  # for example an error of a compiler or driver
        return f"the adapter kernels fail: {type(e).__name__}: {e}"
    if not untouched:
        return "the adapter kernels change rows without an adapter"
    if difference <= TOLERANCES[dtype]:
        return ""
    return f"the output of the adapter kernels differs by {difference:.3g}"


@torch.inference_mode()
def _prove(kernels: "TritonKernels", dtype: torch.dtype, device: torch.device) -> tuple[float, bool]:
    """Return the difference between the kernels' and PyTorch's output of two adapters, and whether rows without
    adapters stayed unchanged.
    """
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
    adapters.release()
    return distance(found - before, expected - before), untouched


def slot_modules(
    module: PreTrainedModel, dtype: torch.dtype, device: torch.device, limits: SlotLimits | None
) -> SlotModules | None:
    """Return the device slots for LoRA adapters of a model that runs with transformers' modules.

    Returns None without ``limits``, on a device that is not a GPU, or if the kernels are missing or fail their check.
    PyTorch then computes the adapters, which is slow.
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
    logger.warning("computing LoRA adapters with PyTorch instead of Penstock's GPU kernels (slower) reason=%s", reason)
    return None


def adapted_modules(
    module: PreTrainedModel, dtype: torch.dtype, device: torch.device, limits: SlotLimits, kernels: "TritonKernels"
) -> SlotModules:
    """Return device slots for LoRA adapters of all layers that ``AdapterTarget`` names and that compute in the model's
    dtype.

    Quantized layers are included, because the engine will dequantize their weights to that dtype.
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
    # Triton is imported only if there is a device for its kernels.
    from penstock_enginecore.forward.cuda.triton_kernels import TritonKernels

    return TritonKernels()
