"""Linear layers that multiply with packed weights, in models that the decoder does not know."""

import torch

from penstock_enginecore.native.library import NativeLibrary
from penstock_enginecore.native.weights import PackedWeight


class PackedLinear(torch.nn.Linear):
    """Stands for ``linear``, whose weight it has packed, with its hooks. Its own ``weight`` is empty: who needs that cannot be
    packed.
    """

    def __init__(self, library: NativeLibrary, linear: torch.nn.Linear) -> None:
        torch.nn.Module.__init__(self)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight = torch.nn.Parameter(linear.weight.new_empty(0), requires_grad=False)
        self.register_parameter("bias", None)
        self._forward_pre_hooks, self._forward_hooks = linear._forward_pre_hooks, linear._forward_hooks
        self._library = library
        self.packed = PackedWeight(library, linear.weight, linear.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``[..., in_features]`` to ``[..., out_features]``, float32."""
        n, k = self.packed.n, self.packed.k
        if x.dtype != torch.float32 or x.shape[-1] != k:
            raise TypeError(f"a packed layer takes float32 [..., {k}], not {x.dtype} {list(x.shape)}")
        out = x.new_empty(*x.shape[:-1], n)
        flat = x.reshape(-1, k).contiguous()
        if len(flat):
            self._library.call("linear", self.packed.pointer, flat.data_ptr(), len(flat), k, out.data_ptr(), n)
        return out


class PackedLinears:
    """The linear layers of ``model`` that compute in float32, replaced by packed ones."""

    def __init__(self, model: torch.nn.Module, library: NativeLibrary) -> None:
        self._replaced = [
            (parent, name, child)
            for parent in model.modules()
            for name, child in parent._modules.items()  # named_children leaves repeated ones out
            if type(child) is torch.nn.Linear
            and child.weight.dtype == torch.float32
            and child.weight.device.type == "cpu"
        ]
        packed = {child: PackedLinear(library, child) for child in {child for _, _, child in self._replaced}}
        for parent, name, child in self._replaced:
            setattr(parent, name, packed[child])
        self.num_layers = len(packed)
        self.num_bytes = sum(layer.packed.num_bytes for layer in packed.values())

    def undo(self) -> None:
        """Put the old layers back."""
        for parent, name, child in self._replaced:
            setattr(parent, name, child)

    def keep(self) -> None:
        """Let go of the old layers' weights."""
        self._replaced = []
