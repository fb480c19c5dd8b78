"""Masks of grammars, the likeliest token, and the draw from a whole distribution, by the kernels."""

import ctypes

import numpy as np
import numpy.typing as npt
import torch

from penstock_enginecore.native.ffi_structs import Mask, Sampling
from penstock_enginecore.native.library import NativeLibrary
from penstock_enginecore.sample.rules import GrammarRows


class NativeSampling:
    """Does what ``sample.blocks.peak`` and ``sample.draw.draw`` do, in one pass by all threads."""

    def __init__(self, library: NativeLibrary) -> None:
        self._library = library

    def takes(self, logits: torch.Tensor) -> bool:
        """Whether the kernels read logits like these."""
        return logits.dtype == torch.float32 and logits.device.type == "cpu" and logits.is_contiguous()

    def mask(self, logits: torch.Tensor, grammar: GrammarRows) -> None:
        """Leave only the tokens whose bits are set, in place: what ``sample.rules.mask_grammar`` does."""
        bitmask = np.ascontiguousarray(grammar.bitmask)
        rows = np.ascontiguousarray(grammar.rows)
        if len(rows):
            mask = Mask(
                len(rows), logits.shape[1], logits.data_ptr(), rows.ctypes.data, bitmask.ctypes.data, bitmask.shape[1]
            )
            self._library.call("mask", ctypes.byref(mask))

    def sample(
        self, logits: torch.Tensor, temperature: npt.NDArray[np.float32], uniforms: npt.NDArray[np.float64]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Largest value ``[rows]`` and a column, int64 ``[rows]``: the first that has it or, where ``temperature`` is not 0
        and the value finite, the one that ``uniforms`` draws.
        """
        peaks, columns = torch.empty(len(logits)), torch.empty(len(logits), dtype=torch.int64)
        uniforms = np.ascontiguousarray(uniforms)
        sampling = Sampling(
            *logits.shape,
            logits.data_ptr(),
            temperature.ctypes.data,
            uniforms.ctypes.data,
            peaks.data_ptr(),
            columns.data_ptr(),
        )
        self._library.call("sample", ctypes.byref(sampling))
        return peaks, columns
