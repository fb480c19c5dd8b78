"""Triton kernels in Triton's interpreter, on CPU tensors. The import of a module decides whether its kernels compile."""

import functools
import importlib
import os
import sys
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

_ROOM = "penstock_enginecore.forward.cuda.kernels"
NO_TRITON = "Triton is in torch's CUDA build; beside the CPU build: pip install triton"


def interpreted(name: str, room: str = _ROOM) -> ModuleType:
    """Return the module ``name`` of the kernels in the package ``room``, with interpreted kernels.

    Raises RuntimeError if Triton was already imported for compilation, because its own functions then also compile.
    """
    if "triton.language" in sys.modules and os.environ.get("TRITON_INTERPRET") != "1":
        raise RuntimeError("triton was imported before TRITON_INTERPRET=1 was set")
    os.environ["TRITON_INTERPRET"] = "1"
    pytest.importorskip("triton", reason=NO_TRITON)
    _patch_functions_once()
    return importlib.import_module(f"{room}.{name}")


def sum_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make products in the interpreter sum column by column, so that each row is computed as if it were alone.

    numpy's library orders sums by a row's place in a tile. The instructions of a GPU do not.
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


def round_float8(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the interpreter convert float32 to 8-bit floats as a GPU does: to the nearest number, ties to even.

    The interpreter loses the carry of a mantissa that is rounded up, and rounds ties up.
    """
    interpreted("attention")
    import triton.language as tl
    from triton.runtime import interpreter

    convert = interpreter._convert_float

    def converted(data: Any, source: Any, target: Any, mode: Any) -> Any:
        if (source, target) != (tl.float32, tl.float8e4nv):
            return convert(data, source, target, mode)
        numbers = torch.from_numpy(np.ascontiguousarray(data)).to(torch.float8_e4m3fn)
        return numbers.view(torch.uint8).numpy()

    monkeypatch.setattr(interpreter, "_convert_float", converted)


def multiply_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make products in the interpreter use the values of bfloat16 numbers, which it stores as bits. Sums as in
    ``sum_in_order``.
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
    """Patch functions only once.

    The interpreter patches all of Triton's language at each call of a function in a kernel, which takes longer than the
    function. The patches of a function stay valid, or the surrounding launch patches them.
    """
    from triton.runtime import interpreter

    patched = set()

    def call(function: Any, *args: Any, **kwargs: Any) -> Any:
        if function.fn not in patched:
            patched.add(function.fn)
            interpreter._patch_lang(function.fn)
        return function.rewrite()(*args, **kwargs)

    interpreter.InterpretedFunction.__call__ = call
