"""Dtypes of a model's computation and of its stored weights. Weights may be stored in 16 bits while computations use
float32.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch.utils._pytree import tree_map_only
from transformers import PretrainedConfig, PreTrainedModel

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_BFLOAT16_FEATURES = ("avx512_bf16", "amx_bf16", "bf16")
"""Names that torch uses for CPU instruction sets with bfloat16."""


@dataclass(frozen=True, slots=True)
class Dtypes:
    """Dtypes of a model.

    Attributes:
        computed: The dtype of the computation.
        weights: The dtype in which weights are read, which may have fewer bits than ``computed``. None means the dtype
            in the files.
        dense: The dtype of weights that have no dtype in the files: quantized and random weights.
        precision: The dtype to which inputs of matrix products may be rounded.
    """

    computed: torch.dtype
    weights: torch.dtype | None
    dense: torch.dtype
    precision: torch.dtype

    @classmethod
    def of(cls, dtype: torch.dtype) -> Self:
        """Return ``Dtypes`` in which every dtype is ``dtype``."""
        return cls(dtype, dtype, dtype, dtype)

    @property
    def widens(self) -> bool:
        """Whether the dtype of weights may have fewer bits than the dtype of the computation."""
        return self.weights != self.computed

    @property
    def name(self) -> str:
        """Name of the dtype of the computation."""
        return str(self.computed).removeprefix("torch.")


def resolve_dtypes(wanted: str, hf_config: PretrainedConfig, device: torch.device, *, widen: bool = False) -> Dtypes:
    """Return the dtypes for the setting ``wanted``.

    The setting "auto" means the checkpoint's dtype. If the CPU only emulates bfloat16, "auto" means float32 instead of
    bfloat16. CPUs compute float16 as float32, which represents every float16 number. With ``widen``, CPUs compute in
    float32 with weights in their stored dtype. The setting "bfloat16" then means that weights and inputs of matrix
    products are rounded to bfloat16.
    """
    if device.type == "cpu" and widen:
        if wanted == "bfloat16":
            return Dtypes(torch.float32, torch.bfloat16, torch.bfloat16, torch.bfloat16)
        halves = wanted == "auto" and hf_config.dtype == torch.bfloat16
        return Dtypes(torch.float32, None, torch.bfloat16 if halves else torch.float32, torch.float32)
    dtype = _DTYPES[wanted] if wanted != "auto" else hf_config.dtype
    if not isinstance(dtype, torch.dtype) or dtype not in _DTYPES.values():
        dtype = torch.float32
    emulated = dtype == torch.float16 or (wanted == "auto" and dtype == torch.bfloat16 and not _cpu_has_bfloat16())
    if device.type == "cpu" and emulated:
        dtype = torch.float32
    return Dtypes.of(dtype)


def _cpu_has_bfloat16() -> bool:
    capabilities = torch.cpu.get_capabilities()
    return any(capabilities.get(name, False) for name in _BFLOAT16_FEATURES)


# Narrow weights: weights that are stored in 16 bits and used in float32 computations.

_aten = torch.ops.aten
_STORED_AS = (torch.bfloat16, torch.float16)
_VIEWS = frozenset(
    {
        _aten.alias,
        _aten.chunk,
        _aten.clone,
        _aten.contiguous,
        _aten.detach,
        _aten.expand,
        _aten.narrow,
        _aten.numpy_T,
        _aten.permute,
        _aten.reshape,
        _aten.select,
        _aten.slice,
        _aten.split,
        _aten.split_with_sizes,
        _aten.squeeze,
        _aten.t,
        _aten.transpose,
        _aten.unsqueeze,
        _aten.view,
    }
)
"""Operations on one tensor whose results contain elements of this tensor, unchanged."""
_LOOK_UPS = frozenset({_aten.embedding, _aten.index, _aten.index_select})
"""Operations that select elements of their first argument."""


class NarrowWeight(torch.Tensor):
    """Weight that other code sees as float32, stored in ``kept`` as bfloat16 or float16.

    Each operation gets a float32 copy of the weight, which is freed after the operation. Lookups select stored elements
    and then convert only these. Views and copies of the weight are stored in 16 bits too. Writing to the weight raises
    TypeError.
    """

    kept: torch.Tensor
    __torch_function__: Any = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls: type["NarrowWeight"], kept: torch.Tensor) -> "NarrowWeight":
        """Return a weight that stores ``kept``, which is bfloat16 or float16."""
        make: Any = torch.Tensor._make_wrapper_subclass
        sizes, strides = kept.shape, kept.stride()
        # Turn inference mode off, because views of a tensor must be created in the same mode as the tensor.
        with torch.inference_mode(mode=False):
            made: NarrowWeight = make(cls, sizes, strides=strides, dtype=torch.float32, device=kept.device)
        made.kept = kept
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch declares it as a plain function
        cls,
        func: Any,
        types: Iterable[type],
        args: Any = (),
        kwargs: Any = None,
    ) -> Any:
        """Compute ``func`` with float32 copies of narrow weights."""
        kwargs = kwargs or {}
        if func._schema.is_mutable and _writes(func, args):
            raise TypeError(
                f"cannot run {func}: it writes to a weight that is stored in 16 bits, and such weights are read-only"
            )
        if func.overloadpacket in _VIEWS:
            made = func(args[0].kept, *args[1:], **kwargs)
            return [cls(each) for each in made] if isinstance(made, list | tuple) else cls(made)
        if func.overloadpacket is _aten.cat and len({_kept_as(each) for each in args[0]}) == 1:
            return cls(func([each.kept for each in args[0]], *args[1:], **kwargs))
        if func.overloadpacket in _LOOK_UPS and isinstance(args[0], cls):
            return func(args[0].kept, *args[1:], **kwargs).float()
        args, kwargs = tree_map_only(cls, widened, (args, kwargs))
        return func(*args, **kwargs)


def widened(weight: torch.Tensor) -> torch.Tensor:
    """Return ``weight``, converted to float32 if it is a ``NarrowWeight``."""
    return weight.kept.float() if isinstance(weight, NarrowWeight) else weight


def num_bytes(weight: torch.Tensor) -> int:
    """Return the size of a weight in memory, in bytes."""
    return weight.kept.nbytes if isinstance(weight, NarrowWeight) else weight.nbytes


@contextmanager
def as_stored(dtype: torch.dtype | None) -> Iterator[None]:
    """Return a context in which ``from_pretrained`` reads weights in ``dtype``, independent of the dtype of the
    computation.

    None means the dtype in the files. Weights that a model keeps in float32 are read in float32.
    """
    loading: Any = PreTrainedModel
    planned = loading._get_dtype_plan

    def plan(model: Any, computed: torch.dtype) -> dict[str, torch.dtype | None]:  # noqa: ARG001 - transformers' signature
        return {f"*{name}": kept for name, kept in planned(model, torch.bfloat16).items()} | {"*": dtype}

    loading._get_dtype_plan = plan
    try:
        yield
    finally:
        loading._get_dtype_plan = planned


@torch.no_grad()
def narrow(module: torch.nn.Module) -> None:
    """Make ``module`` compute in float32. 16-bit matrices become narrow weights, stored in 16 bits. Other parameters
    become float32.
    """
    # keeps the old and the new parameter alive, because ids are only unique among live objects
    made: dict[int, tuple[torch.nn.Parameter, torch.nn.Parameter]] = {}
    for part in module.modules():
        for name, parameter in part._parameters.items():
            if parameter is None or not _becomes_float32(parameter):
                continue
            if id(parameter) not in made:
                weight = parameter.detach()
                stays = weight.dim() > 1 and weight.dtype in _STORED_AS
                seen = NarrowWeight(weight) if stays else weight.float()
                made[id(parameter)] = parameter, torch.nn.Parameter(seen, requires_grad=False)
            part._parameters[name] = made[id(parameter)][1]
        for name, buffer in part._buffers.items():
            if buffer is not None and _becomes_float32(buffer):
                part._buffers[name] = buffer.float()


@torch.no_grad()
def settle(module: torch.nn.Module) -> int:
    """Convert weights of ``module`` that are still stored in 16 bits after kernels have packed their own weights.
    Returns the size in bytes of the weights that become float32.

    Embeddings stay in 16 bits, because each step looks up only some rows. This function copies them, so that the
    checkpoint's files can be closed. All other 16-bit weights become float32.
    """
    made: dict[int, tuple[torch.Tensor, torch.nn.Parameter]] = {}
    looked_up = {id(part.weight) for part in module.modules() if isinstance(part, torch.nn.Embedding)}
    wide = 0
    for part in module.modules():
        parameters: dict[str, Any] = part._parameters
        for name, parameter in parameters.items():
            if not isinstance(parameter, NarrowWeight):
                continue
            if id(parameter) not in made:
                stays = id(parameter) in looked_up
                wide += 0 if stays else parameter.numel() * torch.float32.itemsize
                own = NarrowWeight(parameter.kept.clone()) if stays else widened(parameter)
                made[id(parameter)] = parameter, torch.nn.Parameter(own, requires_grad=False)
            parameters[name] = made[id(parameter)][1]
    return wide


@torch.no_grad()
def widen_all(module: torch.nn.Module) -> None:
    """Convert all 16-bit weights of ``module`` to float32, for modules that no kernels replace."""
    for part in module.modules():
        parameters: dict[str, Any] = part._parameters
        for name, parameter in parameters.items():
            if isinstance(parameter, NarrowWeight):
                parameters[name] = torch.nn.Parameter(widened(parameter), requires_grad=False)


def _becomes_float32(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() and tensor.dtype != torch.float32


def _kept_as(weight: torch.Tensor) -> torch.dtype | None:
    return weight.kept.dtype if isinstance(weight, NarrowWeight) else None


def _writes(func: Any, args: Sequence[Any]) -> bool:
    """Return whether the operation ``func`` writes to an argument that is a ``NarrowWeight``."""
    return any(
        isinstance(arg, NarrowWeight) and said.alias_info is not None and said.alias_info.is_write
        for said, arg in zip(func._schema.arguments, args, strict=False)
    )
