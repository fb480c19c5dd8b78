"""Finds the kernels for this processor and calls them.

A call releases the interpreter's lock. Its arguments are plain tensors and arrays; whoever calls keeps them alive.
"""

import ctypes
import errno
import functools
import logging
import os
import weakref
from pathlib import Path
from typing import Any

import torch

from penstock_common.errors import ConfigError
from penstock_enginecore.native.ffi_structs import ALL

# What the system has to grant before instructions may be used that the processor has.

_ARCH_PRCTL = 158
_ARCH_REQ_XCOMP_PERM = 0x1023
_XFEATURE_XTILEDATA = 18
"""Numbers of Linux on x86-64: a system call, what it is asked to do, and for which registers."""


def request_tiles() -> None:
    """Have Linux let this process, all its threads, use the tiles of AMX. Raises OSError where it does not: a thread that
    uses them would be ended by a signal.
    """
    syscall = ctypes.CDLL(None, use_errno=True).syscall
    syscall.restype = ctypes.c_long
    if syscall(*map(ctypes.c_long, (_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XFEATURE_XTILEDATA))):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


logger = logging.getLogger(__name__)

_AVX512 = ("avx512_f", "avx512_bw", "avx512_dq", "avx512_vl", "avx512_cd")
_CAPABILITIES = {
    "amx": (*_AVX512, "avx512_bf16", "amx_tile", "amx_bf16"),
    "avx512_bf16": (*_AVX512, "avx512_bf16"),
    "avx512": _AVX512,
    "avx2": ("avx2", "fma3"),
    "baseline": (),
}
"""Instruction sets, best first, and what torch calls the features they need."""

_FOR_ROUNDED = {"avx512_bf16"}
"""Instruction sets that gain nothing unless inputs may be rounded: ``auto`` passes them over."""

_PERMISSIONS = {"amx": request_tiles}
"""What asks the system for leave to use an instruction set. Raises OSError where it refuses."""

_DIRECTORY = Path(__file__).parent
"""Where the kernels are."""


class KernelsError(ConfigError):
    """The kernels cannot be had; the message says why."""


class _Context:
    """The threads of a library and what they work with. Refers to nothing, and is freed with its last reference: that of the
    library, or of an object of the library's that outlives it.
    """

    def __init__(self, functions: ctypes.CDLL, num_threads: int) -> None:
        self._functions = functions
        self.handle = ctypes.c_void_p()
        code = functions.penstock_context_new(num_threads, ctypes.byref(self.handle))
        if code:
            raise KernelsError(f"{num_threads} threads cannot be started: {os.strerror(code)}")

    def __del__(self) -> None:
        if self.handle.value:
            self._functions.penstock_context_free(self.handle)

    def free(self, handle: ctypes.c_void_p, name: str) -> None:
        """Free an object that was made in this context."""
        getattr(self._functions, f"penstock_{name}_free")(handle)


class NativeLibrary:
    """The kernels of one instruction set with threads of their own. Not for use by several threads at once. ``parts``: in how
    many bfloat16 numbers inputs are multiplied with weights that bfloat16 holds; 0: as the floats that they are.
    """

    def __init__(self, path: Path, isa: str, num_threads: int, *, rounded: bool = False) -> None:
        self._functions = _load(path)
        self._beside = functools.partial(NativeLibrary, path, isa, 1, rounded=rounded)
        self.isa = isa
        self.num_threads = num_threads
        self.lanes: int = self._functions.penstock_lanes()
        self.parts: int = self._functions.penstock_parts(rounded)
        self._context = _Context(self._functions, num_threads)

    @property
    def rounds_to(self) -> torch.dtype | None:
        """What inputs of products are rounded to; None: they are not."""
        return torch.bfloat16 if self.parts == 1 else None

    @functools.cached_property
    def beside(self) -> "NativeLibrary":
        """The same kernels for another thread, which compute on that alone."""
        return self._beside()

    def filled_to(self, kind: int) -> int:
        """Panels of numbers of ``kind`` have a multiple of so many inputs."""
        multiple: int = self._functions.penstock_filled_to(kind)
        return multiple

    def call(self, name: str, *arguments: Any) -> None:
        """The function ``penstock_<name>`` of this context. MemoryError or OSError where it fails."""
        self.call_on(self._context.handle, name, *arguments)

    def call_on(self, handle: ctypes.c_void_p, name: str, *arguments: Any) -> None:
        """The same of another object of the library's: ``handle`` comes first."""
        function = getattr(self._functions, f"penstock_{name}")
        if torch.autograd.profiler._is_profiler_enabled:
            with torch.profiler.record_function(f"penstock::{name}"):
                code = function(handle, *arguments)
        else:
            code = function(handle, *arguments)
        if code:
            error = OSError(code, f"the kernel {name!r} failed: {os.strerror(code)}")
            raise MemoryError(str(error)) if code == errno.ENOMEM else error

    def free_with(self, owner: object, handle: ctypes.c_void_p, name: str) -> None:
        """Let go of an object, ``penstock_<name>_free``, when ``owner`` is gone. The context outlives it, even where one
        collection of garbage finds both: the finalizer holds the context. Nothing is freed as the process ends: other threads
        may still compute.
        """
        weakref.finalize(owner, self._context.free, handle, name).atexit = False


