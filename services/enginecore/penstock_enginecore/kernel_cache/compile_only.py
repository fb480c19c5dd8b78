"""Launches that compile and launch nothing, for a GPU that need not be there."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import KernelInterface

_WARP = 32


class _Driver:
    """What Triton asks of a GPU before it compiles for it."""

    def __init__(self, capability: int) -> None:
        self._target = GPUTarget("cuda", capability, _WARP)

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:  # noqa: ARG002 - there are none
        return 0


class _NoProducts(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Products into buffers are not computed: what would be in them is of no meaning, and takes a CPU minutes."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.mm.out, torch.ops.aten.addmm.out):
            return kwargs["out"]
        return func(*args, **(kwargs or {}))


@contextmanager
def compile_only(capability: int) -> Iterator[None]:
    """In the ``with`` block a launch of a kernel, with tensors on the CPU, compiles it for compute capability ``capability``
    (90 is 9.0), as the same launch on such a GPU would, and leaves its outputs as they are. Once per process: what was compiled
    for one GPU is remembered for all.
    """
    launch = KernelInterface.__getitem__

    def compile_it(kernel: Any, grid: Any) -> Any:
        return lambda *args, **kwargs: kernel.run(*args, grid=grid, warmup=True, **kwargs)

    driver.set_active(_Driver(capability))
    KernelInterface.__getitem__ = compile_it
    try:
        with _NoProducts():  # type: ignore[no-untyped-call]
            yield
    finally:
        KernelInterface.__getitem__ = launch
