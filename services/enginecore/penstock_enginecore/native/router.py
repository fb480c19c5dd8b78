"""Routers by the kernels: a token's experts and their weights do not depend on the tokens beside it."""

import ctypes
from typing import Any

import torch

from penstock_enginecore.native.ffi_structs import Route
from penstock_enginecore.native.library import NativeLibrary
from penstock_enginecore.native.weights import PackedWeight, multiply

MAX_EXPERTS = 1024
"""``kMaxExperts`` of the kernels."""
_ALWAYS_NORMALIZES = "MixtralTopKRouter"
_CLASSES = frozenset(
    {_ALWAYS_NORMALIZES, "FlexOlmoTopKRouter", "OlmoeTopKRouter", "Qwen2MoeTopKRouter", "Qwen3MoeTopKRouter"}
)
"""Those that choose the largest of a softmax over all experts."""


class PackedRouter(torch.nn.Module):
    """Stands for ``router``, whose weight it has packed, with its hooks. ``top``: experts of a token. ``normalize``: whether
    their weights add up to one.
    """

    def __init__(self, library: NativeLibrary, router: Any) -> None:
        super().__init__()
        self._forward_pre_hooks, self._forward_hooks = router._forward_pre_hooks, router._forward_hooks
        self._library = library
        self.packed = PackedWeight(library, router.weight)
        self.top: int = router.top_k
        self.normalize: bool = type(router).__name__ == _ALWAYS_NORMALIZES or bool(router.norm_topk_prob)

    @staticmethod
    def takes(module: torch.nn.Module) -> bool:
        """Whether ``module`` is a router in float32 on the CPU of a kind that is known."""
        if type(module).__name__ not in _CLASSES:
            return False
        weight: Any = module.weight
        return weight.dtype == torch.float32 and weight.device.type == "cpu" and len(weight) <= MAX_EXPERTS

    @property
    def num_bytes(self) -> int:
        """Bytes of what is packed."""
        return self.packed.num_bytes

    def forward(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """``[..., hidden]`` float32 to logits ``[tokens, experts]``, weights float32 and experts int64 ``[tokens, top]``."""
        logits = multiply(self._library, self.packed, hidden_states.reshape(-1, self.packed.k))
        weights = logits.new_empty(len(logits), self.top)
        experts = torch.empty(len(logits), self.top, dtype=torch.int64)
        route = Route(
            *logits.shape,
            self.top,
            self.normalize,
            logits.data_ptr(),
            logits.stride(0),
            experts.data_ptr(),
            weights.data_ptr(),
        )
        self._library.call("route", ctypes.byref(route))
        return logits, weights, experts
