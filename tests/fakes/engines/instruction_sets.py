"""Instruction sets of the kernels that this machine's processor supports."""

from penstock_enginecore.native.library import KernelsError, open_library


def runnable() -> list[str]:
    """Return the instruction sets for which the kernels can be opened, widest first."""
    found = []
    for isa in ("amx", "avx512_bf16", "avx512", "avx2", "baseline"):
        try:
            open_library(isa, 1)
        except KernelsError:
            continue
        found.append(isa)
    return found
