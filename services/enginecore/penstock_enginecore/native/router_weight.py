"""The weight of a router, multiplied with by the kernels: a token's experts do not depend on the tokens beside it."""

from collections.abc import Callable, Sequence
from typing import Any, Self

import torch

from penstock_enginecore.models.dtypes import widened
from penstock_enginecore.native.library import NativeLibrary
from penstock_enginecore.native.weights import PackedWeight, multiply


class RouterWeight(torch.nn.Parameter):
    """A weight ``[experts, hidden]`` that is given to ``torch.nn.functional.linear`` by a module that is no linear layer. All
    else sees the weight as it was.
    """

    packed: PackedWeight
    library: NativeLibrary

    @classmethod
    def of(cls, library: NativeLibrary, weight: torch.Tensor) -> Self:
        """``weight``: float32, on the CPU."""
        made = cls(widened(weight.detach()), requires_grad=False)
        made.library, made.packed = library, PackedWeight(library, weight)
        return made

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Products by the kernels."""
        if func is torch.nn.functional.linear:
            return _linear(*args, **(kwargs or {}))
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


def _linear(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:  # noqa: A002 - torch's
    if not isinstance(weight, RouterWeight):
        raise TypeError("a router's weight is multiplied with, not multiplied")
    out = multiply(weight.library, weight.packed, input, apart=True)
    return out if bias is None else out + bias