def open_library(isa: str, num_threads: int, *, rounded: bool = False) -> NativeLibrary:
    """The kernels for ``isa``; ``auto``: the best that this processor has and the system lets it use. ``rounded``: they may round
    inputs to bfloat16, where a matrix unit is faster for it. Raises KernelsError.
    """
    path, name = find_library(isa, rounded=rounded)
    return NativeLibrary(path, name, num_threads, rounded=rounded)


def find_library(isa: str, *, rounded: bool = False) -> tuple[Path, str]:
    """Where the kernels are that ``open_library`` opens, and their instruction set. Raises KernelsError."""
    capabilities = torch.cpu.get_capabilities()
    runnable = [name for name, needs in _CAPABILITIES.items() if all(capabilities.get(need, False) for need in needs)]
    for name in runnable if isa == "auto" else [isa]:
        if name not in runnable:
            raise KernelsError(f"kernels.isa is {name!r}, which this processor does not have; it has {runnable}")
        path = _DIRECTORY / f"kernels_{name}.so"
        if not path.is_file() or (isa == "auto" and name in _FOR_ROUNDED and not rounded):
            continue
        try:
            if request := _PERMISSIONS.get(name):
                request()
        except OSError as e:
            if isa != "auto":
                raise KernelsError(f"kernels.isa is {name!r}, which the system refuses to this process: {e}") from e
            logger.warning("the system refuses %s to this process, the kernels for it are passed over: %s", name, e)
            continue
        return path, name
    raise KernelsError("the package was built without kernels; a C++ compiler must be there when it is installed")


@functools.cache
def _load(path: Path) -> ctypes.CDLL:
    try:
        library = ctypes.CDLL(str(path))
    except OSError as e:
        raise KernelsError(f"{path.name} cannot be loaded: {e}") from e
    sizes = (ctypes.c_int64 * len(ALL))()
    library.penstock_sizes(sizes)
    if list(sizes) != [ctypes.sizeof(struct) for struct in ALL]:
        raise KernelsError(f"{path.name} was built from other sources; install the package again")
    pointer, integer = ctypes.c_void_p, ctypes.c_int64
    for name, arguments in {
        "context_new": (ctypes.c_int, pointer),
        "pack": (pointer, pointer, pointer),
        "linear": (pointer, pointer, pointer, integer, integer, pointer, integer),
        "low_rank": (pointer, pointer, integer, integer, pointer, integer, pointer, integer),
        "grouped": (pointer, pointer),
        "route": (pointer, pointer),
        "attend": (pointer, pointer),
        "write": (pointer, pointer),
        "mask": (pointer, pointer),
        "sample": (pointer, pointer),
        "decoder_new": (pointer, pointer, pointer),
        "decoder_forward": (pointer, pointer),
        "decoder_chain": (pointer, pointer, pointer),
        "decoder_head": (pointer, pointer, pointer, integer, pointer, integer, pointer),
    }.items():
        function = getattr(library, f"penstock_{name}")
        function.argtypes, function.restype = arguments, ctypes.c_int
    library.penstock_filled_to.argtypes, library.penstock_filled_to.restype = (integer,), integer
    library.penstock_parts.argtypes, library.penstock_parts.restype = (integer,), integer
    for name in ("context_free", "decoder_free"):
        function = getattr(library, f"penstock_{name}")
        function.argtypes, function.restype = (pointer,), None
    return library
