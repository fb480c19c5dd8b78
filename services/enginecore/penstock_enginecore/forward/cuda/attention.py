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
from penstock_enginecore.forward.cuda.states import open_kernels
from penstock_enginecore.forward.equivalence_check import Candidate
from penstock_enginecore.models.errors import UnsuitableError
from penstock_enginecore.states.core.spec import StateSpec
from penstock_enginecore.states.cuda.context import StateKernels

if TYPE_CHECKING:  # Triton is imported only if there is a device for its kernels
    from penstock_enginecore.forward.cuda.triton_kernels import TritonKernels

_COLUMNS = 16
"""Block tables are padded to a multiple of this number of blocks. Each new table width would compile the kernels again.
"""

_NONE: IntArray = np.zeros(0, dtype=np.int64)
_UNKNOWN = AttentionMetadata(_NONE, _NONE, np.zeros((0, 0), dtype=np.int32), _NONE, 0)
"""Metadata of steps whose metadata is only on the device."""


@dataclass(slots=True, kw_only=True)
class PagedPlan(StepPlan):
    """Kernel inputs of a step, on the device. With ``padded``, rows after the tokens are set to zero."""

    group: GroupInputs
    padded: bool = False


class TritonAttention(AttentionBackend):
    """Attention backend with Triton kernels. The KV caches of all layers are in a ``KVArena``.

    ``why_not`` reports unsupported sizes and dtypes.
    """

    keeps_float8 = True

    def __init__(self, kernels: "TritonKernels") -> None:
        self._kernels = kernels

    def layout(self, spec: KVCacheSpec, dtype: torch.dtype) -> KVLayout:  # noqa: ARG002 - the same for all
        """Return ``HEADS``."""
        return HEADS

    def memory(
        self,
        specs: Mapping[str, KVCacheSpec],
        dtype: torch.dtype,
        device: torch.device,
        scales: Mapping[str, KVScales] = NO_SCALES,
    ) -> KVArena:
        """Return one arena for all layers."""
        return KVArena(specs, dtype, device, scales)

    def plan(self, metadata: AttentionMetadata, device: torch.device) -> PagedPlan:
        """Copy the metadata to the device in one copy, without waiting for the copy."""
        requests, blocks = metadata.block_table.shape
        width = -(-blocks // _COLUMNS) * _COLUMNS
        table = np.zeros((requests, width), dtype=np.int32)
        table[:, :blocks] = metadata.block_table
        told: list[npt.NDArray[Any]] = [metadata.query_start_loc, metadata.seq_lens, table.reshape(-1)]
        told += [] if metadata.key_ends is None else [metadata.key_ends]
        vectors = [(metadata.slot_mapping, torch.int64), *((vector, torch.int32) for vector in told)]
        slots, starts, lengths, tables, *ends = to_device(vectors, device)
        group = GroupInputs(tables.view(requests, width), starts, lengths, slots, *ends)
        return PagedPlan(metadata, device, _slot_mapping=slots, group=group)

    def padded_plan(self, group: GroupInputs, positions: torch.Tensor) -> PagedPlan:
        """Return the plan of a padded step, whose metadata is only on the device. ``positions`` is int64 ``[tokens]``."""
        return PagedPlan(
            _UNKNOWN, positions.device, _slot_mapping=group.slots, _positions=positions, group=group, padded=True
        )

    def write(self, cache: KVCache, plan: StepPlan, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Write keys and values in one launch. Raises TypeError for a plan of another backend."""
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
        """Launch the attention kernels. Raises TypeError for a plan of another backend."""
        padded = isinstance(plan, PagedPlan) and plan.padded
        shape = query.shape[0], query.shape[1], value.shape[2]
        out = query.new_zeros(shape) if padded else query.new_empty(shape)
        self._kernels.attend(query.contiguous(), cache.keys, cache.values, _group(plan), params, out, cache.scales)
        return out


def why_not(specs: Mapping[str, KVCacheSpec], dtype: torch.dtype) -> str:
    """Return the first layer of ``specs`` that the kernels do not support, with the reason, or an empty text. ``dtype``
    is the dtype of queries.
    """
    return next((f"{name}: {reason}" for name, spec in specs.items() if (reason := _why_not(spec, dtype))), "")


def _why_not(spec: KVCacheSpec, dtype: torch.dtype) -> str:
    block_size, largest = spec.block_size, max(spec.head_size, spec.head_size_v)
    if not dtype.is_floating_point or dtype.itemsize not in (2, 4):
        return f"its dtype is {dtype}"
    if block_size < MIN_BLOCK_SIZE:
        return f"its blocks have {block_size} tokens, but at least {MIN_BLOCK_SIZE} are needed"
    for width in (spec.key_width, spec.value_width):
        if block_size * width % 16:  # otherwise the kernels cannot pipeline copies
            return f"its blocks have {block_size} times {width} elements, which is not a multiple of 16"
    try:
        attention_tiles(1 << (largest - 1).bit_length(), spec.dtype_size)
    except ValueError as e:
        return str(e)
    return ""


def _group(plan: StepPlan) -> GroupInputs:
    if not isinstance(plan, PagedPlan):
        raise TypeError(f"a {type(plan).__name__} is not a plan of this backend")
    return plan.group


# Triton kernels as a candidate for the attention of models that run on transformers' own modules.

T = TypeVar("T")
Replay = Callable[[TritonAttention, StepGraphs, StateKernels | None], tuple[T, Callable[[], str]]]
"""Function that creates a pass that replays steps. Models with recurrent layers need their kernels.

Also returns a function that returns why the pass does not replay steps, or an empty text if it replays them.
"""


@dataclass(frozen=True, slots=True)
class Attended(Generic[T]):
    """``Replacement`` that runs the model's modules with another attention backend.

    Attributes:
        serves: The pass or backbone.
        run: Returns the result of ``serves`` for the probe.
        failure: Returns why the last run did not use graphs, or an empty text.
    """

    serves: T
    run: Callable[[T], torch.Tensor]
    failure: Callable[[], str] = str

    def probe(self) -> torch.Tensor:
        """Return the result of ``run``. Raises RuntimeError if there is a ``failure``."""
        result = self.run(self.serves)
        if failure := self.failure():
            raise RuntimeError(failure)
        return result

    def where(self) -> str:
        """Return an empty text, because all layers use the same attention."""
        return ""

    def take_over(self) -> T:
        """Return the pass. The modules keep their weights."""
        return self.serves

    def undo(self) -> None:
        """Do nothing: the model was not changed."""


@dataclass(frozen=True, slots=True)
class Recurrent(Generic[T]):
    """Recurrent layers of a model for which candidates are built.

    Attributes:
        specs: Specs of the layers by module name.
        serve: Creates a pass with an attention backend and kernels for the recurrent layers.
        attends: Attention backend of a model without a KV cache, which never calls it.
    """

    specs: Mapping[str, StateSpec]
    serve: Callable[[AttentionBackend, StateKernels], T]
    attends: AttentionBackend


@dataclass(frozen=True, slots=True)
class Attending(Generic[T]):
    """Model for which attention candidates are built.

    Attributes:
        specs: KV cache specs of the model's attention layers.
        dtype: The dtype of queries.
        serve: Creates a pass with an attention backend.
        run: Returns a pass's result for the probe.
        replay: Creates a pass that replays whole steps, or None if steps cannot be replayed.
        recurrent: The model's recurrent layers, or None if it has none.
    """

    device: torch.device
    specs: Mapping[str, KVCacheSpec]
    dtype: torch.dtype
    serve: Callable[[AttentionBackend], T]
    run: Callable[[T], torch.Tensor]
    replay: Replay[T] | None = None
    recurrent: Recurrent[T] | None = None


def attention_candidates(model: Attending[T], uses: KernelsConfig, attention_backend: str) -> list[Candidate[T]]:
    """Return candidates with ``TritonAttention`` for the model's modules: first one with replayed steps, then one with
    launched steps. The candidates of a model with recurrent layers also compute its states with Triton, except the last.

    Returns none for a model without a KV cache and without states, or if neither the device nor ``attention_backend``
    selects this backend.
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
    return TritonAttention(_kernels())


def can_capture(device: torch.device) -> bool:
    """Return whether the device can capture and replay work."""
    return device.type == "cuda"


make_graphs = cuda_graphs


def _kernels() -> "TritonKernels":
    # Triton is imported only if there is a device for its kernels.
    try:
        from penstock_enginecore.forward.cuda.triton_kernels import TritonKernels
    except ModuleNotFoundError as e:
        raise UnsuitableError(f"the attention kernels cannot be compiled: {e}") from e
    return TritonKernels()
