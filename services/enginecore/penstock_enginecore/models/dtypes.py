"""What a model is computed in, and what its weights are kept in: also 16 bits where float32 computes."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch.utils._pytree import tree_map_only
from transformers import PretrainedConfig, PreTrainedModel

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_BFLOAT16_FEATURES = ("avx512_bf16", "amx_bf16", "bf16")
"""The instruction sets, as torch names them, with which a CPU computes in bfloat16."""


@dataclass(frozen=True, slots=True)
class Dtypes:
    """What a model is ``computed`` in, and what its ``weights`` are read in where that may be narrower, None for what the files
    have. ``dense``: of weights that these have in no dtype, quantized and random ones. ``precision``: what the inputs of products
    may be rounded to.
    """

    computed: torch.dtype
    weights: torch.dtype | None
    dense: torch.dtype
    precision: torch.dtype

    @classmethod
    def of(cls, dtype: torch.dtype) -> Self:
        """One for all."""
        return cls(dtype, dtype, dtype, dtype)

    @property
    def widens(self) -> bool:
        """Whether weights may be narrower than what is computed."""
        return self.weights != self.computed

    @property
    def name(self) -> str:
        """Of what is computed in."""
        return str(self.computed).removeprefix("torch.")


def resolve_dtypes(wanted: str, hf_config: PretrainedConfig, device: torch.device, *, widen: bool = False) -> Dtypes:
    """``auto`` is the checkpoint's, but float32 for bfloat16 that the CPU only emulates. CPUs compute float16, wanted or stored,
    as float32, which holds every number of it. ``widen``: CPUs compute all in float32, by weights that stay as they are stored;
    bfloat16, if wanted, is what weights and inputs of products are rounded to.
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


# Weights that are kept in 16 bits and computed with in float32.

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
"""What is made of one tensor's numbers by these is the same numbers."""
_LOOK_UPS = frozenset({_aten.embedding, _aten.index, _aten.index_select})
"""What takes some of the numbers of its first argument."""


class NarrowWeight(torch.Tensor):
    """A weight that all code sees as float32, of which ``kept`` has the numbers in bfloat16 or float16.

    What is computed with it gets it in float32, for as long as that takes; what is looked up of it is looked up first. Views
    and copies of it are narrow, too. It is not written to: TypeError.
    """

    kept: torch.Tensor
    __torch_function__: Any = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls: type["NarrowWeight"], kept: torch.Tensor) -> "NarrowWeight":
        """``kept``: bfloat16 or float16."""
        make: Any = torch.Tensor._make_wrapper_subclass
        sizes, strides = kept.shape, kept.stride()
        with torch.inference_mode(mode=False):  # a view of what was made without is made without
            made: NarrowWeight = make(cls, sizes, strides=strides, dtype=torch.float32, device=kept.device)
        made.kept = kept
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch names it after a function without a class
        cls,
        func: Any,
        types: Iterable[type],
        args: Any = (),
        kwargs: Any = None,
    ) -> Any:
        """``func`` of the numbers."""
        kwargs = kwargs or {}
        if func._schema.is_mutable and _writes(func, args):
            raise TypeError(f"{func} would write to a weight that is kept in 16 bits")
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
    """``weight`` without a ``NarrowWeight``: in float32 where it was one."""
    return weight.kept.float() if isinstance(weight, NarrowWeight) else weight


def num_bytes(weight: torch.Tensor) -> int:
    """Bytes of memory."""
    return weight.kept.nbytes if isinstance(weight, NarrowWeight) else weight.nbytes


@contextmanager
def as_stored(dtype: torch.dtype | None) -> Iterator[None]:
    """Have ``from_pretrained``, within the ``with`` block, read weights in ``dtype``, None for those that they have in the files,
    whatever the model computes in; and in float32 what a model keeps in that.
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
    """Have ``module``, whose parameters may be of any dtype, compute in float32: matrices of 16 bits stay as they are, all else
    becomes float32.
    """
    made: dict[int, tuple[torch.nn.Parameter, torch.nn.Parameter]] = {}  # both, since an id is that of what is there
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
    """What is still narrow in ``module`` after others have taken over what they compute: embeddings, of which rows are looked up,
    stay so, in memory of their own, so that the files can be let go of; all else is widened. Returns the bytes that the latter
    takes.
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
    """Have ``module`` keep all that is narrow in float32, for what no kernels take over."""
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
    """Whether ``func`` changes an argument that is narrow."""
    return any(
        isinstance(arg, NarrowWeight) and said.alias_info is not None and said.alias_info.is_write
        for said, arg in zip(func._schema.arguments, args, strict=False)
    )
