"""Paged attention by the fused decoder's kernels, for models that run on transformers' own modules."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from penstock_enginecore.attention.base import AttentionBackend, AttentionMetadata, AttentionParams, IntArray, StepPlan
from penstock_enginecore.attention.factory import TRITON
from penstock_enginecore.attention.kv_cache import HEADS, NO_SCALES, KVArena, KVCache, KVLayout, KVScales
from penstock_enginecore.config import KernelsConfig
from penstock_enginecore.core.kv_cache.spec import KVCacheSpec
from penstock_enginecore.forward.cuda.buffers import to_device
from penstock_enginecore.forward.cuda.graphs import StepGraphs, cuda_graphs
from penstock_enginecore.forward.cuda.kernel_api import GroupInputs
from penstock_enginecore.forward.cuda.kernels.configurations import MIN_BLOCK_SIZE, attention_tiles
from penstock_enginecore.forward.cuda.library_attention import LibraryAttention
from penstock_enginecore.forward.cuda.states import open_kernels
from penstock_enginecore.forward.equivalence_check import Candidate
from penstock_enginecore.models.errors import UnsuitableError
from penstock_enginecore.states.core.spec import StateSpec
from penstock_enginecore.states.cuda.context import StateKernels

if TYPE_CHECKING:  # Triton is imported only if there is a device for its kernels
    from penstock_enginecore.forward.cuda.triton_kernels import TritonKernels

_COLUMNS = 16
"""Number of blocks to whose next multiple the width of a block table is padded. Triton compiles the kernels again for
each new width.
"""

_NONE: IntArray = np.zeros(0, dtype=np.int64)
_UNKNOWN = AttentionMetadata(_NONE, _NONE, np.zeros((0, 0), dtype=np.int32), _NONE, 0)
"""Empty host metadata, for plans of steps whose metadata is only on the device."""


@dataclass(slots=True, kw_only=True)
class PagedPlan(StepPlan):
    """Inputs of the attention kernels for a step, on the device. If ``padded`` is true, attention returns zeros for
    padding rows.
    """

    group: GroupInputs
    padded: bool = False


class TritonAttention(AttentionBackend):
    """Attention backend with Triton kernels. One ``KVArena`` holds the KV caches of all layers.

    ``why_not`` reports head sizes, block sizes and dtypes that the kernels do not support. ``library`` computes long
    prompts of steps that are not replayed, or is None.
    """

    keeps_float8 = True

    def __init__(self, kernels: "TritonKernels", library: LibraryAttention | None = None) -> None:
        self._kernels = kernels
        self.library = library

    def layout(self, spec: KVCacheSpec, dtype: torch.dtype) -> KVLayout:  # noqa: ARG002 - the same for all
        """Return the layout ``HEADS``."""
        return HEADS

    def memory(
        self,
        specs: Mapping[str, KVCacheSpec],
        dtype: torch.dtype,
        device: torch.device,
        scales: Mapping[str, KVScales] = NO_SCALES,
    ) -> KVArena:
        """Return one ``KVArena`` that holds the KV caches of all layers."""
        return KVArena(specs, dtype, device, scales)

    def plan(self, metadata: AttentionMetadata, device: torch.device) -> PagedPlan:
        """Start one copy of the metadata to the device, and return the plan without waiting for the copy."""
        requests, blocks = metadata.block_table.shape
        width = -(-blocks // _COLUMNS) * _COLUMNS
        table = np.zeros((requests, width), dtype=np.int32)
        table[:, :blocks] = metadata.block_table
        told: list[npt.NDArray[Any]] = [metadata.query_start_loc, metadata.seq_lens, table.reshape(-1)]
        told += [] if metadata.key_ends is None else [metadata.key_ends]
        vectors = [(metadata.slot_mapping, torch.int64), *((vector, torch.int32) for vector in told)]
        slots, starts, lengths, tables, *ends = to_device(vectors, device)
        key_ends = ends[0] if ends else None
        group = GroupInputs(
            tables.view(requests, width),
            starts,
            lengths,
            slots,
            key_ends,
            windowed_ends=metadata.windowed_ends,
            decodes_only=metadata.decodes_only,
            prompts=None if self.library is None else self.library.chosen([metadata], lengths),
        )
        return PagedPlan(metadata, device, _slot_mapping=slots, group=group)

    def padded_plan(self, group: GroupInputs, positions: torch.Tensor) -> PagedPlan:
        """Return the plan of a padded step, whose metadata is only on the device. ``positions`` is int64 ``[tokens]``."""
        return PagedPlan(
            _UNKNOWN, positions.device, _slot_mapping=group.slots, _positions=positions, group=group, padded=True
        )

    def write(self, cache: KVCache, plan: StepPlan, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Write a step's keys and values into ``cache`` with one kernel launch. Raises TypeError if another backend
        made the plan.
        """
        keys, values = (x if x.stride(2) == 1 else x.contiguous() for x in (keys, values))
        self._kernels.write(keys, values, _group(plan).slots, cache.keys, cache.values, cache.scales)

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,  # noqa: ARG002 - read back from the cache
        value: torch.Tensor,
        cache: KVCache,
        plan: StepPlan,
        params: AttentionParams,
    ) -> torch.Tensor:
        """Launch the attention kernels and return their output. Raises TypeError if another backend made the plan."""
        padded = isinstance(plan, PagedPlan) and plan.padded
        shape = query.shape[0], query.shape[1], value.shape[2]
        out = query.new_zeros(shape) if padded else query.new_empty(shape)
        group = _group(plan).for_window(params.sliding_window)
        self._kernels.attend(query.contiguous(), cache.keys, cache.values, group, params, out, cache.scales)
        return out


