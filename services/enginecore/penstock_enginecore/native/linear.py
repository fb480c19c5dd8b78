"""Linear layers that multiply with packed weights."""

import torch

from penstock_enginecore.lora.adapter import LowRankUpdate
from penstock_enginecore.native.library import NativeLibrary
from penstock_enginecore.native.low_rank import PackedAddition
from penstock_enginecore.native.weights import PackedWeight, multiply


class PackedLinear(torch.nn.Linear):
    """Stands for ``linear``, whose weight it has packed, with its hooks. Its own ``weight`` is empty: who needs that cannot be
    packed.
    """

    def __init__(self, library: NativeLibrary, linear: torch.nn.Linear, *, apart: bool = False) -> None:
        """``apart``: see ``multiply``."""
        torch.nn.Module.__init__(self)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight = torch.nn.Parameter(torch.empty(0), requires_grad=False)
        self.register_parameter("bias", None)
        self._forward_pre_hooks, self._forward_hooks = linear._forward_pre_hooks, linear._forward_hooks
        self._library, self._apart = library, apart
        self.packed = PackedWeight(library, linear.weight, linear.bias)

    @property
    def num_bytes(self) -> int:
        """Bytes of what is packed."""
        return self.packed.num_bytes

    def addition(self, update: LowRankUpdate) -> PackedAddition:
        """An adapter's, by the kernels."""
        return PackedAddition(self._library, update)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``[..., in_features]`` to ``[..., out_features]``, float32."""
        return multiply(self._library, self.packed, x, apart=self._apart)
