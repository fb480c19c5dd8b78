"""Kernels that may round inputs of products to bfloat16: emulated on all machines, real if the processor has them."""

import pytest

from penstock_enginecore.native.library import NativeLibrary, open_library
from tests.emulation.build import pretend
from tests.fakes.engines.instruction_sets import runnable

ROUNDING = [(isa, kind) for isa in ("amx", "avx512_bf16") for kind in ("emulated", *({isa} & set(runnable())))]
"""Instruction sets, and ``emulated`` or the set itself."""


def open_rounding(isa: str, kind: str, num_threads: int = 2) -> NativeLibrary:
    """Return the kernels of an entry of ``ROUNDING``."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        if kind == "emulated":
            pretend(monkeypatch, isa)
        return open_library(isa, num_threads, rounded=True)
