"""Towers whose linear layers and attention the CPU kernels compute."""

import logging
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from penstock_enginecore.forward.proof import TOLERANCES, distance
from penstock_enginecore.models.multimodal.base import MediaEncoder
from penstock_enginecore.models.multimodal.encoder import attend_by
from penstock_enginecore.native.attention import WholeAttention
from penstock_enginecore.native.backend import NativeBackend
from penstock_enginecore.native.library import NativeLibrary
from penstock_enginecore.native.linear import PackedLinear

logger = logging.getLogger(__name__)

_ROWS = 5
_SEQUENCES = (2, 4, 37, 64)
"""Sequences, heads, tokens and head size of what attention is tried with."""


@torch.inference_mode()
def pack_towers(encoder: MediaEncoder | None, native: NativeBackend | None) -> int:
    """Let the kernels compute the linear layers of ``encoder``, each of which is first seen to give what torch makes of the same
    numbers, and attention, likewise. Returns how many layers there are. The rest of a tower stays torch's.
    """
    if encoder is None or native is None:
        return 0
    if native.uses.attention:
        _attend(native.library, encoder.modules)
    if not native.uses.linear:
        return 0
    places = list(_places(encoder.modules))
    packed = sum(_pack(native.library, parent, name) for parent, name in places)
    if packed < len(places):
        logger.warning("%d of %d linear layers of towers stay torch's", len(places) - packed, len(places))
    return packed


def _attend(library: NativeLibrary, towers: Iterable[torch.nn.Module]) -> None:
    attention = WholeAttention(library)
    query, key, value = torch.randn(3, *_SEQUENCES, generator=torch.Generator().manual_seed(0))
    expected = scaled_dot_product_attention(query, key, value, scale=0.2).transpose(1, 2)
    if not distance(attention(query, key, value, 0.2), expected) <= TOLERANCES[torch.float32]:
        logger.warning("attention of towers stays torch's")
        return
    for tower in towers:
        attend_by(tower, attention)


def _places(towers: Iterable[torch.nn.Module]) -> Iterator[tuple[torch.nn.Module, str]]:
    for tower in towers:
        for parent in tower.modules():
            for name, child in parent.named_children():
                if type(child) is torch.nn.Linear and child.weight.dtype == torch.float32:
                    yield parent, name


def _pack(library: NativeLibrary, parent: torch.nn.Module, name: str) -> bool:
    linear: Any = getattr(parent, name)
    packed = PackedLinear(library, linear)
    inputs = torch.randn(_ROWS, linear.in_features, generator=torch.Generator().manual_seed(0))
    if not distance(packed(inputs), linear(inputs)) <= TOLERANCES[library.rounds_to or torch.float32]:
        return False
    setattr(parent, name, packed)
    return True
