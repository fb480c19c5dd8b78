"""Weights that are kept in 16 bits and computed with in float32."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._pytree import tree_map_only
from transformers import PreTrainedModel

_aten = torch.ops.aten
_DTYPES = (torch.bfloat16, torch.float16)
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
                stays = weight.dim() > 1 and weight.dtype in _DTYPES
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
