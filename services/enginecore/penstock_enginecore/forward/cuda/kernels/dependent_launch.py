"""Programmatic dependent launch (PDL): a kernel is launched before the previous kernel of its stream has ended.

Without PDL, a GPU starts a kernel when the previous kernel has ended and its results are in memory. With PDL, the
programs of a kernel start as soon as all programs of the previous kernel have allowed it. They compute addresses and
load their first inputs, and then wait until the previous kernel has ended.

Every kernel that is launched with PDL obeys these rules:

- Every program calls ``wait_for_inputs`` exactly once, also a program without work. Therefore a kernel that has ended
  implies that all earlier kernels have ended.
- Before this call, a program writes nothing. It reads only weights, and the positions and rotary tables of a step. Those
  are complete before the first layer begins, because the lookup of embeddings is launched without PDL.

Kernels of PyTorch and cuBLAS in between are launched without PDL. They start when the previous kernel has ended.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.runtime import driver

_MIN_CAPABILITY = 90


def supports_pdl() -> bool:
    """Return whether kernels can be launched with PDL: on NVIDIA GPUs of compute capability 9.0 or later. Triton's
    interpreter does not support PDL.
    """
    if triton.knobs.runtime.interpret:
        return False
    target = driver.active.get_current_target()
    return bool(target.backend == "cuda" and target.arch >= _MIN_CAPABILITY)


def pdl_options(*, pdl: bool) -> dict[str, bool]:
    """Return the options of a launch: the kernel's constant ``PDL``, and the launch attribute of the driver. A kernel
    needs both.
    """
    return {"PDL": pdl, "launch_pdl": pdl}


@triton.jit
def wait_for_inputs(PDL: tl.constexpr):
    """Wait until all earlier kernels have ended and their results are visible. Then allow the next kernel to start.
    Does nothing if ``PDL`` is false.
    """
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
