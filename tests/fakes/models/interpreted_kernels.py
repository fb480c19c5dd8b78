"""Triton's kernels in its interpreter, on CPU tensors. Which way they run is settled when their modules are imported."""

import importlib
import os
import sys
from types import ModuleType

import pytest

_ROOM = "penstock_enginecore.forward.cuda.kernels"
NO_TRITON = "Triton is in torch's CUDA build; beside the CPU build: pip install triton"


def interpreted(name: str) -> ModuleType:
    """The module ``name`` of the kernels. RuntimeError where Triton was imported already, to compile: its own functions are
    interpreted or compiled as ours are.
    """
    if "triton.language" in sys.modules and os.environ.get("TRITON_INTERPRET") != "1":
        raise RuntimeError("triton was imported before TRITON_INTERPRET=1 was set")
    os.environ["TRITON_INTERPRET"] = "1"
    pytest.importorskip("triton", reason=NO_TRITON)
    return importlib.import_module(f"{_ROOM}.{name}")
