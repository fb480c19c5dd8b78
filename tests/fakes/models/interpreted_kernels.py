"""Triton's kernels in its interpreter, on CPU tensors. Which way they run is settled when their modules are imported."""

import functools
import importlib
import os
import sys
from types import ModuleType
from typing import Any

import numpy as np
import pytest

_ROOM = "penstock_enginecore.forward.cuda.kernels"
NO_TRITON = "Triton is in torch's CUDA build; beside the CPU build: pip install triton"


def interpreted(name: str, room: str = _ROOM) -> ModuleType:
    """The module ``name`` of the kernels in ``room``. RuntimeError where Triton was imported already, to compile: its own
    functions are interpreted or compiled as ours are.
    """
    if "triton.language" in sys.modules and os.environ.get("TRITON_INTERPRET") != "1":
        raise RuntimeError("triton was imported before TRITON_INTERPRET=1 was set")
    os.environ["TRITON_INTERPRET"] = "1"
    pytest.importorskip("triton", reason=NO_TRITON)
    _patch_functions_once()
    return importlib.import_module(f"{room}.{name}")


def sum_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products in the interpreter sum column by column, each row as it would alone. numpy's go by a library whose order of sums
    depends on where in a tile a row stands, which that of a GPU's instruction does not.
    """
    interpreted("attention")
    from triton.runtime import interpreter

    def dot(self: Any, a: Any, b: Any, d: Any, input_precision: Any, max_num_imprecise_acc: Any) -> Any:
        left, right = (tensor.data.astype(d.data.dtype) for tensor in (a, b))
        total = np.zeros_like(d.data)
        for k in range(left.shape[1]):
            total += left[:, k, None] * right[k]
        return interpreter.TensorHandle(total + d.data, d.dtype.scalar)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", dot)


def multiply_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products in the interpreter take numbers in bfloat16, which it keeps as their bits, for what they are; column by column, as
    by ``sum_in_order``.
    """
    interpreted("attention")
    import triton.language as tl
    from triton.runtime import interpreter

    def widened(handle: Any) -> Any:
        data = handle.data
        return (data.astype(np.uint32) << 16).view(np.float32) if handle.dtype.scalar == tl.bfloat16 else data

    def dot(self: Any, a: Any, b: Any, d: Any, input_precision: Any, max_num_imprecise_acc: Any) -> Any:
        left, right = (widened(handle).astype(d.data.dtype) for handle in (a, b))
        total = np.zeros_like(d.data)
        for k in range(left.shape[1]):
            total += left[:, k, None] * right[k]
        return interpreter.TensorHandle(total + d.data, d.dtype.scalar)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", dot)


@functools.cache
def _patch_functions_once() -> None:
    """The interpreter patches all of Triton's language again at each call of a function within a kernel, which takes longer than
    what the function does; what it patches for a function stays as it is, or is patched by the launch around it.
    """
    from triton.runtime import interpreter

    patched = set()

    def call(function: Any, *args: Any, **kwargs: Any) -> Any:
        if function.fn not in patched:
            patched.add(function.fn)
            interpreter._patch_lang(function.fn)
        return function.rewrite()(*args, **kwargs)

    interpreter.InterpretedFunction.__call__ = call
