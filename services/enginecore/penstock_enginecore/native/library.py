"""Loading of the library with the CPU kernels for this processor, and calls of its functions.

A call releases the GIL. The arguments of a call are plain tensors and arrays, which the caller must keep alive.
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
from penstock_enginecore.native import encoder_structs, ffi_structs

# Permission of the operating system to use some instruction sets of the processor.

_ARCH_PRCTL = 158
_ARCH_REQ_XCOMP_PERM = 0x1023
_XFEATURE_XTILEDATA = 18
"""Numbers of Linux on x86-64 for a system call that requests permission: the system call, the kind of request, and the
registers for which permission is requested.
"""


def request_tiles() -> None:
    """Request permission to use AMX tiles in all threads of this process.

    Raises OSError if Linux refuses. Without permission, a signal would kill the process when a thread uses tiles.
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
"""Instruction sets, the best first, and the processor features that each instruction set needs, with torch's names."""

_FOR_ROUNDED = {"avx512_bf16"}
"""Instruction sets that are faster only if inputs of matrix products may be rounded to bfloat16. If inputs may not be
rounded, ``auto`` skips them.
"""

_PERMISSIONS = {"amx": request_tiles}
"""Functions that request permission to use an instruction set. These functions raise OSError if the operating system
refuses.
"""

_DIRECTORY = Path(__file__).parent
"""Folder with the libraries of the kernels, one for each instruction set."""


class KernelsError(ConfigError):
    """Error raised if the kernels are not available. The message gives the reason."""


class _Context:
    """Threads of a library, and the memory of these threads.

    This object references no other objects of the library. The context is freed when neither the library nor an object
    of the library references it.
    """

    def __init__(self, functions: ctypes.CDLL, num_threads: int) -> None:
        self._functions = functions
        self.handle = ctypes.c_void_p()
        code = functions.penstock_context_new(num_threads, ctypes.byref(self.handle))
        if code:
            raise KernelsError(f"cannot start {num_threads} kernel threads: {os.strerror(code)}")

    def __del__(self) -> None:
        if self.handle.value:
            self._functions.penstock_context_free(self.handle)

    def free(self, handle: ctypes.c_void_p, name: str) -> None:
        """Free an object of the library that was created with this context."""
        getattr(self._functions, f"penstock_{name}_free")(handle)


class NativeLibrary:
    """Library with the kernels for one instruction set, and its own threads. Not thread-safe.

    ``parts`` is the number of bfloat16 values into which each input is split for matrix products with bfloat16 weights,
    or 0 if inputs stay float32.
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
        """The dtype to which inputs of matrix products are rounded, or None if inputs are not rounded."""
        return torch.bfloat16 if self.parts == 1 else None

    @functools.cached_property
    def beside(self) -> "NativeLibrary":
        """Second object for the same library, for calls from another thread. The kernels of this second object use only
        the calling thread.
        """
        return self._beside()

    def filled_to(self, kind: int) -> int:
        """Return the number to whose next multiple the inputs of a packed weight with elements of ``kind`` are padded."""
        multiple: int = self._functions.penstock_filled_to(kind)
        return multiple

    def call(self, name: str, *arguments: Any) -> None:
        """Call the library's function ``penstock_<name>`` with this object's context. Raises MemoryError or OSError if
        the function fails.
        """
        self.call_on(self._context.handle, name, *arguments)

    def call_on(self, handle: ctypes.c_void_p, name: str, *arguments: Any) -> None:
        """Call the library's function ``penstock_<name>`` on the object ``handle``. Raises the errors of ``call``."""
        function = getattr(self._functions, f"penstock_{name}")
        if torch.autograd.profiler._is_profiler_enabled:
            with torch.profiler.record_function(f"penstock::{name}"):
                code = function(handle, *arguments)
        else:
            code = function(handle, *arguments)
        if code:
            error = OSError(code, f"kernel {name!r} failed: {os.strerror(code)}")
            raise MemoryError(str(error)) if code == errno.ENOMEM else error

    def free_with(self, owner: object, handle: ctypes.c_void_p, name: str) -> None:
        """Register ``handle``, an object of the library, to be freed with ``penstock_<name>_free`` when ``owner`` is
        garbage collected.

        The finalizer references the context, so the context outlives the object. The object is not freed at process
        exit, because other threads may still compute.
        """
        weakref.finalize(owner, self._context.free, handle, name).atexit = False


