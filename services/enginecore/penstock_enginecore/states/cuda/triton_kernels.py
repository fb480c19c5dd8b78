"""Triton kernels of recurrent layers, under the names that ``TritonStates`` uses."""

from penstock_enginecore.states.cuda.kernels import convolution
from penstock_enginecore.states.cuda.kernels import scan as scanning


class TritonStateKernels:
    """Launches kernels of one device.

    A call launches work and returns without waiting. The host reads no results, and no shape depends on a value on the
    device. Therefore a sequence of calls can be captured and replayed.
    """

    convolve = staticmethod(convolution.convolve)
    scan = staticmethod(scanning.scan)
