"""Projections of latent attention (MLA) into the latent space and out of it, with packed weights."""

import ctypes

import numpy as np
import torch

from penstock_enginecore.models.latent_hook import LatentHeads, by_head
from penstock_enginecore.native.ffi_structs import Grouped, Linear
from penstock_enginecore.native.library import NativeLibrary
from penstock_enginecore.native.weights import PackedWeight


class PackedLatentHeads(LatentHeads):
    """Replacement for the module ``heads``, with two packed weights for each head, and the same hooks.

    The module's ``weight`` is empty. The result of a token does not depend on the other tokens.
    """

    def __init__(self, library: NativeLibrary, heads: LatentHeads) -> None:
        super().__init__(heads, heads.latent, heads.plain, heads.value)
        self._library = library
        self._packed = packed_heads(library, heads.weight, heads.plain, heads.value)
        self.weight = torch.nn.Parameter(torch.empty(0), requires_grad=False)

    @property
    def num_bytes(self) -> int:
        """Size in bytes of the packed weights."""
        return sum(weight.num_bytes for weights in self._packed for weight in weights)

    def products(self, x: torch.Tensor, *, absorbs: bool) -> torch.Tensor:
        """Compute the products of all heads in one call of the kernels; see ``LatentHeads.products``."""
        tokens, heads, size = x.shape
        weights = self._packed[0 if absorbs else 1]
        rows = x.float().contiguous()
        if not tokens:
            return rows.new_empty(0, heads * weights[0].n)
        out = rows.new_empty(heads, tokens, weights[0].n)
        # Row t * heads + h of ``rows`` is multiplied by the weight of head h.
        order = (np.arange(tokens) * heads + np.arange(heads)[:, None]).ravel()
        ends = np.arange(1, heads + 1) * tokens
        grouped = Grouped(
            heads,
            (Linear * heads)(*(weight.struct for weight in weights)),
            ends.ctypes.data,
            order.ctypes.data,
            rows.data_ptr(),
            size,
            out.data_ptr(),
            out.shape[2],
            False,
        )
        self._library.call("grouped", ctypes.byref(grouped))
        return out.transpose(0, 1).flatten(1)


def packed_heads(
    library: NativeLibrary, weight: torch.Tensor, plain: int, value: int
) -> tuple[list[PackedWeight], list[PackedWeight]]:
    """Return each head's packed weight for queries, ``[latent, plain]``, and for outputs, ``[value, latent]``. ``weight``
    is the weight of ``kv_b_proj``.
    """
    keys, values = by_head(weight, plain, value)
    each = range(len(keys))  # torch cannot iterate over weights that are stored in 16 bits
    return [PackedWeight(library, keys[head].T) for head in each], [
        PackedWeight(library, values[head]) for head in each
    ]
