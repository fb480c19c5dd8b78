"""Which kernels the processor that tests run on can run."""

from penstock_enginecore.native.library import KernelsError, open_library


def runnable() -> list[str]:
    """The instruction sets that the kernels can be opened for, the widest first."""
    found = []
    for isa in ("amx", "avx512_bf16", "avx512", "avx2", "baseline"):
        try:
            open_library(isa, 1)
        except KernelsError:
            continue
        found.append(isa)
    return found