def open_library(isa: str, num_threads: int, *, rounded: bool = False) -> NativeLibrary:
    """Return the kernels for ``isa``. "auto" selects the best instruction set that the processor has and that the
    operating system permits.

    If ``rounded`` is true, kernels may round inputs of matrix products to bfloat16 if this is faster. Raises
    KernelsError if no kernels are available.
    """
    path, name = find_library(isa, rounded=rounded)
    return NativeLibrary(path, name, num_threads, rounded=rounded)


def find_library(isa: str, *, rounded: bool = False) -> tuple[Path, str]:
    """Return the path and the instruction set of the library that ``open_library`` would open. Raises KernelsError if
    no kernels are available.
    """
    capabilities = torch.cpu.get_capabilities()
    runnable = [name for name, needs in _CAPABILITIES.items() if all(capabilities.get(need, False) for need in needs)]
    for name in runnable if isa == "auto" else [isa]:
        if name not in runnable:
            raise KernelsError(
                f"kernels.isa is {name!r}, which this processor does not support; set kernels.isa to one of {runnable}"
            )
        path = _DIRECTORY / f"kernels_{name}.so"
        if not path.is_file() or (isa == "auto" and name in _FOR_ROUNDED and not rounded):
            continue
        try:
            if request := _PERMISSIONS.get(name):
                request()
        except OSError as e:
            if isa != "auto":
                raise KernelsError(
                    f"kernels.isa is {name!r}, but the operating system does not let this process use it: {e}"
                ) from e
            logger.warning(
                "the operating system does not let this process use %s, so other kernels are tried reason=%s", name, e
            )
            continue
        return path, name
    raise KernelsError("the package was built without kernels; install it again with a C++ compiler available")


@functools.cache
def _load(path: Path) -> ctypes.CDLL:
    try:
        library = ctypes.CDLL(str(path))
    except OSError as e:
        raise KernelsError(f"{path.name} cannot be loaded: {e}") from e
    structs = (*ffi_structs.ALL, *encoder_structs.ALL)
    sizes = (ctypes.c_int64 * len(structs))()
    library.penstock_sizes(sizes)
    if list(sizes) != [ctypes.sizeof(struct) for struct in structs]:
        raise KernelsError(f"{path.name} was built from other sources; install the package again")
    pointer, integer = ctypes.c_void_p, ctypes.c_int64
    for name, arguments in {
        "context_new": (ctypes.c_int, pointer),
        "pack": (pointer, pointer, pointer),
        "unpack": (pointer, pointer, pointer, integer, pointer),
        "linear": (pointer, pointer, pointer, integer, integer, pointer, integer),
        "low_rank": (pointer, pointer, integer, integer, pointer, integer, pointer, integer),
        "grouped": (pointer, pointer),
        "route": (pointer, pointer),
        "attend": (pointer, pointer),
        "attend_latents": (pointer, pointer),
        "write": (pointer, pointer),
        "convolve": (pointer, pointer, pointer),
        "scan": (pointer, pointer, pointer),
        "mask": (pointer, pointer),
        "sample": (pointer, pointer),
        "decoder_new": (pointer, pointer, pointer),
        "decoder_forward": (pointer, pointer),
        "decoder_chain": (pointer, pointer, pointer),
        "decoder_head": (pointer, pointer, pointer, integer, pointer, integer, pointer),
        "encoder_new": (pointer, pointer, pointer),
        "encoder_forward": (pointer, pointer),
    }.items():
        function = getattr(library, f"penstock_{name}")
        function.argtypes, function.restype = arguments, ctypes.c_int
    library.penstock_filled_to.argtypes, library.penstock_filled_to.restype = (integer,), integer
    library.penstock_parts.argtypes, library.penstock_parts.restype = (integer,), integer
    for name in ("context_free", "decoder_free", "encoder_free"):
        function = getattr(library, f"penstock_{name}")
        function.argtypes, function.restype = (pointer,), None
    return library