def why_not(specs: Mapping[str, KVCacheSpec], dtype: torch.dtype) -> str:
    """Return text that names the first layer of ``specs`` that the kernels do not support, and the reason. The text is
    empty if the kernels support all layers. ``dtype`` is the dtype of queries.
    """
    return next((f"{name}: {reason}" for name, spec in specs.items() if (reason := _why_not(spec, dtype))), "")


def _why_not(spec: KVCacheSpec, dtype: torch.dtype) -> str:
    block_size, largest = spec.block_size, max(spec.head_size, spec.head_size_v)
    if not dtype.is_floating_point or dtype.itemsize not in (2, 4):
        return f"its dtype is {dtype}"
    if block_size < MIN_BLOCK_SIZE:
        return f"its blocks have {block_size} tokens, but at least {MIN_BLOCK_SIZE} are needed"
    for width in (spec.key_width, spec.value_width):
        if block_size * width % 16:  # the kernels can pipeline copies only for such strides
            return f"its blocks have {block_size} times {width} elements, which is not a multiple of 16"
    try:
        attention_tiles(1 << (largest - 1).bit_length(), spec.dtype_size)
    except ValueError as e:
        return str(e)
    return ""


def _group(plan: StepPlan) -> GroupInputs:
    if not isinstance(plan, PagedPlan):
        raise TypeError(f"the plan has type {type(plan).__name__}, but this attention backend needs a PagedPlan")
    return plan.group


# Candidates for the forward pass that run transformers' own modules, with attention by Triton kernels.

T = TypeVar("T")
Replay = Callable[[TritonAttention, StepGraphs, StateKernels | None], tuple[T, Callable[[], str]]]
"""Function that creates a forward pass that replays steps. For a model with recurrent layers, the last argument is the
kernels of these layers.

The second result of a ``Replay`` is a function that returns why the forward pass does not replay steps, or an empty
text.
"""


@dataclass(frozen=True, slots=True)
class Attended(Generic[T]):
    """``Replacement`` that runs the model's modules with another attention backend.

    Attributes:
        serves: The forward pass, or the backbone of a pooling model.
        run: Function that returns the result of ``serves`` for the probe, a short test prompt.
        failure: Function that returns why the last run did not use CUDA graphs, or an empty text.
    """

    serves: T
    run: Callable[[T], torch.Tensor]
    failure: Callable[[], str] = str

    def probe(self) -> torch.Tensor:
        """Return the result of ``run``. Raises RuntimeError if ``failure`` returns a reason."""
        result = self.run(self.serves)
        if failure := self.failure():
            raise RuntimeError(failure)
        return result

    def where(self) -> str:
        """Return an empty text: no single layer causes a difference, because all layers use the same attention kernels."""
        return ""

    def take_over(self) -> T:
        """Return ``serves``. The modules keep their weights."""
        return self.serves

    def undo(self) -> None:
        """Do nothing, because this candidate did not change the model."""


