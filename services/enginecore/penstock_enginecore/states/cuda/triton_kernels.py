"""Class through which ``TritonStates`` launches the Triton kernels of recurrent layers."""

from penstock_enginecore.states.cuda.kernels import convolution
from penstock_enginecore.states.cuda.kernels import scan as scanning


class TritonStateKernels:
    """Launches the kernels of recurrent layers on one device.

    A call launches work and returns without waiting. The host reads no results, and no tensor shape depends on a value
    on the device. Therefore a CUDA graph can capture and replay a sequence of calls.
    """

    convolve = staticmethod(convolution.convolve)
    scan = staticmethod(scanning.scan)