@dataclass(frozen=True, slots=True)
class Recurrent(Generic[T]):
    """Recurrent layers of a model, and how to build a forward pass with kernels for these layers.

    Attributes:
        specs: Specs of the layers by module name.
        serve: Function that creates a forward pass with an attention backend and kernels for the recurrent layers.
        attends: Attention backend for a model without a KV cache. Such a model never calls the backend.
    """

    specs: Mapping[str, StateSpec]
    serve: Callable[[AttentionBackend, StateKernels], T]
    attends: AttentionBackend


@dataclass(frozen=True, slots=True)
class Attending(Generic[T]):
    """Model for which ``attention_candidates`` builds candidates.

    Attributes:
        specs: KV cache specs of the model's attention layers.
        dtype: The dtype of queries.
        serve: Function that creates a forward pass with an attention backend.
        run: Function that returns the result of a forward pass for the probe, a short test prompt.
        replay: Function that creates a forward pass that replays whole steps, or None if steps cannot be replayed.
        recurrent: The model's recurrent layers, or None for a model without recurrent layers.
        library: Computes attention of long prompts, or None.
    """

    device: torch.device
    specs: Mapping[str, KVCacheSpec]
    dtype: torch.dtype
    serve: Callable[[AttentionBackend], T]
    run: Callable[[T], torch.Tensor]
    replay: Replay[T] | None = None
    recurrent: Recurrent[T] | None = None
    library: LibraryAttention | None = None


def attention_candidates(model: Attending[T], uses: KernelsConfig, attention_backend: str) -> list[Candidate[T]]:
    """Return candidates that run the model's modules with ``TritonAttention``. The first candidate replays steps as
    CUDA graphs, the next candidates launch each kernel. For a model with recurrent layers, all candidates except the
    last also compute the recurrent states with Triton.

    Returns an empty list for a model without a KV cache and without recurrent layers, and if the settings do not select
    this backend.
    """
    best = attention_backend == "auto" and model.device.type == "cuda" and uses.attention
    if not (best or attention_backend == TRITON):
        return []
    candidates: list[Candidate[T]] = []
    name = "Triton attention" if model.recurrent is None else "Triton attention and states"
    if model.specs and (replay := model.replay) is not None and uses.graphs and can_capture(model.device):
        candidates.append(Candidate(f"{name} in graphs", lambda: _build_replayed(model, replay)))
    if (recurrent := model.recurrent) is not None:
        name = name if model.specs else "Triton states"
        candidates.append(Candidate(name, lambda: _build_recurrent(model, recurrent)))
    if model.specs:
        candidates.append(Candidate("Triton attention", lambda: _build(model)))
    return candidates


def _build(model: Attending[T]) -> Attended[T]:
    return Attended(model.serve(_attention(model)), model.run)


def _build_recurrent(model: Attending[T], recurrent: Recurrent[T]) -> Attended[T]:
    attends = _attention(model) if model.specs else recurrent.attends
    return Attended(recurrent.serve(attends, open_kernels(recurrent.specs)), model.run)


def _build_replayed(model: Attending[T], replay: Replay[T]) -> Attended[T]:
    kernels = None if model.recurrent is None else open_kernels(model.recurrent.specs)
    serves, failure = replay(_attention(model), make_graphs(), kernels)
    return Attended(serves, model.run, failure)


def _attention(model: Attending[T]) -> TritonAttention:
    if reason := why_not(model.specs, model.dtype):
        raise UnsuitableError(reason)
    return TritonAttention(_kernels(), model.library)


def can_capture(device: torch.device) -> bool:
    """Return whether the device can capture work as a graph and replay the graph."""
    return device.type == "cuda"


make_graphs = cuda_graphs


def _kernels() -> "TritonKernels":
    # Triton is imported only if there is a device for its kernels.
    try:
        from penstock_enginecore.forward.cuda.triton_kernels import TritonKernels
    except ModuleNotFoundError as e:
        raise UnsuitableError(f"the attention kernels cannot be compiled: {e}") from e
    return TritonKernels()
